"""This module keeps the registry of clients' shared-memory regions on this host, and reads and writes within their
bounds.

A region is a window of a POSIX shared-memory object. The server keeps a file descriptor and no mapping. A client may
cut its object short at any time, which ends a process that reads a mapping of it (SIGBUS), while `preadv` returns fewer
bytes. `preadv` also takes the one copy that a check of ids needs, since the client can write during the read.

Front ends of one host know each other's regions (`share`), so that a client's calls may go to any of them. The front
end that registers a region checks the client's rights. The others open the same object and keep to the same owner, name
and bounds.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Any

from epserve.config import ServerConfig
from epserve.errors import InvalidRequest, Overloaded, PermissionDenied, TooLarge
from epserve.joining.board import Board, Handlers
from epserve.protocol import epserve_pb2 as pb

from .region import Region, Slice

log = logging.getLogger("epserve.server")

FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?([A-Za-z0-9._\-]{1,200})")
RESERVED_PREFIX = "epserve-"
"""Names with this prefix belong to this service and its own clients. A client must prove write access to use such an
object."""
MAX_REGIONS_PER_CLIENT = 256
MAX_REGIONS = 512
"""Each region costs a file descriptor, and processes have 1,024 of them by default."""
PROOF_BYTES = range(16, 65)
PROOF_DIFFERENT = 8
"""Memory is full of zeros and other fills that are easy to guess. 16 random bytes have fewer different values less than
once in 10^12 times."""


class Regions:
    """Regions is the registry of one event loop. An owner sees and uses only its own regions. Any thread may use a
    region."""

    def __init__(self, limits: ServerConfig, folder: Path = FOLDER, *, board: Board | None = None):
        """Subscribes to `board`, over which front ends of this host tell each other of their regions."""
        self._limits, self._folder = limits, folder
        self._regions: dict[tuple[str, str], Region] = {}
        self._board = board or Board()
        self._board.subscribe(Handlers(posted=self._adopt, removed=self._removed, used=self._used))

    def register_proven(self, owner: str, *, key: str, offset: int, size: int, proof: bytes) -> Region:
        """Registers a region under a name that the server chooses. `proof`: random bytes at its start, which show write
        access."""
        check_proof(proof, size)
        fd = self._open(owner, key, offset, size)
        try:
            if not hmac.compare_digest(os.pread(fd, len(proof), offset), proof):
                raise InvalidRequest("proof: the region does not start with these bytes", field="proof")
        except BaseException:
            os.close(fd)
            raise
        return self._add(Region(owner=owner, name=drawn_name(), key=key, offset=offset, size=size, lease_s=None, fd=fd))

    def register_leased(self, owner: str, *, uid: int | None, name: str, key: str, offset: int, size: int) -> Region:
        """Registers a region under the client's name, and forgets it when it is unused for `server.region_lease_s`.

        Args:
            uid: the user of the calling process, who must have the right to write the object, or None when it is
                unknown.

        Raises:
            PermissionDenied: this user may not write the object.
        """
        self.check_name(owner, name)
        if key.lstrip("/").startswith(RESERVED_PREFIX):
            raise InvalidRequest(f"key: names that start with {RESERVED_PREFIX!r} are the service's own", field="key")
        fd = self._open(owner, key, offset, size)
        try:
            _check_rights(os.fstat(fd), uid, key)
        except PermissionDenied:
            os.close(fd)
            raise
        lease_s = self._limits.region_lease_s
        return self._add(Region(owner=owner, name=name, key=key, offset=offset, size=size, lease_s=lease_s, fd=fd))

    def check_name(self, owner: str, name: str) -> None:
        """Raises InvalidRequest unless a client may give this name to a region now."""
        if not 1 <= len(name) <= 256 or not name.isprintable():
            raise InvalidRequest(f"name: {len(name)} characters, must be 1 to 256 printable ones", field="name")
        self.reclaim()
        if (owner, name) in self._regions:
            raise InvalidRequest(f"name: {name!r} is registered already; unregister it first", field="name")

    def check_size(self, owner: str, size: int) -> None:
        """Raises TooLarge for a size out of bounds, and Overloaded when the number of regions is at its limit."""
        if not 1 <= size <= self._limits.max_region_bytes:
            limit = self._limits.max_region_bytes
            raise TooLarge(f"byte_size: {size}, must be 1 to {limit} (server.max_region_bytes)", field="byte_size")
        self.reclaim()
        self._check_number(owner)

    def add(self, region: Region) -> Region:
        """Adds a region that is open already and belongs to this process alone. Raises the errors of `check_name` and
        `check_size`."""
        if region.lease_s is not None:
            self.check_name(region.owner, region.name)
        self.check_size(region.owner, region.size)
        return self._add(region)

    def _add(self, region: Region) -> Region:
        self._regions[region.owner, region.name] = region
        return region

    async def share(self, region: Region) -> None:
        """Tells the other front ends of this host, which know the region when this returns. Raises InvalidRequest, and
        forgets the region, when another front end registered its name meanwhile."""
        try:
            known = await self._board.post(_name_on_board(region.owner, region.name), region.describe())
        except BaseException:  # the caller has gone
            self.forget(region)
            raise
        if not known:
            self._drop(region)
            raise InvalidRequest(f"name: {region.name!r} is registered already; unregister it first", field="name")

    def _adopt(self, key: str, value: dict[str, Any]) -> None:
        """Adds a region that another front end has registered."""
        if not self._limits.regions:
            return
        try:
            wanted = {name: value[name] for name in ("owner", "name", "key", "offset", "size", "lease_s")}
            self._check_number(wanted["owner"])
            fd = self._open_same(value)
        except (OSError, Overloaded, KeyError, TypeError, ValueError) as error:
            text = "region %s of front end %s is not known to this one, calls with it fail here: %s"
            log.warning(text, value.get("name"), value.get("pid"), error)
            return
        self._add(Region(**wanted, fd=fd, adopted=True))

    def _open_same(self, value: dict[str, Any]) -> int:
        """Opens the object by its name, or through the other process when the name has gone. Raises OSError."""
        name = str(value["key"])
        elsewhere = Path(f"/proc/{int(value['pid'])}/fd/{int(value['fd'])}")
        ways = [(self._folder / matched[1], os.O_NOFOLLOW)] if (matched := _KEY.fullmatch(name)) else []
        for path, flag in (*ways, (elsewhere, 0)):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | flag)
            except OSError:
                continue
            found = os.fstat(fd)
            if [found.st_dev, found.st_ino] == value["object"] and stat.S_ISREG(found.st_mode):
                return fd
            os.close(fd)
        raise FileNotFoundError(f"its object {name!r} cannot be opened, by name or at process {value['pid']}")

    def _removed(self, key: str) -> None:
        if (region := self._regions.get(_owner_and_name(key))) is not None:
            self._drop(region)

    def _used(self, keys: list[str]) -> None:
        for key in keys:
            if (region := self._regions.get(_owner_and_name(key))) is not None:
                region.last_used = region.told_used = time.monotonic()

    def _check_number(self, owner: str) -> None:
        mine = sum(region.owner == owner for region in self._regions.values())
        if mine >= MAX_REGIONS_PER_CLIENT or len(self._regions) >= MAX_REGIONS:
            text = f"{mine} regions of this client and {len(self._regions)} in all are registered, which is the most"
            raise Overloaded(
                f"{text} ({MAX_REGIONS_PER_CLIENT}, {MAX_REGIONS}); use fewer and larger ones", retry_after_s=1
            )

    def _open(self, owner: str, key: str, offset: int, size: int) -> int:
        """Returns a descriptor of the object, and checks that it is large enough now."""
        matched = _KEY.fullmatch(key)
        if matched is None or matched[1] in (".", ".."):
            text = "key: must name a POSIX shared-memory object: 1 to 200 letters, digits, dots, dashes or underscores"
            raise InvalidRequest(text, field="key")
        self.check_size(owner, size)
        try:
            # NOTE: O_NOFOLLOW refuses a link out of the folder, and O_NONBLOCK never waits for a pipe's peer.
            fd = os.open(self._folder / matched[1], os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"key: cannot open {key!r}: {error.strerror}", field="key") from None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or offset + size > found.st_size:
            os.close(fd)
            text = f"offset, byte_size: {offset} + {size} bytes, but {key!r} has {found.st_size}"
            raise InvalidRequest(text, field="byte_size")
        return fd

    def unregister(self, owner: str, name: str, *, on_gpu: bool = False) -> None:
        """Unregisters a region. Requests that use it still finish. Raises InvalidRequest for an unknown region."""
        self.forget(self.find(owner, name, "name", on_gpu=on_gpu))

    def forget(self, region: Region) -> None:
        """Unregisters a region that the caller holds. It may be called twice. Other front ends forget the region too."""
        if self._regions.get((region.owner, region.name)) is region:
            self._board.remove(_name_on_board(region.owner, region.name))
        self._drop(region)

    def _drop(self, region: Region) -> None:
        region.unregister()
        if self._regions.get((region.owner, region.name)) is region:
            del self._regions[region.owner, region.name]

    def unregister_all(self, owner: str | None = None, *, on_gpu: bool = False) -> None:
        """Unregisters the regions that one owner registered by name. With None it unregisters all regions of this
        process, at its end."""
        for region in list(self._regions.values()):
            if owner is None and region.adopted:
                self._drop(region)
            elif owner is None or (
                region.owner == owner and region.lease_s is not None and bool(region.gpu_uuid) == on_gpu
            ):
                self.forget(region)

    def of(self, owner: str, *, on_gpu: bool | None = None) -> list[Region]:
        """Returns the regions of an owner. on_gpu: selects one kind."""
        self.reclaim()
        mine = (region for region in self._regions.values() if region.owner == owner)
        return [region for region in mine if on_gpu in (None, bool(region.gpu_uuid))]

    def find(self, owner: str, name: str, field: str, *, on_gpu: bool | None = None) -> Region:
        """Returns a region of this owner. Raises InvalidRequest for others, those of other clients included. on_gpu:
        selects one kind."""
        region = self._regions.get((owner, name))
        if region is None or on_gpu not in (None, bool(region.gpu_uuid)):
            raise InvalidRequest(f"{field}: no region {name!r} of this client is registered", field=field)
        return region

    def slice_of(self, owner: str, wanted: pb.RegionSlice, nbytes: int, field: str) -> Slice:
        """Returns the slice. Raises InvalidRequest unless it is `nbytes` long and within the region."""
        region = self.find(owner, wanted.region, field)
        if wanted.byte_size != nbytes:
            text = f"{field}: {wanted.byte_size} bytes of region {region.name!r}, its shape and dtype make {nbytes}"
            raise InvalidRequest(text, field=field)
        if wanted.offset + nbytes > region.size:
            text = f"{field}: bytes {wanted.offset} to {wanted.offset + nbytes} of region {region.name!r}, it has {region.size}"
            raise InvalidRequest(text, field=field)
        region.renew()
        return Slice(region=region, offset=wanted.offset, nbytes=nbytes, field=field)

    def reclaim(self) -> None:
        """Forgets regions whose lease is over, since their clients count as dead, and tells other front ends which
        regions are in use."""
        now, used = time.monotonic(), []
        for region in list(self._regions.values()):
            if region.expired(now):
                self.forget(region)
            elif region.lease_s is not None and (region.users or region.last_used > region.told_used):
                region.told_used = now
                used.append(_name_on_board(region.owner, region.name))
        if used:
            self._board.use(used)

    def __len__(self) -> int:
        return len(self._regions)


def _check_rights(found: os.stat_result, uid: int | None, key: str) -> None:
    """Raises PermissionDenied unless the caller may write the object, since the server's own rights may be wider than
    the caller's."""
    if uid is None:
        text = (
            f"key: whether the caller may use {key[:100]!r} cannot be known over this connection; connect over"
            " loopback TCP or the Unix-domain socket, or use epserve's own client, which proves it"
        )
        raise PermissionDenied(text, field="key")
    if uid not in (0, found.st_uid) and found.st_mode & 0o006 != 0o006:
        text = (
            f"key: {key[:100]!r} is user {found.st_uid}'s with mode {stat.S_IMODE(found.st_mode):04o}, and the caller is user"
            f" {uid}; only its owner may register it, or give others the right to read and write it"
        )
        raise PermissionDenied(text, field="key")


def check_proof(proof: bytes, size: int) -> None:
    """Raises InvalidRequest for a proof that is easy to guess, or that does not lie in the region."""
    if len(proof) not in PROOF_BYTES:
        text = f"proof: {len(proof)} bytes, must be {PROOF_BYTES.start} to {PROOF_BYTES.stop - 1} random ones"
        raise InvalidRequest(text, field="proof")
    if len(proof) > size:
        raise InvalidRequest(f"byte_size: {size}, less than the {len(proof)} bytes of the proof", field="byte_size")
    if (different := len(set(proof))) < PROOF_DIFFERENT:
        text = (
            f"proof: {different} different bytes in it, at least {PROOF_DIFFERENT} are needed: random ones, not a fill"
        )
        raise InvalidRequest(text, field="proof")


def drawn_name() -> str:
    return f"region-{secrets.token_hex(8)}"


def _name_on_board(owner: str, name: str) -> str:
    return json.dumps([owner, name])


def _owner_and_name(key: str) -> tuple[str, str]:
    owner, name = json.loads(key)
    return owner, name
