"""Several front ends: requests of all of them in one order of steps, and what the loss of one, or of the orderer, does."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.config import SchedulerConfig, ServerConfig, load_front_end, parse_config
from epserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    Overloaded,
    RankFailed,
    TooLarge,
    UnknownLayer,
)
from epserve.front_ends import FrontEnds
from epserve.runtime import join_frames, join_link
from epserve.runtime.join_port import JoinPort
from epserve.runtime.planning import Batch, Priority
from epserve.runtime.remote import RemoteEngine
from epserve.runtime.scheduler import Scheduler
from tests.checkpoints import write
from tests.fake_engine import FakeEngine, LocalExperts, serving
from tests.grpc_calls import until
from tests.observed import WatchedEngine, fetch
from tests.test_metrics import values
from tests.test_scheduler import FakeRanks

SECRET = b"sixteen letters!"
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))


@contextlib.asynccontextmanager
async def ordering(engine, address="127.0.0.1:0", *, max_bytes=1 << 30):
    port = JoinPort(engine, address, SECRET, max_bytes=max_bytes)
    port.start()
    try:
        yield port
    finally:
        await port.close()


@contextlib.asynccontextmanager
async def joining(port, secret=SECRET):
    engine = await RemoteEngine.join(port.address, secret, timeout_s=10)
    try:
        yield engine
    finally:
        await engine.close()


def batch(x, layer=1, **more):
    return Batch(**{"layer": layer, "hidden": x, "deadline": time.monotonic() + 20, **more})


class ScheduledEngine(FakeEngine):
    """With the real queue, over ranks that add the layer's number."""

    def __init__(self):
        super().__init__(self._compute)
        self.ranks = FakeRanks()
        self.scheduler = Scheduler(SchedulerConfig(), self.ranks)
        self.scheduler.on_step = lambda record: [callback(record) for callback in self.step_callbacks]

    async def _compute(self, batch):
        return await self.scheduler.submit(batch)


