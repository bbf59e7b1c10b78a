"""Lanes whose rows lie on a rank's GPU, through a whole service: made-up GPUs, a stand-in for their driver, and the thread that
serves them as it is built for use."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import pytest_asyncio
import torch

from epserve.client import Client, ClientOptions, RetryPolicy
from epserve.client.lanes import on_gpu, ways
from epserve.client.session import connect
from epserve.config import ServerConfig, parse_config
from epserve.engine.engine import Engine
from epserve.errors import (
    DeadlineExceeded,
    EpserveError,
    InvalidRequest,
    NotFinite,
    NotReady,
    Overloaded,
    TooLarge,
    Unauthenticated,
)
from epserve.joining.peers import Peers
from epserve.models.demo import reference_block
from epserve.pool import members
from epserve.process import words
from epserve.protocol import lane_words as lw
from epserve.server.server import Server
from tests.support.checkpoints import LAYER, write
from tests.support.fake_device_memory import tokens
from tests.support.front_ends import joining, ordering
from tests.support.gpu_driver import RankWithLanes, lanes_on_made_up_gpus, why_not
from tests.support.grpc_calls import in_thread
from tests.support.ranks import cluster_section
from tests.support.recovering import BACK_S, TOLERANCE, back, pids, spare, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not() or words.why_not()), reason=why_not() or words.why_not() or "-"),
]
LIMIT_S = 200
CALL_S = BACK_S + 60
GPU = "cuda:0"
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))


@pytest.fixture(autouse=True, scope="module")
def gpus():
    with pytest.MonkeyPatch.context() as patch, lanes_on_made_up_gpus(patch) as made:
        patch.setattr(members, "RankActor", RankWithLanes)
        yield made


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("gpu-lanes"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(path):
    return reference_block(path, LAYER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(gpus, path):
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {
                "device": "cpu", "experts": "grouped_mm", "standbys": 0, "ranks": 1, "spares": 1, "spare_weights": "host",
                "max_tokens_per_rank": 64, "cuda_graph_tokens": [2, 16],
            },
            "cluster": {"start_timeout_s": 240, **cluster_section()},
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


def routing(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (count, 2), generator=generator).int(), torch.rand((count, 2), generator=generator)


async def test_the_bits_of_grpc_with_and_without_routing(service):
    engine, server = service

    def calls():
        with Client(server.address) as client, client.open_lane(16, slots=2, device=GPU) as lane:
            for count in (1, 2, 3, 16):
                x, (ids, weights) = tokens(count), routing(count)
                assert torch.equal(lane.forward(LAYER, x), client.forward(LAYER, x))
                assert torch.equal(lane.forward(LAYER, x, ids, weights), client.forward(LAYER, x, ids, weights))
                narrow = ids[:, :1], weights[:, :1]
                assert torch.equal(lane.forward(LAYER, x, *narrow), client.forward(LAYER, x, *narrow))
                assert torch.equal(lane.forward(LAYER, x, ids.long(), weights), client.forward(LAYER, x, ids, weights))
                lane.x(1)[:count] = x
                y = lane.call(LAYER, count, slot=1)
                assert y.data_ptr() == lane.y(1).data_ptr() and torch.equal(y, client.forward(LAYER, x))
                assert torch.equal(lane.retry(slot=1), y)
            lane.check()
            until_counted = time.monotonic() + LIMIT_S
            while (shown := client.status().lanes).calls < 24 and time.monotonic() < until_counted:
                time.sleep(0.05)
            return shown

    shown = await in_thread(calls)
    assert "lanes on GPUs: a thread of the rank serves calls of up to 16 tokens" in engine.status().backends
    assert (shown.open, shown.on_gpu, shown.calls, shown.refused) == (1, 1, 24, 0)
    await until(lambda: not server._lanes.on_gpu.lanes and not len(engine.device_regions), LIMIT_S, "all is closed")
    assert not server._lanes._keys


async def test_an_operator_that_compilers_keep_whole(service):
    _, server = service

    def calls():
        with Client(server.address) as client, client.open_lane(4, device=GPU) as lane:
            x = tokens(4)
            layer = lane.operator()
            once = torch.compile(lambda x: layer(LAYER, x) * 2, backend="eager", fullgraph=True)
            assert torch.equal(once(x), client.forward(LAYER, x) * 2)
            op = torch.ops.epserve.lane_on_gpu
            torch.library.opcheck(op, (lane.name, LAYER, x, None, None), test_utils="test_faketensor")
            assert torch.Tag.cudagraph_unsafe not in op.default.tags

    await in_thread(calls)


async def test_refused_calls_are_nan_until_check_raises_their_error_and_the_lane_goes_on(service):
    _, server = service
    x, (ids, weights) = tokens(2), routing(2)
    nan = torch.full_like(x, float("nan"))
    cases = [
        ((nan,), NotFinite, "hidden_states"),
        ((x * 1e38,), NotFinite, "hidden_states"),
        ((x, ids + 100, weights), InvalidRequest, "topk_ids"),
        ((x, ids - 100, weights), InvalidRequest, "topk_ids"),
        ((x, ids.long() + (1 << 40), weights), InvalidRequest, "topk_ids"),
        ((x, ids, weights * float("nan")), NotFinite, "hidden_states"),
    ]

    def calls():
        with Client(server.address) as client, client.open_lane(4, device=GPU) as lane:
            expected = client.forward(LAYER, x)
            for given, kind, field in cases:
                assert lane.forward(LAYER, *given).isnan().all()
                assert torch.equal(lane.forward(LAYER, x), expected), "the next call is right"
                with pytest.raises(kind) as raised:
                    lane.check(wait=False)
                assert raised.value.field == field
                lane.check()
            for bad in (
                (9, x),
                (LAYER, x[:, :3]),
                (LAYER, torch.zeros(5, 64)),
                (LAYER, x, ids),
                (LAYER, x, ids[:1], weights),
            ):
                with pytest.raises(InvalidRequest):
                    lane.forward(*bad)
            with pytest.raises(InvalidRequest, match="gradient"):
                lane.forward(LAYER, x.clone().requires_grad_())
            lane._words.store(lw.bell_at(0), 12345, lw.header(mode=3, layer=LAYER, tokens=1))
            while lane._words.load(lw.answer_at(0)) >> 32 != 12345:
                time.sleep(0.001)
            lane.call(LAYER, 2)  # its number does not follow
            with pytest.raises(InvalidRequest, match="bell"):
                lane.check()
            assert torch.equal(lane.forward(LAYER, x), expected)

    await in_thread(calls)


async def test_what_cannot_be_opened_says_why(service, gpus):
    engine, server = service

    def calls():
        with Client(server.address, ONCE) as client:
            for keywords, kind, text in (
                ({"max_tokens": 0}, InvalidRequest, "max_tokens: 0"),
                ({"slots": 9}, InvalidRequest, "slots: 9"),
                ({"device": "cuda:1"}, InvalidRequest, "no rank of this host computes on GPU"),
                ({"max_tokens": 20000}, TooLarge, "server.max_tokens_per_request"),
            ):
                with (
                    pytest.raises(kind, match=text),
                    client.open_lane(keywords.pop("max_tokens", 4), **{"device": GPU, **keywords}),
                ):
                    pass
            with client.open_lane(64, device=GPU) as lane:
                assert lane.max_tokens == 16, "the largest graph of the ranks"
                with pytest.raises(InvalidRequest, match="must be 1 to 16"):
                    lane.call(LAYER, 17)

    await in_thread(calls)
    off = Server(engine, ServerConfig(port=0))
    await off.start()
    try:
        with pytest.raises(InvalidRequest, match=r"switched off \(server.gpu_lanes\)"):
            await in_thread(lambda: _opened(off.address))
    finally:
        await off.stop()
    assert not len(engine.device_regions)


def _opened(address):
    with Client(address, ONCE) as client, client.open_lane(4, device=GPU):
        pass


async def test_a_client_with_limits_goes_through_the_queue_and_a_withdrawn_token_ends_its_lane(service, tmp_path):
    engine, _ = service
    tokens_file = tmp_path / "tokens"
    tokens_file.write_text("secret-1 name=limited tokens_per_s=1000000\nsecret-2 name=free\n")
    server = Server(engine, ServerConfig(port=0, gpu_lanes=True, tokens_file=tokens_file))
    await server.start()

    def calls():
        x = tokens(2)
        limited, free = Client(server.address, ONCE, token="secret-1"), Client(server.address, ONCE, token="secret-2")
        with limited, free, limited.open_lane(4, device=GPU) as queued, free.open_lane(4, device=GPU) as lane:
            assert (queued.queued, lane.queued) == (True, False)
            expected = free.forward(LAYER, x)
            assert torch.equal(lane.forward(LAYER, x), expected)
            torch.testing.assert_close(queued.forward(LAYER, x), expected, **TOLERANCE)
            tokens_file.write_text("secret-1 name=limited tokens_per_s=1\n")
            server.reload()
            ended = time.monotonic() + LIMIT_S
            while lane.usable and time.monotonic() < ended:
                time.sleep(0.01)
            assert lane.forward(LAYER, x).isnan().all()
            with pytest.raises((NotReady, Unauthenticated)):
                lane.check()
            for _ in range(5):
                queued.forward(LAYER, tokens(4))
            with pytest.raises(Overloaded, match="tokens_per_s"):
                queued.check()
            return limited.status().lanes.waited

    try:
        assert await in_thread(calls) >= 1
    finally:
        await server.stop()


class Clients:
    """Threads that call one layer without pause, over lanes and over gRPC. Every answer is compared."""

    def __init__(self, address, reference, *, lanes=2, messages=1):
        self._address, self._reference = address, reference
        self.done = [0] * (lanes + messages)
        self.errors = []
        self._stop = threading.Event()
        work = [self._lane] * lanes + [self._grpc] * messages
        self._threads = [
            threading.Thread(target=self._watched, args=(each, number)) for number, each in enumerate(work)
        ]
        for thread in self._threads:
            thread.start()

    def _watched(self, function, number):
        try:
            function(number)
        except BaseException as error:
            self.errors.append(error)

    def _lane(self, number):
        with Client(self._address) as client, client.open_lane(16, device=GPU, call_timeout=CALL_S) as lane:
            x = tokens(1 + 5 * number, number)
            expected = self._reference(x)
            while not self._stop.is_set():
                y = lane.forward(LAYER, x)
                lane.check()
                torch.testing.assert_close(y, expected, **TOLERANCE)
                self.done[number] += 1

    def _grpc(self, number):
        with Client(self._address) as client:
            x = tokens(3 + number, 50 + number)
            expected = self._reference(x)
            while not self._stop.is_set():
                torch.testing.assert_close(client.forward(LAYER, x, timeout=CALL_S), expected, **TOLERANCE)
                self.done[number] += 1

    async def more(self, count=5):
        """Returns when each client has had so many answers more."""
        want = [done + count for done in self.done]
        await until(
            lambda: self.errors or all(has >= each for has, each in zip(self.done, want, strict=True)),
            LIMIT_S,
            "answers",
        )
        assert not self.errors, self.errors

    async def end(self):
        self._stop.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, LIMIT_S)
        assert not self.errors, self.errors


async def test_lanes_and_messages_share_the_rank(service, reference):
    engine, server = service
    clients = Clients(server.address, reference, lanes=3, messages=2)
    await clients.more(20)
    await engine.rebalance()
    await clients.more(20)
    await clients.end()
    assert engine.status().recoveries == 0


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_calls_go_on_when_the_rank_dies_or_stands_still(service, reference, sign):
    """The new rank opens the lanes and finds the bells that have no answer."""
    engine, server = service
    await spare(engine)
    clients = Clients(server.address, reference, messages=0)
    await clients.more()
    recoveries = engine.status().recoveries
    os.kill(pids(engine)[0], sign)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)
    await clients.more()
    await clients.end()


async def test_a_driver_that_fails_ends_the_rank_and_its_successor_computes_the_call(service, reference):
    engine, server = service
    await spare(engine)
    recoveries = engine.status().recoveries

    def call():
        with Client(server.address) as client, client.open_lane(16, device=GPU, call_timeout=CALL_S) as lane:
            failing = engine._pool.members[0].call(RankWithLanes.fail_driver, timeout=20)
            asyncio.run_coroutine_threadsafe(failing, loop).result(LIMIT_S)
            y = lane.forward(LAYER, tokens(7))
            lane.check()
            return y

    loop = asyncio.get_running_loop()
    torch.testing.assert_close(await in_thread(call), reference(tokens(7)), **TOLERANCE)
    # The rank serves lanes a moment before the recovery has ended.
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)


CLIENT = """
import sys, pytest
from epserve.client import Client
from tests.support.front_ends import joining, ordering
from tests.support.gpu_driver import lanes_on_made_up_gpus
patch = pytest.MonkeyPatch()
with lanes_on_made_up_gpus(patch), Client(sys.argv[1]) as client, client.open_lane(16, device="cuda:0") as lane:
    lane.x().normal_()
    print("calling", flush=True)
    while True:
        lane.call(int(sys.argv[2]), 16)
