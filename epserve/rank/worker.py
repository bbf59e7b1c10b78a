"""One rank as a plain class: its experts, gates and kernel. The module knows neither Ray nor gRPC.

worker = Worker(config, ranks)    checks the configuration, reads no weight, is not collective
worker.load()                     reads this rank's experts, gates and shared experts
worker.warm_up()                  collective: builds the kernel, compiles, runs real steps
worker.step(plan, x, ids, w)      collective
worker.arrange(rank, arrangement) takes another rank, number of ranks or placement: keeps its experts, reads missing ones
worker.regroup(ranks)             after a failure: takes another process group, keeps the weights. warm_up() comes next
worker.stage(layer, placement)    while serving: reads the layer's experts of another placement beside the present ones
worker.adopt(layer, version)      makes the staged placement the present one and frees the old one
worker.close()                    collective
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from epserve.config import Config
from epserve.errors import CheckpointError, InternalError, NotReady
from epserve.link.failure import StepError
from epserve.models import LateCheckpoint, LayerWeights, UnchangedCheckpoint, open_checkpoint
from epserve.models.slices import SlicedLayers
from epserve.modular_kernel import RankContext, Routing
from epserve.modular_kernel.measured.known_times import KnownTable, KnownTimes
from epserve.modular_kernel.measured.selection import Choice
from epserve.process.phases import IDLE, PhaseClock

from .device_facts import compile_counter, free_bytes, held_bytes, peak_bytes
from .expert_load import LoadCounter
from .gate import BLOCK, modes_of, whole
from .gate import warm_up as warm_up_gate
from .layer_kernels import LayerKernels
from .layer_step import LayerStep
from .placement import Placement, left_out
from .reports import Loading
from .setup import plan as rank_plan
from .setup.topology import Topology
from .step import Arrangement, Counters, LayerSource, LoadReport, Rows, StepPlan, check_tensors
from .weights.held import HeldLayers, Staged

WARM_UP_TOKENS = 2  # per rank and layer: enough to touch every code path, cheap for sixty layers
STAGING_MARGIN = 1.25  # free memory / bytes of one layer: other allocations that grow meanwhile must not fail


class Worker:
    """Runs one rank. With several ranks `ranks.group` must be initialised before warm_up()."""

    def __init__(
        self,
        config: Config,
        ranks: RankContext,
        *,
        placements: Mapping[int, Placement] | None = None,
        source: LayerSource | None = None,
        peers: LayerSource | None = None,
        checkpoint: UnchangedCheckpoint | LateCheckpoint | None = None,
        times: Iterable[KnownTable] | None = None,
        topology: Topology | None = None,
    ):
        """Checks the configuration, the checkpoint and the backends.

        Args:
            config: the service's configuration.
            ranks: this rank's number, device and process group.
            placements: placement of each layer. None: the initial placement that the configuration gives.
            source: reads the weights. None: the checkpoint.
            peers: replaces `source`: ranks that hold the same experts (their slices, when ranks share experts).
            checkpoint: the checkpoint as the service's start saw it. None: as it is now.
            times: times that the ranks of a running service measured.
            topology: where the ranks are. None: unknown.

        Raises:
            ConfigError, CheckpointError, Incompatible: within a second, before any weight is read.
        """
        self.config, self.ranks = config, ranks
        self.checkpoint = checkpoint or UnchangedCheckpoint(
            config.model.path, config.model.dtype, opened=open_checkpoint
        )
        self.info = self.checkpoint.info
        self.topology = topology
        self.plan = rank_plan.plan_ranks(config, self.info, device=ranks.device.type, topology=topology)
        self.checkpoint.serve_as(self.plan.served)
        self._source = peers or self._sliced(source or self.checkpoint)
        self.weights = HeldLayers(self.info, placements or dict.fromkeys(self.plan.layers, self.plan.placement))
        self.clock = PhaseClock(ranks.device)
        self.counters = Counters()
        self.loading: Loading | None = None
        """How far `load` has come. Threads that report this rank's health read it."""
        self.left_out: dict[int, tuple[int, ...]] = {}
        """Part of the last step -> the experts that its tokens chose and that no rank holds."""
        self.load_counter = LoadCounter(self.plan.layers, self.info.num_experts, ranks.device)
        self.known = KnownTimes()
        """Times that this rank measured, for this arrangement and earlier ones, and times that other ranks reported."""
        if times is not None:
            self.known.add(times)
            self.known.started = True
        self.kernels = LayerKernels(self.plan, config, ranks, self.known)

    @property
    def phase(self) -> str:
        """The phase that this rank is in. It is "idle" between steps."""
        return self.clock.phase

    @phase.setter
    def phase(self, name: str) -> None:
        self.clock.enter(name)

    @property
    def late_compiles(self) -> int:
        """Kernels that Triton compiled after warm-up, on the request path."""
        counter = compile_counter()
        return counter.num_late if counter is not None else 0

    @property
    def placements(self) -> Mapping[int, Placement]:
        """The present placement of each layer."""
        return self.weights.placements

    @property
    def experts(self) -> tuple[int, ...]:
        """Logical ids of this rank's slots, in the first layer served."""
        return self.placements[self.plan.layers[0]].experts_of(self.ranks.rank)

    def load(self) -> LoadReport:
        start = time.perf_counter()
        self.phase = "load"
        for number, layer in enumerate(self.plan.layers, 1):
            self._take(layer, self.placements[layer].experts_of(self.ranks.rank))
            self.loading = Loading(
                layers=number,
                of_layers=len(self.plan.layers),
                nbytes=self.weights.nbytes,
                seconds=time.perf_counter() - start,
            )
        self._source = self._sliced(self.checkpoint)  # copies in host memory are not needed any more
        self.phase, self.loading = "idle", None
        return LoadReport(
            rank=self.ranks.rank,
            experts=self.experts,
            num_layers=len(self.weights.layers),
            weights_bytes=self.weights.nbytes,
            peak_bytes=peak_bytes(self.ranks.device),
            seconds=time.perf_counter() - start,
            backends=self.plan.chosen.names,
        )

    def warm_up(self) -> None:
        """Builds the kernel, lets it compile and reserve memory, then runs one small step a layer. Collective."""
        assert self.weights.layers, "load() comes first"
        self.phase = "warm-up"
        self._build()
        steps = {
            layer: self._steps(layer, self.placements[layer], weights) for layer, weights in self.weights.layers.items()
        }
        with torch.no_grad(), self.load_counter.kept():
            for weights in self.weights.layers.values():
                warm_up_gate(weights.gate, self.info.gate, self.plan.spec.shape.dtype, self.kernels.ids_dtypes())
            first = next(iter(self.weights.layers.values()))
            self.kernels.warm_up(steps, self.clock.enter)
            if first.shared is not None:
                first.shared.warm_up()
        tokens = (WARM_UP_TOKENS,) * self.ranks.world_size
        shape = self.plan.spec.shape
        x_MK = torch.zeros((WARM_UP_TOKENS, shape.hidden), dtype=shape.dtype)
        mode = modes_of(self.info.gate)[0]
        routed = (WARM_UP_TOKENS, self.info.top_k)
        ids_Mt, weights_Mt = torch.zeros(routed, dtype=torch.int32), torch.ones(routed)
        given = (ids_Mt, weights_Mt) if mode == "routed" else (None, None)
        first_of_kind = {group.layers[0] for group in self.plan.groups}
        counters = self.counters
        for layer in self.weights.layers:
            version = self.placements[layer].version
            plan = StepPlan(step=-1, layer=layer, mode=mode, tokens_per_rank=tokens, placement=version)
            self.step(plan, x_MK, given[0], given[1])
            if layer in first_of_kind:  # backward steps compile, and may meet peers, on a way of their own
                self.step(replace(plan, backward=True), x_MK, given[0], given[1], x_MK)
        self.counters = counters
        with torch.no_grad():
            self.kernels.capture_all((each for of_layer in steps.values() for each in of_layer), self.ranks)
        if (counter := compile_counter()) is not None:
            counter.ready()
        self.phase = IDLE

    def step(
        self,
        plan: StepPlan,
        x_MK: torch.Tensor | Rows,
        ids_Mt: torch.Tensor | None,
        weights_Mt: torch.Tensor | None,
        gradient_MK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs one step on this rank's tokens. Collective.

        Args:
            plan: the step, the same on all ranks.
            x_MK: `(m, K)` in the model's dtype, on any device.
            ids_Mt: `(m, t)` int32 logical ids, which the door has checked. Mode "routed" only.
            weights_Mt: `(m, t)` float32. Mode "routed" only.
            gradient_MK: the gradients of the results, `(m, K)` in the model's dtype. Backward steps only.

        Returns:
            The result `(m, K)` on the rank's device. A backward step gives gradients, in mode "routed" as `joined_gradients`.

        Raises:
            StepError: any failure, with rank, step and phase. Peers then wait for this rank, so the caller must leave the group.
        """
        self.phase = "check"
        try:
            # Autograd computes parts of a backward step, and inference mode would forbid that.
            with torch.no_grad() if plan.backward else torch.inference_mode():
                out_MK = self._step(plan, x_MK, ids_Mt, weights_Mt, gradient_MK)
        except Exception as error:
            raise StepError(self.ranks.rank, plan.step, self.phase, f"{type(error).__name__}: {error}") from error
        self.phase = "idle"
        return out_MK

    def check(self) -> None:
        """Raises RankFailed when a device reports a failure late. The caller has waited for the result before."""
        self.kernels.check()

    def explain(self) -> list[str]:
        """Returns lines that tell measurements and choices of this rank, and why a configured feature is off."""
        return self.kernels.notes()

    def experts_choices(self) -> tuple[Choice, ...]:
        """Returns the experts backend for each range of rows on this rank. Empty: one backend computes all batches."""
        return self.kernels.experts_choices()

    def time_experts(self, *, again: bool) -> list[str]:
        """Times the experts backends for `epserve tune` and returns lines as `explain` does.

        It follows load(), replaces warm_up() and is not collective.
        """
        assert self.weights.layers, "load() comes first"
        with torch.inference_mode():
            return self.kernels.time_experts(self.weights.layers, again)

    def leave(self) -> None:
        """Drops the group and everything built on it, after a failure. Weights, experts and workspaces stay.

        NOTE: a process group closes its connections when its last reference goes. Until then peers wait for this rank.
        """
        self.ranks = replace(self.ranks, group=None)
        self.kernels.leave()

    def regroup(self, ranks: RankContext) -> None:
        """Takes another process group. warm_up() comes next."""
        assert (ranks.rank, ranks.device) == (self.ranks.rank, self.ranks.device), "arrange() gives another place"
        self.leave()
        self.ranks = ranks

    def arrange(self, rank: int, arrangement: Arrangement) -> None:
        """Takes another rank number, number of ranks or placement, between leave() and regroup(). Not collective.

        A staged layer is adopted when it holds the wanted experts, and dropped otherwise.
        """
        assert not self.kernels.built, "leave() comes first"
        ranks = replace(self.ranks, rank=rank, world_size=arrangement.config.engine.ranks, group=None)
        slices = self.config.engine.tensor_parallel
        assert rank % slices == self.ranks.rank % slices, "a rank keeps its slice"
        with self.weights.arranging:
            self._plan_anew(arrangement, ranks)
            for layer, placement in arrangement.placements.items():
                wanted = placement.experts_of(rank)
                if not self.weights.settle(layer, wanted):
                    self.checkpoint.check()  # before this rank frees any expert
                    self.weights.free(layer)
                    self._take(layer, wanted)
            self.config, self.ranks, self.weights.placements = arrangement.config, ranks, dict(arrangement.placements)

    def _plan_anew(self, arrangement: Arrangement, ranks: RankContext) -> None:
        """Takes the plan for other numbers of experts or other places of ranks, and new kernels where it differs."""
        layout = next(iter(arrangement.placements.values())).layout
        if layout == self.plan.spec.layout and arrangement.topology == self.topology:
            return
        plan = rank_plan.plan_ranks(
            arrangement.config, self.info, device=ranks.device.type, topology=arrangement.topology
        )
        if plan.served != self.plan.served:
            self.checkpoint.check()
            self.checkpoint.serve_as(plan.served)
            self.weights.clear()
        if not plan.runs_as(self.plan):
            self.kernels = LayerKernels(plan, arrangement.config, ranks, self.known)
        self.plan, self.topology = plan, arrangement.topology

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights:
        """Reads experts from the checkpoint. Raises CheckpointError when the checkpoint has changed since it was loaded."""
        return self._source.load_layer(layer, experts, device)

    def out_of_reach(self, rank: int, arrangement: Arrangement) -> tuple[int, ...]:
        """Returns the layers whose experts arrange() would have to read from a checkpoint that has changed or gone."""
        lacking = self.weights.lacking(rank, arrangement.placements)
        try:
            if lacking:
                self.checkpoint.check()
        except CheckpointError:
            return lacking
        return ()

    def secure(self, rank: int, arrangement: Arrangement, source: LayerSource, layers: Sequence[int]) -> None:
        """Stages the experts that arrange() will need in `layers`, read from `source`, while steps run.

        Raises:
            NotReady: there is no memory for them. Errors of `source` pass through.
        """
        slots = sum(len(arrangement.placements[layer].experts_of(rank)) for layer in layers)
        needed = int(self.weights.bytes_per_expert * slots)
        free = self._free_bytes()
        if free < needed * self._staging_margin:
            raise NotReady(
                f"{self.config.model.path} has changed since the start, and there is no memory to take experts from"
                f" other ranks beside the present ones: about {needed >> 20} MiB, {free >> 20} MiB are free"
            )
        for layer in layers:
            placement = arrangement.placements[layer]
            wanted = placement.experts_of(rank)
            read = self.weights.read(source, layer, wanted, self.ranks.device)
            self.weights.staged[layer] = Staged(placement=placement, experts=wanted, weights=read, prepared=False)

    def stage(self, layer: int, placement: Placement, *, source: LayerSource | None = None) -> bool:
        """Reads a layer's experts of another placement. Not collective. Steps may run meanwhile.

        Args:
            layer: the layer.
            placement: the placement to prepare.
            source: reads the experts. None: the checkpoint.

        Returns:
            False when there is no memory for it. Nothing has changed then.

        Raises:
            CheckpointError: the checkpoint has changed. Errors of `source` pass through.
        """
        assert self.kernels.ready and placement.layout == self.plan.spec.layout, "warm_up() comes first"
        needed = held_bytes(self.weights.layers[layer])
        if self._free_bytes() < needed * self._staging_margin:
            return False
        wanted = placement.experts_of(self.ranks.rank)
        read = self.weights.read(source or self, layer, wanted, self.ranks.device)
        ready = replace(read, experts=self.kernels.prepare_weights(layer, read.experts))
        self.weights.staged[layer] = Staged(placement=placement, experts=wanted, weights=ready)
        return True

    def capture_staged(self, layer: int) -> None:
        """Captures the staged placement's CUDA graphs, if any, between two steps.

        NOTE: capture before any step of the staged placement. A rank that replays a graph and one that runs eagerly
        would not understand each other.
        """
        if (staged := self.weights.staged.get(layer)) is not None:
            with torch.no_grad():
                self.kernels.capture(self._steps(layer, staged.placement, staged.weights))

    def adopt(self, layer: int, version: int) -> None:
        """Makes the staged placement the present one. No step of the old placement may follow.

        The call does nothing when no placement of this version is staged.
        """
        if self.weights.adopt(layer, version):
            self._keep_graphs()

    def unstage(self, layer: int) -> None:
        if self.weights.staged.pop(layer, None) is not None:
            self._keep_graphs()

    def _sliced(self, source: LayerSource) -> LayerSource:
        """Returns a source of this rank's slices when ranks share experts. A rank keeps its slice in every arrangement."""
        slices = self.config.engine.tensor_parallel
        return source if slices == 1 else SlicedLayers(source, self.plan.served, self.ranks.rank % slices, slices)

    def _take(self, layer: int, experts: tuple[int, ...]) -> None:
        self.weights.take(self, layer, experts, self.ranks.device)

    def close(self) -> None:
        """Frees buffers. Collective. The process group belongs to the caller."""
        self.weights.clear()
        self.kernels.destroy()

    def _step(self, plan: StepPlan, x_MK, ids_Mt, weights_Mt, gradient_MK) -> torch.Tensor:
        placement, weights = self._check(plan, x_MK, ids_Mt, weights_Mt, gradient_MK)
        given = None if plan.mode == BLOCK else Routing(ids_Mt=ids_Mt, weights_Mt=weights_Mt)
        first = sum(plan.tokens_per_rank[: self.ranks.rank])
        self.phase, before = "copy in", self.kernels.of(plan.layer).network_bytes
        key = plan.layer, plan.placement, plan.mode
        replay = None if plan.backward else self.kernels.graph(key, plan.tokens_per_rank)
        if replay is not None:
            self.left_out = {}
            # What lies in one tensor is copied straight into the graph's own.
            rows_MK = x_MK if isinstance(x_MK, torch.Tensor) else x_MK.to(self.ranks.device, non_blocking=True)
            out_MK = replay(rows_MK, None if given is None else whole(given, self.info.top_k), first)
        else:
            step = self._layer_step(plan.layer, plan.mode, placement, weights)
            out_MK = self._eager_step(step, plan, x_MK, given, first, gradient_MK)
        top_k = self.info.top_k if given is None else given.ids_Mt.shape[1]
        sent = self.kernels.of(plan.layer).network_bytes - before
        self.counters = self.counters.after(tokens=out_MK.shape[0], top_k=top_k, sent=sent)
        return out_MK

    def _eager_step(
        self, step: LayerStep, plan: StepPlan, x_MK: torch.Tensor | Rows, given: Routing | None, first: int, gradient_MK
    ) -> torch.Tensor:
        device = self.ranks.device
        x_MK = x_MK.to(device, non_blocking=True)
        self.phase = "gate"
        ids_dtype = self.kernels.ids_dtype(plan.layer, plan.tokens_per_rank, backward=plan.backward)
        if given is None:
            logical = step.route(x_MK, ids_dtype)
        else:
            ids_Mt = given.ids_Mt.to(device, ids_dtype, non_blocking=True)
            weights_Mt = given.weights_Mt.to(device, non_blocking=True)
            logical = Routing(ids_Mt=ids_Mt.contiguous(), weights_Mt=weights_Mt.contiguous())
        if plan.step >= 0:  # warm-up's tokens do not count as load
            self.load_counter.add(plan.layer, logical.ids_Mt)
            self.left_out = left_out(logical.ids_Mt, step.placement, [part.rows for part in plan.parts] or (len(x_MK),))
        if gradient_MK is not None:
            both = x_MK, gradient_MK.to(device, non_blocking=True)
            return step.gradients(
                partial(self.kernels.backward, plan.layer), both, logical, plan.tokens_per_rank, first
            )
        eager = partial(self.kernels.eager, plan.layer)
        return step.compute(eager, x_MK, logical, plan.tokens_per_rank, first)

    def _layer_step(self, layer: int, mode: str, placement: Placement, weights: LayerWeights) -> LayerStep:
        return LayerStep(
            layer=layer, mode=mode, placement=placement, weights=weights, gate=self.info.gate, counter=self.load_counter
        )

    def _steps(self, layer: int, placement: Placement, weights: LayerWeights) -> tuple[LayerStep, ...]:
        """Returns the layer's step in every mode in which it can be asked for."""
        return tuple(self._layer_step(layer, mode, placement, weights) for mode in modes_of(self.info.gate))

    def _check(self, plan: StepPlan, x_MK, ids_Mt, weights_Mt, gradient_MK) -> tuple[Placement, LayerWeights]:
        """Checks a step against its plan. A mismatch is a defect of the scheduler, not of a caller."""
        if not self.kernels.built:
            raise InternalError("the kernel is not built: warm_up() comes before step()")
        check_tensors(plan, self.ranks, self.plan.spec.shape, (x_MK, ids_Mt, weights_Mt, gradient_MK))
        return self.weights.of(plan.layer, plan.placement)

    def _build(self) -> None:
        """Builds the kernels on the present group."""
        if not self.kernels.built:
            self.kernels.build(self.ranks)
        self.weights.prepare(self.kernels.prepare_weights)

    def _keep_graphs(self) -> None:
        modes = modes_of(self.info.gate)
        self.kernels.keep_graphs({(*each, mode) for each in self.weights.versions() for mode in modes})

    @property
    def _staging_margin(self) -> float:
        """Returns the margin of free memory. A layer that is being packed lies beside its plain rows for a moment."""
        return STAGING_MARGIN + self.kernels.packs_weights

    def _free_bytes(self) -> int:
        """Returns this rank's share of the device's free memory."""
        return free_bytes(self.ranks.device) // self.ranks.sharers