class TestJoined:
    async def test_answers_are_those_of_the_experts_over_both_kinds_of_address(self):
        experts = LocalExperts()
        x, ids, weights = torch.randn(9, 32), torch.randint(0, 8, (9, 3)).int(), torch.rand(9, 3)
        for address in ("127.0.0.1:0", f"unix:@epserve-test-{os.getpid()}"):
            async with ordering(FakeEngine(experts), address) as port, joining(port) as engine:
                assert engine.layers == (1, 2, 3, 7)
                assert (engine.state(), engine.info.hidden, engine.info.dtype) == ("serving", 32, torch.float32)
                assert torch.equal(await engine.forward(batch(x)), experts.forward(x))
                routed = await engine.forward(batch(x, ids=ids, weights=weights))
                assert torch.equal(routed, experts.forward(x, ids, weights))

    async def test_a_batch_keeps_all_that_it_says(self):
        engine = FakeEngine()
        async with ordering(engine) as port, joining(port) as front_end:
            sent = batch(torch.ones(2, 32), 7, request_id="r-1", client="search", priority=Priority.HIGH)
            await front_end.forward(sent)
        (came,) = engine.seen
        kept = ("layer", "request_id", "client", "priority")
        assert [getattr(came, name) for name in kept] == [getattr(sent, name) for name in kept]
        assert came.deadline == pytest.approx(sent.deadline, abs=0.5)

    async def test_requests_of_all_front_ends_share_steps_in_one_order(self):
        engine = ScheduledEngine()
        engine.ranks.gate.clear()
        async with ordering(engine) as port, joining(port) as one, joining(port) as other:
            assert port.front_ends == 2
            calls = [
                asyncio.ensure_future(each.forward(batch(torch.full((2, 4), float(number)), layer)))
                for number in range(4)
                for layer in (1, 2)
                for each in (one, other)
            ]
            await until(lambda: len(engine.seen) == 16)
            engine.ranks.gate.set()
            for number, answer in enumerate(await asyncio.gather(*calls)):
                assert torch.equal(answer, torch.full((2, 4), float(number // 4)) + 1 + number // 2 % 2)
        assert [plan.step for plan in engine.ranks.steps] == list(range(len(engine.ranks.steps)))
        assert len(engine.ranks.steps) < 16
        await engine.scheduler.close()

    @pytest.mark.parametrize(
        "error",
        [
            Overloaded("full", retry_after_s=0.25),
            InvalidRequest("bad ids", field="topk_ids"),
            RankFailed("rank 1 died"),
            NotReady("recovering"),
            TooLarge("41 tokens"),
            UnknownLayer("layer 9"),
            DeadlineExceeded("in the queue"),
        ],
        ids=lambda error: type(error).__name__,
    )
    async def test_errors_arrive_as_they_were_raised(self, error):
        async def refuse(batch):
            raise error

        async with ordering(FakeEngine(refuse)) as port, joining(port) as engine:
            with pytest.raises(type(error), match=str(error)) as raised:
                await engine.forward(batch(torch.ones(1, 32)))
        for name in ("field", "retry_after_s"):
            assert getattr(raised.value, name, None) == getattr(error, name, None)

    async def test_a_defect_is_logged_where_it_was_and_not_shown(self, caplog):
        async def break_down(batch):
            raise ZeroDivisionError("of ours")

        async with ordering(FakeEngine(break_down)) as port, joining(port) as engine:
            with pytest.raises(InternalError) as raised:
                await engine.forward(batch(torch.ones(1, 32)))
        assert "of ours" not in str(raised.value)
        assert "of ours" in caplog.text

    async def test_cancelled_calls_and_late_ones_are_cancelled_there(self):
        async def hang(batch):
            await asyncio.sleep(60)

        engine = FakeEngine(hang)
        async with ordering(engine) as port, joining(port) as front_end:
            call = asyncio.ensure_future(front_end.forward(batch(torch.ones(1, 32))))
            await until(lambda: engine.running == 1)
            call.cancel()
            await until(lambda: engine.cancelled == 1)
            late = batch(torch.ones(1, 32), deadline=time.monotonic() - 0.9)
            with pytest.raises(DeadlineExceeded, match="no answer from"):
                await front_end.forward(late)
            await until(lambda: engine.cancelled == 2 and engine.running == 0)
            assert port._held == 0
            assert not front_end._calls

    async def test_bytes_of_all_front_ends_are_bounded(self):
        gate = asyncio.Event()

        async def wait(batch):
            await gate.wait()
            return batch.hidden

        engine, x = FakeEngine(wait), torch.randn(100, 32)
        async with ordering(engine, max_bytes=20_000) as port, joining(port) as one, joining(port) as other:
            first = asyncio.ensure_future(one.forward(batch(x)))
            await until(lambda: engine.running == 1)
            with pytest.raises(Overloaded, match=r"12800 bytes of other front ends'.*at most 20000"):
                await other.forward(batch(x))
            small = asyncio.ensure_future(other.forward(batch(x[:10])))  # what follows a refused payload is whole
            await until(lambda: engine.running == 2)
            gate.set()
            assert torch.equal(await first, x)
            assert torch.equal(await small, x[:10])
            assert torch.equal(await other.forward(batch(x)), x)

    async def test_states_status_and_changes_pass(self):
        engine = WatchedEngine(layers=(1, 2))

        async def rebalance():
            return SimpleNamespace(layers=(1,), skipped=(), moved=3, before=2.0, after=1.1, seconds=0.5)

        async def scale(ranks):
            raise ConfigError(f"{ranks} ranks cannot be")

        engine.rebalance, engine.scale = rebalance, scale
        async with ordering(engine) as port, joining(port) as front_end:
            states = []
            front_end.on_state_change(states.append)
            status = front_end.status()
            assert status.ranks[0].layer_experts == {2: [7, 1, 2, 3]}
            assert list(status.expert_tokens) == [1, 2]
            for state in ("recovering", "serving"):
                engine.set_state(state)
            await until(lambda: states == ["recovering", "serving"])
            assert (await front_end.rebalance()).moved == 3
            with pytest.raises(ConfigError, match="5 ranks cannot be"):
                await front_end.scale(5)
            await front_end.forward(batch(torch.ones(4, 32)))
            await until(lambda: front_end.status().expert_tokens[1][7] == 28)

    async def test_steps_are_told_to_whose_requests_they_had(self):
        engine = ScheduledEngine()
        async with ordering(engine) as port, joining(port) as one, joining(port) as other:
            seen = {1: [], 2: []}
            one.on_step(seen[1].append)
            other.on_step(seen[2].append)
            engine.ranks.gate.clear()
            calls = [
                asyncio.ensure_future(one.forward(batch(torch.ones(3, 4), request_id="a", trace="span a"))),
                asyncio.ensure_future(one.forward(batch(torch.ones(4, 4), 2, request_id="b"))),
                asyncio.ensure_future(other.forward(batch(torch.ones(5, 4), 3, request_id="c"))),
            ]
            await asyncio.sleep(0.1)
            engine.ranks.gate.set()
            await asyncio.gather(*calls)
            (mine,) = [record for record in seen[1] if record.layer == 1]
            (part,) = mine.parts
            assert (part.request_id, part.tokens, part.trace) == ("a", 3, "span a")
            assert 0.09 < mine.seconds < 5
            assert abs(time.monotonic() - mine.ended) < 5
            assert [record.layer for record in seen[2]] == [3]
        await engine.scheduler.close()


class TestStrangers:
    async def test_who_does_not_know_the_secret_cannot_join(self, caplog):
        caplog.set_level(logging.WARNING)
        async with ordering(FakeEngine()) as port:
            with pytest.raises(ConfigError, match=r"cannot be joined within 0\.5 s"):
                await RemoteEngine.join(port.address, b"another sixteen!", timeout_s=0.5)
            assert port.front_ends == 0
            async with joining(port) as engine:  # and who does, still can
                await engine.forward(batch(torch.ones(1, 32)))
        assert "does not know the secret" in caplog.text
        assert SECRET.decode() not in caplog.text

    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\n\r\n",
            join_frames.PREFIX.pack(join_frames.MAGIC, 1 << 30),
            join_frames.PREFIX.pack(join_frames.MAGIC, 2) + b"[]",
            join_frames.PREFIX.pack(join_frames.MAGIC, 9) + b"\xff" * 9,
            join_frames.PREFIX.pack(join_frames.MAGIC, 44) + b'{"kind":"hello","version":0,"tensors":[]}   ',
            b"",
        ],
    )
    async def test_who_speaks_something_else_is_turned_away(self, said):
        async with ordering(FakeEngine()) as port:
            host, number = join_link.parse_address(port.address)
            reader, writer = await asyncio.open_connection(host, number)
            writer.write(said)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)  # its hello, then the end
            writer.close()
            async with joining(port) as engine:
                await engine.forward(batch(torch.ones(1, 32)))

    @pytest.mark.parametrize(
        "header",
        [
            {"kind": "what"},
            {"kind": "forward", "call": 1},
            {"kind": "forward", "call": 1, "layer": 1, "timeout_s": 1, "request_id": "", "client": "", "priority": 5},
            {"kind": "forward", "call": 1, "tensors": [["float32", [-1, 2]]]},
            {"kind": "forward", "call": 1, "tensors": [["complex64", [1]]]},
            {"kind": "cancel"},
        ],
        ids=str,
    )
    async def test_a_guest_whose_frames_make_no_sense_loses_its_connection_only(self, header):
        async with ordering(FakeEngine()) as port, joining(port) as good:
            link = join_link.Link(await asyncio.to_thread(join_link.connect, port.address))
            await link.greet(SECRET, joining=True)
            text = json.dumps({"tensors": [["float32", [1, 32]]], **header}).encode()
            await asyncio.get_running_loop().sock_sendall(
                link._sock, join_frames.PREFIX.pack(join_frames.MAGIC, len(text)) + text + bytes(128)
            )
            with pytest.raises((join_frames.JoinError, OSError)):
                await asyncio.wait_for(self.listen(link), 5)
            link.close()
            await until(lambda: port.front_ends == 1)
            assert port._held == 0
            await good.forward(batch(torch.ones(1, 32)))

    async def listen(self, link):
        while True:
            await link.header()

    @pytest.mark.parametrize("address", ["nowhere", ":5", "h:", "h:port", "h:70000"])
    async def test_what_is_no_address_is_refused_at_once(self, address):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            await RemoteEngine.join(address, SECRET, timeout_s=30)


