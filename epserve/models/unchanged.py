"""Whether the checkpoint is still the one that the service started with: one folder's files, on this host and on others.

A rank that reads another checkpoint than the others computes wrong numbers without an error. So the process that starts the
service takes a `Stamp`, hands it to every rank whenever that starts, and each compares before it reads and after it.

On one host and file system sizes and times of modification tell. Elsewhere the times mean nothing (a copy has its own): there
a digest of the contents is compared, of the configuration, the index and all headers whole and of samples of the data.
NOTE: not noticed is data that was overwritten in place with its old size and time, and, on another host than the front end's,
a file that differs in bytes alone that are not in a sample.
"""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel import QuantConfig
from epserve.process.boot import boot_id

from . import gguf_files
from .checkpoint import open_checkpoint
from .stored.declared import BESIDE
from .tensors import INDEX, SINGLE, read_json
from .weights import LayerWeights

WHOLE_BYTES = 4 << 20  # files up to this size are digested whole
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
"""Of larger files: one sample in each of so many equal parts, 1 MiB a file. A checkpoint of 163 files of 4 GB each: 163 MiB."""
READERS = 8  # files at once: on network storage each read waits for its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    name: str
    size: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a checkpoint's files looked like at one time. `place`: the running host and its file system.

    digest: of the contents, hexadecimal; empty where nobody has asked for it (`with_digest`).
    """

    path: Path
    place: tuple[str, int]
    files: tuple[FileStamp, ...]
    digest: str = ""

    @classmethod
    def take(cls, path: Path) -> Stamp:
        """By the files' sizes and times alone: no data is read. Raises CheckpointError where a file is missing."""
        try:
            host = boot_id()
            found = [(name, (_folder(path) / name).stat()) for name in _names(path)]
            return cls(
                path=path,
                place=(host, path.stat().st_dev),
                files=tuple(
                    FileStamp(name=name, size=stat.st_size, modified_ns=stat.st_mtime_ns, inode=stat.st_ino)
                    for name, stat in found
                ),
            )
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def with_digest(self) -> Stamp:
        """Reads at most WHOLE_BYTES of each file. Raises CheckpointError where the files have changed since, or meanwhile."""
        digest = _digest(self.path, self.files)
        check(self, Stamp.take(self.path))
        return replace(self, digest=digest)


def check(start: Stamp, now: Stamp) -> None:
    """Raises CheckpointError unless `now`, which may be of another host, is the checkpoint of `start`. May read samples."""
    same_place = start.place == now.place
    if same_place and start.files == now.files:
        return
    sizes = [[(file.name, file.size) for file in each.files] for each in (start, now)]
    times = [[file.modified_ns for file in each.files] for each in (start, now)]
    same = sizes[0] == sizes[1] and (times[0] == times[1] or not same_place)
    # Another host, or other inodes alone: some network file systems number their files anew.
    if not same or not start.digest or start.digest != _digest(now.path, now.files):
        raise changed(now.path) if start.place[0] == now.place[0] else different(now.path)


def changed(path: Path, why: str = "") -> CheckpointError:
    more = f" ({why})" if why else ""
    return CheckpointError(f"{path} has changed since the start: restart the service{more}")


def different(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} on {socket.gethostname()} is another checkpoint than the service has started with: copy the same one to"
        " all hosts, or restart the service where it has changed since the start"
    )


class UnchangedCheckpoint:
    """A source of layers that raises CheckpointError instead of reading from other files than those of the start."""

    def __init__(
        self,
        path: Path,
        dtype: str = "auto",
        *,
        start: Stamp | None = None,
        opened: Callable[..., Any] = open_checkpoint,
    ):
        """start: what the service's checkpoint looked like when it started; None: as it is now."""
        try:
            self._seen = Stamp.take(path)
        except CheckpointError as error:
            if start is not None:
                raise changed(path, f"{error} on {socket.gethostname()}") from None
            opened(path, dtype)  # says it better
            raise
        if start is not None:
            check(start, self._seen)
            self._seen = replace(self._seen, digest=start.digest)
        self.checkpoint = opened(path, dtype)
        self.check()

    @property
    def info(self) -> Any:
        """A ModelInfo."""
        return self.checkpoint.info

    @property
    def stamp(self) -> Stamp:
        """What the files looked like when they were opened."""
        return self._seen

    def check(self) -> None:
        """Raises CheckpointError where the files are not the ones that were opened any more."""
        try:
            now = Stamp.take(self._seen.path)
        except CheckpointError:
            raise changed(self._seen.path) from None
        if (now.place, now.files) != (self._seen.place, self._seen.files):
            check(self._seen, now)
            self._seen = replace(now, digest=self._seen.digest)

    def serve_as(self, served: Mapping[int, QuantConfig]) -> None:
        """As `Checkpoint.serve_as`."""
        self.checkpoint.serve_as(served)

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device | str = "cpu") -> LayerWeights:
        """As `Checkpoint.load_layer`."""
        self.check()
        read = self.checkpoint.load_layer(layer, experts, device)
        self.check()  # replaced while it was read
        return read


def _names(path: Path) -> list[str]:
    """The files that are read, within the folder: the configuration, and what `read_index` reads; or GGUF files."""
    if pieces := gguf_files.files_of(path):
        return [piece.name for piece in pieces]
    settings = ["config.json", *(name for name in BESIDE if (path / name).exists())]
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        return [*settings, SINGLE]
    shard_of = read_json(path / INDEX).get("weight_map")
    if not isinstance(shard_of, dict):
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    shards = set(map(str, shard_of.values()))
    return [*settings, INDEX, *sorted(shards)]


def _folder(path: Path) -> Path:
    """A checkpoint may be one GGUF file."""
    return path.parent if path.suffix == gguf_files.SUFFIX and not path.is_dir() else path


def _digest(path: Path, files: Sequence[FileStamp]) -> str:
    try:
        with ThreadPoolExecutor(READERS) as readers:
            digests = list(readers.map(lambda file: _digest_file(_folder(path) / file.name, file.size), files))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_file(path: Path, size: int) -> bytes:
    """Of the whole file, or of its header and samples that are the same ones on every host."""
    digest = hashlib.sha256(f"{path.name} {size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_BYTES or path.suffix == ".json":
            digest.update(file.read())
            return digest.digest()
        gguf = path.suffix == gguf_files.SUFFIX  # does not say how long its header is
        start = min(WHOLE_BYTES if gguf else 8 + int.from_bytes(file.read(8), "little"), size)
        file.seek(0)
        digest.update(file.read(start))
        chance, part = random.Random(f"{path.name} {size}"), max((size - start) // SAMPLES, SAMPLE_BYTES)
        while start < size:
            # Somewhere in its part: tensors of one size follow each other, and equal steps would meet the same rows of each.
            file.seek(start + chance.randrange(part - SAMPLE_BYTES + 1))
            digest.update(file.read(SAMPLE_BYTES))
            start += part
    return digest.digest()
