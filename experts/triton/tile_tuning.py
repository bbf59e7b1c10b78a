"""Tiles of the Triton experts: tables of this machine or of a file over the shipped one, a search for missing cells, and the
lines that explain them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from epserve.experts.tiles.cache import Layer, Machine, Times, Tuned, path_of, read_folder, read_named, write
from epserve.experts.tiles.candidates import Options, candidates, token_tiles
from epserve.experts.tiles.limits import Limits
from epserve.experts.tiles.search import Bench, Found, search
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Problem, Table, pick, shipped
from epserve.modular_kernel import ExpertWeights
from epserve.modular_kernel.measured.buckets import BUCKETS, bucket_of

from . import warmup as triton_warmup
from .compiles import COUNTER
from .tile_trial import Hung, Trial, batches_of
from .tiled import TiledExperts

LOG = logging.getLogger("epserve.experts")
FEW = 5
"""Candidates of each GEMM at a start, all with the current token tile."""

MakeBench = Callable[[int], Bench]
"""Bucket -> the bench of its cell."""


def limits_of(experts: TiledExperts) -> Limits:
    launcher = experts.launcher()
    return Limits.of(experts.spec, specialised=launcher.specialises, gpu=launcher.gpu)


def table_for(experts: TiledExperts, device: torch.device) -> Table:
    """The shipped table with this machine's cells, or a named file's, in place of the same ones. Fills `experts.tuned`."""
    tuning, name = experts.tuning, triton_warmup.device_name(device)
    if tuning.file is not None:
        experts.tuned = read_named(tuning.file, experts.spec, limits_of(experts))
    elif tuning.folder is not None:
        experts.tuned = read_folder(tuning.folder, Machine.here(name), experts.spec, limits_of(experts),
                                    every_row=tuning.every_row)  # fmt: skip
    for note in experts.tuned.notes:
        LOG.warning(note)
    return merged(shipped(name), experts.tuned.table)


def merged(below: Table, above: Table) -> Table:
    """Returns a new table, merged cell by cell. Cells of `above` take precedence."""
    return {key: {**below.get(key, {}), **above.get(key, {})} for key in {**below, **above}}


def tune(
    experts: TiledExperts, weights: ExpertWeights, max_rows: int, *, make_bench: MakeBench | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:  # fmt: skip
    """Searches tiles for the buckets that no file has, smallest first, within `tuning.budget_s`, and writes them.

    Returns:
        Whether any tiles changed. Without room for a trial the former tiles stay.

    Raises:
        Hung: a candidate hangs. No other failure of a candidate raises.
    """
    tuning, num_experts = experts.tuning, weights.num_experts
    launcher = experts.launcher()  # reads the files
    if tuning.budget_s <= 0 or tuning.file is not None or num_experts == 0 or max_rows < 1:
        return False
    problem = Problem.of(experts.spec, num_experts)
    buckets = [b for b in BUCKETS if b <= bucket_of(max_rows) and b not in experts.searched
               and _is_wanted(experts.tuned, problem.key, b, again=tuning.again, thorough=tuning.thorough)]  # fmt: skip
    if not buckets or (make_bench is None and launcher.device.type != "cuda"):
        return False
    bench_of = make_bench or _on_device(experts, weights)
    limits, before = limits_of(experts), experts.tuned.table.get(problem.key, {}).copy()
    start = clock()
    end, left, done = start + tuning.budget_s, len(buckets), 0
    with COUNTER.trying():
        for bucket in buckets:
            now = clock()
            if now >= end:
                break
            experts.searched.add(bucket)
            current = pick(
                problem, bucket, experts.table or {}, specialised=launcher.specialises, gpu=launcher.gpu
            ).tiles
            options = options_for(problem, bucket, current, limits, thorough=tuning.thorough)
            try:
                found = search(bench_of(bucket), current, options, deadline=now + (end - now) / left, clock=clock)
            except Hung:
                raise
            except Exception as error:  # no room, or a failure of the device, which the warm-up then meets too
                LOG.warning("tiles for %d tokens and more are not timed: %s", bucket, str(error).splitlines()[:1])
                break
            left -= 1
            done += 1
            if found is not None:
                _take(experts, problem.key, bucket, found, thorough=tuning.thorough)
    if done < len(buckets):
        text = (
            f"tiles: {done} of {len(buckets)} token sizes were timed in {clock() - start:.0f} s; the others as before"
        )
        experts.tuned.notes.append(text)
        LOG.info(text)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # scratch of the trials
    _keep(experts, num_experts)
    return experts.tuned.table.get(problem.key, {}) != before


def options_for(problem: Problem, bucket: int, current: Tiles, limits: Limits, *, thorough: bool) -> list[Options]:
    """Returns the options to try for a cell. A start tries a few, with the current token tile."""
    if not thorough:
        return [candidates(problem, bucket, current.bm, limits, most=FEW)]
    sizes = token_tiles(problem, bucket, limits)
    return [candidates(problem, bucket, bm, limits) for bm in ([current.bm] if current.bm not in sizes else []) + sizes]


def variant(experts: TiledExperts) -> str:
    """Returns a digest of the cells that are not shipped. Times of other backends are compared with these tiles."""
    experts.launcher()
    if not experts.tuned.table:
        return ""
    cells = {
        key: {b: tiles.to_json() for b, tiles in sorted(rows.items())}
        for key, rows in sorted(experts.tuned.table.items())
    }
    return "tiles " + hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:10]


def explain(experts: TiledExperts) -> list[str]:
    """Returns one line for each source of tiles, with its token sizes and times, and lines for the files left aside."""
    if experts.table is None:  # tiles were not asked for yet
        return []
    launcher = experts.launcher()
    groups: dict[str, list[str]] = {}
    for num_experts in sorted(experts.served):
        problem = Problem.of(experts.spec, num_experts)
        for bucket in BUCKETS:
            if bucket > bucket_of(experts.served[num_experts]):
                break
            picked = pick(problem, bucket, experts.table, specialised=launcher.specialises, gpu=launcher.gpu)
            origin = _origin(experts, picked.cell, picked.why)
            times = experts.tuned.times.get(picked.cell) if picked.cell == (problem.key, bucket) else None
            groups.setdefault(origin, []).append(f"{bucket}{_said(times)}")
    lines = [f"triton tiles for {', '.join(sizes)} tokens: {origin}" for origin, sizes in groups.items()]
    return lines + experts.tuned.notes


def _origin(experts: TiledExperts, cell: tuple[str, int] | None, why: str) -> str:
    if cell is None:
        return why
    own = experts.tuned.origins.get(cell)
    if own is None:
        own = f"shipped for {triton_warmup.device_name(experts.launcher().device)}"
    return own if why.startswith("measured for this shape") else f"{own}: {why}"


def _said(times: Times | None) -> str:
    if times is None:
        return ""
    if times.us == times.before_us:
        return f" ({times.us:.1f} us, nothing was faster)"
    return f" ({times.us:.1f} us, {times.before_us:.1f} before)"


def _is_wanted(tuned: Tuned, key: str, bucket: int, *, again: bool, thorough: bool) -> bool:
    """Returns whether to search a cell: `again`, if it is unknown, or if `thorough` and only a start has searched it."""
    if again or (key, bucket) not in tuned.origins:
        return True
    times = tuned.times.get((key, bucket))
    return thorough and times is not None and times.few


def _take(experts: TiledExperts, key: str, bucket: int, found: Found, *, thorough: bool) -> None:
    times = Times(us=found.times.us, before_us=found.times.before_us, few=not thorough)
    experts.tuned.add(key, bucket, found.tiles, f"tuned here on {time.strftime('%Y-%m-%d')}", times)
    if found.note:
        note = f"tiles for {bucket} tokens that were faster are not used: {found.note}"
        experts.tuned.notes.append(note)
        LOG.warning(note)
    experts.take(merged(experts.table or {}, {key: {bucket: found.tiles}}))
    LOG.info(
        "tiles for %d tokens: %.1f us, %.1f before, %d candidates timed", bucket, times.us, times.before_us, found.timed
    )


def _keep(experts: TiledExperts, num_experts: int) -> Path | None:
    tuning = experts.tuning
    if tuning.folder is None:
        return None
    machine = Machine.here(triton_warmup.device_name(experts.launcher().device))
    layer = Layer.of(experts.spec, num_experts, every_row=tuning.every_row)
    path = path_of(tuning.folder, machine, layer)
    if reason := write(path, machine, layer, experts.tuned):
        experts.tuned.notes.append(reason)
        LOG.warning(reason)
        return None
    return path


def _on_device(experts: TiledExperts, weights: ExpertWeights) -> MakeBench:
    spec, every_row = experts.spec, experts.tuning.every_row

    def make(bucket: int) -> Bench:
        batches = batches_of(spec, bucket, weights, every_row=every_row)
        return Trial(lambda: type(experts)(spec), weights, batches)

    return make
