"""The port that other front ends join at. Their requests go into this process's queue, so that one order of steps remains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from epserve.engine.budgets import Claim
from epserve.engine.face import EngineFace
from epserve.engine.planning import Batch, Priority
from epserve.engine.records import StepRecord
from epserve.errors import ConfigError, EpserveError, InvalidRequest, Overloaded
from epserve.link.greeting import MOST_GREETED
from epserve.process.unix_peers import same_user

from . import board
from . import values as joined
from .frames import JoinError, Make
from .guest_regions import GuestRegions, somewhere
from .link import Link, parse_address
from .peers import Peers, UseNews

log = logging.getLogger(__name__)

STATUS_S = 1.0
FLUSH_S = 2.0
PAUSE_S = 0.05  # before another attempt where the system is short of something


class _Ticket:
    """Stands for a front end's request in the records of steps."""

    __slots__ = ("call", "guest")

    def __init__(self, guest: _Guest, call: int):
        self.guest, self.call = guest, call


class JoinPort:
    """Takes joined front ends. `start()` needs a running loop, and `close()` follows the engine's drain."""

    def __init__(self, engine: EngineFace, address: str, secret: bytes, *, max_bytes: int, peers: Peers | None = None):
        """Does not listen yet.

        Args:
            engine: runs the requests.
            address: host:port, or unix:@NAME. Port 0: `start` puts in the port that the system picked.
            secret: known to all front ends.
            max_bytes: most bytes of all requests that are here at once.
            peers: the state that this process's server has, too.
        """
        self.engine, self.address, self.secret, self._max_bytes = engine, address, secret, max_bytes
        self.peers = peers or Peers()
        self._held = 0
        self._guests: set[_Guest] = set()
        self._greeted: deque[Link] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        engine.on_step(self._step_done)
        engine.on_state_change(self._state_changed)

    @property
    def front_ends(self) -> int:
        return len(self._guests)

    def start(self) -> None:
        """Listens. Raises ConfigError when the address cannot be used."""
        try:
            if self.address.startswith("unix:@"):
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._listener.bind("\0" + self.address.removeprefix("unix:@"))
                self._listener.listen()
            else:
                host, port = parse_address(self.address)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = socket.create_server((host, port), family=family)
                bound = self._listener.getsockname()
                self.address = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        except OSError as error:
            text = f"server.host, server.join_port: cannot listen on {self.address}: {error.strerror or error}"
            raise ConfigError(text) from None
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener))
        self._spawn(self._tell_status())

    async def close(self) -> None:
        """Closes the port. Answers on their way have a moment to go out."""
        if self._listener is None:
            return
        self._listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await asyncio.gather(*(guest.finish() for guest in self._guests))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, nbytes: int) -> Callable[[], None]:
        """Takes room for a request. Returns the function that gives it back. Raises Overloaded."""
        if self._held and self._held + nbytes > self._max_bytes:
            raise Overloaded(
                f"request of {nbytes} bytes: {self._held} bytes of other front ends' requests are where the steps are"
                f" ordered, at most {self._max_bytes} are held at once (server.max_buffered_bytes); try again later"
            )
        self._held += nbytes

        def give_back() -> None:
            self._held -= nbytes

        return give_back

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection was not taken: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            if same_user(sock):
                self._spawn(self._serve(sock))
            else:
                sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        link = Link(sock)
        self._greeted.append(link)
        if len(self._greeted) > MOST_GREETED:
            self._greeted.popleft().hang_up()
        try:
            await link.greet(self.secret, joining=False)
        except (JoinError, OSError, TimeoutError, ValueError) as error:
            log.warning("a front end was turned away: %s", str(error) or type(error).__name__)
            link.close()
            return
        finally:
            with contextlib.suppress(ValueError):
                self._greeted.remove(link)
        guest = _Guest(self, link)
        self._guests.add(guest)
        log.info("a front end has joined; %d are here", len(self._guests))
        why: object = "it closed the connection"
        try:
            guest.welcome()
            await link.serve(guest)
        except (JoinError, OSError, ValueError, KeyError, TypeError) as error:  # also for wrong frames
            why = error
        finally:
            self._guests.discard(guest)
            await guest.end()
            log.info("a front end is gone (%s); %d are here", why, len(self._guests))

    async def _tell_status(self) -> None:
        while True:
            if self._guests:
                status = self.engine.status()
                for guest in self._guests:
                    guest.link.send({"kind": "status", "status": status})
            await asyncio.sleep(STATUS_S)

    def _state_changed(self, state: str) -> None:
        for guest in self._guests:
            guest.link.send({"kind": "state", "state": state})

    def _step_done(self, record: StepRecord) -> None:
        """Sends each front end the steps that have its requests, before their results."""
        now = time.monotonic()
        parts: dict[_Guest, list[list[Any]]] = {}
        for part in record.parts:
            if isinstance(part.trace, _Ticket):
                ticket = part.trace
                parts.setdefault(ticket.guest, []).append([ticket.call, part.tokens, now - part.queued])
        for guest, own in parts.items():
            guest.link.send({"kind": "step", "record": joined.record_as_json(record, now), "parts": own})

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Guest:
    """One joined front end: the receiver of its link. Its requests end with it."""

    def __init__(self, port: JoinPort, link: Link):
        self._port, self.link = port, link
        self._engine = port.engine
        self._running: dict[int, asyncio.Task[None]] = {}
        self._arriving: dict[int, Callable[[], None]] = {}  # call -> what gives its room back
        self._news: UseNews | None = None
        self._neighbour: board.LinkNeighbour | None = None
        self._regions = GuestRegions(lambda: port.engine.device_regions, self._is_here)

    def _is_here(self) -> bool:
        return self._neighbour is not None and self._neighbour.place == self._port.peers.board.place

    def welcome(self) -> None:
        engine = self._engine
        model = joined.model_as_json(engine.info, engine.layers)
        status = engine.status()
        self.link.send({"kind": "welcome", "model": model, "state": engine.state(), "status": status})
        budgets = self._port.peers.budgets
        self._news = UseNews(budgets, lambda news: self.link.send({"kind": "use", "clients": news}), self)

    def arriving(self, header: dict[str, Any], nbytes: int) -> Make | None:
        """Finds room for a request before its bytes are read, or refuses it."""
        if header.get("kind") != "forward":
            raise JoinError(f"a frame of kind {header.get('kind')!r} with tensors")
        call = header["call"]
        if call in self._running or call in self._arriving:
            raise JoinError(f"call {call} is in use")
        try:
            self._arriving[call] = self._take(header, nbytes)
        except Overloaded as error:
            self._fail(call, error)
            return None
        return self._engine.buffer

    def dropped(self, header: dict[str, Any]) -> None:
        self._arriving.pop(header["call"])()

    def arrived(self, header: dict[str, Any], tensors: list[Any]) -> None:
        match header.get("kind"):
            case "forward":
                self._begin(header, tensors)
            case "cancel":
                if (task := self._running.get(header["call"])) is not None:
                    task.cancel()
            case "close_region":
                self._regions.close(int(header["number"]))
            case "change":
                self._run(header["call"], self._change(header["call"], header))
            case "use":
                for name, nbytes, _ in header["clients"]:
                    self._port.peers.budgets.of(str(name)).report(self, int(nbytes))
            case "place":
                self._place(str(header["place"]))
            case kind if kind in board.KINDS and self._neighbour is not None:
                self._neighbour.came(header)
            case "beat":
                pass
            case other:
                raise JoinError(f"a frame of kind {other!r}")

    def _place(self, place: str) -> None:
        if self._neighbour is not None:
            raise JoinError("a front end that moves")
        self._neighbour = board.LinkNeighbour(self._port.peers.board, self.link.send, place)
        self._port.peers.board.joined(self._neighbour)

    def _take(self, header: dict[str, Any], nbytes: int) -> Callable[[], None]:
        """Takes room here and in the client's limits. Returns the function that gives both back. Raises Overloaded."""
        give_back = self._port.take(nbytes)
        if (claimed := header.get("claim")) is None:
            return give_back
        claim, budget = Claim.from_json(claimed), self._port.peers.budgets.of(str(header["client"]))
        try:
            budget.hold_for(self, claim.nbytes, claim.bytes_in_flight)
            try:
                budget.spend(_tokens(header), claim.tokens_per_s)
            except Overloaded:
                budget.release(claim.nbytes, self)
                raise
        except Overloaded:
            give_back()
            raise

        def give_all_back() -> None:
            give_back()
            budget.release(claim.nbytes, self)

        return give_all_back

    async def finish(self) -> None:
        """Waits until every request is answered and the answers are out."""
        while self._running:
            await asyncio.wait(list(self._running.values()))
        await self.link.sent()

    async def end(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._regions.close_all()
        if self._news is not None:
            self._news.close()
        self._port.peers.budgets.forget(self)
        if self._neighbour is not None:
            self._neighbour.close()

    def _begin(self, header: dict[str, Any], tensors: list[Any]) -> None:
        call = header["call"]
        if call not in self._arriving:  # no bytes came: its rows lie on a GPU
            try:
                self._arriving[call] = self._take(header, 0)
            except Overloaded as error:
                self._fail(call, error)
                return
        give_back = self._arriving.pop(call)
        try:
            batch = self._batch(header, tensors)
            task = self._run(call, self._forward(call, batch))
        except InvalidRequest as error:
            give_back()
            self._fail(call, error)
        except BaseException:
            give_back()
            raise
        else:
            task.add_done_callback(lambda _: give_back())

    def _batch(self, header: dict[str, Any], tensors: list[Any]) -> Batch:
        device = header.get("device") or {}
        source, target = self._regions.rows(device.get("source")), self._regions.rows(device.get("target"))
        if source is not None:
            info = self._engine.info
            tensors = [somewhere(int(device["rows"]), info.hidden, info.dtype), *tensors]
        backward = bool(header.get("backward"))
        if len(tensors) - backward not in (1, 3):
            text = f"tensors: {len(tensors)} came, must be {1 + backward} or {3 + backward}"
            raise InvalidRequest(text, field="tensors")
        hidden, *routed = tensors
        gradient = routed.pop(0) if backward else None
        ids, weights = routed or (None, None)
        return Batch(
            layer=int(header["layer"]),
            hidden=hidden,
            ids=ids,
            weights=weights,
            gradient=gradient,
            deadline=time.monotonic() + float(header["timeout_s"]),
            request_id=str(header["request_id"]),
            client=str(header["client"]),
            priority=Priority(header["priority"]),
            trace=_Ticket(self, header["call"]),
            claim=Claim.from_json(header["claim"]) if header.get("claim") is not None else None,
            source=source,
            target=target,
        )

    def _run(self, call: int, work: Any) -> asyncio.Task[None]:
        if call in self._running:
            raise JoinError(f"call {call} is in use")
        task = self._running[call] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._running.pop(call, None))
        return task

    async def _forward(self, call: int, batch: Batch) -> None:
        try:
            answer = await self._engine.answer(batch)
        except Exception as error:
            refused = isinstance(error, EpserveError) and error.retryable
            if batch.claim is not None and refused:  # refused work is free
                self._port.peers.budgets.of(batch.client).give_back(batch.num_tokens, batch.claim.tokens_per_s)
            self._fail(call, error)
        else:
            told = {"left_out": sorted(answer.left_out), "not_finite": sorted(answer.not_finite)}
            values = [] if answer.out_MK.is_meta else [answer.out_MK]
            self.link.send({"kind": "result", "call": call, **told}, values)

    async def _change(self, call: int, header: dict[str, Any]) -> None:
        """Carries out a change that a caller has asked of the front end, which has checked the caller's rights."""
        try:
            what: Any = self._regions.open
            if header["what"] != "open_region":
                what = {"rebalance": self._engine.rebalance, "scale": self._engine.scale}[header["what"]]
            done = await what(*header["args"])
        except Exception as error:
            self._fail(call, error)
        else:
            self.link.send({"kind": "changed", "call": call, "value": done})

    def _fail(self, call: int, error: BaseException) -> None:
        described = joined.error_as_json(error)
        if described["class"] == "InternalError":
            log.error("call %d of a front end failed", call, exc_info=error)
        self.link.send({"kind": "failure", "call": call, "error": described})


def _tokens(header: dict[str, Any]) -> int:
    """Returns the number of rows of the first tensor, or of rows on a GPU."""
    return int(header["device"]["rows"]) if header.get("device") else int(header["tensors"][0][1][0])