"""


async def test_a_client_that_is_killed_takes_its_lane_with_it_and_harms_no_other(service, reference, gpus):
    engine, server = service
    clients = Clients(server.address, reference, lanes=1, messages=0)
    await clients.more()
    dying = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.address, str(LAYER)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert await in_thread(dying.stdout.readline) == b"calling\n"
    await until(lambda: len(server._lanes.on_gpu.lanes) == 2, LIMIT_S, "two lanes")
    await clients.more()
    dying.kill()
    dying.wait()
    await until(
        lambda: len(server._lanes.on_gpu.lanes) == 1 and len(engine.device_regions) == 1, LIMIT_S, "it is closed"
    )
    await clients.more()
    await clients.end()


async def test_a_call_without_an_answer_ends_at_its_limit(service, monkeypatch):
    """The rank's process stands still for longer than the call may take, and goes on before it is missed."""
    engine, server = service
    await spare(engine)
    monkeypatch.setattr(on_gpu, "MARGIN_S", 0.0)
    recoveries = engine.status().recoveries

    def calls():
        with Client(server.address) as client, client.open_lane(4, device=GPU, call_timeout=1.5) as lane:
            x = tokens(2)
            expected = client.forward(LAYER, x)
            assert torch.equal(lane.forward(LAYER, x), expected)
            os.kill(pids(engine)[0], signal.SIGSTOP)
            try:
                y = lane.forward(LAYER, x)
                later = [lane.forward(LAYER, x) for _ in range(5)]
            finally:
                os.kill(pids(engine)[0], signal.SIGCONT)
            assert y.isnan().all() and all(each.isnan().all() for each in later)
            with pytest.raises(DeadlineExceeded, match=r"no answer after 1\.5 s"):
                lane.check()
            assert not lane.usable and not lane.takes(LAYER, x)
            torch.testing.assert_close(client.forward(LAYER, x), expected, **TOLERANCE)

    await in_thread(calls)
    if engine.status().recoveries > recoveries:
        await back(engine)


