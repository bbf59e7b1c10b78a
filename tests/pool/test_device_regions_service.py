"""Regions on made-up GPUs through a whole service, its ranks under Ray: rows go where they shall, nobody is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys

import grpc
import pytest
import pytest_asyncio
import torch

from epserve.client import AsyncClient, Client
from epserve.config import parse_config
from epserve.errors import EpserveError, InvalidRequest, NotFinite, NotReady, TooLarge
from epserve.joining.peers import Peers
from epserve.models.demo import reference_block
from epserve.pool import members
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.service.run import running
from tests.support.checkpoints import LAYER, write
from tests.support.fake_device_memory import (
    HIDDEN,
    SIZE,
    FakeGpuMemory,
    RankOnFakeGpu,
    clients_on_made_up_gpus,
    tokens,
    uuid_of,
)
from tests.support.fake_engine import serving
from tests.support.front_ends import joining, ordering
from tests.support.grpc_calls import connect, status_of, until
from tests.support.region_calls import slice_


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    with clients_on_made_up_gpus(monkeypatch) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory):
    """Two CPU ranks that say they compute on GPUs 0 and 1; (engine, server, what the layer computes)."""
    path = write("mixtral", tmp_path_factory.mktemp("device"), dtype=torch.float32)
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": 2, "device": "cpu", "experts": "grouped_mm", "max_tokens_per_rank": 64, "standbys": 0},
            "cluster": {"start_timeout_s": 240},
            "scheduler": {"step_timeout_s": 20, "heartbeat_s": 4, "max_step_tokens": 128},
            "server": {"port": 0, "max_region_bytes": 1 << 24},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "RankActor", RankOnFakeGpu)
        async with running(config) as (engine, server):
            yield engine, server, reference_block(path, LAYER)


on_ranks = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class TestService:
    pytestmark = on_ranks

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("count", [1, 50, 300])
    async def test_rows_stay_on_their_gpu_and_results_are_those_of_inline_calls(self, service, number, count):
        engine, server, _ = service
        x = tokens(count)
        async with AsyncClient(server.address) as client:
            expected = await client.forward(LAYER, x)
            before = [rank.tokens_done for rank in engine.status().ranks]
            async with client.register_cuda_region(SIZE, device=number) as region:
                mine = region.empty(x.shape, x.dtype)
                mine.copy_(x)
                y = await client.forward(LAYER, mine, region=region)
                again = await client.forward(LAYER, x, region=region)  # copied there
                assert region._memory.offset_of(y) is not None
            done = [after - b for after, b in zip((r.tokens_done for r in engine.status().ranks), before, strict=True)]
        assert done[number] == 2 * count
        assert done[1 - number] == 0
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(y, again)

    async def test_two_clients_on_two_gpus_share_a_step_with_one_that_has_no_region(self, service):
        engine, server, reference = service
        steps = []
        engine.on_step(steps.append)
        async with (
            AsyncClient(server.address) as client,
            client.register_cuda_region(SIZE, device=0) as first,
            client.register_cuda_region(SIZE, device=1) as second,
        ):
            calls = [(tokens(40, 1), first), (tokens(40, 2), second), (tokens(20, 3), None)]
            await asyncio.gather(*(client.forward(LAYER, x, region=region) for x, region in calls))  # to join: a wait
            found = await asyncio.gather(*(client.forward(LAYER, x, region=region) for x, region in calls * 4))
        for (x, _), y in zip(calls * 4, found, strict=True):
            torch.testing.assert_close(y, reference(x), rtol=1e-4, atol=1e-5)
        assert any(len(step.parts) >= 2 and min(step.tokens_per_rank) >= 40 for step in steps)

    async def test_routing_of_the_caller_and_mixed_ways(self, service):
        _, server, _ = service
        x = tokens(30)
        ids = torch.randint(0, 8, (30, 2), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        weights = torch.rand((30, 2), generator=torch.Generator().manual_seed(2))
        async with AsyncClient(server.address) as client, connect(server) as channel:
            expected = await client.forward(LAYER, x, ids, weights)
            async with client.register_cuda_region(SIZE, device=1) as region:
                y = await client.forward(LAYER, x, ids, weights, region=region)
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
                stub = pb_grpc.ExpertsStub(channel)
                mine = region.empty(x.shape, x.dtype)
                mine.copy_(x)
                where = slice_(region.name, region._memory.offset_of(mine), mine.nbytes)
                request = pb.ForwardRequest(
                    layer=LAYER,
                    hidden_states=pb.Tensor(dtype=pb.FP32, shape=x.shape, region=where),
                    topk_ids=pb.Tensor(dtype=pb.INT32, shape=ids.shape, data=ids.numpy().tobytes()),
                    topk_weights=pb.Tensor(dtype=pb.FP32, shape=ids.shape, data=weights.numpy().tobytes()),
                )
                inline = (await stub.Forward(request)).hidden_states.data  # in the region, out with the reply
                assert torch.equal(torch.frombuffer(bytearray(inline), dtype=torch.float32).view(30, HIDDEN), y)
                out = region.empty(x.shape, x.dtype)
                request.hidden_states.CopyFrom(pb.Tensor(dtype=pb.FP32, shape=x.shape, data=x.numpy().tobytes()))
                request.output.CopyFrom(slice_(region.name, region._memory.offset_of(out), out.nbytes))
                reply = await stub.Forward(request)  # the other way round
                assert reply.hidden_states.region == request.output
                assert not reply.hidden_states.data
                assert torch.equal(out, y)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    async def test_other_floats_are_converted_as_they_are_copied(self, service, dtype):
        _, server, reference = service
        x = tokens(9).to(dtype)
        async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
            y = await client.forward(LAYER, x, region=region)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), reference(x.float()), rtol=2e-2, atol=2e-3)

    async def test_bad_registrations_say_why(self, service):
        _, server, _ = service
        memory = FakeGpuMemory(8192, 0)
        try:
            proof = os.urandom(32)
            memory.piece(0, 32)[1].copy_(torch.tensor(list(proof), dtype=torch.uint8))
            cuda = pb.CudaMemory(handle=memory.handle, gpu_uuid=memory.gpu_uuid)
            good = pb.HoldRegionRequest(byte_size=8192, proof=proof, cuda=cuda)
            async with connect(server) as channel:
                stub = pb_grpc.ExpertsStub(channel)
                for changes, text, code in [
                    (
                        {"byte_size": 8193},
                        "byte_size: 0 + 8193 bytes, but the allocation that the handle opens has 8192",
                        3,
                    ),
                    ({"offset": 16}, "byte_size: 16 + 8192 bytes", 3),
                    ({"offset": 8}, "offset: 8, must be a multiple of 16", 3),
                    ({"offset": 2**64 - 16}, "offset: ", 3),
                    ({"byte_size": 1 << 30}, "server.max_region_bytes", 11),
                    ({"proof": os.urandom(32)}, "proof: the region does not start with these bytes", 3),
                    ({"proof": bytes(32)}, "proof: 1 different bytes", 3),
                    ({"key": "object"}, "key: 'object' came with the handle", 3),
                    ({"handle": b"short"}, "handle: 5 bytes, a cudaIpcMemHandle_t has 64", 3),
                    ({"handle": os.urandom(64)}, "handle: the driver cannot open this handle", 3),
                    ({"gpu_uuid": ""}, "gpu_uuid: missing", 3),
                    ({"gpu_uuid": uuid_of(1)}, "handle: the driver cannot open", 3),
                    ({"gpu_uuid": uuid_of(5)}, "gpu_uuid: no rank of this host computes on GPU", 3),
                ]:
                    bad = pb.HoldRegionRequest.FromString(good.SerializeToString())
                    for key, value in changes.items():
                        setattr(bad.cuda if key in ("handle", "gpu_uuid") else bad, key, value)
                    error = await status_of(stub.HoldRegion(bad).read())
                    assert error.code().value[0] == code, (changes, error.details())
                    assert text in error.details()
                assert not (await stub.ListRegions(pb.ListRegionsRequest())).regions
                call = stub.HoldRegion(good)
                name = (await call.read()).region
                (info,) = (await stub.ListRegions(pb.ListRegionsRequest())).regions
                assert (info.region, info.gpu_uuid, info.byte_size, info.users) == (name, uuid_of(0), 8192, 0)
                call.cancel()
                await until(lambda: not len(server._calls.regions))
        finally:
            memory.free()

    @pytest.mark.parametrize("number", [0, 1])
    async def test_a_result_that_is_not_finite_is_told_and_concerns_its_request_only(self, service, number):
        _, server, _ = service
        large, good = tokens(4), tokens(30, 5)
        large[1:3] = 1e30
        async with (
            AsyncClient(server.address) as client,
            client.register_cuda_region(SIZE, device=number) as first,
            client.register_cuda_region(SIZE, device=number) as second,
        ):
            expected, rows, fine = await client.forward(LAYER, good), [], [7]
            refused = client.forward(LAYER, large, region=first)
            calls = [refused, client.forward(LAYER, large, region=first, not_finite_rows=rows)]
            calls += [client.forward(LAYER, good, region=second, not_finite_rows=fine) for _ in range(4)]
            error, kept, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(error, NotFinite) and "layer 1 makes NaN or infinity of 2 of 4 tokens (rows 1, 2)" in str(
            error
        )
        assert rows == [1, 2] and kept.isfinite().all(1).tolist() == [True, False, False, True] and fine == []
        for y in others:
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)

    async def test_bad_requests_say_why(self, service):
        _, server, _ = service
        x = tokens(4)
        async with (
            AsyncClient(server.address) as client,
            client.register_cuda_region(SIZE, device=0) as first,
            client.register_cuda_region(SIZE, device=1) as second,
            connect(server) as channel,
        ):
            stub = pb_grpc.ExpertsStub(channel)

            def request(where=None, out=None, dtype=pb.FP32, nbytes=x.nbytes, **more):
                where = where or slice_(first.name, 4096, nbytes)
                tensor = pb.Tensor(dtype=dtype, shape=x.shape, region=where)
                return pb.ForwardRequest(layer=LAYER, hidden_states=tensor, output=out, **more)

            def routing(data=None, region=None):
                ids = pb.Tensor(dtype=pb.INT32, shape=(4, 2), data=data or b"", region=region)
                return {
                    "topk_ids": ids,
                    "topk_weights": pb.Tensor(dtype=pb.FP32, shape=(4, 2), data=torch.ones(4, 2).numpy().tobytes()),
                }

            scales = pb.Tensor(dtype=pb.FP32, shape=(4, 0))
            for bad, text in [
                (request(slice_(first.name, SIZE - 4, x.nbytes)), f"it has {SIZE}"),
                (request(slice_(first.name, 2**64 - 4, x.nbytes)), f"it has {SIZE}"),
                (request(slice_(first.name, 2, x.nbytes)), "hidden_states: byte 2 of region"),
                (request(slice_(first.name, 0, 8)), "shape and dtype make 1024"),
                (request(slice_("other", 0, x.nbytes)), "no region 'other' of this client"),
                (request(out=slice_(second.name, 0, x.nbytes)), f"output: on GPU {uuid_of(1)}, hidden_states on"),
                (request(out=slice_(first.name, 4096 + 512, x.nbytes)), "a step is run again from its input"),
                (request(out=slice_(first.name, 4096, x.nbytes)), "overlap hidden_states"),
                (request(**routing(region=slice_(first.name, 0, 32))), "topk_ids: lies in region"),
                (request(dtype=pb.FP8_E4M3, nbytes=256, hidden_scales=scales), "not a multiple of 128"),
            ]:
                error = await status_of(stub.Forward(bad))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert text in error.details()
            beside = request(out=slice_(first.name, 4096 + x.nbytes, x.nbytes))
            assert (await stub.Forward(beside)).hidden_states.region.offset == 4096 + x.nbytes

    async def test_values_that_are_not_finite_are_refused_as_inline_and_harm_nobody_else(self, service):
        _, server, reference = service
        async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
            bad, good = tokens(200), tokens(7)
            bad[150, 3] = float("inf")  # in the second step of the request
            (inline, here, fine) = await asyncio.gather(
                client.forward(LAYER, bad),
                client.forward(LAYER, bad, region=region),
                client.forward(LAYER, good, region=region),
                return_exceptions=True,
            )
            assert isinstance(here, InvalidRequest)
            assert str(here).split(" [")[0] == str(inline).split(" [")[0]
            assert "row 150, column 3: inf" in str(here)
            torch.testing.assert_close(fine, reference(good), rtol=1e-4, atol=1e-5)
            poisoned = region.empty((64, HIDDEN), torch.float32)
            poisoned.fill_(float("nan"))
            with pytest.raises(InvalidRequest, match="row 0, column 0: nan"):
                await client.forward(LAYER, poisoned, region=region)
            y = await client.forward(LAYER, good, region=region)
            torch.testing.assert_close(y, reference(good), rtol=1e-4, atol=1e-5)

    async def test_unregistering_in_flight_lets_the_call_finish(self, service):
        engine, server, reference = service
        x = tokens(100)
        async with AsyncClient(server.address) as client:
            async with client.register_cuda_region(SIZE) as region:
                calls = [asyncio.ensure_future(client.forward(LAYER, x, region=region)) for _ in range(8)]
                await until(lambda: server._calls.in_flight == 8)
                name = region.name
            found = await asyncio.gather(*calls, return_exceptions=True)
            # Calls on the doorbell end with the registration; what had been answered is right.
            assert all(isinstance(each, torch.Tensor | EpserveError) for each in found)
            for each in found:
                if isinstance(each, torch.Tensor):
                    torch.testing.assert_close(each, reference(x), rtol=1e-4, atol=1e-5)
            await until(lambda: not len(server._calls.regions) and not len(engine.device_regions))
            with pytest.raises(NotReady, match=f"region {name} is closed"):
                await client.forward(LAYER, x, region=region)
            async with connect(server) as channel:
                tensor = pb.Tensor(dtype=pb.FP32, shape=x.shape, region=slice_(name, 0, x.nbytes))
                error = await status_of(
                    pb_grpc.ExpertsStub(channel).Forward(pb.ForwardRequest(layer=LAYER, hidden_states=tensor))
                )
                assert f"no region '{name}' of this client" in error.details()

    async def test_a_client_that_is_killed_has_unregistered(self, service):
        engine, server, reference = service
        program = (
            "import sys, torch\nfrom epserve.client import Client, cuda_region\n"
            "from tests.support.fake_device_memory import FakeGpuMemory\ncuda_region.GpuMemory = FakeGpuMemory\n"
            f"with Client({server.address!r}) as client, client.register_cuda_region(1 << 16) as region:\n"
            "    print(region._memory.path, flush=True)\n"
            f"    while True: client.forward({LAYER}, torch.ones(64, {HIDDEN}), region=region)\n"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        await until(lambda: len(engine.device_regions) == 1)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        os.unlink(line.decode().strip())
        await until(lambda: not len(engine.device_regions) and not len(server._calls.regions))
        async with AsyncClient(server.address) as client:
            torch.testing.assert_close(
                await client.forward(LAYER, tokens(5)), reference(tokens(5)), rtol=1e-4, atol=1e-5
            )

    async def test_blocking_clients_have_them_too(self, service):
        _, server, reference = service

        def calls():
            with Client(server.address) as client, client.register_cuda_region(SIZE, device="cuda:1") as region:
                x = region.empty((12, HIDDEN), torch.float32)
                x.copy_(tokens(12))
                return client.forward(LAYER, x, region=region), client.forward(LAYER, tokens(12).numpy(), region=region)

        y, as_numpy = await asyncio.to_thread(calls)
        torch.testing.assert_close(y, reference(tokens(12)), rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.from_numpy(as_numpy), y)

    async def test_a_region_that_is_too_large_for_the_service(self, service):
        _, server, _ = service
        async with AsyncClient(server.address) as client:
            with pytest.raises(TooLarge, match="max_region_bytes"):
                async with client.register_cuda_region(1 << 25):
                    pass

    @pytest.mark.parametrize("address", ["unix:@", "127.0.0.1:0"])
    async def test_front_ends_that_have_joined_offer_them_too(self, service, address):
        engine, _, reference = service
        address += os.urandom(8).hex() if address.startswith("unix") else ""
        x = tokens(70)
        peers = [Peers(), Peers()]
        async with contextlib.AsyncExitStack() as stack:
            port = await stack.enter_async_context(ordering(engine, address, peers=peers[0]))
            remote = await stack.enter_async_context(joining(port, peers=peers[1]))
            server = await stack.enter_async_context(serving(remote, peers=peers[1]))
            client = await stack.enter_async_context(AsyncClient(server.address))
            assert remote.device_regions.offered == address.startswith("unix"), "as far as it can know"
            with pytest.raises(InvalidRequest, match="gpu_uuid: no rank of this host computes on GPU"):
                async with client.register_cuda_region(SIZE, device=7):
                    pass
            async with client.register_cuda_region(SIZE, device=1) as region:
                assert len(engine.device_regions) == 1
                y = await client.forward(LAYER, x, region=region)
                torch.testing.assert_close(y, reference(x), rtol=1e-4, atol=1e-5)
                ids = torch.zeros((70, 2), dtype=torch.int32)
                ids[:, 1] = 5
                routed = await client.forward(LAYER, x, ids, torch.ones(70, 2), region=region)
                inline = await client.forward(LAYER, x, ids, torch.ones(70, 2))
                torch.testing.assert_close(routed, inline, rtol=1e-4, atol=1e-5)
                bad = x.clone()
                bad[69, 63] = float("nan")
                with pytest.raises(InvalidRequest, match="row 69, column 63: nan"):
                    await client.forward(LAYER, bad, region=region)
            await until(lambda: not len(engine.device_regions))
            async with client.register_cuda_region(SIZE) as region:  # the front end loses its connection
                remote._link._sock.shutdown(socket.SHUT_RDWR)
                await until(lambda: remote.state() == "disconnected")
                await until(lambda: remote.state() == "serving")
                with pytest.raises(InvalidRequest, match="register it again"):
                    await client.forward(LAYER, x, region=region)
                await until(lambda: not len(engine.device_regions))
        await until(lambda: not len(engine.device_regions))

    async def test_tritons_client_registers_uses_and_unregisters(self, service):
        _, server, _ = service
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.server.kserve.triton_cuda_session", server.address, str(LAYER), str(HIDDEN),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, err.decode()
        found = json.loads(out)
        assert found["extensions"] == ["system_shared_memory", "cuda_shared_memory"]
        assert found["status"] == {"mine": {"name": "mine", "device_id": "1", "byte_size": "65536"}}
        assert found["difference"] < 1e-5
        assert found["no_bytes"]
        for what, text in [
            ("twice", "registered already"),
            ("too_large", "byte_size: 0 + 131072 bytes"),
            ("unknown_handle", "handle: the driver cannot open"),
            ("out_of_bounds", "it has 65536"),
            ("as_system_memory", "no region 'mine'"),
            ("unregistered", "no region 'mine'"),
            ("unregister_twice", "no region 'mine'"),
        ]:
            assert found[what][0] == "StatusCode.INVALID_ARGUMENT", found[what]
            assert text in found[what][1]
        assert found["empty"] == {}

    async def test_a_rank_that_is_replaced_opens_its_regions_again(self, service):
        """Last: it kills a rank. Calls that were under way are answered, from the input that is still in the region."""
        engine, server, reference = service
        x = tokens(60)
        async with (
            AsyncClient(server.address) as client,
            client.register_cuda_region(SIZE, device=0) as kept,
            client.register_cuda_region(SIZE, device=1) as reopened,
        ):
            mine = [region.empty(x.shape, x.dtype) for region in (kept, reopened)]
            for each in mine:
                each.copy_(x)
            regions = (kept, reopened)
            stop = asyncio.Event()

            async def ask(number):
                answers = 0
                while not stop.is_set():
                    y = await client.forward(LAYER, mine[number], region=regions[number], timeout=120)
                    torch.testing.assert_close(y, reference(x), rtol=1e-4, atol=1e-5)
                    answers += 1
                return answers

            asking = [asyncio.ensure_future(ask(number)) for number in (0, 1, 1)]
            await asyncio.sleep(0.3)
            generation = engine.status().generation
            os.kill(engine.status().ranks[1].pid, signal.SIGKILL)
            await until(lambda: engine.status().generation > generation and engine.state() == "serving", 120)
            await asyncio.sleep(0.3)
            stop.set()
            assert min(await asyncio.wait_for(asyncio.gather(*asking), 120)) > 0
            y = await client.forward(LAYER, mine[1], region=reopened)
            torch.testing.assert_close(y, reference(x), rtol=1e-4, atol=1e-5)
