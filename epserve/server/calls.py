"""This module takes one request from checked header to reply. Forward and ForwardStream share it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import grpc

from epserve.config import ServerConfig
from epserve.engine.face import EngineFace
from epserve.engine.planning import Answer, Priority
from epserve.errors import DeadlineExceeded, EpserveError, InvalidRequest, NotReady, Overloaded, PermissionDenied
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import wire
from epserve.protocol.messages import Outgoing, Received

from . import codec, replies
from .accounts import Account, Accounts
from .cuda_regions import CudaRegistry
from .incoming import sockets
from .incoming.intake import Intake
from .region import Region, Slice
from .regions import Regions
from .watch.layer_counts import Spent
from .watch.observer import Observer
from .watch.step_times import StepTimes, Times

log = logging.getLogger("epserve.server")

PRIORITIES = {pb.LOW: Priority.LOW, pb.NORMAL: Priority.NORMAL, pb.HIGH: Priority.HIGH}
THREAD_BYTES = 4 << 20
"""Checks and conversions of this size and above leave the event loop, which 4 MiB hold up for 0.3 to 0.6 ms. The way to
a thread and back takes as long as that."""


@contextmanager
def until_sent() -> Iterator[ExitStack]:
    """Yields a stack for a method with one reply, and closes it when gRPC has sent the reply or has given it up.

    It closes the stack at once when the method fails.
    """
    task = asyncio.current_task()
    assert task is not None
    held = ExitStack()
    try:
        yield held
    except BaseException:
        held.close()
        raise
    task.add_done_callback(lambda _: held.close())


def is_on_this_host(peer: str) -> bool:
    """Tells whether gRPC's name of a connection is of loopback or a Unix-domain socket."""
    return unquote(peer).startswith(("unix:", "ipv4:127.", "ipv6:[::1]"))


