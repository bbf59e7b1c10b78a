"""The Ray actor of one rank."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

from epserve.config import Config
from epserve.errors import CheckpointError, InternalError, NotReady
from epserve.link.door import LinkAddress
from epserve.link.failure import from_exception
from epserve.link.step_server import Later, Reply, StepServer
from epserve.models import UnchangedCheckpoint, open_checkpoint
from epserve.modular_kernel import RankContext
from epserve.process import allocator, logs
from epserve.rank.setup import cores

from . import device, groups
from .device_memory import CudaMemory, DeviceMemory, RankRegions
from .groups import GroupAddress, hang_up
from .lanes import native
from .lanes.lanes import CudaDevice, Device, RankLanes
from .placement import Placement
from .reports import Outcome, Pulse, RankFacts, Standing
from .setup import plan as rank_plan
from .setup.backends import Chosen
from .setup.topology import Location
from .setup.whereabouts import locate
from .step import Arrangement, Counters, LoadReport
from .steps import RankSteps
from .weights.copies import HostCopies
from .weights.hand_over import ExpertServer, PeerSource
from .weights.newcomers import Holders, Welcome, open_unchanged, sources_for
from .worker import Worker

log = logging.getLogger(__name__)

LANES_FAILED = 70  # sysexits.h, EX_SOFTWARE
TRIM_S = 15.0
"""Seconds after which a CPU rank returns free memory to the system. Batches of all sizes come and go on its heap."""


class RankActor:
    """Ray's view of a Worker. `call` runs one method at a time. `background`, `ping` and `abort` have their own threads.

    A spare has no rank: it runs `warm` at its start, and `set_up` when it takes a rank over. A standby has neither rank nor
    device: it runs `stand_by` first, then `occupy`, and then goes on as a rank or as a spare.
    """

    def __init__(self, config: Config, device: str):
        self._config, self._device_kind = config, device
        self._rank, self._device = -1, torch.device("cpu")
        allocator.settle()
        self._trimmed = time.monotonic()
        logs.configure(config.server.log_format, level=logging.INFO, members=lambda: {"rank": self._rank})
        self._checkpoint: UnchangedCheckpoint | None = None
        self._copies: HostCopies | None = None
        self._worker: Worker | None = None
        self._server: StepServer | None = None
        self._experts: ExpertServer | None = None
        self._steps = RankSteps(self._poison)
        self._cores_note: tuple[str, ...] = ()
        self._host = cores.this_host()  # before this process is bound to a part of it
        self._newest = -1  # generation of the last group that this rank was asked to join
        self._before_me: RankFacts | None = None
        self._location: Location | None = None
        self._hosts: tuple[int, ...] = ()

    @ray.method(concurrency_group="work")
    def call(self, method: str, *args) -> Outcome:
        return self._run_method(method, *args)

    @ray.method(concurrency_group="background")
    def background(self, method: str, *args) -> Outcome:
        """Runs a method that may take long while steps run."""
        return self._run_method(method, *args)

    def _run_method(self, method: str, *args) -> Outcome:
        try:
            return Outcome(value=getattr(self, method)(*args))
        except Exception as error:
            failure = from_exception(error, rank=self._rank, phase=method)
        if method == "join":
            self._poison()
        return Outcome(failure=failure)

    @ray.method(concurrency_group="control")
    def ping(self) -> Pulse:
        worker = self._worker
        if self._device_kind == "cpu" and time.monotonic() - self._trimmed > TRIM_S:
            self._trimmed = time.monotonic()
            allocator.trim()
        step = self._steps.step
        seconds = time.monotonic() - self._steps.started if step >= 0 else 0.0
        phase, counters = (worker.phase, worker.counters) if worker is not None else ("set-up", Counters())
        late = worker.late_compiles if worker is not None else 0
        loading = worker.loading if worker is not None else None
        return Pulse(
            phase=phase, step=step, step_seconds=seconds, counters=counters, late_compiles=late, loading=loading
        )

    @ray.method(concurrency_group="control")
    def load_counts(self) -> bytes:
        """Returns the tokens of each served layer and logical expert (`LoadCounter.read`)."""
        return self._worker.load_counter.read() if self._worker is not None else b""

    @ray.method(concurrency_group="control")
    def abort(self, generation: int, unreachable: list[str]) -> None:
        """Ends operations of this generation's group that wait for a lost rank. A late call does not end later groups.

        Gloo needs no help if the process has ended, since its sockets break. Behind a cut cable they do not break, and gloo
        would wait for its timeout. This rank therefore closes its connections to `unreachable` nodes (addresses).
        """
        if self._newest > generation:
            return
        self._steps.aborted = generation  # set first: the output of an aborted operation must not count as a result
        hang_up(unreachable)
        if self._worker is not None:
            try:
                self._worker.kernels.interrupt()
            except Exception:
                # The waits then end at their own deadline. This thread still has work to do.
                log.exception("rank %d: ending the device's waits", self._rank)
        if self._device.type == "cuda":
            groups.leave(self._device)

    def stand_by(self, chosen: tuple[Chosen, ...]) -> RankFacts:
        """Does the slow work that needs neither device nor weights: imports. The GPU is not known yet."""
        torch.set_num_threads(1)
        try:
            open_checkpoint(self._config.model.path, self._config.model.dtype)
        except CheckpointError as error:  # it may be back later, or other ranks hold the experts
            log.warning("this standby found no checkpoint: %s", error)
        for each in chosen:
            backends = each.as_backends()
            backends.all2all.get(each.all2all)
            for name in (each.experts, *each.rivals):
                backends.experts.get(name)
        if device.driver_started():  # the driver has then read CUDA_VISIBLE_DEVICES too early
            raise InternalError(
                "something that was imported has started CUDA: a standby could not choose its GPU any more"
            )
        gc.freeze()
        return self._facts("", placed=False)

    def occupy(self, before_me: RankFacts) -> None:
        """Takes the place of a process that is gone. `set_up` or `warm` comes next and takes its device."""
        self._before_me = before_me

    def warm(self, welcome: Welcome) -> RankFacts:
        """Does the slow work that needs no rank: imports, the device, the checkpoint's headers, perhaps its weights."""
        uuid = self._take_device()
        checkpoint = None
        try:
            checkpoint = self._checkpoint = open_unchanged(self._config.model, welcome.start)
        except CheckpointError as error:
            if not self._config.engine.redundant_experts:
                raise
            log.warning("this spare can take over where other ranks have copies only: %s", error)
        info = checkpoint.info if checkpoint is not None else welcome.info
        plan = rank_plan.plan_ranks(self._config, info, device=self._device.type)
        plan.chosen.as_backends().experts.get(plan.chosen.experts)  # imports it
        if checkpoint is not None and self._config.engine.spare_weights == "host":
            try:
                checkpoint.serve_as(plan.served)
                self._copies = HostCopies(checkpoint, checkpoint.info.num_experts, plan.layers)
            except NotReady as error:  # a spare that reads files is better than none
                log.warning("this spare will read the checkpoint when it takes over: %s", error)
        if self._lane_device() is not None:
            native.build()
        gc.freeze()
        return self._facts(uuid)

    def take_over(
        self, rank: int, arrangement: Arrangement, welcome: Welcome, local: bool
    ) -> tuple[RankFacts, LinkAddress, LoadReport]:
        return self.set_up(rank, arrangement, welcome), self.listen(local), self.load()

    def _take_device(self) -> str:
        """Takes the device. Returns the GPU's id, empty on a CPU."""
        shared = self._config.cluster.ranks_per_gpu > 1
        self._device, uuid = device.take(self._device_kind, self._before_me, shared=shared)
        return uuid

    def locate(self, rank: int) -> RankFacts:
        """Takes the device and tells where this process is. It comes before the ranks' backends are chosen."""
        self._rank = rank
        return self._facts(self._take_device())

    def set_up(self, rank: int, arrangement: Arrangement, welcome: Welcome | None = None) -> RankFacts:
        self._take_place(rank, arrangement)
        uuid = self._take_device()
        # A spare opened it before, which suffices for its copies.
        checkpoint, peers = sources_for(self._config.model, rank, welcome, self._checkpoint)
        self._worker = Worker(
            self._config, self._context(group=None), placements=arrangement.placements, source=self._copies, peers=peers,
            checkpoint=checkpoint, times=welcome.times if welcome is not None else None, topology=arrangement.topology,
        )  # fmt: skip
        self._copies = None  # goes when the worker has read from it
        gc.freeze()  # what imports left behind: collecting after a failure otherwise takes 0.2 s, while all wait
        return self._facts(uuid)

    def _take_place(self, rank: int, arrangement: Arrangement) -> None:
        self._rank, self._config = rank, arrangement.config
        self._hosts = arrangement.topology.hosts if arrangement.topology is not None else ()

    def _facts(self, uuid: str, *, placed: bool = True) -> RankFacts:
        address = ray.util.get_node_ip_address()
        if placed and self._location is None:
            self._location = locate(self._config.engine, self._device_kind, gpu_uuid=uuid, address=address)
        return RankFacts(
            rank=self._rank,
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=address,
            device=str(self._device),
            gpu_uuid=uuid,
            started=device.start_ticks(),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES", "") if uuid else "",
            location=self._location,
        )

    def load(self) -> LoadReport:
        assert self._worker is not None
        return self._worker.load()

    def listen(self, local: bool) -> LinkAddress:
        """Opens the data path, on this machine only or on the node's address."""
        if self._server is not None:
            self._server.close()
        host = "" if local else ray.util.get_node_ip_address()
        self._steps.lanes.close_all()
        if self._lane_device() is not None:
            native.build()
        self._steps.lanes = lanes = RankLanes(self._lane_device())
        lanes.configure(self._config)
        self._steps.regions = RankRegions(self._device_memory(), lanes)
        self._server = StepServer(self._answer, host=host, pin=self._device.type == "cuda", bells=self._steps)
        return self._server.address

    def _device_memory(self) -> DeviceMemory | None:
        """Returns the opener of clients' memory on this rank's GPU."""
        return CudaMemory(self._device) if self._device.type == "cuda" else None

    def _lane_device(self) -> Device | None:
        """Returns this rank's GPU as lanes need it, where the configuration has them."""
        return CudaDevice() if self._device.type == "cuda" and self._config.server.gpu_lanes else None

    def join(self, address: GroupAddress) -> dict[str, float]:
        """Joins a new process group, builds the kernel on it and warms up. Collective. Returns the seconds of each part."""
        assert self._worker is not None
        with self._steps.between():
            start = time.monotonic()
            self._newest = address.generation
            self._leave_group()
            group = None
            if self._config.engine.ranks > 1:
                group = groups.join(
                    address, self._rank, self._config.engine.ranks, self._device, self._config.scheduler.step_timeout_s
                )
            grouped = time.monotonic()
            if self._device.type == "cpu":
                self._take_cores(group)
            self._worker.regroup(self._context(group))
            self._worker.warm_up()
            self._steps.generation = address.generation
            self._steps.lanes.ready(self._worker)
            self._steps.direct.ready(self._worker, address.generation)
            log.info("ready in generation=%d on device=%s", address.generation, str(self._device))
            return {"group": grouped - start, "warm-up": time.monotonic() - grouped}

    def _take_cores(self, group: Any) -> None:
        """Takes this rank's share of its host's cores among the ranks now on the host. Collective."""
        index, sharers = groups.neighbours(group, self._config.engine.ranks, self._rank, self._host.key)
        asked = self._config.engine.cpu_threads
        share = cores.share_of(self._host, index, sharers, asked)
        if share.cores:
            cores.bind(share.cores)
        torch.set_num_threads(share.threads)
        self._steps.threads = share.threads
        if asked is not None and asked > share.threads:
            log.warning(
                "rank %d: engine.cpu_threads (or OMP_NUM_THREADS) %d is above its share, %d cores among %d ranks; it takes %d",
                self._rank, asked, self._host.usable, sharers, share.threads,
            )  # fmt: skip
        bound = f", bound to cores {cores.shown(share.cores)}" if share.cores else ""
        self._cores_note = (f"threads: {share.threads}, {self._host.usable} cores among {sharers} ranks{bound}",)
        log.info("rank %d: %s", self._rank, *self._cores_note)

    def leave(self, rank: int, arrangement: Arrangement) -> None:
        """Leaves the group, and takes another place if one is given. Joining comes next."""
        assert self._worker is not None
        with self._steps.between():
            self._leave_group()
            self._take_place(rank, arrangement)
            self._worker.arrange(rank, arrangement)

    def hand_out(self, local: bool) -> LinkAddress:
        """Lets other ranks take this rank's experts, from this machine only or at the node's address."""
        assert self._worker is not None
        if self._experts is not None:
            self._experts.close()
        self._experts = ExpertServer(self._worker.weights.held, host="" if local else ray.util.get_node_ip_address())
        return self._experts.address

    def stage(self, layer: int, placement: Placement, holders: Sequence[Holders]) -> dict[str, int] | None:
        """Stages a layer. Returns the number of experts by source, or None when there is no memory. `holders` is by slice."""
        worker = self._worker
        assert worker is not None
        source = PeerSource(worker.weights.held, holders[self._rank % len(holders)][layer], fallback=worker)
        if not worker.stage(layer, placement, source=source):
            return None
        with self._steps.between():  # between two steps
            worker.capture_staged(layer)
            self._steps.lanes.refresh()
        return dict(source.came_from)

    def out_of_reach(self, arrangement: Arrangement) -> tuple[int, ...]:
        assert self._worker is not None
        return self._worker.out_of_reach(self._rank, arrangement)

    def secure(self, arrangement: Arrangement, layers: Sequence[int], holders: Sequence[Holders]) -> None:
        """Takes the experts of `layers` from other ranks before `leave`, since the checkpoint cannot be read.

        `holders` is by slice.
        """
        worker, mine = self._worker, holders[self._rank % len(holders)]
        assert worker is not None
        for layer in layers:
            worker.secure(
                self._rank, arrangement, PeerSource(worker.weights.held, mine[layer], fallback=worker), (layer,)
            )

    def explain(self) -> Standing:
        worker = self._worker
        assert worker is not None
        notes = (*worker.explain(), *self._cores_note, *filter(None, [self._steps.lanes.note]))
        return Standing(
            notes=notes, choices=worker.experts_choices(), backends=worker.plan.chosen.names,
            weights_bytes=worker.weights.nbytes, times=worker.known.tables,
        )  # fmt: skip

    def adopt(self, layer: int, version: int) -> None:
        assert self._worker is not None
        with self._steps.between():  # between two steps
            self._worker.adopt(layer, version)
            self._steps.lanes.refresh()

    def unstage(self, layer: int) -> None:
        assert self._worker is not None
        with self._steps.between():
            self._worker.unstage(layer)
            self._steps.lanes.refresh()

    def close(self) -> None:
        """Collective."""
        with self._steps.between():
            for server in (self._server, self._experts):
                if server is not None:
                    server.close()
            self._steps.regions.close_all()
            self._steps.lanes.close_all()
            try:
                if self._worker is not None:
                    self._worker.close()
            finally:
                self._leave_group()

    def _leave_group(self) -> None:
        self._steps.generation = -1
        self._steps.lanes.pause()
        self._steps.direct.pause()
        if self._worker is not None:
            self._worker.leave()
        groups.leave(self._device)

    def _poison(self) -> None:
        """Leaves the group right after a failure, so that peers fail at once instead of waiting for this rank."""
        try:
            self._leave_group()
        except Exception:
            # The group is already broken. The caller gets the first error.
            log.exception("rank %d: leaving a broken group", self._rank)

    def _context(self, group) -> RankContext:
        return RankContext(
            rank=self._rank,
            world_size=self._config.engine.ranks,
            device=self._device,
            group=group,
            timeout_s=self._config.scheduler.step_timeout_s,
            sharers=self._config.cluster.ranks_per_gpu if self._device.type == "cuda" else 1,
            hosts=self._hosts,
        )

    def _answer(self, header: dict, tensors: list[torch.Tensor], out: torch.Tensor | None) -> Reply | Later:
        """Answers a frame of the data path. It runs in the step thread."""
        if why := self._steps.lanes.error:
            log.error("rank %d: lanes on its GPU have failed, this process ends: %s", self._rank, why)
            os._exit(LANES_FAILED)
        return self._steps.answer(self._worker, header, tensors, out, rank=self._rank, overlaps=self._overlaps)

    @property
    def _overlaps(self) -> bool:
        """Returns whether a step still runs after all of its work is queued."""
        return self._device.type == "cuda"
