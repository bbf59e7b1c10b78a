"""Traces one forward of a synthetic MoE layer and splits its time into phases, for `epserve profile`.

It starts one process a rank on this host, runs the layer until it is warm, times its phases over several forwards, and traces one
more with torch's profiler. Phases follow each other on the current stream. A backend's work on a second stream counts only as
far as the current stream waits for it. So `dispatch` is the rest of the dispatch after the shared expert's first half, and
`combine` is the rest of the combine after its second half.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from epserve import all2all, experts
from epserve.errors import ConfigError, EpserveError, Incompatible, InternalError, RankFailed
from epserve.modular_kernel import FusedMoEActivationFormat, PrepareFinalizeOptions, RankContext
from epserve.modular_kernel.kernel import SharedExperts, begin
from epserve.process.phases import FIRST, IDLE, PhaseClock

from .synthetic import TOLERANCE, LayerSizes, SyntheticLayer, reasons

PHASES = ("gate", "dispatch", "shared", "experts", "combine")
KERNEL_PHASES = {"prepare": "dispatch", "experts": "experts", "finalize": "combine"}
WARM_FORWARDS = 3
BATCHED_CAP = 128  # batched formats hold this many rows for every expert and rank. More tokens take several rounds
GRACE_S = 2.0  # the time in which the other ranks can report after the first failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Configures a profile.

    Args:
        tokens: the tokens of each rank.
        rank: the rank whose trace is written.
        timeout_s: the limit of the whole run, and of each wait in it.
    """

    all2all: str
    experts: str
    trace: Path
    sizes: LayerSizes = LayerSizes()
    world_size: int = 2
    device: str = "cpu"
    tokens: int = 128
    rank: int = 0
    repeats: int = 20
    timeout_s: float = 180.0

    def check(self) -> None:
        """Raises ConfigError or Incompatible, before any process is started."""
        for name, least in (("world_size", 1), ("tokens", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is outside 0..{self.world_size - 1} (world_size {self.world_size})")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not cpu or cuda")
        all2all.REGISTRY.entry(self.all2all)
        experts.REGISTRY.entry(self.experts)
        if self.device == "cuda" and torch.cuda.device_count() < self.world_size:
            raise ConfigError(f"world_size {self.world_size}: this host has {torch.cuda.device_count()} CUDA GPUs")
        if not self.trace.parent.is_dir():
            raise ConfigError(f"trace {self.trace}: there is no folder {self.trace.parent}")
        if why := reasons(self.all2all, self.experts, self.sizes.spec(self.world_size, self.device)):
            raise Incompatible(f"{self.all2all} and {self.experts} cannot run this layer here:", why)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Holds the median microseconds of one forward: on the traced rank, and on the rank with the longest phase."""

    phase: str
    us: float
    slowest_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """Holds the result. `error`: relative L2 error of a few rows against float32 with the same weights, the largest of all."""

    phases: tuple[PhaseTime, ...]
    error: float
    trace: Path

    @property
    def total_us(self) -> float:
        return sum(phase.us for phase in self.phases)


def profile_layer(request: ProfileRequest) -> ProfileResult:
    """Profiles a layer on processes of this host.

    Raises:
        ConfigError, Incompatible: `ProfileRequest.check` refuses the request.
        RankFailed: a rank dies or is late. A rank's own error is raised as it is.
        InternalError: the result is wrong.
    """
    request.check()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the ranks' tracer logs every start and stop
    context = multiprocessing.get_context("spawn")
    inbox = context.Queue()
    with tempfile.TemporaryDirectory() as folder:  # with mode 0700, other users cannot name a rank's peers
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank_main, args=(rank, request, store, inbox), daemon=True, name=f"rank{rank}")
            for rank in range(request.world_size)
        ]
        for process in ranks:
            process.start()
        try:
            answers = _collect(request, ranks, inbox)
        finally:
            for process in ranks:
                process.join(GRACE_S)
                process.kill()
    medians, error = [phases for phases, _ in answers], max(error for _, error in answers)
    if not error <= TOLERANCE[request.sizes.scheme]:
        limit = TOLERANCE[request.sizes.scheme]
        raise InternalError(f"{request.all2all} + {request.experts}: relative L2 error {error:.3g}, at most {limit:g}")
    times = tuple(
        PhaseTime(phase=phase, us=medians[request.rank].get(phase, 0.0),
                  slowest_us=max(each.get(phase, 0.0) for each in medians))
        for phase in PHASES if any(phase in each for each in medians)
    )  # fmt: skip
    return ProfileResult(phases=times, error=error, trace=request.trace)


def _collect(request: ProfileRequest, ranks: list[Any], inbox: Any) -> list[tuple[dict[str, float], float]]:
    answers: dict[int, tuple[dict[str, float], float]] = {}
    failures: list[tuple[int, BaseException | str]] = []
    deadline = time.monotonic() + request.timeout_s
    while len(answers) + len(failures) < len(ranks) and time.monotonic() < deadline:
        try:
            rank, answer = inbox.get(timeout=0.2)
        except queue.Empty:
            dead = [i for i, process in enumerate(ranks) if process.exitcode not in (None, 0) and i not in answers]
            if dead and not failures:
                failures.append((dead[0], f"its process ended with exit code {ranks[dead[0]].exitcode}"))
                deadline = min(deadline, time.monotonic() + GRACE_S)
            continue
        if isinstance(answer, tuple):
            answers[rank] = answer
        else:
            failures.append((rank, answer))
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        own = [error for _, error in failures if isinstance(error, EpserveError) and not isinstance(error, RankFailed)]
        if own:
            raise own[0]
        raise RankFailed(f"rank {failures[0][0]}: {failures[0][1]}")
    if len(answers) < len(ranks):
        late = sorted(set(range(len(ranks))) - set(answers))
        raise RankFailed(f"ranks {late} had not answered after {request.timeout_s:g} s")
    return [answers[rank] for rank in range(len(ranks))]


def _rank_main(rank: int, request: ProfileRequest, store: str, inbox: Any) -> None:
    try:
        inbox.put((rank, _profile_rank(rank, request, store)))
    except EpserveError as error:
        inbox.put((rank, error))
    except Exception:
        inbox.put((rank, traceback.format_exc()))


def _profile_rank(rank: int, request: ProfileRequest, store: str) -> tuple[dict[str, float], float]:
    ranks = _join(rank, request, store)
    sizes, cap = request.sizes, max(1, request.tokens)
    prepare_finalize = all2all.REGISTRY.get(request.all2all).prepare_finalize
    if prepare_finalize.capability.activation_format is FusedMoEActivationFormat.BatchedExperts:
        cap = min(cap, BATCHED_CAP)
    layer = SyntheticLayer(
        ranks, sizes, all2all_name=request.all2all, experts_name=request.experts,
        options=PrepareFinalizeOptions(max_tokens_per_rank=cap),
    )  # fmt: skip
    layer.warm_up()
    steps = Steps(layer, request)
    for _ in range(WARM_FORWARDS):
        steps.forward()
    found = [steps.timed() for _ in range(request.repeats)]
    error = layer.error(steps.x, layer.gate(steps.x), steps.forward())
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if request.device == "cuda" else [])]
    with torch.profiler.profile(activities=activities):  # the first use sets the device's tracing up
        steps.forward()
    with torch.profiler.profile(activities=activities) as trace:
        steps.forward()
        steps.wait()
    if rank == request.rank:
        trace.export_chrome_trace(str(request.trace))
    layer.close()
    if request.world_size > 1:
        dist.destroy_process_group()
    medians = {phase: statistics.median(each[phase] for each in found) * 1e6 for phase in PHASES if phase in found[0]}
    return medians, error


def _join(rank: int, request: ProfileRequest, path: str) -> RankContext:
    torch.set_num_threads(1)
    device, group = torch.device("cpu"), None
    if request.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if request.world_size > 1:
        timeout = timedelta(seconds=request.timeout_s)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(path, request.world_size)
        backend = "nccl" if request.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=request.world_size, timeout=timeout)
        group = dist.group.WORLD
    return RankContext(
        rank=rank, world_size=request.world_size, device=device, group=group, timeout_s=request.timeout_s
    )


class Steps:
    """Runs forwards of one layer, with a clock and with named ranges in the trace."""

    def __init__(self, layer: SyntheticLayer, request: ProfileRequest):
        self.layer, self.counts = layer, (request.tokens,) * request.world_size
        self.x = layer.tokens(request.tokens)
        self.clock = PhaseClock(layer.ranks.device)
        self._range = ExitStack()
        layer.kernel.on_phase = lambda phase: self.enter(KERNEL_PHASES[phase])
        if layer.shared is not None:
            layer.shared = Beside(layer.shared, self.enter)

    def forward(self) -> torch.Tensor:
        self.enter(FIRST)
        self.enter("gate")
        routing = self.layer.gate(self.x)
        out = self.layer.routed(self.x, routing, self.counts)
        self.enter(IDLE)
        return out

    def timed(self) -> dict[str, float]:
        """Returns the seconds of each phase of one forward."""
        self.forward()
        self.wait()
        return self.clock.seconds()

    def wait(self) -> None:
        if self.layer.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def enter(self, phase: str) -> None:
        self._range.close()
        self.clock.enter(phase)
        if phase in PHASES:
            self._range.enter_context(torch.profiler.record_function(f"epserve::{phase}"))


class Beside:
    """Runs the shared expert in two halves, as a service does: one beside the dispatch, the other beside the combine."""

    def __init__(self, shared: SharedExperts, enter: Callable[[str], None]):
        self._shared, self._enter = shared, enter

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        return self.begin(x_MK)()

    def begin(self, x_MK: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._enter("shared")
        rest = begin(self._shared, x_MK)
        self._enter("dispatch")

        def finish() -> torch.Tensor:
            self._enter("shared")
            y_MK = rest()
            self._enter("combine")
            return y_MK

        return finish
