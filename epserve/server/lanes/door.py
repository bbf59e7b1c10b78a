"""This module opens lanes: it checks what is asked for, and hands the memory over on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from typing import Any

from epserve.errors import InvalidRequest, NotReady, Overloaded, TooLarge, UnknownLayer
from epserve.process import ranges, words
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import lane_words as lw
from epserve.protocol import wire
from epserve.server.calls import Caller, Calls, is_on_this_host

from .direct import DirectLanes, Keep
from .lane import Lane
from .on_gpu import GpuLane, GpuLanes
from .poller import Poller

log = logging.getLogger("epserve.server")

GREETING_S = 5.0
MOST_STRANGERS = 64
"""Connections that have sent no key yet. One more is closed."""


class LaneDoor:
    """Starts with `start()` in the server's loop."""

    def __init__(self, calls: Calls):
        self._calls = calls
        self.poller = Poller(calls)
        self.on_gpu = GpuLanes(calls)
        self.name = f"epserve-lanes-{secrets.token_hex(8)}"
        self._listener: socket.socket | None = None
        self.direct = DirectLanes(calls, self.poller, lambda lane, keep: (self.name, self._key(lane, keep).hex()))
        self._keys: dict[bytes, tuple[Lane, Keep | None]] = {}
        self._open: set[Lane] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen()
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        self.direct.start()

    async def drain(self, timeout_s: float) -> None:
        """Waits for the calls that have begun."""
        await self.direct.take_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(lane.busy for lane in (*self.poller.lanes, *self.on_gpu.lanes)):
                    await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for task in (*self._tasks, *([self._accepting] if self._accepting is not None else [])):
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        await self.direct.stop()
        await self.on_gpu.stop()
        await self.poller.stop()

    async def open(self, request: pb.OpenLaneRequest, caller: Caller) -> tuple[Lane, pb.OpenLaneReply]:
        """Raises CallerError, Overloaded or NotReady."""
        calls, limits, info = self._calls, self._calls.limits, self._calls.engine.info
        self._check_may_open(caller)
        on_gpu = request.HasField("cuda")
        if on_gpu:
            self.on_gpu.check(request)
        layers, slots = self._layers(request), request.slots or 1
        if not 1 <= slots <= lw.MAX_SLOTS:
            raise InvalidRequest(f"slots: {slots}, must be 1 to {lw.MAX_SLOTS}", field="slots")
        most = min(limits.max_tokens_per_request, lw.MAX_TOKENS)
        if not 1 <= request.max_tokens <= most:
            text = f"max_tokens: {request.max_tokens}, must be 1 to {most} (server.max_tokens_per_request)"
            raise (InvalidRequest if request.max_tokens < 1 else TooLarge)(text, field="max_tokens")
        layout = lw.Layout(
            slots=slots, cap=request.max_tokens, hidden=info.hidden, top_k=info.top_k, itemsize=info.dtype.itemsize,
            on_gpu=on_gpu,
        )  # fmt: skip
        if layout.total > limits.max_region_bytes:
            text = (
                f"max_tokens, slots: {layout.total} bytes, at most {limits.max_region_bytes} (server.max_region_bytes)"
            )
            raise TooLarge(f"{text}; fewer of either", field="max_tokens")
        lane = (GpuLane if on_gpu else Lane)(
            layout=layout, layers=frozenset(layers), info=info, caller=caller,
            priority=calls.priority(request.priority, caller),
            timeout_s=request.timeout_ms / 1000 or calls.default_deadline_s,
        )  # fmt: skip
        try:
            lane.make()
        except OSError as error:
            raise Overloaded(
                f"max_tokens, slots: no {layout.shared} bytes of shared memory ({error.strerror})", retry_after_s=1
            ) from None
        most = layout.cap
        self._open.add(lane)
        try:
            if isinstance(lane, GpuLane):
                most = await self.on_gpu.open(lane, request, lambda: (self.name, self._key(lane).hex()))
            if lane.through_poller:
                self.poller.add(lane)
                await self.direct.give(lane)
        except BaseException:
            self.close(lane)
            raise
        where = "on the GPU" if on_gpu else "in shared memory"
        log.info("%s of client=%s: %d slots of %d tokens %s", lane.name, caller.name, slots, most, where)
        reply = pb.OpenLaneReply(
            lane=lane.name, socket=self.name, key=self._key(lane), byte_size=layout.shared, slots=slots, max_tokens=most,
            dtype=wire.DTYPES[str(info.dtype).removeprefix("torch.")], hidden=info.hidden, top_k=info.top_k, layers=layers,
            timeout_ms=round(lane.timeout_s * 1000), queued=on_gpu and lane.through_poller,
        )  # fmt: skip
        return lane, reply

    async def hold(self, lane: Lane) -> None:
        """Returns when the service closes the lane. Raises Unauthenticated when its token was withdrawn."""
        ends = [asyncio.ensure_future(each.wait()) for each in (lane.ended, self._calls.draining)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self.direct.take(lane)
            while (lane.busy or lane in self.direct.lanes) and not lane.ended.is_set():  # accepted calls are finished
                await asyncio.sleep(0.005)
        finally:
            for end in ends:
                end.cancel()
        lane.caller.account.current()
        if lane.why is not None:
            raise lane.why

    def close(self, lane: Lane) -> None:
        """Closes the lane, with the calls that are under way."""
        self._open.discard(lane)
        self._keys = {key: each for key, each in self._keys.items() if each[0] is not lane}
        if isinstance(lane, GpuLane):
            self.on_gpu.close(lane, lane.why or NotReady("lane: the service has closed it; open another"))
        self.poller.remove(lane)
        self.direct.take(lane)

    def shown(self) -> pb.Lanes:
        counts, on_gpu, direct = self.poller.counts, self.on_gpu, self.direct
        return pb.Lanes(
            open=len(self._open), calls=counts.calls + direct.calls + on_gpu.calls,
            joined=counts.joined + direct.joined + on_gpu.joined, refused=counts.refused + on_gpu.refused, waited=counts.waited,
            polling_share=self.poller.polling_share, on_gpu=len(on_gpu.lanes), gpu_polling_share=on_gpu.polling_share,
        )  # fmt: skip

    def _key(self, lane: Lane, keep: Keep | None = None) -> bytes:
        """Returns a new key of the lane, which works once. keep: takes the connection that comes with the key."""
        key = secrets.token_bytes(lw.KEY_BYTES)
        self._keys[key] = lane, keep
        return key

    def _check_may_open(self, caller: Caller) -> None:
        limit = self._calls.limits.lanes
        if not limit or self._listener is None:
            raise InvalidRequest("lane: lanes are switched off (server.lanes)", field="lane")
        if why := words.why_not():
            raise InvalidRequest(f"lane: there are none on the server's host: {why}", field="lane")
        if not is_on_this_host(caller.peer):
            text = "lane: lanes are for clients that connect over loopback or the Unix-domain socket"
            raise InvalidRequest(text, field="lane")
        if self._calls.draining.is_set():
            raise NotReady("the server is stopping; open the lane at another one, or again later")
        if (number := len(self._open)) >= limit:
            text = f"{number} lanes are open, at most {limit} are (server.lanes); try again later"
            raise Overloaded(text, retry_after_s=1)

    def _layers(self, request: pb.OpenLaneRequest) -> tuple[int, ...]:
        served = self._calls.engine.layers
        for layer in request.layers:
            if layer not in served:
                text = f"layers: {layer} is not a served MoE layer of {self._calls.engine.info.name}"
                raise UnknownLayer(f"{text} (served: {ranges.shown(served)})", field="layers")
        return tuple(request.layers) or tuple(served)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("lanes: a connection was not taken: %s", error)
                await asyncio.sleep(0.05)
                continue
            if len(self._tasks) >= MOST_STRANGERS:
                sock.close()
                continue
            task = asyncio.create_task(self._hand_over(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, sock: socket.socket) -> None:
        """Gives the descriptors of a lane to the first connection with its key."""
        kept = False
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, TimeoutError):
            held.callback(lambda: None if kept else sock.close())
            sock.setblocking(False)
            async with asyncio.timeout(GREETING_S):
                sent = b""
                while len(sent) < lw.KEY_BYTES:
                    more = await asyncio.get_running_loop().sock_recv(sock, lw.KEY_BYTES - len(sent))
                    if not more:
                        return
                    sent += more
            lane, keep = self._lane_of(sent) or (None, None)
            if lane is not None and lane.fd >= 0:
                if keep is not None and not (kept := keep(sock)):
                    return
                socket.send_fds(sock, [b"\0"], [lane.fd, lane.bell])

    def _lane_of(self, sent: bytes) -> tuple[Lane, Keep | None] | None:
        """The lane of this key, once."""
        found: Any = None
        for key in self._keys:
            if hmac.compare_digest(key, sent):
                found = key
        return self._keys.pop(found) if found is not None else None
