"""Files of tiles that were tuned on this machine: one for each device, software, layer and quantisation, in one folder.

A file has `cells` like the shipped table, the times behind them, and the machine and layer that they hold for. A file for
another machine or layer, or with tiles that the kernels cannot take, is left aside with a reason and never an error. A file
that the configuration names must be right.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from epserve.errors import ConfigError
from epserve.modular_kernel import LayerSpec
from epserve.modular_kernel.measured.buckets import BUCKETS
from epserve.modular_kernel.measured.times_cache import driver_version

from .limits import Limits
from .sizes import Tiles
from .table import Problem, Table

LOG = logging.getLogger("epserve.experts")
FORMAT = 1
LARGEST = 4 << 20  # bytes of a file that is read at all
REMEDY = "run `epserve tune` to write a new one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Holds times of the whole layer, in microseconds for one batch: with these tiles, and with the tiles before them."""

    us: float
    before_us: float
    few: bool = False
    """Whether the times come from the short search at a start, which tries few candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Names the device and software that times depend on, beside the layer. A file that differs in any field is stale."""

    gpu: str
    driver: str
    triton: str
    epserve: str

    @classmethod
    def here(cls, gpu: str) -> Machine:
        return cls(gpu=gpu, driver=driver_version(), triton=_version("triton"), epserve=_version("epserve"))

    def differs(self, content: Mapping) -> str | None:
        """Returns the first field in which the file differs, with both values, or None."""
        for name in self.__slots__:
            if content.get(name) != getattr(self, name):
                return f"it was made with {name} {content.get(name)}, here is {getattr(self, name)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Names the layer that tiles hold for: the shape and quantisation of `problem`, its dtype and its kind of batches."""

    problem: Problem
    dtype: str
    rows: str
    """Kind of batches. With "every" they may have rows without a local expert, with "local" they have none."""

    @classmethod
    def of(cls, spec: LayerSpec, local_experts: int, *, every_row: bool) -> Layer:
        dtype = str(spec.shape.dtype).removeprefix("torch.")
        return cls(problem=Problem.of(spec, local_experts), dtype=dtype, rows="every" if every_row else "local")


@dataclass(slots=True)
class Tuned:
    """Holds the contents of files. `origins` says who tuned a cell and when. `notes` lists the files left aside and why."""

    table: Table = field(default_factory=dict)
    origins: dict[tuple[str, int], str] = field(default_factory=dict)
    times: dict[tuple[str, int], Times] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, bucket: int, tiles: Tiles, origin: str, times: Times | None = None) -> None:
        self.table.setdefault(key, {})[bucket] = tiles
        self.origins[key, bucket] = origin
        if times is not None:
            self.times[key, bucket] = times


class Unusable(ValueError):
    """Raised for a file that holds no table for the machine or layer. The text says why, without the file's name."""


def path_of(folder: Path, machine: Machine, layer: Layer) -> Path:
    """Returns the path of a file: readable, and different for machines or layers that differ in any field."""
    p = layer.problem
    what = f"{machine.gpu} {p.scheme} K{p.hidden} N{p.intermediate} E{p.local_experts}of{p.num_experts} t{p.top_k}"
    name = "".join(letter if letter.isalnum() else "_" for letter in what.lower())
    digest = hashlib.sha256(repr((FORMAT, machine, layer)).encode()).hexdigest()[:10]
    return folder.expanduser() / f"{name}-{digest}.json"


