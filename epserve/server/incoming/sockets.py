"""Asks the kernel about this host's TCP connections: the owner of a socket, and the bytes that came through it.

The kernel answers over netlink (`sock_diag`, as for `ss`), to any user. Nothing here reads or writes a connection.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

_SOCK_DIAG, _BY_FAMILY = 4, 20  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY
_DUMP_REQUEST, _ERROR, _DONE = 0x301, 2, 3
_ESTABLISHED, _INFO = 1, 2
"""The state that is asked for. A socket that its owner has closed is in another state, and then seems to be user 0's."""
_HEADER = struct.Struct("=IHHII")
_REPLY_BYTES, _UID_AT, _BYTES_RECEIVED_AT = 72, 64, 128
"""The length and two offsets of inet_diag_msg and tcp_info."""
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Describes one end of an established TCP connection. `source` is this end. `received`: the bytes that came in here. `inode`
    tells sockets of one time apart."""

    source: tuple[str, int]
    destination: tuple[str, int]
    uid: int
    received: int
    inode: int = 0

    @property
    def peer(self) -> str:
        """Returns the other end as gRPC names it."""
        host, port = self.destination
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def connections(*, source_port: int = 0, destination_port: int = 0) -> list[Connection]:
    """Returns the connections of this network namespace with these ports (0: any). Raises OSError without netlink."""
    found: list[Connection] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(_TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            ports = struct.pack(">HH", source_port, destination_port)
            body = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << _INFO - 1, 1 << _ESTABLISHED) + ports
            body = body.ljust(56, b"\0")
            link.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + body)
            found += _replies(link)
    return found


def uid_of_peer(peer: str, port: int) -> int | None:
    """Returns the user whose process opened the connection from `peer`, in gRPC's words, to this host's `port`.

    Returns None if that cannot be known: over the network, over a Unix-domain socket, or without netlink.
    """
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, number = address.rpartition(":")
    try:
        source = _plain(host.strip("[]")), int(number)
        ends = connections(source_port=source[1], destination_port=port)
    except (OSError, ValueError):
        return None
    uids = {end.uid for end in ends if end.source == source and ipaddress.ip_address(source[0]).is_loopback}
    return uids.pop() if len(uids) == 1 else None


def _replies(link: socket.socket) -> Iterator[Connection]:
    """Yields the connections of the kernel's answers. Raises OSError."""
    while True:
        data, at = link.recv(1 << 17), 0
        while at < len(data):
            size, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise OSError(-struct.unpack_from("=i", data, at + _HEADER.size)[0], "sock_diag")
            yield _connection(data[at + _HEADER.size : at + size])
            at += size + 3 & ~3


def _connection(reply: bytes) -> Connection:
    source_port, destination_port = struct.unpack_from(">HH", reply, 4)
    width = 4 if reply[0] == socket.AF_INET else 16
    source, destination = (_plain(ipaddress.ip_address(reply[at : at + width])) for at in (8, 24))
    received, at = 0, _REPLY_BYTES
    while at + 4 <= len(reply):
        size, kind = struct.unpack_from("=HH", reply, at)
        if kind == _INFO and size >= 4 + _BYTES_RECEIVED_AT + 8:
            (received,) = struct.unpack_from("=Q", reply, at + 4 + _BYTES_RECEIVED_AT)
        at += max(size + 3 & ~3, 4)
    uid, inode = struct.unpack_from("=II", reply, _UID_AT)
    return Connection(
        source=(source, source_port),
        destination=(destination, destination_port),
        uid=uid,
        received=received,
        inode=inode,
    )


def _plain(address: str | ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns an address as gRPC shows it: IPv4 for an IPv6 socket's IPv4 address. Raises ValueError."""
    parsed = ipaddress.ip_address(address) if isinstance(address, str) else address
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)
