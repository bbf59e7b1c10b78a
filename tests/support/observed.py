"""A step, a status and a server to watch, for the tests of metrics, traces, the status page and `epserve top`."""

import asyncio
import http.client
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

from epserve.config import ServerConfig
from epserve.engine.records import StepPart, StepRecord
from epserve.process.phases import PHASES
from epserve.server.server import Server
from tests.support.fake_engine import FakeEngine


def record(step=1, *, layer=1, tokens=(3, 2), seconds=0.02, waited=0.005, traces=(None,), phases=None) -> StepRecord:
    """A step of two ranks that took `seconds`; its phases are 1, 2, .. ms on rank 0 and twice that on rank 1."""
    end = time.monotonic()
    start = end - seconds
    if phases is None:
        phases = [
            {phase: (rank + 1) * (index + 1) / 1e3 for index, phase in enumerate(PHASES)} for rank in range(len(tokens))
        ]
    parts = [StepPart(request_id=f"r{i}", tokens=1, queued=start - waited, trace=each) for i, each in enumerate(traces)]
    return StepRecord(
        step=step,
        layer=layer,
        mode="block",
        tokens_per_rank=tokens,
        started=start,
        ended=end,
        parts=tuple(parts),
        phases=tuple(phases),
    )


def rank_status(rank, experts, **changes) -> SimpleNamespace:
    values = {
        "rank": rank, "node": "10.0.0.1", "pid": 100 + rank, "device": "cpu", "gpu_uuid": "", "experts": tuple(experts),
        "tokens_done": 50, "weights_bytes": 1 << 20, "alive": True, "phase": "idle", "late_compiles": 0,
        "layer_experts": {}, "experts_choices": (),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def engine_status(ranks, expert_tokens, **changes) -> SimpleNamespace:
    values = {
        "state": "serving", "generation": 2, "steps": 7, "ranks": tuple(ranks), "queue_tokens": 11, "backends": "local",
        "recoveries": 1, "replayed_requests": 3, "expert_tokens": expert_tokens,
        "slots": {}, "spares": 1, "rebalances": 4, "rebalances_skipped": 2, "front_ends": 0, "missing_experts": {},
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


class WatchedEngine(FakeEngine):
    """Each request is a step of two ranks, whose eight experts get more tokens the higher their number."""

    def __init__(self, **info):
        super().__init__(self._compute, **info)
        self.loads = {layer: [0] * 8 for layer in self.layers}
        self.slots: dict = {}
        """Layer -> expert of each slot, where experts have moved."""

    async def _compute(self, batch):
        for expert in range(8):
            self.loads[batch.layer][expert] += expert * batch.num_tokens
        self.tell_step(record(len(self.seen), layer=batch.layer, tokens=(batch.num_tokens, 0), traces=(batch.trace,)))
        return batch.hidden

    def status(self):
        moved = {2: (7, 1, 2, 3)}
        ranks = [
            rank_status(0, range(4), layer_experts=moved),
            rank_status(1, range(4, 8), alive=self._state == "serving"),
        ]
        loads = {layer: tuple(loads) for layer, loads in self.loads.items()}
        return engine_status(ranks, loads, state=self._state, steps=len(self.seen), slots=self.slots)


@asynccontextmanager
async def watched(engine=None, *, provider=None, **config):
    """A server with a status page."""
    settings = ServerConfig(**{"port": 0, "metrics_port": 0, **config})
    server = Server(engine or WatchedEngine(), settings, tracer_provider=provider)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def fetch(port, path, *, method="GET", context=None, **headers) -> SimpleNamespace:
    """status, headers, text of one HTTP request."""

    def ask():
        if context is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            reply = connection.getresponse()
            return SimpleNamespace(status=reply.status, headers=reply.headers, body=reply.read())
        finally:
            connection.close()

    reply = await asyncio.to_thread(ask)
    reply.text = reply.body.decode(errors="replace")
    return reply


def sample(server: Server) -> None:
    """What the server does once a second."""
    server._observer.sample(server._calls)
