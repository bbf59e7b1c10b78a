"""Keeps the file of measured times: one for all shapes and machines, written whole, merged under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from epserve.modular_kernel.capability import LayerSpec
from epserve.modular_kernel.types import ExpertWeights

LOG = logging.getLogger("epserve.selection")
LOCK_S = 2.0
LIBRARIES = {"triton": "triton", "triton_batched": "triton", "cutlass": "triton", "deepgemm": "deep_gemm"}
"""Maps a candidate to the package beside torch whose version its times depend on."""


class TimesCache:
    """Reads and writes the times of one key: bucket -> candidate -> seconds. An unusable file costs a warning, not the start."""

    def __init__(self, path: Path | None, key: str):
        self.path, self.key = path, key
        if path is not None:
            try:
                self.path = path.expanduser()
            except RuntimeError as error:
                LOG.warning("%s: %s; times are not kept", path, error)
                self.path = None

    def read(self) -> dict[int, dict[str, float]]:
        found = self._load().get(self.key)
        try:
            return {
                int(bucket): {name: float(value) for name, value in times.items()}
                for bucket, times in (found or {}).items()
            }
        except (AttributeError, TypeError, ValueError):
            LOG.warning("%s: the entry %r is not a table of times and is measured again", self.path, self.key)
            return {}

    def write(self, times: Mapping[int, Mapping[str, float]]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                content = self._load() | {self.key: {str(bucket): seen for bucket, seen in times.items()}}
                fresh = self.path.with_suffix(".new")
                fresh.write_text(json.dumps(content, indent=1), encoding="utf-8")
                fresh.replace(self.path)  # a reader never sees half a file
        except OSError as error:
            LOG.warning("%s cannot be written, the next start measures again: %s", self.path, error)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the file's lock: ranks of one host finish at about the same time.

        A rank that cannot get the lock writes nothing, and a later start measures its entry.
        """
        assert self.path is not None
        deadline = time.monotonic() + LOCK_S
        with open(self.path.with_suffix(".lock"), "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            yield

    def _load(self) -> dict:
        if self.path is None:
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            LOG.warning("%s cannot be read and is measured again: %s", self.path, error)
            return {}
        return found if isinstance(found, dict) else {}


def key_of(spec: LayerSpec, weights: ExpertWeights, candidates: Iterable[str], *, counts: bool = True) -> str:
    """Returns everything that times depend on, except the bucket. counts False: the numbers of experts are left out as well."""
    s, device = spec.shape, weights.w13_eNK.device
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)} driver {driver_version()} CUDA {torch.version.cuda}"
    else:
        where = f"{_processor()} with {torch.get_num_threads()} threads"
    packages = ["epserve", *sorted({LIBRARIES[name] for name in candidates if name in LIBRARIES})]
    versions = " ".join(f"{name} {_version(name)}" for name in packages)
    scheme = spec.quant.scheme + (" dynamic" if spec.quant.dynamic else "")
    experts = f" e{weights.num_experts} E{s.num_experts}" if counts else ""
    layer = f"K{s.hidden} N{s.intermediate}{experts} t{s.top_k} {s.dtype}"
    return f"{where} | torch {torch.__version__} {versions} | {layer} {scheme} {spec.activation.kind}"


def driver_version() -> str:
    """Returns the kernel module's version from the driver itself. torch has it in some releases only."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as lines:
        for word in lines.readline().split():
            if word[:1].isdigit():
                return word
    return "of unknown version"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
