"""The engine of the process that has the ranks: the pool and the step scheduler behind one face."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from epserve.config import Config
from epserve.errors import InvalidRequest, NotReady, TooLarge, UnknownLayer
from epserve.models import ModelInfo, UnchangedCheckpoint
from epserve.modular_kernel import check_routing
from epserve.pool.changes import Rebalance, Resize
from epserve.pool.device_regions import DeviceRegions
from epserve.pool.pool import Pool
from epserve.pool.ray_cluster import Cluster
from epserve.rank.expert_load import by_layer
from epserve.rank.setup import plan as rank_plan

from .direct_lanes import DirectLanes
from .face import EngineFace
from .now import StepsNow
from .planning import Answer, Batch
from .records import UP, EngineStatus, RankStatus, State
from .scheduler import Scheduler

log = logging.getLogger(__name__)


class Engine(EngineFace):
    """Make it, `await start()`, call `forward` or `answer` from any task of that loop, `await close()`.

    The constructor checks the configuration against the checkpoint and the backends. It starts nothing.
    """

    def __init__(self, config: Config):
        """Raises ConfigError, CheckpointError or Incompatible within a second."""
        super().__init__()
        self.config = config
        self._checkpoint = UnchangedCheckpoint(config.model.path, config.model.dtype)
        self.info: ModelInfo = self._checkpoint.info
        self._device = rank_plan.resolve_device(config.engine.device)
        here = self._device == "cpu" or torch.cuda.is_available()  # else a front end whose ranks are on other nodes
        self.plan = rank_plan.plan_ranks(config, self.info, device=self._device, here=here)
        self._state: State = "stopped"
        self._cluster: Cluster | None = None
        self._pool: Pool | None = None
        self._scheduler: Scheduler | None = None
        self._now: StepsNow | None = None
        self._direct: DirectLanes | None = None
        self._last_status: tuple[RankStatus, ...] = ()
        self.count_front_ends: Callable[[], int] = lambda: 0
        """Returns the number of front ends that have joined. The port that they join at sets it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The MoE layers that are served."""
        return self.plan.layers

    async def start(self) -> None:
        """Returns when every rank has loaded and run a step. Raises an EpserveError when everything is stopped again."""
        self._set_state("starting")
        for group in self.plan.groups:
            log.info(group.describe())
        try:
            await self._connect()
            pool = self._pool = Pool(
                self.config, self.plan, device=self._device, stamp=self._checkpoint.stamp, info=self.info,
                on_state=self._set_state,
            )  # fmt: skip
            self._scheduler = Scheduler(
                self.config.scheduler,
                pool,
                wait_for_ranks=self.config.engine.when_experts_missing != "refuse",
                serve_without=self.config.engine.when_experts_missing == "serve_without",
            )
            pool.supervisor.on_missing = self._scheduler.refuse_waiting
            self._scheduler.on_step = self._tell_step
            self._now = StepsNow(self._scheduler, pool, self._check, self.config.scheduler.max_step_tokens)
            self._direct = DirectLanes(self._scheduler, pool)
            await pool.start()
            log.info(self._explain_backends())
        except BaseException as error:
            # Now, since closing takes seconds and may itself go wrong.
            if isinstance(error, asyncio.CancelledError):
                log.debug("start given up")
            else:
                log.error("start failed: %s: %s", type(error).__name__, error)
            await self.close()
            raise

    async def _connect(self) -> None:
        connecting = asyncio.ensure_future(asyncio.to_thread(Cluster.connect, self.config))
        try:
            self._cluster = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # A thread cannot be cancelled, so its Ray must be stopped. The signal may have ended Ray's processes first.
            with contextlib.suppress(Exception):
                self._cluster = await connecting
            raise

    async def close(self, drain_s: float = 0) -> None:
        """Refuses new requests, finishes accepted ones for up to `drain_s` seconds, and stops the ranks. Safe at any time."""
        if self._state == "stopped":
            return
        if self._scheduler is not None:
            self._set_state("draining")
            if drain_s > 0 and not await self._scheduler.drain(drain_s):
                log.warning("drain: requests were left after %g s", drain_s)
            await self._scheduler.close()
        reachable = self._cluster is not None and await asyncio.to_thread(self._cluster.answers)
        if self._pool is not None:
            await self._pool.close(reachable=reachable)
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)
        self._scheduler = self._pool = self._cluster = self._now = self._direct = None
        self._set_state("stopped")

    async def answer(self, batch: Batch) -> Answer:
        """Runs one layer on one batch, forward or backward. Raises only EpserveErrors."""
        scheduler = self._scheduler
        if scheduler is None or self._state not in UP:
            raise NotReady(f"the service is {self._state}")
        checked = self._check(batch)
        if not checked.num_tokens:
            return Answer(out_MK=checked.hidden.new_empty((0, checked.columns)))
        return await scheduler.submit(checked)

    def buffer(self, nbytes: int) -> Any:
        """Returns a writable buffer for a request's bytes. The ranks of this host read a tensor over it in place."""
        return self._pool.buffer(nbytes) if self._pool is not None else bytearray(nbytes)

    @property
    def now(self) -> StepsNow | None:
        """Returns the steps of other threads than the loop's, or None while no rank can be reached."""
        return self._now if self._state in UP else None

    @property
    def device_regions(self) -> DeviceRegions | None:
        """Opens memory of clients on the GPUs of this host's ranks. None until the engine has started."""
        return self._pool.regions if self._pool is not None else None

    @property
    def lane_opener(self) -> DeviceRegions | None:
        return self.device_regions

    @property
    def direct_lanes(self) -> DirectLanes | None:
        return self._direct if self._state in UP else None

    async def rebalance(self, explain: bool = False) -> Rebalance:
        """Moves experts to balance the counted load, while serving. Raises NotReady, RankFailed."""
        return await self._serving_pool().changes.rebalance(explain=explain)

    async def scale(self, ranks: int) -> Resize:
        """Goes on with another number of ranks. Requests wait in the queue for a moment. Raises NotReady, ConfigError."""
        return await self._serving_pool().changes.scale(ranks)

    def _serving_pool(self) -> Pool:
        if self._pool is None or self._state not in UP:
            raise NotReady(f"the service is {self._state}")
        return self._pool

    def state(self) -> State:
        return self._state

    def status(self) -> EngineStatus:
        pool, scheduler = self._pool, self._scheduler
        if pool is not None and pool.members:
            self._last_status = tuple(self._rank_status(member) for member in pool.members)
        return EngineStatus(
            state=self._state,
            generation=pool.generation if pool is not None else 0,
            steps=scheduler.steps_done if scheduler is not None else 0,
            ranks=self._last_status,
            queue_tokens=scheduler.queued_tokens if scheduler is not None else 0,
            backends=self._explain_backends(),
            recoveries=len(pool.recoveries) if pool is not None else 0,
            replayed_requests=scheduler.replays if scheduler is not None else 0,
            spares=pool.spares.ready if pool is not None else 0,
            front_ends=self.count_front_ends(),
            rebalances=pool.changes.rebalances if pool is not None else 0,
            rebalances_skipped=pool.changes.skipped_layers if pool is not None else 0,
            missing_experts=pool.missing if pool is not None else {},
            expert_tokens=by_layer(pool.load) if pool is not None else {},
            slots=self._slots() if pool is not None else {},
        )

    def _slots(self) -> dict[int, tuple[int, ...]]:
        assert self._pool is not None
        return {layer: each.physical_to_logical for layer, each in self._pool.arrangement.placements.items()}

    def _explain_backends(self) -> str:
        pool = self._pool
        plan = pool.plan if pool is not None else self.plan
        text = plan.chosen.explain()
        lines = [group.describe() for group in plan.groups]
        if pool is not None and (topology := pool.arrangement.topology) is not None and topology.num_hosts > 1:
            lines.append(f"ranks on {topology.describe()}")
        if pool is not None:
            lines += [*pool.explanation, *filter(None, (pool.stuck, pool.changes.trouble))]
        return text + "".join(f"\n  - {line}" for line in lines)

    def _rank_status(self, member) -> RankStatus:
        facts, report, pulse = member.facts, member.report, member.pulse
        assert self._pool is not None
        placements = self._pool.arrangement.placements
        experts = {layer: each.experts_of(member.rank) for layer, each in placements.items()}
        first = experts[self.plan.layers[0]]
        return RankStatus(
            rank=member.rank,
            node=facts.node_ip if facts is not None else "",
            pid=facts.pid if facts is not None else 0,
            device=facts.device if facts is not None else "",
            gpu_uuid=facts.gpu_uuid if facts is not None else "",
            experts=first,
            layer_experts={layer: each for layer, each in experts.items() if each != first},
            tokens_done=self._pool.steps.tokens_done.get(member.rank, 0),
            weights_bytes=report.weights_bytes if report is not None else 0,
            alive=member.alive,
            phase=pulse.phase if pulse is not None else "idle",
            late_compiles=pulse.late_compiles if pulse is not None else 0,
            experts_choices=member.experts_choices,
            network_bytes=pulse.counters.network_bytes if pulse is not None else 0,
        )

    def _set_state(self, state: State) -> None:
        if state == self._state or (self._state == "draining" and state != "stopped"):
            return
        log.info("state: %s -> %s", self._state, state)
        self._state = state
        self._tell_state(state)

    def _check(self, batch: Batch) -> Batch:
        """Checks a batch at the engine's own door, so that no batch fails on the ranks. Returns it with its routing checked."""
        shape, hidden = self.plan.spec.shape, batch.hidden
        if batch.layer not in self.plan.layers:
            served = ", ".join(map(str, self.plan.layers))
            text = f"layer {batch.layer} is not a served MoE layer of {self.info.name} (served: {served})"
            raise UnknownLayer(text, field="layer")
        if hidden.ndim != 2 or hidden.shape[1] != shape.hidden:
            text = f"hidden_states: shape {tuple(hidden.shape)}, the model has (tokens, {shape.hidden})"
            raise InvalidRequest(text, field="hidden_states")
        if hidden.dtype != shape.dtype:
            raise InvalidRequest(f"hidden_states: {hidden.dtype}, the model has {shape.dtype}", field="hidden_states")
        if batch.gradient is not None and (batch.gradient.shape, batch.gradient.dtype) != (hidden.shape, hidden.dtype):
            text = f"output_gradients: {tuple(batch.gradient.shape)} {batch.gradient.dtype}, must be as hidden_states:"
            raise InvalidRequest(f"{text} {tuple(hidden.shape)} {hidden.dtype}", field="output_gradients")
        if (batch.ids is None) != (batch.weights is None):
            raise InvalidRequest("topk_ids and topk_weights come together", field="topk_ids")
        if batch.ids is None and self.info.gate.scoring == "client":
            why = f" ({self.info.gate.refusal})" if self.info.gate.refusal else ""
            raise InvalidRequest(
                f"topk_ids: missing; the service has no gate for {self.info.family}{why}, the client chooses experts",
                field="topk_ids",
            )
        ids, weights = batch.ids, batch.weights
        if ids is None or weights is None:
            return batch
        if not batch.routing_checked:  # otherwise the door has looked at the values
            routing = check_routing(ids, weights, num_tokens=batch.num_tokens, num_experts=self.info.num_experts)
            batch = replace(batch, ids=routing.ids_Mt, weights=routing.weights_Mt, routing_checked=True)
        if ids.shape[1] > shape.top_k:
            text = f"topk_ids: {ids.shape[1]} experts a token, the model's top-k is {shape.top_k}"
            raise TooLarge(text, field="topk_ids")
        return batch
