"""Which user is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of linux/socket.h


def same_user(sock: socket.socket) -> bool:
    """Whether this user or root opened the other end. True for other sockets than Unix ones, which cannot tell.

    Any user can connect to an abstract socket, and reads its name in /proc/net/unix.
    """
    if sock.family != socket.AF_UNIX:
        return True
    _, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return uid in (0, os.geteuid())
