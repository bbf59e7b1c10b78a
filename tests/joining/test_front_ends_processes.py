"""Front ends in processes of their own: balance, death, drain, restart, and a whole service."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace

import grpc
import pytest
import torch

from epserve.client import AsyncClient, ClientOptions, RetryPolicy
from epserve.config import ServerConfig, parse_config
from epserve.errors import NotReady
from epserve.joining.peers import Peers
from epserve.joining.port import JoinPort
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.service.front_ends import FrontEnds
from tests.support.checkpoints import write
from tests.support.fake_engine import FakeEngine, LocalExperts, serving
from tests.support.front_ends import ONCE, SECRET, front_end_processes, ordering, ready, spawn
from tests.support.grpc_calls import connect, tensor_of, until
from tests.support.observed import WatchedEngine, fetch
from tests.support.region_calls import held, name_of, request_in, shared_memory
from tests.watch.test_metrics import values


class TestProcesses:
    @pytest.mark.timeout(600)
    async def test_clients_balance_over_front_ends_and_the_death_of_one_harms_its_own_calls_only(self, tmp_path):
        experts, gate = LocalExperts(), asyncio.Event()
        gate.set()

        async def compute(batch):
            await gate.wait()
            return experts.forward(batch.hidden, batch.ids, batch.weights)

        engine = FakeEngine(compute)

        def callers() -> set:
            """Through which front ends requests came so far."""
            return {each.trace.guest for each in engine.seen}

        async with ordering(engine) as port, front_end_processes(port, tmp_path, 2) as (processes, facts):
            x = torch.randn(5, 32)
            async with AsyncClient(f"127.0.0.1:{facts[0]['port']}") as client:
                await client.forward(1, x)
            (first,) = callers()
            target = "ipv4:" + ",".join(f"127.0.0.1:{each['port']}" for each in facts)
            options = ClientOptions(balance="round_robin", retry=RetryPolicy(attempts=50), timeout_s=300)
            async with AsyncClient(target, options) as client, asyncio.timeout(300):
                while len(callers()) < 2:  # at first one of the two may not be connected yet
                    assert torch.equal(await client.forward(1, x), experts.forward(x))

                async def one(number):
                    x = torch.randn(1 + number % 7, 32)
                    assert torch.equal(await client.forward(1, x), experts.forward(x))

                gate.clear()
                engine.seen.clear()
                running = [asyncio.ensure_future(one(number)) for number in range(60)]
                await until(lambda: len(callers()) == 2, 60)
                assert first in callers(), "what it has is lost"
                processes[0].kill()
                assert await processes[0].wait() == -signal.SIGKILL
                await until(lambda: port.front_ends == 1 and engine.cancelled > 0, 60)
                gate.set()
                await asyncio.gather(*running)  # what was on its way there is sent again, to the other
            async with AsyncClient(f"127.0.0.1:{facts[1]['port']}") as client:
                await client.forward(1, x)
            processes[1].send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(processes[1].wait(), 60) == 0
            await until(lambda: port.front_ends == 0, 60)

    @pytest.mark.slow
    async def test_a_region_that_one_process_registers_is_known_to_another_and_goes_with_the_first(self, tmp_path):
        x, peers, engine = torch.randn(4, 32), Peers(), FakeEngine()
        async with ordering(engine, peers=peers) as port, serving(engine, peers=peers) as server:  # noqa: SIM117
            async with front_end_processes(port, tmp_path, 1) as ((process,), (facts,)):
                there = grpc.aio.insecure_channel(f"127.0.0.1:{facts['port']}")
                with shared_memory() as shm:
                    region = await name_of(held(pb_grpc.ExpertsStub(there), shm))
                    request = request_in(region, x, shm[2])
                    shm[2].unlink()  # what is left is the descriptor of the other process, and ours of that
                    async with connect(server) as here:
                        assert torch.equal(tensor_of(await pb_grpc.ExpertsStub(here).Forward(request)), x)
                    process.kill()
                    await until(lambda: not len(server._calls.regions))
                await there.close()

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
                end, found = time.monotonic() + 60, {}
                while not found.get("epserve_steps_total") and time.monotonic() < end:  # some seconds old
                    await asyncio.sleep(0.2)
                    found = values((await fetch(before["metrics_port"], "/metrics")).text)
                assert found["epserve_steps_total"] == found["epserve_step_seconds_count"] == 1
                os.kill(before["pid"], signal.SIGKILL)
                await until(lambda: own.facts.get(1, before)["pid"] != before["pid"], 300)
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
                "p = subprocess.Popen([sys.executable, '-m', 'epserve.service.front_end'], stdin=subprocess.PIPE);"
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