class Admitted(Protocol):
    """A request as the limits see it. `reply_bytes`: of a result that this process holds until it is sent."""

    @property
    def nbytes(self) -> int: ...
    @property
    def reply_bytes(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def regions(self) -> Collection[Region]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller is the origin of a call. `peer`: gRPC's name of the connection. `account`: the account whose limits
    count."""

    peer: str
    account: Account

    @property
    def name(self) -> str:
        """Returns the name of the client for fairness and logs."""
        return self.account.name or self.peer


class Calls:
    """Runs calls on the engine. It counts the calls in flight and the bytes that they hold."""

    def __init__(
        self,
        engine: EngineFace,
        limits: ServerConfig,
        default_deadline_s: float,
        *,
        accounts: Accounts,
        regions: Regions,
        observer: Observer,
        intake: Intake,
    ):
        self.engine, self.limits, self.default_deadline_s = engine, limits, default_deadline_s
        self.accounts, self.regions, self.observer = accounts, regions, observer
        self.cuda_regions = CudaRegistry(regions, limits, lambda: engine.device_regions)
        self.door = codec.Door(engine.info, engine.layers, limits, make_buffer=engine.buffer)
        self.admitted = self.admitted_bytes = 0
        """The requests from their header until their reply is sent, and the bytes of both."""
        self._intake = intake
        self.draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._step_times = StepTimes()
        engine.on_step(self._step_times.record)
        self._prefix = os.urandom(4).hex()
        self._numbers = itertools.count(1)

    @property
    def in_flight(self) -> int:
        """Counts the admitted requests and those whose message is on its way."""
        return self.admitted + self._intake.waiting

    @property
    def buffered_bytes(self) -> int:
        """Counts the bytes of admitted requests and of messages on their way."""
        return self.admitted_bytes + self._intake.nbytes

    def caller(self, context: grpc.aio.ServicerContext) -> Caller:
        """Identifies the caller. Raises Unauthenticated."""
        account = self.accounts.identify(context.invocation_metadata())
        account.current()
        return Caller(peer=context.peer(), account=account)

    def check_may_use_regions(self, caller: Caller) -> None:
        """Raises InvalidRequest unless regions are on and the caller is on this host."""
        if not self.limits.regions:
            raise InvalidRequest("region: shared-memory regions are switched off (server.regions)", field="region")
        if not is_on_this_host(caller.peer):
            text = "region: shared-memory regions are for clients that connect over loopback or the Unix-domain socket"
            raise InvalidRequest(text, field="region")

    async def uid_of(self, peer: str) -> int | None:
        """Returns the user whose process has this connection, or None when it is unknown."""
        if peer.startswith("unix:"):
            return os.geteuid()  # the socket is open to this user alone (`server.unix_socket`)
        return await asyncio.to_thread(sockets.uid_of_peer, peer, self._intake.port)

    def request_id(self, wanted: str) -> str:
        """Returns the caller's id, checked, or a new one."""
        return codec.checked_request_id(wanted) if wanted else f"{self._prefix}-{next(self._numbers)}"

    def deadline(self, *remaining_s: float | None) -> float:
        """Returns the soonest given deadline on the clock of time.monotonic, or the default. Raises DeadlineExceeded
        when it is past."""
        given = [value for value in remaining_s if value is not None]
        remaining = min(given, default=self.default_deadline_s)
        if remaining <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        return time.monotonic() + remaining

    def check(self, request: pb.ForwardRequest, request_id: str, caller: Caller) -> codec.CheckedRequest:
        """Checks the header. Raises NotReady while draining."""
        if self.draining.is_set():
            raise NotReady("the server is stopping; send the request to another one, or again later")

        def resolve(wanted: pb.RegionSlice, nbytes: int, field: str) -> Slice:
            self.check_may_use_regions(caller)
            return self.regions.slice_of(caller.account.name, wanted, nbytes, field)

        priority = self.priority(request.priority, caller)
        return self.door.check(request, request_id, resolve, priority=priority)

    def priority(self, wanted: pb.Priority, caller: Caller) -> Priority:
        """Returns the request's priority. Raises InvalidRequest for an unknown one, PermissionDenied above the caller's
        highest."""
        highest = caller.account.current().priority or Priority[self.limits.max_priority.upper()]
        if wanted == pb.PRIORITY_UNSPECIFIED:
            return min(Priority.NORMAL, highest)
        if wanted not in PRIORITIES:
            known = ", ".join(each.name for each in PRIORITIES.values())
            raise InvalidRequest(f"priority: number {wanted} is none (known: {known})", field="priority")
        priority = PRIORITIES[wanted]
        if priority > highest:
            raise PermissionDenied(
                f"priority: {priority.name} is above {highest.name}, the highest for client {caller.name!r}"
                " (server.max_priority, or priority= of its line in server.tokens_file)",
                field="priority",
            )
        return priority

    @contextmanager
    def admitting(self, checked: Admitted, caller: Caller) -> Iterator[None]:
        """Holds a request's regions, and counts the bytes of request and reply against the server's and the client's
        limits.

        Raises Overloaded.
        """
        limit, wanted = self.limits.max_buffered_bytes, checked.nbytes + checked.reply_bytes
        if self.admitted_bytes and self.admitted_bytes + wanted > limit:
            raise Overloaded(
                f"request and reply of {wanted} bytes: {self.admitted_bytes} bytes of others are here, at most {limit} are held"
                " at once (server.max_buffered_bytes); try again later"
            )
        with caller.account.holding(checked.nbytes), ExitStack() as held:
            for region in checked.regions:
                held.enter_context(region.used())
            caller.account.spend(checked.tokens)
            self.admitted_bytes += wanted
            self.admitted += 1
            self._idle.clear()
            try:
                yield
            finally:
                self.admitted_bytes -= wanted
                self.admitted -= 1
                if not self.admitted:
                    self._idle.set()

    async def answer(self, message: Received, remaining_s: float | None, caller: Caller, held: ExitStack) -> Outgoing:
        """Answers a call that is one message each way. Raises the errors of `run`.

        Args:
            remaining_s: seconds until the connection's own deadline.
            held: takes the resources that the call holds. The caller closes it once the reply is sent.
        """
        request = message.header
        request_id = request.request_id = self.request_id(request.request_id)
        own_limit = request.timeout_ms / 1000 if request.timeout_ms else None
        deadline = self.deadline(remaining_s, own_limit)
        checked = self.check(request, request_id, caller)
        assembly = self.door.assembly(checked)
        held.enter_context(self.admitting(checked, caller))
        for which in checked.sizes:
            assembly.add(which, message.bytes_of(which))
        result, reply = await self.run(checked, assembly.finish(), deadline, caller)
        return Outgoing(reply, result)

    async def run(
        self,
        checked: codec.CheckedRequest,
        buffers: Mapping[pb.Field, Any],
        deadline: float,
        caller: Caller,
    ) -> tuple[dict[pb.Field, wire.WireTensor], pb.ForwardReply]:
        """Returns the result, and a reply without it. Raises EpserveError, or the exception of a defect."""
        watch = self.observer.request(
            checked.request_id, layer=checked.layer, tokens=checked.tokens, received=checked.nbytes
        )
        started = time.perf_counter()
        status, times = "CANCELLED", Times()
        try:
            async with asyncio.timeout_at(deadline):
                claim = caller.account.claim(checked.nbytes)
                decode = functools.partial(
                    self.door.decode, deadline=deadline, client=caller.name, trace=watch.trace, claim=claim
                )
                batch = await _maybe_in_thread(checked.work, decode, checked, buffers)
                decoded_at = time.perf_counter()
                watch.decoded()
                # A batch without rows is no work for the ranks.
                answer = Answer(out_MK=batch.hidden.new_empty((0, batch.columns)))
                if checked.tokens:
                    with self._step_times.of(checked.request_id) as times:
                        answer = await self.engine.answer(batch)
                computed_at = time.perf_counter()
                work = answer.out_MK.nbytes if checked.target is None else 0
                encoded = await _maybe_in_thread(work, replies.encode_reply, answer.out_MK, checked, answer.not_finite)
            engine_s = computed_at - decoded_at
            spent = Spent(
                queue=max(times.queued, 0),
                decoding=decoded_at - started,
                steps=times.steps,
                encoding=time.perf_counter() - computed_at,
            )
            timings = pb.Timings(
                codec_us=round((spent.decoding + spent.encoding) * 1e6),
                engine_us=round(engine_s * 1e6),
                queue_us=round(spent.queue * 1e6),
                steps_us=round(spent.steps * 1e6),
            )
            watch.sent, watch.spent, status = answer.out_MK.nbytes, spent, "OK"
            reply = pb.ForwardReply(
                request_id=checked.request_id,
                timings=timings,
                left_out_experts=sorted(answer.left_out),
                not_finite_rows=encoded.not_finite,
                gradients=checked.backward,
            )
            return encoded.tensors, reply
        except TimeoutError as error:
            status = "DEADLINE_EXCEEDED"
            raise DeadlineExceeded(
                f"request {checked.request_id}: no result after {time.perf_counter() - started:.3f} s; allow more time or"
                " see GetStatus for the queue"
            ) from error
        except EpserveError as error:
            status = error.grpc_status
            if error.retryable:
                caller.account.give_back(checked.tokens)
            raise
        except Exception:
            status = "INTERNAL"
            raise
        finally:
            watch.ended(status)
            self._log(checked, status, (time.perf_counter() - started) * 1e3, caller.name)

    def _log(self, checked: codec.CheckedRequest, status: str, ms: float, client: str) -> None:
        text = "request=%s layer=%d tokens=%d status=%s ms=%.2f client=%s"
        log.debug(text, checked.request_id, checked.layer, checked.tokens, status, ms, client)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new calls and waits for the accepted ones. Returns False when some still run after `timeout_s`."""
        self.draining.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._idle.is_set()


async def _maybe_in_thread(nbytes: int, function: Any, *args: Any) -> Any:
    return await asyncio.to_thread(function, *args) if nbytes >= THREAD_BYTES else function(*args)
