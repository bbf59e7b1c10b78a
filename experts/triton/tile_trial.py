"""One cell of a table on a device: candidates of each GEMM on the same routed batches, and whole layers against each other."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from epserve.errors import InternalError
from epserve.experts.tiles.candidates import Option, Options, joined
from epserve.experts.tiles.sizes import Tiles
from epserve.experts.tiles.table import Problem
from epserve.modular_kernel import ExpertWeights, Prepared, Workspaces
from epserve.modular_kernel.measured.buckets import BUCKETS
from epserve.modular_kernel.measured.selection import APART, example_batch

from .compiles import COUNTER
from .launch import Buffers, Carver, regions
from .tiled import TiledExperts

LOG = logging.getLogger("epserve.experts")
REPEATS = 5
ROUNDS = 7
"""Rounds of a comparison of whole layers."""

HANGS = 20.0
"""Seconds after which a kernel counts as hung. One launch over all batches takes less than one second."""

Timer = Callable[[Callable[[], object]], float]
"""Microseconds of one call on the device."""


class Hung(InternalError):
    """Raised when a candidate does not end. The process has to end, because its device no longer answers."""


def batches_of(spec, num_rows: int, weights: ExpertWeights, *, every_row: bool) -> list[Prepared]:
    """Returns several batches, so that thin ones do not all find the same experts' weights in the cache. Each batch has a slot
    on this rank, if one of the first 100 batches has."""
    sets = 8 if num_rows <= 64 else 4 if num_rows <= 1024 else 2
    made: list[Prepared] = []
    for seed in range(100):
        batch = example_batch(spec, num_rows, weights, seed, every_row)
        if batch.routing is not None and bool((batch.routing.ids_Mt >= 0).any()):
            made.append(batch)
        if len(made) == sets:
            return made
    return made or [example_batch(spec, num_rows, weights, 0, every_row)]


class Trial:
    """Implements `search.Bench`. `make` returns an experts object of its own. Batches are not quantised and have one size.

    NOTE: a trial keeps the scratch of all batches. The caller drops it before the next cell.
    """

    def __init__(
        self,
        make: Callable[[], TiledExperts],
        weights: ExpertWeights,
        batches: Sequence[Prepared],
        *,
        timer: Timer | None = None,
    ):
        self.experts, self.batches, self.make = make(), list(batches), make
        self.experts.table = {}
        self.run = self.experts.launcher()
        self.weights = dataclasses.replace(weights, derived={})  # descriptors of losers go with this object
        assert batches[0].routing is not None
        self.num_rows, self.top_k = batches[0].routing.ids_Mt.shape
        self.timer = timer or time_us
        self.out = torch.empty((self.num_rows, self.experts.spec.shape.hidden), dtype=self.experts.spec.shape.dtype,
                               device=self.run.device)  # fmt: skip
        self._space: list[tuple[torch.Tensor, torch.Tensor]] = []

    def buffers(self, tiles: Tiles) -> tuple[list[Buffers], bool]:
        """Returns scratch for each batch, already routed, and whether tiles come from the ids themselves. It overwrites the
        scratch of an earlier call."""
        e = self.weights.num_experts
        r13, r2 = regions(None)
        self.experts.carve(r13, r2, self.num_rows, self.top_k, e, tiles)
        sizes = r13.most, r2.most
        if not self._space or any(have.numel() < size for have, size in zip(self._space[0], sizes, strict=True)):
            most = [max(size, *(have[i].numel() for have in self._space), 0) for i, size in enumerate(sizes)]
            self._space.clear()  # free before growing
            device = self.run.device
            for _ in self.batches:
                one, two = (torch.zeros(size, dtype=torch.uint8, device=device) for size in most)
                self._space.append((one, two))
        made: list[Buffers] = []
        direct = False
        for batch, space in zip(self.batches, self._space, strict=True):
            carvers = Carver(space[0]), Carver(space[1])
            b, direct = self.experts.carve(*carvers, self.num_rows, self.top_k, e, tiles)
            self.experts.route(b, batch, tiles, e, direct)
            made.append(b)
        return made, direct

    def step(self, which: str, tiles: Tiles, made: list[Buffers], direct: bool) -> None:
        for b, batch in zip(made, self.batches, strict=True):
            if which == "gate_up":
                self.experts.first_half(b, batch, self.weights, tiles, direct)
            else:
                self.experts.second_half(b, batch, self.weights, tiles, direct, self.out)

    def launchable(self, which: str, bm: int, option: Option, partner: Option) -> Callable[[], None]:
        """Returns the timed launch. The second GEMM reads the first one's results for real rows, because stale bytes, such as NaN
        or denormals, change its power."""
        pair = (option, partner) if which == "gate_up" else (partner, option)
        tiles = joined(bm, *pair)
        made, direct = self.buffers(tiles)
        if which == "down":
            self.step("gate_up", tiles, made, direct)
        return lambda: self.step(which, tiles, made, direct)

    def time(self, which: str, bm: int, option: Option, partner: Option) -> float | None:
        try:
            return self.timer(self.launchable(which, bm, option, partner)) / len(self.batches)
        except Hung as error:
            raise Hung(f"{error} with bm {bm} {which} {option}") from None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's compiler, an assembler or a launch: the candidate is dropped
            LOG.debug("bm %d %s %s: %s", bm, which, option, str(error).splitlines()[:1])
            self.run.counter.zero_()
            return None

    def compile(self, options: Options, deadline: float) -> Options:
        """Compiles on all cores, one option a core. It leaves out options that were not begun by the deadline."""
        if self.run.device.type != "cuda":
            return options
        cores = len(os.sched_getaffinity(0))
        jobs: list[tuple[str, Option]] = []
        for i in range(max(len(options.first), len(options.second))):  # the likely best of both first
            jobs += [(which, options.of(which)[i]) for which in ("gate_up", "down") if i < len(options.of(which))]
        done: list[Option] = []
        run, self.run.launch = self.run.launch, self.run.compile_only
        try:
            for at in range(0, len(jobs), cores):
                if len(done) > 1 and time.monotonic() > deadline:
                    break
                with (
                    COUNTER.trying(),
                    ThreadPoolExecutor(cores) as pool,
                    triton.AsyncCompileMode(pool, ignore_errors=True),
                ):
                    for which, option in jobs[at : at + cores]:
                        self._compile_one(which, options, option)
                        done.append(option)
        finally:
            self.run.launch = run
        return Options(
            bm=options.bm,
            first=tuple(each for each in options.first if each in done),
            second=tuple(each for each in options.second if each in done),
        )

    def _compile_one(self, which: str, options: Options, option: Option) -> None:
        pair = (option, options.second[0]) if which == "gate_up" else (options.first[0], option)
        tiles = joined(options.bm, *pair)
        try:
            made, direct = self.buffers(tiles)
            self.step(which, tiles, made[:1], direct)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a candidate that cannot even be launched: `time` drops it
            LOG.debug("bm %d %s %s: %s", options.bm, which, option, str(error).splitlines()[:1])

    def compare(self, old: Tiles, new: Tiles) -> tuple[float, float, str | None]:
        self._space.clear()
        layers = [Layer(self.make(), self.weights, self.batches, tiles) for tiles in (old, new)]
        want, got = (torch.cat([each.float() for each in layer.run()]) for layer in layers)
        apart = float((got - want).norm() / want.norm().clamp(min=1e-30))
        wrong = None if apart <= APART else f"results differ by {apart:.2g} (relative L2): {new.to_json()}"
        seen: list[list[float]] = [[], []]
        order, launches = random.Random(1), [prepared(layer.run, self.timer) for layer in layers]
        for _ in range(ROUNDS):
            for i in order.sample((0, 1), 2):
                seen[i].append(launches[i]() / len(self.batches))
        return statistics.median(seen[0]), statistics.median(seen[1]), wrong


class Layer:
    """Runs the whole layer with some tiles, on every batch."""

    def __init__(self, experts: TiledExperts, weights: ExpertWeights, batches: list[Prepared], tiles: Tiles):
        self.experts, self.weights, self.batches = experts, weights, batches
        experts.table = {Problem.of(experts.spec, weights.num_experts).key: dict.fromkeys(BUCKETS, tiles)}
        assert batches[0].routing is not None
        num_rows, top_k = batches[0].routing.ids_Mt.shape
        shapes = experts.workspace_shapes(num_rows, top_k, weights.num_experts)
        spaces = Workspaces(weights.w13_eNK.device)
        self.workspace = spaces.carve(shapes)
        self.outs = [torch.empty_like(self.workspace.output) for _ in batches]

    def run(self) -> list[torch.Tensor]:
        for batch, out in zip(self.batches, self.outs, strict=True):
            self.experts.apply(out, batch, weights=self.weights, workspace=self.workspace)
        return self.outs


def capture(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Returns a graph of launch(), after it has run once and has been replayed once."""
    launch()
    wait()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):  # without torch.cuda.graph, which empties torch's cache each time
        graph.capture_begin(capture_error_mode="thread_local")
        launch()
        graph.capture_end()
    graph.replay()
    wait()
    return graph


def wait(limit: float = HANGS) -> torch.cuda.Event:
    """Waits for all launched work. Raises Hung after `limit` seconds, and the device cannot be used any more then."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    deadline = time.monotonic() + limit
    while not event.query():
        if time.monotonic() > deadline:
            raise Hung(f"the GPU has not finished after {limit:.0f} s")
        time.sleep(20e-6)
    return event


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    return start.elapsed_time(wait()) * 1e3


def time_us(launch: Callable[[], object]) -> float:
    """Returns the median time, in microseconds, of some replays of a graph of launch()."""
    graph = capture(launch)
    return statistics.median(replay_us(graph) for _ in range(REPEATS))


def prepared(launch: Callable[[], object], timer: Timer) -> Callable[[], float]:
    """Returns a function that times launch(). If the timer is the one of graphs, it captures the graph only once."""
    if timer is not time_us:
        return lambda: timer(launch)
    graph = capture(launch)
    return lambda: replay_us(graph)
