"""Checks that the checkpoint is still the one that the service started with, on this host and on others.

A rank that reads another checkpoint than the others computes wrong numbers without an error. So the process that starts the
service takes a `Stamp` and hands it to every rank when that starts. Each rank compares before and after it reads.

On one host and file system, sizes and times of modification tell. Elsewhere the times mean nothing (a copy has its own), so
the ranks compare a digest of the contents: the whole configuration, index and headers, and samples of the data.
NOTE: two changes go unnoticed: data overwritten in place with its old size and time, and, on another host than the front
end's, a file that differs only in bytes outside the samples.
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
"""A larger file has one sample in each of SAMPLES equal parts, 1 MiB a file. 163 files of 4 GB each need 163 MiB."""
READERS = 8  # files at once: on network storage each read waits for its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    name: str
    size: int
    modified_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Records the state of a checkpoint's files at one time. `place`: the running host and its file system.

    digest: the hash of the contents, hexadecimal. It is empty until `with_digest` computes it.
    """

    path: Path
    place: tuple[str, int]
    files: tuple[FileStamp, ...]
    digest: str = ""

    @classmethod
    def take(cls, path: Path) -> Stamp:
        """Takes a stamp from the files' sizes and times, without reading data. Raises CheckpointError when a file is missing."""
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
        """Returns the stamp with its digest, from at most WHOLE_BYTES of each file.

        Raises CheckpointError when the files have changed since the stamp, or change meanwhile.
        """
        digest = _digest(self.path, self.files)
        check(self, Stamp.take(self.path))
        return replace(self, digest=digest)


def check(start: Stamp, now: Stamp) -> None:
    """Raises CheckpointError unless `now`, perhaps taken on another host, is the checkpoint of `start`. May read samples."""
    same_place = start.place == now.place
    if same_place and start.files == now.files:
        return
    sizes = [[(file.name, file.size) for file in each.files] for each in (start, now)]
    times = [[file.modified_ns for file in each.files] for each in (start, now)]
    same = sizes[0] == sizes[1] and (times[0] == times[1] or not same_place)
    # It is another host, or only the inodes differ: some network file systems number their files anew.
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
    """Loads layers, and raises CheckpointError instead of reading from other files than those of the start."""

    def __init__(
        self,
        path: Path,
        dtype: str = "auto",
        *,
        start: Stamp | None = None,
        opened: Callable[..., Any] = open_checkpoint,
    ):
        """start: the stamp of the service's checkpoint at its start. None: the checkpoint is taken as it is now."""
        try:
            self._seen = Stamp.take(path)
        except CheckpointError as error:
            if start is not None:
                raise changed(path, f"{error} on {socket.gethostname()}") from None
            opened(path, dtype)  # its error message is better
            raise
        if start is not None:
            check(start, self._seen)
            self._seen = replace(self._seen, digest=start.digest)
        self.checkpoint = opened(path, dtype)
        self.check()

    @property
    def info(self) -> Any:
        """Returns the ModelInfo of the checkpoint."""
        return self.checkpoint.info

    @property
    def stamp(self) -> Stamp:
        """Returns the state of the files when they were opened."""
        return self._seen

    def check(self) -> None:
        """Raises CheckpointError when the files are no longer the ones that were opened."""
        try:
            now = Stamp.take(self._seen.path)
        except CheckpointError:
            raise changed(self._seen.path) from None
        if (now.place, now.files) != (self._seen.place, self._seen.files):
            check(self._seen, now)
            self._seen = replace(now, digest=self._seen.digest)

    def serve_as(self, served: Mapping[int, QuantConfig]) -> None:
        """Does the same as `Checkpoint.serve_as`."""
        self.checkpoint.serve_as(served)

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device | str = "cpu") -> LayerWeights:
        """Returns the weights of `layer`, as `Checkpoint.load_layer` does."""
        self.check()
        read = self.checkpoint.load_layer(layer, experts, device)
        self.check()  # the files may have been replaced during the read
        return read


def _names(path: Path) -> list[str]:
    """Returns the names of the files that are read: the configuration and the files of `read_index`, or GGUF files."""
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
    """Returns the checkpoint's folder. A checkpoint may be one GGUF file."""
    return path.parent if path.suffix == gguf_files.SUFFIX and not path.is_dir() else path


def _digest(path: Path, files: Sequence[FileStamp]) -> str:
    try:
        with ThreadPoolExecutor(READERS) as readers:
            digests = list(readers.map(lambda file: _digest_file(_folder(path) / file.name, file.size), files))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_file(path: Path, size: int) -> bytes:
    """Returns the digest of the whole file, or of its header and of samples, which are the same on every host."""
    digest = hashlib.sha256(f"{path.name} {size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_BYTES or path.suffix == ".json":
            digest.update(file.read())
            return digest.digest()
        gguf = path.suffix == gguf_files.SUFFIX  # a GGUF file does not say how long its header is
        start = min(WHOLE_BYTES if gguf else 8 + int.from_bytes(file.read(8), "little"), size)
        file.seek(0)
        digest.update(file.read(start))
        chance, part = random.Random(f"{path.name} {size}"), max((size - start) // SAMPLES, SAMPLE_BYTES)
        while start < size:
            # The sample lies at random in its part: tensors of one size follow each other, and equal steps would always meet
            # the same rows of them.
            file.seek(start + chance.randrange(part - SAMPLE_BYTES + 1))
            digest.update(file.read(SAMPLE_BYTES))
            start += part
    return digest.digest()