class TestLoss:
    async def test_a_front_end_that_vanishes_takes_its_own_calls_along_and_no_others(self):
        engine = FakeEngine(lambda batch: asyncio.sleep(0.3, batch.hidden))
        async with ordering(engine) as port, joining(port) as good:
            bad = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
            kept = asyncio.ensure_future(good.forward(batch(torch.ones(1, 32))))
            lost = asyncio.ensure_future(bad.forward(batch(torch.ones(2, 32))))
            await until(lambda: engine.running == 2)
            bad._link._sock.shutdown(socket.SHUT_RDWR)
            with pytest.raises(NotReady, match="which orders the steps, cannot be reached"):
                await lost
            await until(lambda: engine.cancelled == 1)
            assert torch.equal(await kept, torch.ones(1, 32))
            await until(lambda: bad.state() == "serving")  # it joins again
            assert torch.equal(await bad.forward(batch(torch.ones(3, 32))), torch.ones(3, 32))
            await bad.close()
            await until(lambda: port.front_ends == 1)

    async def test_the_orderers_loss_is_unavailable_until_it_is_back(self):
        engine = FakeEngine(lambda batch: asyncio.sleep(0.2, batch.hidden))
        port = JoinPort(engine, "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        address = port.address
        remote = await RemoteEngine.join(address, SECRET, timeout_s=5)
        async with serving(remote) as server, AsyncClient(server.address, ONCE) as client:
            assert torch.equal(await client.forward(1, torch.ones(1, 32)), torch.ones(1, 32))
            await port.close()
            await until(lambda: remote.state() == "disconnected")
            started = time.monotonic()
            with pytest.raises(NotReady, match=rf"{address}, which orders the steps, cannot be reached"):
                await client.forward(1, torch.ones(1, 32))
            assert time.monotonic() - started < 1
            assert (await client.status()).state == "disconnected"
            async with ordering(engine, address), AsyncClient(server.address) as patient:
                assert torch.equal(await patient.forward(1, torch.ones(1, 32)), torch.ones(1, 32))
        await remote.close()

    async def test_an_orderer_with_another_model_ends_the_front_end(self):
        port = JoinPort(FakeEngine(), "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        remote = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
        await port.close()
        async with ordering(FakeEngine(fingerprint="another"), port.address):
            with pytest.raises(ConfigError, match="serves something else now"):
                await asyncio.wait_for(remote.ended, 10)
        await remote.close()

    async def test_silence_is_noticed(self, monkeypatch):
        """A host that vanished closes nothing: as after `join`, when nobody on the other side reads or writes any more."""
        monkeypatch.setattr(join_link, "SILENCE_S", 0.3)
        monkeypatch.setattr(join_link, "BEAT_S", 0.1)
        async with ordering(FakeEngine(), f"unix:@epserve-silent-{os.getpid()}") as port:
            remote = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
            await asyncio.sleep(0.6)
            assert remote.state() == "serving", "beats keep an idle connection"
            (guest,) = port._guests
            monkeypatch.setattr(guest.link, "send", lambda *_, **__: None)
            states = []
            remote.on_state_change(states.append)
            await until(lambda: states[:1] == ["disconnected"])
            assert "nothing was heard" in remote._lost
            await until(lambda: remote.state() == "serving")
            await remote.close()

    async def test_accepted_calls_are_answered_before_the_port_closes(self):
        engine = FakeEngine(lambda batch: asyncio.sleep(0.3, batch.hidden))
        port = JoinPort(engine, "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        remote = await RemoteEngine.join(port.address, SECRET, timeout_s=5)
        call = asyncio.ensure_future(remote.forward(batch(torch.ones(1, 32))))
        await until(lambda: engine.running == 1)
        await port.close()
        assert torch.equal(await call, torch.ones(1, 32))
        await remote.close()


async def spawn(*command: str, **options) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", *command, **options)


async def ready(path, process, seconds=60.0) -> dict:
    await until(lambda: path.exists() or process.returncode is not None, seconds)
    assert process.returncode is None, "it ended"
    return json.loads(path.read_text())


@contextlib.asynccontextmanager
async def front_end_processes(port, tmp_path, count, *more):
    """`epserve front-end` so many times."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    files = [tmp_path / f"ready-{number}.json" for number in range(count)]
    common = (
        "epserve",
        "front-end",
        "--join",
        port.address,
        "--secret-file",
        str(secret),
        "--set",
        "server.port=0",
        *more,
    )
    processes = [await spawn(*common, "--ready-file", str(file)) for file in files]
    try:
        yield processes, await asyncio.gather(*map(ready, files, processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


class TestProcesses:
    async def test_clients_balance_over_front_ends_and_the_death_of_one_harms_its_own_calls_only(self, tmp_path):
        experts = LocalExperts()
        engine = FakeEngine(experts)
        async with ordering(engine) as port, front_end_processes(port, tmp_path, 2) as (processes, facts):
            target = "ipv4:" + ",".join(f"127.0.0.1:{each['port']}" for each in facts)
            async with AsyncClient(target, ClientOptions(balance="round_robin")) as client:
                x = torch.randn(5, 32)
                for _ in range(40):
                    assert torch.equal(await client.forward(1, x), experts.forward(x))
                    if await self.done(facts) == 2:
                        break
                    await asyncio.sleep(0.1)  # counts are made once a second
                assert await self.done(facts) == 2, "both were called"

                async def many(count):
                    async def one(number):
                        x = torch.randn(1 + number % 7, 32)
                        assert torch.equal(await client.forward(1, x), experts.forward(x))

                    await asyncio.gather(*map(one, range(count)))

                running = asyncio.ensure_future(many(300))
                await asyncio.sleep(0.05)
                processes[0].kill()
                await running  # what was on its way there is sent again, to the other
                assert await processes[0].wait() == -signal.SIGKILL
                await until(lambda: port.front_ends == 1)
            with Client(f"127.0.0.1:{facts[1]['port']}") as client:
                await asyncio.to_thread(client.forward, 1, x)
            processes[1].send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(processes[1].wait(), 20) == 0
            await until(lambda: port.front_ends == 0)

    async def done(self, facts) -> int:
        """How many front ends have answered something."""
        found = 0
        for each in facts:
            async with AsyncClient(f"127.0.0.1:{each['port']}") as client:
                status = await client.status()
            found += status.latency.count > 0
        return found

    @pytest.mark.slow
    async def test_it_drains_says_why_it_cannot_join_and_ends_when_the_service_is_another_one(self, tmp_path):
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        pipes = {"stderr": asyncio.subprocess.PIPE}
        lonely = await spawn(
            "epserve", "front-end", "--join", nobody, "--secret-file", str(secret), "--timeout", "1", **pipes
        )
        port = JoinPort(FakeEngine(), "127.0.0.1:0", SECRET, max_bytes=1 << 30)
        port.start()
        async with front_end_processes(port, tmp_path, 1) as ((process,), _):
            await port.close()
            async with ordering(FakeEngine(fingerprint="another"), port.address):
                assert await asyncio.wait_for(process.wait(), 30) == 2
        _, said = await asyncio.wait_for(lonely.communicate(), 60)
        assert lonely.returncode == 2
        assert "cannot be joined within 1 s" in said.decode()

    @pytest.mark.slow
    async def test_the_service_starts_watches_and_stops_its_own(self, tmp_path):
        config = parse_config(
            {
                "model": {"path": "."},
                "server": {"port": 0, "front_ends": 3, "metrics_port": 0, "max_tokens_per_request": 77},
                "scheduler": {"default_deadline_s": 7, "drain_timeout_s": 5},
            }
        )
        engine = WatchedEngine()
        async with ordering(engine, f"unix:@epserve-own-{os.getpid()}") as port:
            own = FrontEnds(config, port.address, SECRET)
            await own.start()
            try:
                assert sorted(own.facts) == [1, 2]
                before = dict(own.facts[1])
                async with AsyncClient(f"127.0.0.1:{before['port']}") as client:
                    assert (await client.model()).max_tokens_per_request == 77
                    await client.forward(1, torch.ones(3, 32))
                end, found = time.monotonic() + 20, {}
                while not found.get("epserve_steps_total") and time.monotonic() < end:  # some seconds old
                    await asyncio.sleep(0.2)
                    found = values((await fetch(before["metrics_port"], "/metrics")).text)
                assert found["epserve_steps_total"] == found["epserve_step_seconds_count"] == 1
                os.kill(before["pid"], signal.SIGKILL)
                await until(lambda: own.facts.get(1, before)["pid"] != before["pid"], 60)
                assert own.facts[1]["port"] == before["port"], "clients know it"
                async with AsyncClient(f"127.0.0.1:{before['port']}") as client:
                    await client.forward(1, torch.ones(3, 32))
            finally:
                await own.stop()
            await until(lambda: port.front_ends == 0)

    @pytest.mark.slow
    async def test_one_whose_parent_is_killed_ends_too(self, tmp_path):
        async with ordering(FakeEngine(), f"unix:@epserve-orphan-{os.getpid()}") as port:
            given = {
                "server": ServerConfig(port=0).model_dump(mode="json"), "number": 1, "log_level": 20,
                "joining": {"address": port.address, "secret": SECRET.hex()},
            }  # fmt: skip
            script = (
                "import subprocess, sys, json, os;"
                "given = json.loads(sys.argv[1]); given['joining']['parent'] = os.getpid();"
                "p = subprocess.Popen([sys.executable, '-m', 'epserve.front_end'], stdin=subprocess.PIPE);"
                "p.communicate(json.dumps(given).encode())"
            )
            parent = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, json.dumps(given), stdout=asyncio.subprocess.PIPE
            )
            facts = json.loads(await asyncio.wait_for(parent.stdout.readline(), 60))
            parent.kill()
            await parent.wait()
            await until(lambda: port.front_ends == 0, 20)
            await until(lambda: not os.path.exists(f"/proc/{facts['pid']}"), 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_whole_service_with_real_ranks(tmp_path):
    """Two front ends on its host, one that joins from outside: the same bits from each, one order of steps, a clean end."""
    path, secret, file = (
        write("mixtral", tmp_path / "model", dtype=torch.float32),
        tmp_path / "secret",
        tmp_path / "ready",
    )
    secret.write_bytes(SECRET)
    config = tmp_path / "service.yaml"
    config.write_text(
        f"model: {{path: {path}}}\nengine: {{ranks: 2, device: cpu}}\n"
        f"server: {{port: 0, join_port: 0, join_secret_file: {secret}}}\n"
    )
    service = await spawn(
        "epserve", "serve", str(config), "--front-ends", "2", "--ready-file", str(file),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        facts = await ready(file, service, 300)
        (further,) = facts["front_ends"]
        joined_at = SimpleNamespace(address=facts["join"])
        async with front_end_processes(joined_at, tmp_path, 1, str(config)) as ((outside,), (outer,)):
            ports = [facts["port"], further["port"], outer["port"]]
            x, answers = torch.randn(20, 64), []
            for port in ports:
                async with AsyncClient(f"127.0.0.1:{port}") as client:
                    await client.wait_ready(30)
                    layer = (await client.model()).layers[0]
                    answers.append(await client.forward(layer, x))
            assert torch.equal(answers[0], answers[1])
            assert torch.equal(answers[0], answers[2])
            target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
            async with AsyncClient(target, ClientOptions(balance="round_robin")) as client:
                calls = [client.forward(layer, x[: 1 + number % 20]) for number in range(200)]
                await asyncio.sleep(0)
                for number, answer in enumerate(await asyncio.gather(*calls)):
                    torch.testing.assert_close(answer, answers[0][: 1 + number % 20])
            async with AsyncClient(f"127.0.0.1:{facts['port']}") as client:
                status = await client.status()
            assert status.front_ends == 2
            assert status.steps < 200, "requests of several front ends share steps"
            service.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(service.wait(), 60) == 0
            assert not os.path.exists(f"/proc/{further['pid']}")
            async with AsyncClient(f"127.0.0.1:{outer['port']}", ONCE) as client:
                with pytest.raises(NotReady, match="which orders the steps, cannot be reached"):
                    await client.forward(layer, x)
            outside.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(outside.wait(), 30) == 0
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()


class TestConfiguration:
    def test_ports_that_clash_are_refused(self):
        server = {"front_ends": 4, "port": 50051, "metrics_port": 50053}
        with pytest.raises(ConfigError, match=r"4 front ends would use .*50054.*\[50053, 50054\] clash"):
            parse_config({"model": {"path": "."}, "server": server})
        good = parse_config({"model": {"path": "."}, "server": {**server, "metrics_port": 9464}}).server
        assert good.ports == (50051, 50052, 50053, 50054)
        assert good.all_metrics_ports == (9464, 9465, 9466, 9467)
        assert parse_config({"model": {"path": "."}, "server": {"front_ends": 2, "port": 0}}).server.ports == (0, 0)

    def test_a_secret_and_a_port_come_together(self, tmp_path):
        with pytest.raises(ConfigError, match="join_port and join_secret_file come together"):
            parse_config({"model": {"path": "."}, "server": {"join_port": 0}})

    def test_a_front_end_reads_the_services_own_file(self, tmp_path):
        path = tmp_path / "service.yaml"
        path.write_text(
            "model: {path: /nowhere}\nengine: {ranks: 8}\nscheduler: {default_deadline_s: 3}\n"
            "server: {port: 7000, front_ends: 3, join_port: 7100, join_secret_file: /etc/secret}\n"
        )
        server, scheduler = load_front_end(path, {"server.port": 0})
        assert (server.port, server.front_ends, server.join_port, scheduler.default_deadline_s) == (0, 1, None, 3)
        with pytest.raises(ConfigError, match="unknown key"):
            load_front_end(None, {"server.prt": 0})


def test_round_robin_asks_for_health():
    options = dict(ClientOptions(balance="round_robin").channel_options())
    assert json.loads(options["grpc.service_config"])["healthCheckConfig"] == {"serviceName": "epserve.v1.Experts"}
    assert "grpc.service_config" not in dict(ClientOptions().channel_options())
