"""Tells the service manager that started this process how far it is, by systemd's protocol (sd_notify): one datagram a change."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["notify"]

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(*changes: str) -> bool:
    """Sends assignments such as `READY=1` to the socket that NOTIFY_SOCKET names.

    Returns whether they were sent. Without a service manager, or with one that does not listen, nothing happens.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)  # a full queue of the manager must not stop a service
        sender.sendto("\n".join(changes).encode(), target)
        return True
    return False