async def test_a_service_that_ends_lets_the_stream_go_on(service):
    engine, _ = service
    server = Server(engine, ServerConfig(port=0, gpu_lanes=True))
    await server.start()
    opened, stopped = threading.Event(), threading.Event()

    def calls():
        with Client(server.address, ONCE) as client, client.open_lane(4, device=GPU) as lane:
            x = tokens(2)
            assert lane.forward(LAYER, x).isfinite().all()
            opened.set()
            assert stopped.wait(LIMIT_S)
            ended = time.monotonic() + LIMIT_S
            while lane.usable and time.monotonic() < ended:
                time.sleep(0.01)
            assert lane.forward(LAYER, x).isnan().all()
            with pytest.raises(NotReady):
                lane.check()

    waiting = asyncio.ensure_future(in_thread(calls))
    await in_thread(opened.wait, LIMIT_S)
    await server.stop()
    stopped.set()
    await waiting


async def test_a_session_takes_the_lane_by_itself_and_another_one_after_its_end(service, monkeypatch):
    _, server = service
    monkeypatch.setattr(ways, "gpu_of", lambda tensor: GPU)

    def calls():
        with connect(server.address) as session, Client(server.address) as client:
            x = tokens(3)
            expected = client.forward(LAYER, x)
            assert torch.equal(session.layer(LAYER).forward(x), expected)
            way = session._ways._lane._ways[GPU]
            first = way._lane
            assert isinstance(first, on_gpu.GpuLane) and first._slots[0].header
            assert torch.equal(session.layer(LAYER).forward(tokens(20)), client.forward(LAYER, tokens(20))), (
                "too long for it"
            )
            bad = session.layer(LAYER).forward(torch.full_like(x, float("nan")))
            assert bad.isnan().all()
            with pytest.raises(NotFinite):
                session.layer(LAYER).forward(x)
            assert torch.equal(session.layer(LAYER).forward(x), expected)
            first.lost()
            way._next_try = 0.0
            assert torch.equal(session.layer(LAYER).forward(x), expected)
            assert way._lane is not first and way._lane.usable

    await in_thread(calls)
    await until(lambda: not server._lanes.on_gpu.lanes, LIMIT_S, "the session's lane is closed")


