"""The steps of one rank: begun in the thread that reads the engine's frames, ended where their results are waited for.

On a GPU the next step is queued behind the one that computes: the device need not wait until this process has sent one answer
and read the next frame.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from epserve.link.failure import from_exception
from epserve.link.step_server import MOST_KNOWN, Later, Reply, Watched
from epserve.process.phases import COPY_OUT, IDLE

from .device_memory import RankRegions, StepRows
from .lanes.direct import STEP as STEP_OF_LANES
from .lanes.direct import DirectLanes
from .lanes.lanes import RankLanes
from .step import StepPlan
from .worker import Worker

log = logging.getLogger(__name__)


class RankSteps:
    """`generation`: of the group that steps run in, -1: none. `aborted`: the last one whose operations were ended from outside.

    `step`, `started`: the one that was begun last and has not ended, or -1, and when. `regions`: clients' memory on the device.
    `lanes`: lanes whose slots lie there. `direct`: lanes in host memory that this rank serves itself.
    """

    def __init__(self, poison: Callable[[], None]):
        """poison: leaves the group, so that peers fail at once instead of waiting for this rank."""
        self._poison = poison
        self.generation = self.aborted = -1
        self.step, self.started = -1, 0.0
        self.regions = RankRegions(None)
        self.lanes = RankLanes(None)
        self.direct = DirectLanes()
        self.threads = 1
        """Operators of a step compute with so many. Torch keeps the number by thread, so the step's own thread sets it."""
        self._threads_taken = (0, 0)
        self._known: dict[bytes, StepPlan] = {}
        self._busy = threading.RLock()
        self._begun: queue.Queue[int] = queue.Queue()
        """Steps that the device may still be at."""

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """No step begins, of lanes neither, and those that have begun have ended."""
        with self._busy:
            self._begun.join()
            with self.lanes.between():
                yield

    def answer(
        self, worker: Worker | None, header: dict, tensors: list[torch.Tensor], out: torch.Tensor | None, *,
        rank: int, overlaps: bool,
    ) -> Reply | Later:  # fmt: skip
        """One step: its result, in `out` where that is given, or the report of its failure. overlaps: it comes later."""
        step = header["step"]
        if header.get("beat"):
            return {"step": step}, []
        if "lanes" in header:
            return {"step": step, **self.lanes.shown()}, []
        if "direct" in header:
            with self._busy:
                return {"step": step, **self.direct.told(header["direct"])}, []
        if "region" in header:
            return {"step": step, **self._told_of_region(header["region"], rank)}, []
        with self._busy:
            try:
                assert worker is not None
                self._take_threads()
                with self.lanes.turn():
                    begun = self._begin(worker, header, tensors, out)
                later = functools.partial(self._end, rank, step, header["generation"], begun, tensors)
                return Watched(later, begun.ready) if overlaps else later()
            except Exception as error:
                failure = from_exception(error, rank=rank, phase="step").as_json()
                self.step = -1
            if header["generation"] == self.generation:  # a step of an earlier group came too late to harm this one
                self._poison()  # NOTE: not in the except block, where the exception's frames still hold the group
            return {"step": step, "failure": failure}, []

    # The bells of lanes that this rank serves itself, for the step thread (`link.step_server.Bells`).

    @property
    def fd(self) -> int:
        return self.direct.fd

    def serve(self) -> bool:
        """Computes one step of calls that have rung. Returns whether others wait."""
        if not self.direct.open:
            return False
        with self._busy:
            self._take_threads()
            self.started, self.step = time.monotonic(), STEP_OF_LANES
            try:
                with self.lanes.turn():
                    self.direct.serve()
            except Exception:  # a defect: the engine's steps go on
                log.exception("serving lanes")
                self.direct.give_back()
            finally:
                self.step = -1
            return bool(self.direct.waiting)

    def leave(self) -> None:
        """No engine is connected: the lanes go back to it."""
        with self._busy:
            self.direct.give_back()

    def _take_threads(self) -> None:
        taken = threading.get_ident(), self.threads
        if self._threads_taken != taken:
            torch.set_num_threads(self.threads)
            self._threads_taken = taken

    def _plan(self, header: dict) -> StepPlan:
        """Returns the plan in a frame. `text`: what a step by words says but for its number. It is read once."""
        if (text := header.get("text")) is None:
            return StepPlan.from_json(header)
        if (plan := self._known.get(text)) is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            plan = self._known[text] = StepPlan.from_json(header)
        return replace(plan, step=header["step"])

    def _told_of_region(self, asked: dict[str, Any], rank: int) -> dict[str, Any]:
        with self.between():  # nor while another thread captures graphs: the driver's calls would spoil them
            try:
                return self.regions.told(asked)
            except Exception as error:
                log.exception("opening or closing a client's memory")
                return {"failure": from_exception(error, rank=rank, phase="region").as_json()}

    def _begin(self, worker: Worker, header: dict, tensors: list[torch.Tensor], out: torch.Tensor | None) -> Watched:
        """Queues a step; what waits for its result, which is on the CPU or in clients' regions then."""
        plan = self._plan(header)
        generation = plan.generation
        if generation != self.generation:
            raise ConnectionResetError(f"connection reset: generation {generation} has ended")
        routed, gradient_MK = tensors[1:], None
        if plan.backward:
            gradient_MK, *routed = routed
        ids_Mt, weights_Mt = routed or (None, None)
        self.started, self.step = time.monotonic(), plan.step
        rows = StepRows(self.regions, plan.parts, tensors[0]) if plan.on_device else None
        y_MK = worker.step(plan, tensors[0] if rows is None else rows, ids_Mt, weights_Mt, gradient_MK)
        if rows is not None:
            worker.phase = COPY_OUT
            home = rows.put(y_MK, out)
            worker.phase = IDLE
        else:
            home = _to_host(y_MK, out)
        phases, left_out = worker.clock.take(), list(worker.left_out.items())
        ended = torch.cuda.Event() if y_MK.device.type == "cuda" else None
        if ended is not None:
            ended.record()
        del y_MK

        def wait() -> Reply:
            if ended is not None:
                ended.synchronize()
            worker.check()
            if self.aborted >= generation or self.generation != generation:  # another step may have left the group
                raise ConnectionResetError(
                    "connection reset: another rank is gone, the operations of this step were ended"
                )
            if rows is not None:
                rows.finish()
            told = {
                "step": plan.step,
                "phases": phases(),
                "left_out": left_out,
                "refused": list(rows.refused.items()) if rows is not None else [],
                "not_finite": list(rows.not_finite.items()) if rows is not None else [],
            }
            return told, [home] if out is None else []

        self._begun.put(plan.step)
        return Watched(wait, functools.partial(_ended, ended))

    def _end(self, rank: int, step: int, generation: int, wait: Later, _tensors: list[torch.Tensor]) -> Reply:
        """The answer of a step that has begun. `_tensors`: the device may read them until then."""
        try:
            return wait()
        except Exception as error:
            failure = from_exception(error, rank=rank, phase="step").as_json()
        finally:
            if self.step == step:
                self.step = -1
            self._begun.get()
            self._begun.task_done()  # before the lock, whose holder may wait for it
        with self._busy:
            if self.generation == generation:  # else it has been left since
                self._poison()
        return {"step": step, "failure": failure}, []


def _ended(event: torch.cuda.Event | None) -> bool:
    """Returns whether waiting for the event would end at once, also with an error: the wait then reports it."""
    try:
        return event is None or event.query()
    except RuntimeError:
        return True


def _to_host(y_MK: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Into `out`, or memory of its own; from a GPU through pinned memory, and not waited for."""
    if y_MK.device.type != "cuda":
        return y_MK if out is None else out.copy_(y_MK)
    if out is None:
        out = torch.empty(y_MK.shape, dtype=y_MK.dtype, pin_memory=True)
    return out.copy_(y_MK, non_blocking=True)
