"""Where `epserve` and `python -m epserve` begin: standard library only, so that a signal during imports shows no traceback."""

from __future__ import annotations

import io
import signal
import sys

from epserve.process import working_folder
from epserve.process.early_signals import NUMBERS, leave


def main() -> None:
    """The imports behind the command line take seconds, and Python shows an interrupt in the midst of one as its traceback."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # so starts what a shell has put into the background
            signal.signal(number, leave)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name beyond the locale's alphabet is no reason to end
    working_folder.leave_out()
    from . import commands

    commands.main()
