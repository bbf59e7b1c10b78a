"""The engine of a joined front end: its ranks and its queue are those of another process. No Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from epserve.engine.budgets import HERE
from epserve.engine.face import EngineFace
from epserve.engine.planning import Answer, Batch
from epserve.engine.records import StepPart, StepRecord
from epserve.errors import ConfigError, DeadlineExceeded, EpserveError, NotReady

from . import board, guest_regions
from . import values as joined
from .frames import JoinError, Make
from .link import Link, connect
from .peers import Peers, UseNews

log = logging.getLogger(__name__)

RETRY_S = (0.1, 2.0)
"""Pauses between attempts to join again. They double from the first to the last."""
LATE_S = 1.0
"""Seconds after a deadline in which the other process may still answer, since it knows the cause of the delay."""
CHANGE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Any]
    batch: Batch | None = None


class RemoteEngine(EngineFace):
    """Passes everything to the engine of another process. Make it with `join`.

    Its state is the other engine's, or "disconnected" while the process that orders the steps cannot be reached. Requests then
    get NotReady (UNAVAILABLE, to be sent again), and this side tries to join again until `close`. The future `ended` fails
    when the other side serves another model now, so that this process has to start anew.
    """

    def __init__(self, address: str, secret: bytes, peers: Peers | None = None):
        super().__init__()
        self._address, self._secret = address, secret
        self.peers = peers or Peers()
        self.info: Any = None
        self._link: Link | None = None
        self._lost = "it has not been reached yet"
        self._state = "disconnected"
        self._status: Any = None
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined = asyncio.Event()
        self._regions = guest_regions.RemoteDeviceRegions(self._change, self._tell, self._shares_gpus)
        self._staying: asyncio.Task[None] | None = None

    @classmethod
    async def join(cls, address: str, secret: bytes, *, timeout_s: float, peers: Peers | None = None) -> RemoteEngine:
        """Joins the process at `address`. Raises ConfigError with the last error when that fails for `timeout_s` seconds.

        peers: the state that this process's server has, too.
        """
        engine = cls(address, secret, peers)
        engine._staying = asyncio.ensure_future(engine._stay())
        joining = asyncio.ensure_future(engine._joined.wait())
        await asyncio.wait({joining, engine._staying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        if not engine._joined.is_set():
            await engine.close()
            if engine.ended.done() and not engine.ended.cancelled():
                engine.ended.result()
            raise ConfigError(f"join: {address} cannot be joined within {timeout_s:g} s: {engine._lost}")
        return engine

    @property
    def layers(self) -> tuple[int, ...]:
        return self.info.layers

    @property
    def device_regions(self) -> guest_regions.RemoteDeviceRegions:
        return self._regions

    def state(self) -> str:
        return self._state

    def status(self) -> Any:
        """Returns the other engine's status, some seconds old at most."""
        return SimpleNamespace(**{**vars(self._status), "state": self._state})

    async def answer(self, batch: Batch) -> Answer:
        """Runs one layer on one batch, as `Engine.answer` does. Raises only EpserveErrors."""
        if self._link is not None and self._state not in ("serving", "recovering", "resizing"):
            raise NotReady(f"the service is {self._state}")
        routed = () if batch.ids is None or batch.weights is None else (batch.ids, batch.weights)
        hidden = (batch.hidden,) if batch.source is None else ()
        gradient = () if batch.gradient is None else (batch.gradient,)
        header = {
            "kind": "forward",
            "layer": batch.layer,
            "timeout_s": batch.deadline - time.monotonic(),
            "request_id": batch.request_id,
            "client": batch.client,
            "priority": int(batch.priority),
            **({"claim": batch.claim.as_json()} if batch.claim is not None else {}),
            **({"backward": True} if gradient else {}),
            **guest_regions.as_json(batch),
        }
        return await self._ask(header, (*hidden, *gradient, *routed), batch, batch.deadline + LATE_S)

    async def rebalance(self, explain: bool = False) -> Any:
        return await self._change("rebalance", explain)

    async def scale(self, ranks: int) -> Any:
        return await self._change("scale", ranks)

    async def close(self) -> None:
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.gather(self._staying, return_exceptions=True)
        self._fail_all(NotReady("this front end has stopped"))
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # seen

    def _tell(self, header: dict[str, Any]) -> None:
        """Sends a message. Its loss with the connection does no harm, since the subject is lost too."""
        if self._link is not None:
            self._link.send(header)

    def _shares_gpus(self) -> bool:
        """Returns whether the ranks may be on this host and on GPUs. Only the other process knows."""
        return self._address.startswith("unix:") and any(rank.gpu_uuid for rank in self._status.ranks)

    async def _change(self, what: str, *args: Any) -> Any:
        header = {"kind": "change", "what": what, "args": args}
        return await self._ask(header, (), None, time.monotonic() + CHANGE_TIMEOUT_S)

    async def _ask(self, header: dict[str, Any], tensors: Any, batch: Batch | None, until: float) -> Any:
        link = self._link
        if link is None:
            raise self._unreachable()
        number, call = next(self._numbers), _Call(asyncio.get_running_loop().create_future(), batch)
        self._calls[number] = call
        sent = link.send({**header, "call": number}, tensors)
        try:
            async with asyncio.timeout_at(until):  # the loop's clock is time.monotonic
                return await call.future
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer from {self._address}, which orders the steps, before the deadline"
            ) from None
        finally:
            link.drop(sent)  # in case it was refused or given up on its way
            if self._calls.pop(number, None) is not None:  # the caller no longer waits for the answer
                link.send({"kind": "cancel", "call": number})

    def _unreachable(self) -> NotReady:
        return NotReady(
            f"{self._address}, which orders the steps, cannot be reached ({self._lost}); send the request again"
        )

    async def _stay(self) -> None:
        """Joins, and joins again whenever the connection has ended."""
        wait = RETRY_S[0]
        while True:
            started = time.monotonic()
            try:
                await self._once()
            except ConfigError as error:
                if not self.ended.done():
                    self.ended.set_exception(error)
                return
            except (OSError, JoinError, TimeoutError, ValueError, KeyError) as error:
                why = str(error) or type(error).__name__
            if self._link is not None or why != self._lost:
                log.warning("%s, which orders the steps, cannot be reached: %s", self._address, why)
            self._link, self._lost = None, why
            self._fail_all(self._unreachable())
            self.set_state("disconnected")
            wait = RETRY_S[0] if time.monotonic() - started > RETRY_S[1] else min(2 * wait, RETRY_S[1])
            await asyncio.sleep(wait)

    async def _once(self) -> None:
        """Runs one connection until it ends. Raises the reason."""
        link = Link(await asyncio.to_thread(connect, self._address))
        receiver = _Receiver(self, link)
        try:
            await link.greet(self._secret, joining=True)
            await link.serve(receiver)
        finally:
            link.close()
            receiver.close()

    # Messages of the other process.

    def welcome(self, link: Link, header: dict[str, Any]) -> None:
        info = joined.model_from_json(header["model"])
        if self.info is not None and info != self.info:
            raise ConfigError(f"join: {self._address} serves something else now: {info.name} with layers {info.layers}")
        self.info, self._status = info, header["status"]
        self._link = link
        log.info("joined %s", self._address)
        self.set_state(header["state"])
        self._joined.set()

    def take_status(self, status: Any) -> None:
        self._status = status

    def expects(self, header: dict[str, Any]) -> bool:
        """Returns whether a call waits for the message that begins to arrive."""
        return header.get("call") in self._calls

    def answered(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        call = self._calls.pop(header["call"], None)
        if call is None or call.future.done():
            return  # given up meanwhile
        if header["kind"] == "failure":
            call.future.set_exception(joined.error_from_json(header["error"]))
        elif header["kind"] == "changed":
            call.future.set_result(header["value"])
        else:
            out_MK = tensors[0] if tensors else _elsewhere(call.batch)
            left_out, not_finite = frozenset(header["left_out"]), frozenset(header["not_finite"])
            call.future.set_result(Answer(out_MK=out_MK, left_out=left_out, not_finite=not_finite))

    def step(self, header: dict[str, Any]) -> None:
        now, record = time.monotonic(), header["record"]
        parts = []
        for number, tokens, queued in header["parts"]:
            batch = call.batch if (call := self._calls.get(number)) is not None else None
            if batch is not None:
                parts.append(
                    StepPart(request_id=batch.request_id, tokens=tokens, queued=now - queued, trace=batch.trace)
                )
        record = StepRecord(
            step=record["step"],
            layer=record["layer"],
            mode=record["mode"],
            tokens_per_rank=tuple(record["tokens_per_rank"]),
            started=now - record["started"],
            ended=now - record["ended"],
            parts=tuple(parts),
            phases=tuple(record["phases"]),
        )
        self._tell_step(record)

    def _fail_all(self, error: EpserveError) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(error)

    def set_state(self, state: str) -> None:
        if state == self._state:
            return
        log.info("state: %s -> %s", self._state, state)
        self._state = state
        self._tell_state(state)


def _elsewhere(batch: Batch | None) -> torch.Tensor:
    """Returns the result of a request that wants it on a GPU."""
    if batch is None or batch.target is None:
        raise JoinError("a result without values")
    rows, hidden = batch.hidden.shape
    return guest_regions.somewhere(rows, hidden, batch.hidden.dtype)


class _Receiver:
    """Receives the messages of one connection to the process that orders the steps."""

    def __init__(self, engine: RemoteEngine, link: Link):
        self._engine, self._link = engine, link
        self._news: UseNews | None = None
        self._neighbour: board.LinkNeighbour | None = None

    def arriving(self, header: dict[str, Any], nbytes: int) -> Make | None:
        return bytearray if self._engine.expects(header) else None

    def dropped(self, header: dict[str, Any]) -> None:
        pass

    def arrived(self, header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        engine = self._engine
        match header.get("kind"):
            case "welcome":
                engine.welcome(self._link, header)
                self._share()
            case "state":
                engine.set_state(header["state"])
            case "status":
                engine.take_status(header["status"])
            case "step":
                engine.step(header)
            case "result" | "failure" | "changed":
                engine.answered(header, tensors)
            case "use":
                for name, nbytes, level in header["clients"]:
                    engine.peers.budgets.of(name).told(self, nbytes, level)
            case kind if kind in board.KINDS and self._neighbour is not None:
                self._neighbour.came(header)

    def _share(self) -> None:
        peers, link = self._engine.peers, self._link
        self._news = UseNews(peers.budgets, lambda news: link.send({"kind": "use", "clients": news}), HERE)
        link.send({"kind": "place", "place": peers.board.place})
        self._neighbour = board.LinkNeighbour(peers.board, link.send, None)
        peers.board.joined(self._neighbour)

    def close(self) -> None:
        """Forgets the reports of the other processes."""
        if self._news is not None:
            self._news.close()
        self._engine.peers.budgets.forget(self)
        if self._neighbour is not None:
            self._neighbour.close()
