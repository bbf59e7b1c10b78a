"""Signals while a command still imports what it needs. Standard library only."""

from __future__ import annotations

import os
import signal

NUMBERS = (signal.SIGINT, signal.SIGTERM)


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
