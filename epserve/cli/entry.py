"""Starts `epserve` and `python -m epserve` with the standard library only, so that a signal during imports shows no traceback."""

from __future__ import annotations

import io
import signal
import sys

from epserve.process import working_folder
from epserve.process.early_signals import NUMBERS, leave


def main() -> None:
    """Runs the command line. Its imports take seconds, and Python would print an interrupt during an import as a traceback."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell starts background jobs with SIGINT ignored
            signal.signal(number, leave)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a name outside the locale's alphabet must not end the command
    working_folder.leave_out()
    from . import commands

    commands.main()