def read_folder(folder: Path, machine: Machine, spec: LayerSpec, limits: Limits, *, every_row: bool) -> Tuned:
    """Reads every file of this machine with this layer's matrices, including files for other numbers of ranks."""
    found, like = Tuned(), Layer.of(spec, 1, every_row=every_row)
    stale = Tuned()
    try:
        files = sorted(folder.expanduser().glob("*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        _note(found, folder, str(error))
        return found
    for file in files:
        try:
            content = _load(file)
            if not _is_about(content, like):
                continue
            if reason := machine.differs(content):
                _note(stale, file, reason)
                continue
            _take(found, content, limits, f"tuned here on {content.get('made', 'an unknown day')}")
        except Unusable as error:
            _note(found, file, str(error))
    if not found.table:  # a current file makes stale ones irrelevant
        found.notes += stale.notes
    return found


def read_named(path: Path, spec: LayerSpec, limits: Limits, *, setting: str = "engine.experts_tiles") -> Tuned:
    """Reads the table in a named file, written by `epserve tune`, `benchmarks.tune_experts` or hand.

    Raises:
        ConfigError: the file holds no table, nothing for these matrices, or tiles that the kernels cannot take. The text
            names `setting`.
    """
    found = Tuned()
    try:
        content = _load(path.expanduser())
        _take(found, content, limits, f"from {path}")
    except (Unusable, RuntimeError) as error:
        raise ConfigError(f"{setting}: {path}: {error}; name a table of tiles, or set it to auto or shipped") from None
    wanted = Problem.of(spec, 1)
    if not any(_same_matrices(Problem.parse(key), wanted) for key in found.table):
        has = ", ".join(found.table) or "none"
        raise ConfigError(
            f"{setting}: {path} has no cell for {wanted.scheme} with hidden {wanted.hidden} and intermediate"
            f" {wanted.intermediate} (it has: {has}); set it to auto, or tune this layer with `epserve tune --tiles`"
        )
    return found


def write(path: Path, machine: Machine, layer: Layer, tuned: Tuned) -> str | None:
    """Writes the cells of `layer` in `tuned`, whole or not at all.

    Returns:
        The reason why the file could not be written, or None. A start goes on without the file.
    """
    key = layer.problem.key
    times = {
        str(b): {"us": t.us, "before_us": t.before_us, "few": t.few} for (k, b), t in tuned.times.items() if k == key
    }
    content = {
        "format": FORMAT, "made": time.strftime("%Y-%m-%d"), **{name: getattr(machine, name) for name in machine.__slots__},
        "dtype": layer.dtype, "rows": layer.rows,
        "cells": {key: {str(b): tiles.to_json() for b, tiles in sorted(tuned.table.get(key, {}).items())}},
        "times": {key: times},
    }  # fmt: skip
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(content, indent=1), encoding="utf-8")
        fresh.replace(path)  # a reader never sees half of one
    except OSError as error:
        return f"{path} cannot be written, the next start has nothing of it: {error}"
    return None


def _load(path: Path) -> dict:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise Unusable(f"it has {size} bytes, a table has at most {LARGEST}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unusable("no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"it cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), dict):
        raise Unusable("it is not a table of tiles: an object with `cells` is")
    return content


def _take(found: Tuned, content: dict, limits: Limits, origin: str) -> None:
    """Adds all cells of a file's layers with the matrices of `limits`, or none, because a partly wrong file is not trusted."""
    fresh = Tuned()
    times = content.get("times", {})
    for key, rows in content["cells"].items():
        try:
            problem = Problem.parse(key)
            if problem.key != key or min(problem.num_experts, problem.top_k, problem.local_experts) < 1:
                raise ValueError
        except (AttributeError, IndexError, ValueError):
            raise Unusable(f"cells: {key!r} is not a layer, such as 'none K4096 N1536 E16/128 t8'") from None
        if not isinstance(rows, dict):
            raise Unusable(f"cells.{key} is not an object of buckets")
        for text, cell in rows.items():
            where = f"cells.{key}.{text}"
            if not text.isdecimal() or int(text) not in BUCKETS:
                raise Unusable(f"{where}: {text} is not a bucket of tokens, one of {', '.join(map(str, BUCKETS))}")
            try:
                tiles = Tiles.from_json(cell)
            except (AttributeError, KeyError, TypeError) as error:
                raise Unusable(f"{where} is not a configuration of tiles: {type(error).__name__}: {error}") from None
            mine = (problem.scheme, problem.hidden, problem.intermediate) == (
                limits.scheme,
                limits.hidden,
                limits.intermediate,
            )
            if mine and (reason := limits.why_not(tiles, problem, int(text))):
                raise Unusable(f"{where} is not for these kernels: {reason}")
            fresh.add(key, int(text), tiles, origin, _times(times, key, text))
    for key, cells in fresh.table.items():
        for bucket, tiles in cells.items():
            found.add(key, bucket, tiles, fresh.origins[key, bucket], fresh.times.get((key, bucket)))


def _times(times, key: str, bucket: str) -> Times | None:
    """Reads a cell's times, which only people use. The cell holds even if its times are wrong."""
    try:
        seen = times[key][bucket]
        return Times(us=float(seen["us"]), before_us=float(seen["before_us"]), few=bool(seen.get("few", False)))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _is_about(content: dict, like: Layer) -> bool:
    """Returns whether a file of the folder is for these matrices, dtype and rows."""
    for key in content["cells"]:
        try:
            same = _same_matrices(Problem.parse(key), like.problem)
        except (AttributeError, IndexError, ValueError):
            same = True  # so that the reason is reported
        if same:
            return (content.get("dtype", like.dtype), content.get("rows", like.rows)) == (like.dtype, like.rows)
    return False


def _same_matrices(one: Problem, other: Problem) -> bool:
    return (one.scheme, one.hidden, one.intermediate) == (other.scheme, other.hidden, other.intermediate)


def _note(found: Tuned, path: Path, reason: str) -> None:
    found.notes.append(f"tiles in {path} are not used: {reason}; {REMEDY}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
