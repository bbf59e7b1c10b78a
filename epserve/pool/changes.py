"""Changes while the service runs, one at a time: other places of experts, another number of ranks.

A move of experts never stops the service. Layer by layer, every rank reads its experts of the next placement beside the present
ones. When all ranks have them, the next step of that layer names the new version. When the last step of the old version has
ended, the old experts are freed. A step never mixes two versions. One layer at a time bounds the memory.

For another number of ranks, new processes start and load while the others serve. Then all ranks meet in a new group, and requests
wait in the queue meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from ray.exceptions import RayError

from epserve.errors import ConfigError, EpserveError, NotReady, OperatorError
from epserve.link.failure import root_cause
from epserve.modular_kernel import ExpertLayout
from epserve.rank.actor import RankActor
from epserve.rank.placement import Placement
from epserve.rank.setup import plan as rank_plan
from epserve.rank.setup.balance import ONE_HOST, Hosts, propose
from epserve.rank.setup.memory import check_machine
from epserve.rank.step import Arrangement

from .holders import find_holders
from .members import Member, as_error, call_all
from .one_at_a_time import OneAtATime
from .ranks import Ranks
from .supervisor import Supervisor

log = logging.getLogger(__name__)

GROW_RETRY_S = 5.0
GROW_RETRY_LATER_S = 60.0  # when only an operator can help, since each attempt costs the start of a process
POLL_S = 0.5  # pause between two looks whether a recovery is stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMoves:
    """One layer's part in a rebalance. `nbytes`: size of the moved experts. `reason`: the reason why no expert moves."""

    layer: int
    moved: int
    nbytes: int
    before: float
    after: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """The outcome of one rebalance, or of its explanation.

    Attributes:
        layers: layers whose experts have moved.
        skipped: layers for which some rank had no memory.
        moved: number of slots whose expert changed, over all layers.
        before, after: largest imbalance (load of the busiest rank over the mean) of the layers that moved, or of all layers
            when none did.
        seconds: duration.
        came_from: number of experts that ranks had themselves ("here"), took from other ranks ("peer") or read ("checkpoint").
        moves: every layer with its gain, or with the reason why no expert moves.
    """

    layers: tuple[int, ...]
    skipped: tuple[int, ...]
    moved: int
    before: float
    after: float
    seconds: float
    came_from: Mapping[str, int] = field(default_factory=dict)
    moves: tuple[LayerMoves, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The outcome of a change of the number of ranks. `paused_s`: seconds that requests waited in the queue."""

    before: int
    after: int
    seconds: float
    paused_s: float


class Changes:
    """Moves experts between the ranks of one pool, and changes the number of ranks."""

    def __init__(self, ranks: Ranks, supervisor: Supervisor):
        self._ranks, self._supervisor = ranks, supervisor
        self._one = OneAtATime()
        self._full: Arrangement | None = None  # the arrangement to grow back to
        self._counted: dict[int, torch.Tensor] = {}  # layer -> tokens of each expert when its placement began
        self._came_from: Counter[str] = Counter()
        self.rebalances = 0
        self.skipped_layers = 0
        self.trouble = ""
        """The reason why the service does not grow back."""

    def start(self) -> None:
        if self._ranks.config.engine.rebalance_every_s:
            self._one.background(self._timer(self._ranks.config.engine.rebalance_every_s))

    def close(self) -> list[asyncio.Task]:
        return list(self._one.tasks)

    # Moving experts.

    def loads(self, layer: int) -> list[float]:
        """Returns the tokens of each logical expert since the layer's present placement began."""
        counts_E = self._ranks.load.of_layer(layer)
        since_E = self._counted.get(layer)
        return (counts_E if since_E is None else counts_E - since_E).tolist()

    async def rebalance(
        self, *, above: float = 1.0, loads: dict[int, Sequence[float]] | None = None, explain: bool = False
    ) -> Rebalance:
        """Moves the experts of layers whose imbalance is greater than `above`, where that is worth it.

        Args:
            above: imbalance that may stay.
            loads: tokens of each logical expert by layer, instead of the counted ones.
            explain: move nothing, and tell what would move.

        Raises:
            NotReady: something else changes.
            RankFailed: a rank is lost meanwhile. Layers that are done stay moved, the others stay as they were.
        """
        if self._ranks.missing:
            raise NotReady("a lost rank is being replaced, its experts are on no rank; ask again when it is back")
        return await self._one.alone(self._rebalance(above, loads or {}, explain), "rebalance")

    async def _rebalance(self, above: float, given: dict[int, Sequence[float]], explain: bool) -> Rebalance:
        pool, start = self._ranks, time.monotonic()
        await asyncio.gather(*(member.read_load(pool.load) for member in pool.members))
        skipped: list[int] = []
        told: list[LayerMoves] = []
        self._came_from.clear()
        hosts = self._hosts()
        for layer, placement in pool.arrangement.placements.items():
            loads = list(given.get(layer) or self.loads(layer))
            # A large layer takes tenths of a second, in which the service answers.
            found = await asyncio.to_thread(
                propose, placement, loads, hosts, version=pool.next_version(), above=above
            )  # fmt: skip
            moves = LayerMoves(
                layer=layer, moved=found.moved, nbytes=found.moved * pool.expert_bytes(layer), before=found.before,
                after=found.after, reason=found.reason,
            )  # fmt: skip
            if found.moved and not explain and not await self._move(layer, found.placement):
                skipped.append(layer)
                moves = replace(moves, moved=0, nbytes=0, after=found.before, reason="some rank has no memory for it")
            told.append(moves)
        done = [each for each in told if each.moved]
        self.rebalances += bool(done) and not explain
        self.skipped_layers += len(skipped)
        shown = done or told
        result = Rebalance(
            layers=tuple(each.layer for each in done), skipped=tuple(skipped), moved=sum(each.moved for each in done),
            before=max(each.before for each in shown), after=max(each.after for each in shown),
            seconds=time.monotonic() - start, came_from=dict(self._came_from), moves=tuple(told),
        )  # fmt: skip
        log.info(
            "rebalance%s: %d slots in %d layers, busiest rank %.2f of the mean, now %.2f, experts from %s",
            " (explained)" if explain else "", result.moved, len(done), result.before, result.after, result.came_from,
        )  # fmt: skip
        return result

    def _hosts(self) -> Hosts:
        """Returns the ranks of each host, as far as they are consecutive."""
        topology = self._ranks.arrangement.topology
        if topology is None or not topology.by_host:
            return ONE_HOST
        return Hosts(sizes=topology.host_sizes, num_groups=self._ranks.info.gate.num_groups)

    async def _move(self, layer: int, placement: Placement) -> bool:
        """Moves a layer's experts. Returns False when some rank has no memory for it, and nothing has changed."""
        pool = self._ranks
        await self._steady()
        generation, members = pool.generation, list(pool.members)
        limit = pool.config.cluster.start_timeout_s
        try:
            holders = await find_holders(members, (), pool.arrangement, (layer,))
            staged = await call_all(members, RankActor.stage, layer, placement, holders, timeout=limit, background=True)
        except EpserveError:
            await self._unstage(layer)
            raise
        if any(each is None for each in staged):
            await self._unstage(layer)
            return False
        for each in staged:
            self._came_from.update(each)
        if pool.generation != generation or not pool.serving.is_set():
            await self._unstage(layer)
            raise NotReady("a rank was lost while experts moved; the layer stays as it was")
        pool.move(layer, placement)
        self._counted[layer] = pool.load.of_layer(layer)
        await pool.steps_done()
        # If a rank is lost here, the others arrange themselves anew and take the experts that they have staged.
        await call_all(members, RankActor.adopt, layer, placement.version, timeout=limit, background=True)
        return True

    async def _unstage(self, layer: int) -> None:
        members, limit = list(self._ranks.members), self._ranks.config.cluster.start_timeout_s
        await asyncio.gather(
            *(member.call(RankActor.unstage, layer, timeout=limit, background=True) for member in members)
        )

    async def _timer(self, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            if self._ranks.serving.is_set() and not self._one.busy:
                try:
                    await self.rebalance(above=self._ranks.config.engine.rebalance_above)
                except (EpserveError, RayError) as error:
                    log.warning("rebalance: %s", error)

    # Another number of ranks.

    async def scale(self, ranks: int) -> Resize:
        """Changes the number of ranks, also when its caller gives up. Does nothing when there are as many.

        Raises:
            NotReady: another change is under way, or the change failed and was undone.
            ConfigError: the cluster or the model does not allow it.
        """
        return await self._one.alone(self._scale(ranks), f"scale to {ranks} ranks")

    async def _scale(self, ranks: int) -> Resize:
        pool = self._ranks
        await self._steady()
        if ranks == pool.num_ranks and self._full is None and not pool.missing:
            log.info("scale: there are %d ranks already", ranks)
            return Resize(before=ranks, after=ranks, seconds=0.0, paused_s=0.0)
        arrangement = self._for(ranks)
        before, start = pool.num_ranks, time.monotonic()
        full, self._full = self._full, None
        try:
            pause = await self._become(arrangement)
        except BaseException:
            self._full = self._full or full
            raise
        result = Resize(before=before, after=ranks, seconds=time.monotonic() - start, paused_s=pause)
        log.info("scale: %s", result)
        return result

    def _for(self, ranks: int) -> Arrangement:
        """Returns an arrangement for so many ranks: slots as even as possible, experts by their load."""
        pool = self._ranks
        present = pool.arrangement
        info_experts = next(iter(present.placements.values())).num_logical
        if not 1 <= ranks <= 1024:
            raise ConfigError(f"{ranks} ranks; at least 1, at most 1024")
        slots = info_experts + pool.config.engine.redundant_experts
        slices = pool.config.engine.tensor_parallel
        if ranks % slices:
            raise ConfigError(f"{ranks} ranks do not divide by engine.tensor_parallel {slices}")
        layout = ExpertLayout.even(slots, ranks // slices, slices=slices)
        config = rank_plan.resized(pool.config, layout.counts, info_experts)
        rank_plan.check_layout(config, pool.plan, layout)  # Incompatible before anything is started
        if ranks > pool.num_ranks and config.cluster.address == "local":
            check_machine(config, pool.info, rank_plan.plan_ranks(config, pool.info, device=pool.device))
        version = self._ranks.next_version()
        placements = {
            layer: Placement.spread(
                info_experts, layout, loads=loads if slots > info_experts and any(loads := self.loads(layer)) else (),
                version=version,
            )
            for layer in present.placements
        }  # fmt: skip
        return Arrangement(config=config, placements=placements)

    async def _become(self, arrangement: Arrangement) -> float:
        """Starts missing ranks beside those that serve, then regroups. Returns the seconds of the pause."""
        pool = self._ranks
        wanted, present = arrangement.config.engine.ranks, list(pool.members)
        new = []
        if wanted > len(present):
            missing = wanted - len(present) + pool.config.engine.spares - pool.spares.ready - pool.gang.num_free
            if missing > 0:
                await pool.reserve(missing)
            new = [pool.new_member(rank) for rank in range(len(present), wanted)]
        try:
            await pool.prepare(new, arrangement)
            await self._secure(present[:wanted], arrangement)
            await self._steady()
            if list(pool.members) != present:
                raise NotReady("a rank was replaced meanwhile; ask again")
        except BaseException:
            for member in new:
                pool.discard(member)
            await self._unsecure(present[:wanted], arrangement)
            raise
        start, before, full = time.monotonic(), pool.arrangement, self._full
        surplus = present[wanted:]
        failures: list[Exception] = []

        def back(error: Exception) -> None:
            failures.append(error)
            for member in pool.members:
                if member not in present:
                    pool.discard(member)
            pool.become(present, before)  # the fence finds and replaces those that died
            self._full = full

        pool.become([*present[:wanted], *new], arrangement)
        self._counted.clear()
        change = f"{len(present)} -> {wanted} ranks"
        self._supervisor.rebuild(change, back=back)
        await self._steady()
        if failures:
            (error,) = failures
            if isinstance(error, OperatorError):
                raise error
            raise NotReady(f"{change} failed, the service goes on with {pool.num_ranks}: {error}")
        for member in surplus:
            pool.discard(member)
        return time.monotonic() - start

    async def _secure(self, staying: Sequence[Member], arrangement: Arrangement) -> None:
        """Makes sure, before the pause, that staying ranks can get the experts that they will lack.

        They come from the checkpoint, or from other ranks if the checkpoint has changed. Raises CheckpointError, NotReady.
        """
        limit = self._ranks.config.cluster.start_timeout_s
        beyond = await call_all(staying, RankActor.out_of_reach, arrangement, timeout=limit, background=True)
        if layers := sorted({layer for each in beyond for layer in each}):
            holders = await find_holders(self._ranks.members, (), self._ranks.arrangement, layers)
            outcomes = await asyncio.gather(
                *(
                    member.call(RankActor.secure, arrangement, each, holders, timeout=limit, background=True)
                    for member, each in zip(staying, beyond, strict=True)
                )
            )
            if failures := [each.failure for each in outcomes if each.failure is not None]:
                raise as_error(root_cause(failures))

    async def _unsecure(self, staying: Sequence[Member], arrangement: Arrangement) -> None:
        limit = self._ranks.config.cluster.start_timeout_s
        alive = [member for member in staying if member.alive]
        for layer in arrangement.placements:
            await asyncio.gather(
                *(each.call(RankActor.unstage, layer, timeout=limit, background=True) for each in alive)
            )

    def lose(self, ranks: Collection[int]) -> None:
        """Notes that these ranks are gone and the others go on. `grow_back` follows. Newcomers get the last numbers."""
        full = self._full or self._ranks.arrangement
        order = sorted(range(full.config.engine.ranks), key=lambda rank: rank in ranks)
        placements = {layer: each.reordered(order) for layer, each in full.placements.items()}
        first = next(iter(placements.values()))
        config = rank_plan.resized(full.config, first.layout.counts, first.num_logical)
        self._full = Arrangement(config=config, placements=placements)
        self._counted.clear()

    def grow_back(self) -> None:
        if self._full is not None and not any(task.get_name() == "grow back" for task in self._one.tasks):
            self._one.background(self._grow_back(), name="grow back")

    async def _grow_back(self) -> None:
        while True:
            pause = GROW_RETRY_S
            async with self._one.turn():
                try:
                    await self._steady()
                    if (full := self._full) is None:
                        return
                    version = self._ranks.next_version()
                    placements = {layer: each.with_version(version) for layer, each in full.placements.items()}
                    await self._become(Arrangement(config=full.config, placements=placements))
                except (EpserveError, RayError, OSError) as error:
                    self.trouble = f"growing back to the ranks that there were: {error}"
                    log.warning("%s", self.trouble)
                    if isinstance(error, OperatorError):
                        pause = GROW_RETRY_LATER_S
                else:
                    self.trouble = ""
                    if self._ranks.num_ranks == full.config.engine.ranks:
                        self._full = None
                    continue
            await asyncio.sleep(pause)

    async def _steady(self) -> None:
        """Waits for a recovery to end. Raises NotReady when it is stuck or the service stops."""
        while not self._ranks.serving.is_set():
            if self._ranks.closing:
                raise NotReady("the service is stopping")
            if stuck := self._supervisor.stuck:
                raise NotReady(stuck)
            await self._supervisor.settled(POLL_S)
            await asyncio.sleep(0.01)
