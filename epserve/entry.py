"""Where `epserve` and `python -m epserve` begin: standard library only, so that a signal during imports shows no traceback."""

from __future__ import annotations

import os
import signal

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """The imports behind the command line take seconds, and Python shows an interrupt in the midst of one as its traceback."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # so starts what a shell has put into the background
            signal.signal(number, leave)
    from epserve import cli

    cli.main()


def leave(number: int, frame: object) -> None:
    """While there is nothing yet that would have to be ended."""
    os.write(2, f"epserve: {signal.Signals(number).name}: stopped\n".encode())
    os._exit(128 + number)


def as_usual() -> None:
    """For commands without handlers of their own: Ctrl-C is a KeyboardInterrupt again, SIGTERM the system's."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
