"""One region of a client's shared memory, and slices of it that requests name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epserve.errors import InvalidRequest

_IO_BYTES = 1 << 30
"""Linux moves at most 2 GiB in one call."""


class Region:
    """A region is one window of an object. Any thread may read and write it, and the descriptor lives until the last of
    them is done.

    Args:
        adopted: True when another front end registered the region and decides when its lease is over.
    """

    gpu_uuid = ""
    """The UUID of the GPU that holds the region. It is empty for system memory."""

    def __init__(
        self, *, owner: str, name: str, key: str, offset: int, size: int, lease_s: float | None, fd: int,
        adopted: bool = False,
    ):  # fmt: skip
        self.owner, self.name, self.key, self.offset, self.size = owner, name, key, offset, size
        self.lease_s, self.adopted = lease_s, adopted
        self.last_used = self.told_used = time.monotonic()
        self.users = 0
        self._fd, self._registered, self._released = fd, True, False
        self._lock = threading.Lock()

    def used(self) -> Region:
        """Returns a context that keeps the descriptor open: `with region.used() as fd`. Raises InvalidRequest when the
        region is gone."""
        return self

    def __enter__(self) -> int:
        with self._lock:
            if self._released:
                raise InvalidRequest(f"region: {self.name!r} was unregistered meanwhile", field="region")
            self.users += 1
            return self._fd

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self.users -= 1
            self.last_used = time.monotonic()
            self._close_if_idle()

    def unregister(self) -> None:
        with self._lock:
            self._registered = False
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._registered and not self.users and not self._released:
            self._released = True
            self._release()

    def _release(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def renew(self) -> None:
        self.last_used = time.monotonic()

    def expired(self, now: float) -> bool:
        leased = self.lease_s is not None and not self.adopted
        return leased and not self.users and now - self.last_used > (self.lease_s or 0.0)

    def describe(self) -> dict[str, Any]:
        """Describes a registered region to another front end of this host: which object it is, and where it is open."""
        with self._lock:
            found = os.fstat(self._fd)
            return {
                "owner": self.owner, "name": self.name, "key": self.key, "offset": self.offset, "size": self.size,
                "lease_s": self.lease_s, "pid": os.getpid(), "fd": self._fd, "object": [found.st_dev, found.st_ino],
            }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice is bytes of a region that lie within its bounds. `field` names the request's field in messages."""

    region: Region
    offset: int
    nbytes: int
    field: str

    @property
    def on_gpu(self) -> bool:
        """Tells whether the slice lies on a GPU. The rank then reads and writes it."""
        return bool(self.region.gpu_uuid)

    def read(self, make_buffer: Callable[[int], Any] = bytearray) -> Any:
        """Returns the bytes in a buffer of their own. Raises InvalidRequest when the object has become too short."""
        buffer = make_buffer(self.nbytes)
        view, at = memoryview(buffer).cast("B"), self.region.offset + self.offset
        with self.region.used() as fd:
            while view:
                count = os.preadv(fd, [view[:_IO_BYTES]], at)
                if not count:
                    raise self._too_short()
                view, at = view[count:], at + count
        return buffer

    def write(self, data: memoryview) -> None:
        """Writes the bytes. Raises InvalidRequest when the object has become too short. A write makes the object longer
        only in a race with a client that cuts it."""
        assert len(data) == self.nbytes
        at = self.region.offset + self.offset
        with self.region.used() as fd:
            if os.fstat(fd).st_size < at + len(data):
                raise self._too_short()
            while data:
                count = os.pwritev(fd, [data[:_IO_BYTES]], at)
                data, at = data[count:], at + count

    def _too_short(self) -> InvalidRequest:
        text = (
            f"{self.field}: the shared-memory object of region {self.region.name!r} has become shorter than the region"
        )
        return InvalidRequest(text, field=self.field)
