"""Lanes whose rows lie on a real GPU: one rank, this process as its client on the same GPU, and clients in further processes.

python -m pytest -m gpu tests/gpus/test_gpu_lanes.py -q      (one GPU; EPSERVE_TEST_RANKS_PER_GPU has no part in it)

What does not need a GPU is in tests/rank/test_gpu_lanes.py and tests/engine/test_gpu_lanes_service.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import pytest_asyncio
import torch

from epserve.client import Client
from epserve.client.lanes import on_gpu
from epserve.client.session import connect
from epserve.config import ServerConfig, parse_config
from epserve.engine.engine import Engine
from epserve.errors import DeadlineExceeded, InvalidRequest, NotFinite, NotReady
from epserve.models.demo import write_demo_checkpoint
from epserve.protocol import lane_words as lw
from epserve.server.server import Server
from tests.support.grpc_calls import in_thread
from tests.support.recovering import BACK_S, back, pids, spare, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
GPU = "cuda:0"
HIDDEN, EXPERTS, TOP_K = 1024, 16, 4
SIZES = {"hidden": HIDDEN, "intermediate": 256, "num_experts": EXPERTS, "top_k": TOP_K, "num_layers": 3, "seed": 3}
CAP, BUCKETS = 128, [1, 16, 128]
LIMIT_S, CALL_S = 300, BACK_S + 60
RANDOM_CALLS = 10_000
FLAT_BYTES = 64 << 20
"""GPU memory that may differ between the middle and the end of many calls."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu-lanes") / "deepseek"
    write_demo_checkpoint("deepseek_v3", path, dtype=torch.bfloat16, **SIZES)
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {
                "device": "cuda", "ranks": 1, "standbys": 1, "experts_timing_s": 0, "max_tokens_per_rank": 256,
                "cuda_graph_tokens": BUCKETS,
            },
            "cluster": {"start_timeout_s": 240},
            "scheduler": {"step_timeout_s": 8.0, "heartbeat_s": 4.0},
            "server": {"gpu_lanes": True},
        }
    )  # fmt: skip
    engine = Engine(config)
    await engine.start()
    server = Server(engine, ServerConfig(port=0, gpu_lanes=True))
    await server.start()
    yield engine, server
    await server.stop()
    await engine.close()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(1000 * seed + count))
    return made.to(GPU, torch.bfloat16)