async def test_a_model_of_transformers_takes_the_lane_by_itself(service, path, monkeypatch):
    """The text is that of local experts. A call that was refused is told at a later one."""
    from transformers import AutoModelForCausalLM

    import epserve.transformers

    _, server = service
    monkeypatch.setattr(ways, "gpu_of", lambda tensor: GPU)
    prompt, many = (
        torch.tensor([[5, 6, 7]]),
        {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0},
    )

    def generate():
        local = AutoModelForCausalLM.from_pretrained(path).eval()
        with epserve.transformers.connect(server.address) as service:
            remote = epserve.transformers.from_pretrained(path, service).eval()
            made = [model.generate(prompt, **many) for model in (local, remote)]
            (lane,) = server._lanes.on_gpu.lanes
            assert lane.own_thread and lane._words.load(lw.bell_at(0)) >> 32 >= 6
            return made

    assert torch.equal(*await in_thread(generate))


@pytest.mark.slow
async def test_more_ranks_end_the_lanes_and_the_next_ones_go_through_the_queue(service, reference):
    engine, server = service
    loop = asyncio.get_running_loop()
    x, (ids, weights) = tokens(9), routing(9)

    def scale(ranks):
        asyncio.run_coroutine_threadsafe(engine.scale(ranks), loop).result(LIMIT_S)

    def before():
        with Client(server.address) as client, client.open_lane(4, device=GPU, call_timeout=CALL_S) as lane:
            scale(2)
            y = lane.forward(LAYER, x[:2])
            with pytest.raises(NotReady, match="need one rank, there are 2"):
                lane.check()
            assert y.isnan().all()

    def calls(client, lane):
        """A lane on the GPU of either rank: the other one takes part with no rows."""
        assert lane.queued and lane.max_tokens == 32
        torch.testing.assert_close(lane.forward(LAYER, x), reference(x), **TOLERANCE)
        given = client.forward(LAYER, x, ids, weights)
        torch.testing.assert_close(lane.forward(LAYER, x, ids, weights), given, **TOLERANCE)
        lane.check()
        for bad, kind in (
            ((torch.full_like(x, float("nan")),), InvalidRequest),
            ((x * 1e30,), NotFinite),
            ((x, ids + 100, weights), InvalidRequest),
        ):
            assert lane.forward(LAYER, *bad).isnan().all()
            with pytest.raises(kind):
                lane.check()
        torch.testing.assert_close(lane.forward(LAYER, x), reference(x), **TOLERANCE)

    def after(number):
        with Client(server.address) as client, client.open_lane(32, device=f"cuda:{number}") as lane:
            calls(client, lane)

    await in_thread(before)
    for number in (0, 1):
        await in_thread(after, number)
    await spare(engine)
    clients = Clients(server.address, reference)
    await clients.more()
    recoveries = engine.status().recoveries
    os.kill(pids(engine)[0], signal.SIGKILL)
    await until(lambda: engine.status().recoveries > recoveries, LIMIT_S, "recovery")
    await back(engine)
    await clients.more()
    await clients.end()
    assert len(engine.device_regions) == 0
    await engine.scale(1)


