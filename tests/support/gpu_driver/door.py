"""The socket that hands a lane's words to a rank, without a service."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def handing_out(memory: int) -> Iterator[str]:
    """The name of an abstract socket that gives a copy of the memory's descriptor, and a bell, to each that sends a key."""
    name = f"made-up-door-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)
    listener.listen()

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                if not sock.recv(32):
                    return
                bell = os.eventfd(0)
                socket.send_fds(sock, [b"\0"], [memory, bell])
                os.close(bell)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield name
    finally:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect("\0" + name)
        thread.join()
        listener.close()
