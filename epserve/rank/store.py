"""The store in which ranks of a process group find each other. Only processes that know its secret reach it.

Torch's own TCPStore takes keys from any process that can connect, and lists them, so that a secret prefix hides nothing.
What it holds decides where ranks connect to. This one is behind a door (link/door.py).
"""

from __future__ import annotations

import base64
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from epserve.link import wire
from epserve.link.door import Door, LinkAddress

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # beyond what a call itself may wait
MOST_KEYS = 1 << 16  # a group of 1,000 ranks sets some thousands


class StoreServer:
    """Holds the keys. A thread for each connection, which waits where a key is not there yet."""

    def __init__(self, host: str):
        """host: listen on TCP there. Empty: on an abstract Unix socket."""
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._door = Door(self._serve, protocol="store", host=host)
        self.address = self._door.address

    def close(self) -> None:
        self._door.close()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.settimeout(None)  # a rank asks when it likes, and closes when it ends
                while True:
                    asked = wire.receive_header(sock)
                    wire.send(sock, self._answer(asked))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.debug("connection of a rank ended: %s", error)

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        keys = [str(key) for key in asked["keys"]]
        with self._changed:
            match asked["op"]:
                case "get":
                    return self._wait(keys, float(asked["timeout_s"]))
                case "check":
                    return {"there": all(key in self._values for key in keys)}
                case "count":
                    return {"count": len(self._values)}
                case "delete":
                    return {"there": self._values.pop(keys[0], None) is not None}
                case "set":
                    return self._put(keys[0], _raw(asked["value"]))
                case "add":
                    count = int(self._values.get(keys[0], b"0")) + int(asked["amount"])
                    return {**self._put(keys[0], str(count).encode()), "count": count}
                case "compare":
                    return self._compare(keys[0], _raw(asked["expected"]), _raw(asked["value"]))
                case other:
                    raise ValueError(f"op {other!r}")

    def _wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
            return {"missing": [key for key in keys if key not in self._values]}
        return {"values": [_text(self._values[key]) for key in keys]}

    def _put(self, key: str, value: bytes) -> dict[str, Any]:
        if key not in self._values and len(self._values) >= MOST_KEYS:
            return {"full": len(self._values)}
        self._values[key] = value
        self._changed.notify_all()
        return {"value": _text(value)}

    def _compare(self, key: str, expected: bytes, value: bytes) -> dict[str, Any]:
        """As torch's stores: a key that is not there is set where nothing is expected."""
        have = self._values.get(key)
        if have == expected or (have is None and not expected):
            return self._put(key, value)
        return {"value": _text(expected if have is None else have)}

    def forget(self, prefix: str) -> None:
        """Removes the keys of a group that is gone."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]


class RankStore(dist.Store):
    """A rank's end, for torch. Safe to call from several threads, those of torch too: each call takes an idle connection.

    NOTE: torch keeps the native half alone. The caller keeps this object as long as a group may use it.
    """

    def __init__(self, address: LinkAddress, timeout: timedelta):
        super().__init__()
        self.address, self._timeout = address, timeout
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    # The names and arguments are torch's.

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=_text(_bytes(value)))

    def get(self, key: str) -> bytes:
        return _raw(self._wait([key], self._timeout)[0])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_raw(each) for each in self._wait(list(keys), self._timeout)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(list(keys), timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys))["there"])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", [key], amount=amount)["count"])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        told = self._ask("compare", [key], expected=_text(_bytes(expected)), value=_text(_bytes(desired)))
        return _raw(told["value"])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key])["there"])

    def num_keys(self) -> int:
        return int(self._ask("count", [])["count"])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def close(self) -> None:
        """Ends idle connections. A later call opens another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    def _wait(self, keys: list[str], timeout: timedelta) -> list[str]:
        seconds = timeout.total_seconds()
        answer = self._ask("get", keys, wait_s=seconds, timeout_s=seconds)
        if "missing" in answer:
            raise dist.DistStoreError(f"not in the store within {seconds:g} s: {', '.join(answer['missing'])}")
        return answer["values"]

    def _ask(self, op: str, keys: list[str], *, wait_s: float = 0.0, **values: Any) -> dict[str, Any]:
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        try:
            sock = sock or self.address.connect()
            wire.send(sock, {"op": op, "keys": keys, **values})
            answer = wire.receive_header(sock, until=time.monotonic() + wait_s + ANSWER_S)
        except (OSError, ValueError) as error:
            if sock is not None:
                sock.close()
            raise dist.DistNetworkError(f"the store of the process groups does not answer: {error}") from None
        with self._lock:
            self._idle.append(sock)
        if "full" in answer:
            raise dist.DistStoreError(f"the store of the process groups holds {answer['full']} keys, no more are taken")
        return answer

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # of an interpreter that ends
            self.close()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text)