async def test_without_a_compiler_calls_go_through_the_queue(service, monkeypatch):
    """A rank that cannot build its thread says so, and the service's own thread serves the lane."""
    engine, server = service
    real = type(engine.device_regions)._ask

    async def refuses(self, member, asked):
        answer = await real(self, member, {name: each for name, each in asked.items() if name != "lane"})
        return {**answer, "most": 0, "why": "lanes on GPUs: no C compiler is here"} if "lane" in asked else answer

    monkeypatch.setattr(type(engine.device_regions), "_ask", refuses)

    def calls():
        with Client(server.address) as client, client.open_lane(64, slots=2, device=GPU) as lane:
            assert lane.queued
            for count in (1, 16, 64):
                x, (ids, weights) = tokens(count), routing(count)
                torch.testing.assert_close(lane.forward(LAYER, x), client.forward(LAYER, x), **TOLERANCE)
                lane.ids(1)[:count], lane.weights(1)[:count], lane.x(1)[:count] = ids, weights, x
                y = lane.call(LAYER, count, slot=1, routed=True)
                torch.testing.assert_close(y, client.forward(LAYER, x, ids, weights), **TOLERANCE)
            lane.check()
            assert client.status().lanes.on_gpu == 1

    await in_thread(calls)


async def test_a_joined_front_end_sends_the_calls_on(service, reference):
    """Its lanes go through the queue of the process with the ranks, and end with the connection to it."""
    engine, _ = service
    peers = [Peers(), Peers()]
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(ordering(engine, peers=peers[0]))
        remote = await stack.enter_async_context(joining(port, peers=peers[1]))
        server = Server(remote, ServerConfig(port=0, gpu_lanes=True), peers=peers[1])
        await server.start()
        stack.push_async_callback(server.stop)
        cut = threading.Event()

        def calls():
            x, (ids, weights) = tokens(5), routing(5)
            with Client(server.address) as client, client.open_lane(16, device=GPU, call_timeout=20) as lane:
                assert lane.queued
                torch.testing.assert_close(lane.forward(LAYER, x), reference(x), **TOLERANCE)
                given = client.forward(LAYER, x, ids, weights)
                torch.testing.assert_close(lane.forward(LAYER, x, ids, weights), given, **TOLERANCE)
                lane.check()
                remote._link._sock.shutdown(socket.SHUT_RDWR)
                cut.set()
                ended = time.monotonic() + LIMIT_S
                while lane.usable and time.monotonic() < ended:
                    assert lane.forward(LAYER, x).isnan().all() or lane.usable
                    with contextlib.suppress(EpserveError):
                        lane.check()
                assert not lane.usable

        await in_thread(calls)
        await until(lambda: not len(engine.device_regions), LIMIT_S, "the rows are let go")