def routing(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand((count, EXPERTS), generator=generator).argsort(1)[:, :TOP_K].int()
    return ids.to(GPU), torch.rand((count, TOP_K), generator=generator).to(GPU)


async def test_the_bits_of_grpc(service):
    """A call of a lane and one over gRPC replay the same graph."""
    engine, server = service

    def calls():
        with Client(server.address) as client, client.open_lane(CAP, slots=2, device=GPU) as lane:
            assert not lane.queued, "the rank's own thread serves it; the service's log says why not"
            for layer in engine.info.layers:
                for count in (1, 2, 16, 17, CAP):
                    x, (ids, weights) = tokens(count), routing(count)
                    assert torch.equal(lane.forward(layer, x), client.forward(layer, x)), (layer, count)
                    given = ids, weights
                    assert torch.equal(lane.forward(layer, x, *given), client.forward(layer, x, *given)), (layer, count)
                    lane.x(1)[:count] = x
                    assert torch.equal(lane.call(layer, count, slot=1), client.forward(layer, x)), (layer, count)
            lane.check()

    await in_thread(calls)


@pytest.mark.skipif(torch.device(GPU).type != "cuda", reason="a CUDA graph of the client")
async def test_a_cuda_graph_holds_the_calls_of_several_layers(service):
    engine, server = service

    def calls():
        with Client(server.address) as client, client.open_lane(16, device=GPU) as lane:
            layers = engine.info.layers[:2]

            def decode() -> torch.Tensor:
                lane.x()[:16].copy_(x)
                for layer in layers:
                    lane.x()[:16].copy_(lane.call(layer, 16))
                return lane.x()[:16].clone()

            x = tokens(16)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                decode()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                y = decode()
            for seed in range(50):
                x.copy_(tokens(16, seed))
                graph.replay()
                lane.check()
                expected = tokens(16, seed)
                for layer in layers:
                    expected = client.forward(layer, expected)
                assert torch.equal(y, expected), seed

    await in_thread(calls)


async def test_an_operator_that_compilers_keep_whole(service):
    engine, server = service

    def calls():
        with Client(server.address) as client, client.open_lane(16, device=GPU) as lane:
            x, layer, operator = tokens(16), engine.info.layers[0], lane.operator()
            once = torch.compile(lambda x: operator(layer, x) * 2, backend="eager", fullgraph=True)
            assert torch.equal(once(x), client.forward(layer, x) * 2)
            lane.check()

    await in_thread(calls)


async def test_values_that_are_refused_concern_their_own_call(service):
    engine, server = service
    layer = engine.info.layers[0]
    x, (ids, weights) = tokens(4), routing(4)
    odd = x.clone()
    odd[3, HIDDEN - 1] = float("inf")
    cases = [
        ((x * float("nan"),), NotFinite),
        ((odd,), NotFinite),
        ((x, ids + EXPERTS, weights), InvalidRequest),
        ((x, torch.full_like(ids, -2), weights), InvalidRequest),
        ((x, torch.full_like(ids, 2**31 - 1), weights), InvalidRequest),
        ((x, ids, weights * float("nan")), NotFinite),
    ]

    def calls():
        with (
            Client(server.address) as client,
            client.open_lane(CAP, device=GPU) as lane,
            client.open_lane(CAP, device=GPU) as other,
        ):
            mine = tokens(9)
            expected = client.forward(layer, mine)
            for given, kind in cases:
                bad, good = lane.forward(layer, *given), other.forward(layer, mine)
                assert bad.isnan().all()
                assert torch.equal(good, expected)
                with pytest.raises(kind):
                    lane.check()
                other.check()
                assert torch.equal(lane.forward(layer, mine), expected)
            for bad in ({"tokens": 0}, {"tokens": CAP + 1}, {"layer": 16383}, {"mode": 3}):
                number = (lane._words.load(lw.bell_at(0)) >> 32) + 7
                header = {"mode": 0, "layer": layer, "tokens": 1, **bad}
                lane._words.store(lw.bell_at(0), number, lw.header(**header))
                until_answered(lane, 0, number)
                assert lane._words.load(lw.answer_at(0)) & 0xFFFFFFFF == lw.BAD_HEADER
            assert torch.equal(other.forward(layer, mine), expected)
            other.check()

    await in_thread(calls)


def until_answered(lane, slot: int, number: int) -> None:
    end = time.monotonic() + LIMIT_S
    while lane._words.load(lw.answer_at(slot)) >> 32 != number & 0xFFFFFFFF:
        assert time.monotonic() < end
        time.sleep(0.001)


class Calls:
    """A thread with a lane of its own that calls without pause. Every answer is compared."""

    def __init__(self, address, layer, *, seed: int, bits: bool = True):
        self._address, self._layer, self._seed, self._bits = address, layer, seed, bits
        self.done, self.error = 0, None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            with Client(self._address) as client, client.open_lane(CAP, device=GPU, call_timeout=CALL_S) as lane:
                x = tokens(5 + self._seed, self._seed)
                expected = client.forward(self._layer, x)
                while not self._stop.is_set():
                    y = lane.forward(self._layer, x)
                    lane.check()
                    close(y, expected)
                    self.done += 1
        except BaseException as error:
            self.error = error

    async def more(self, count: int = 20):
        want = self.done + count
        await until(lambda: self.error or self.done >= want, LIMIT_S, "answers")
        assert self.error is None, self.error

    async def end(self):
        self._stop.set()
        await asyncio.to_thread(self._thread.join, LIMIT_S)
        assert self.error is None, self.error


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Calls that share a step are rounded as a larger batch is."""
    got, want = got.double(), want.double()
    assert float((got - want).norm() / want.norm()) < 1e-2


async def test_garbage_in_one_page_harms_no_other_lane(service):
    engine, server = service
    calls = Calls(server.address, engine.info.layers[0], seed=1)
    await calls.more()

    def scribble():
        rng = random.Random(1)
        with Client(server.address) as client, client.open_lane(CAP, slots=2, device=GPU) as lane:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:
                lane._words._words[rng.randrange(16, 16 + 32)] = rng.getrandbits(64)

    await in_thread(scribble)
    await calls.more()
    await calls.end()
    assert engine.status().recoveries == 0


CLIENT = """
import sys
from epserve.client import Client
with Client(sys.argv[1]) as client, client.open_lane(128, device=sys.argv[3]) as lane:
    lane.x().normal_()
    print("calling", flush=True)
    while True:
        for _ in range(60):
            lane.call(int(sys.argv[2]), 128)
        lane.check()
"""


async def test_a_client_that_is_killed_takes_its_lane_with_it(service):
    engine, server = service
    layer = engine.info.layers[0]
    calls = Calls(server.address, layer, seed=2)
    await calls.more()
    for _ in range(3):
        command = [sys.executable, "-c", CLIENT, server.address, str(layer), GPU]
        dying = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert await in_thread(dying.stdout.readline) == b"calling\n"
        await calls.more()
        dying.kill()
        dying.wait()
        await until(lambda: len(server._lanes.on_gpu.lanes) == 1, LIMIT_S, "its lane is closed")
        await calls.more()
    await calls.end()
    assert engine.status().recoveries == 0


async def test_calls_that_are_queued_are_right_when_the_rank_is_killed(service):
    engine, server = service
    layer = engine.info.layers[0]
    await spare_or_standby(engine)
    recoveries = engine.status().recoveries

    def calls():
        with Client(server.address) as client, client.open_lane(CAP, slots=2, device=GPU, call_timeout=CALL_S) as lane:
            x = tokens(16)
            expected = client.forward(layer, x)
            lane.x()[:16] = x
            queued = [lane.call(layer, 16).clone() for _ in range(30)]
            os.kill(pids(engine)[0], signal.SIGKILL)
            queued += [lane.call(layer, 16).clone() for _ in range(30)]
            lane.check()
            for number, y in enumerate(queued):
                assert torch.equal(y, expected), number

    await in_thread(calls)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)


async def spare_or_standby(engine):
    if engine.status().spares:
        await spare(engine)


@pytest.mark.parametrize("limit_s", [0.05, 0.3])
async def test_a_call_without_an_answer_ends_at_its_limit(service, monkeypatch, limit_s):
    engine, server = service
    layer = engine.info.layers[0]
    monkeypatch.setattr(on_gpu, "MARGIN_S", 0.0)
    recoveries = engine.status().recoveries

    def calls():
        with Client(server.address) as client, client.open_lane(4, device=GPU, call_timeout=limit_s) as lane:
            x = tokens(2)
            assert lane.forward(layer, x).isfinite().all()
            lane.check()
            os.kill(pids(engine)[0], signal.SIGSTOP)
            try:
                start = time.monotonic()
                queued = [lane.forward(layer, x) for _ in range(60)]
                with pytest.raises(DeadlineExceeded):
                    lane.check()
                took = time.monotonic() - start
            finally:
                os.kill(pids(engine)[0], signal.SIGCONT)
            assert all(y.isnan().all() for y in queued)
            assert not lane.usable
            return took

    assert await in_thread(calls) < limit_s + 2.0
    if engine.status().recoveries > recoveries:
        await back(engine)


async def test_a_service_that_ends_lets_the_stream_go_on(service):
    engine, _ = service
    layer = engine.info.layers[0]
    server = Server(engine, ServerConfig(port=0, gpu_lanes=True))
    await server.start()
    opened, stopped = threading.Event(), threading.Event()

    def calls():
        with Client(server.address) as client, client.open_lane(4, device=GPU) as lane:
            x = tokens(2)
            lane.forward(layer, x)
            lane.check()
            opened.set()
            assert stopped.wait(LIMIT_S)
            end = time.monotonic() + LIMIT_S
            while lane.usable and time.monotonic() < end:
                time.sleep(0.01)
            assert lane.forward(layer, x).isnan().all()
            with pytest.raises(NotReady):
                lane.check()

    waiting = asyncio.ensure_future(in_thread(calls))
    await in_thread(opened.wait, LIMIT_S)
    await server.stop()
    stopped.set()
    await waiting


async def test_a_session_takes_the_lane_by_itself(service):
    engine, server = service
    layer = engine.info.layers[0]

    def calls():
        with connect(server.address) as session, Client(server.address) as client:
            for count in (1, 16, 200):  # the last one is too long for a lane
                x = tokens(count)
                close(session.layer(layer).forward(x), client.forward(layer, x))
            (way,) = session._ways._lane._ways.values()
            assert isinstance(way._lane, on_gpu.GpuLane) and way._lane._slots[0].header

    await in_thread(calls)


async def test_calls_of_a_client_with_limits_go_through_the_queue(service, tmp_path):
    engine, _ = service
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("secret name=limited tokens_per_s=1000000\n")
    server = Server(engine, ServerConfig(port=0, gpu_lanes=True, tokens_file=tokens_file))
    await server.start()

    def calls():
        with Client(server.address, token="secret") as client, client.open_lane(200, device=GPU) as lane:
            assert lane.queued and lane.max_tokens == 200
            for count in (1, 16, 200):
                x, given = tokens(count), routing(count)
                for layer in engine.info.layers:
                    close(lane.forward(layer, x), client.forward(layer, x))
                    close(lane.forward(layer, x, *given), client.forward(layer, x, *given))
            lane.check()
            assert lane.forward(engine.info.layers[0], x * float("nan")).isnan().all()
            with pytest.raises(InvalidRequest):
                lane.check()

    await in_thread(calls)
    await server.stop()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


async def test_many_random_calls(service):
    """Two slots of one lane in turn, random sizes, layers and modes; another lane and gRPC beside. Memory stays flat."""
    engine, server = service
    calls = Calls(server.address, engine.info.layers[0], seed=3)

    def random_calls():
        rng = random.Random(7)
        known = {}
        with Client(server.address) as client, client.open_lane(CAP, slots=2, device=GPU) as lane:
            for count in (1, 3, 16, 50, CAP):
                for layer in engine.info.layers:
                    x, given = tokens(count), routing(count)
                    known[layer, count, False] = x, None, client.forward(layer, x)
                    known[layer, count, True] = x, given, client.forward(layer, x, *given)
            free = 0
            for number in range(RANDOM_CALLS):
                key = rng.choice(list(known))
                (x, given, expected), slot = known[key], number % 2
                lane.x(slot)[: len(x)] = x
                if given is not None:
                    lane.ids(slot)[: len(x)], lane.weights(slot)[: len(x)] = given
                close(lane.call(key[0], len(x), slot=slot, routed=given is not None), expected)
                if number % 500 == 0:
                    lane.check()
                    close(client.forward(key[0], x, *(given or ())), expected)
                if number == RANDOM_CALLS // 2:
                    free = free_bytes()
            lane.check()
            assert free - free_bytes() < FLAT_BYTES

    await in_thread(random_calls)
    await calls.more()
    await calls.end()
    assert engine.status().recoveries <= 3
