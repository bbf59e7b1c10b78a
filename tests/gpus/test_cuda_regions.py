"""Regions of GPU memory on real GPUs: one rank on each, clients on the same ones. `pytest -m gpu tests/gpus`.

What does not need a GPU is in tests/pool/test_device_regions.py; cuda_ipc_facts.py measured what the driver does by itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys

import pytest
import pytest_asyncio
import torch

from epserve.client import AsyncClient, Client
from epserve.config import parse_config
from epserve.errors import InvalidRequest
from epserve.models.demo import write_demo_checkpoint
from epserve.process import cuda_memory
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.service.run import running
from tests.support.grpc_calls import connect, status_of, until
from tests.support.ranks import cluster_section, num_places

LAYER = 1
HIDDEN = 512
SIZES = {"hidden": HIDDEN, "intermediate": 256, "num_experts": 16, "top_k": 4, "num_layers": 2, "seed": 3}
SIZE = 64 << 20
TOLERANCE = 1e-2  # relative L2 error in bfloat16, between the same rows on one rank and spread over several

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "mixtral"
    write_demo_checkpoint("mixtral", path, dtype=torch.bfloat16, **SIZES)
    config = parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": num_places(), "device": "cuda", "experts_timing_s": 0, "standbys": 1},
            "cluster": cluster_section(),
            "server": {"port": 0},
        }
    )
    async with running(config) as both:
        yield both


def tokens(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count)).to("cuda:0", dtype)


def close_enough(got: torch.Tensor, want: torch.Tensor) -> None:
    got, want = got.double(), want.double().to(got.device)
    assert float((got - want).norm() / want.norm()) < TOLERANCE


@pytest.mark.parametrize("count", [1, 128, 1000, 4096])
async def test_results_are_those_of_inline_calls(service, count):
    engine, server = service
    x = tokens(count)
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE, device="cuda:0") as region:
        inline = await client.forward(LAYER, x, timeout=120)
        mine = region.empty(x.shape, x.dtype)
        mine.copy_(x)
        y = await client.forward(LAYER, mine, region=region)
        copied = await client.forward(LAYER, x, region=region)
        assert y.device == x.device
        assert region._memory.offset_of(y) is not None
    assert torch.equal(y, copied)
    if len(engine.status().ranks) == 1:
        assert torch.equal(y, inline), "the same rows on the same rank"
    close_enough(y, inline)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
async def test_other_floats(service, dtype):
    _, server = service
    x = tokens(77, dtype)
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
        y = await client.forward(LAYER, x, region=region)
        inline = await client.forward(LAYER, x)
    assert y.dtype == dtype
    close_enough(y, inline)


async def test_routing_of_the_caller(service):
    _, server = service
    x = tokens(300)
    ids = torch.rand((300, 16), generator=torch.Generator().manual_seed(1)).topk(4).indices.int()
    weights = torch.rand((300, 4), generator=torch.Generator().manual_seed(2))
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
        y = await client.forward(LAYER, x, ids, weights, region=region)
        close_enough(y, await client.forward(LAYER, x, ids, weights))


async def test_work_that_is_queued_on_the_clients_stream_counts(service):
    """The client waits for its stream before it rings; the rank's stream knows nothing of it."""
    _, server = service
    x = tokens(512)
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
        expected = await client.forward(LAYER, x, region=region)
        mine = region.empty(x.shape, x.dtype)
        mine.fill_(float("nan"))
        torch.cuda._sleep(200_000_000)  # a tenth of a second, then the values
        mine.copy_(x)
        assert torch.equal(await client.forward(LAYER, mine, region=region), expected)


async def test_poisoned_regions_are_refused_and_harm_nobody_else(service):
    _, server = service
    good, poisoned = tokens(64), tokens(100)
    poisoned[70, 5] = float("inf")
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
        expected = await client.forward(LAYER, good, region=region)
        calls = [client.forward(LAYER, x, region=region) for x in (good, poisoned, good)]
        first, refused, last = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, InvalidRequest)
        assert "row 70, column 5: inf" in str(refused)
        for y in (first, last):
            close_enough(y, expected)
        full = region.empty((64, HIDDEN), torch.bfloat16)
        full.fill_(float("nan"))
        with pytest.raises(InvalidRequest, match="row 0, column 0: nan"):
            await client.forward(LAYER, full, region=region)
        close_enough(await client.forward(LAYER, good, region=region), expected)


async def test_bad_registrations_say_why_and_the_rank_lives(service):
    _, server = service
    torch.zeros(1, device="cuda:0")
    address = cuda_memory.allocate(SIZE)
    try:
        proof = os.urandom(32)
        start = cuda_memory.tensor(cuda_memory.Bytes(address, 32), torch.device("cuda:0"))
        start.copy_(torch.tensor(list(proof), dtype=torch.uint8))
        torch.cuda.synchronize()
        handle, uuid = cuda_memory.export(address), cuda_memory.gpu_uuid(0)
        assert uuid == str(torch.cuda.get_device_properties(0).uuid)
        async with connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            for size, offset, raw, shown, text in [
                (
                    SIZE + 1,
                    0,
                    handle,
                    proof,
                    f"byte_size: 0 + {SIZE + 1} bytes, but the allocation that the handle opens has",
                ),
                (SIZE, 16, handle, proof, "byte_size: 16 +"),
                (SIZE, 0, handle, os.urandom(32), "proof: the region does not start"),
                (SIZE, 0, bytes(64), proof, "handle: the driver cannot open this handle"),
                (SIZE, 0, os.urandom(64), proof, "handle: the driver cannot open this handle"),
            ]:
                cuda = pb.CudaMemory(handle=raw, gpu_uuid=f"GPU-{uuid}")
                request = pb.HoldRegionRequest(byte_size=size, offset=offset, proof=shown, cuda=cuda)
                error = await status_of(stub.HoldRegion(request).read())
                assert text in error.details()
            cuda = pb.CudaMemory(handle=handle, gpu_uuid=uuid)
            call = stub.HoldRegion(pb.HoldRegionRequest(byte_size=SIZE, proof=proof, cuda=cuda))
            assert (await call.read()).region
            call.cancel()
        await until(lambda: not len(server._calls.regions))
        async with AsyncClient(server.address) as client:
            assert (await client.forward(LAYER, tokens(5))).isfinite().all()
    finally:
        cuda_memory.free(address)


async def test_memory_that_is_freed_while_it_is_registered_harms_only_its_own_client(service):
    """Against the rules; the driver keeps the memory until the rank has closed it."""
    _, server = service
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as other:
        expected = await client.forward(LAYER, tokens(32), region=other)
        async with client.register_cuda_region(SIZE) as region:
            memory = region._memory
            offset, data = memory.piece(0, 4096)[1].data_ptr() - memory._address, tokens(4)
            memory.piece(0, data.nbytes)[1].view(torch.bfloat16).view(4, HIDDEN).copy_(data)
            torch.cuda.synchronize()
            memory.free()
            where = pb.RegionSlice(region=region.name, offset=offset, byte_size=data.nbytes)
            tensor = pb.Tensor(dtype=pb.BF16, shape=data.shape, region=where)
            async with connect(server) as channel:
                stub = pb_grpc.ExpertsStub(channel)
                reply = await stub.Forward(pb.ForwardRequest(layer=LAYER, hidden_states=tensor))
            got = torch.frombuffer(bytearray(reply.hidden_states.data), dtype=torch.bfloat16).view(4, HIDDEN)
            close_enough(got, await client.forward(LAYER, data))
        close_enough(await client.forward(LAYER, tokens(32), region=other), expected)


PROGRAM = """
import sys, torch
from epserve.client import Client
with Client(sys.argv[1]) as client, client.register_cuda_region(2 << 30, device="cuda:0") as region:
    x = region.empty((4096, {hidden}), torch.bfloat16)
    x.normal_()
    client.forward({layer}, x, region=region)
    print("ready", flush=True)
    while True:
        client.forward({layer}, x, region=region)
"""


async def test_a_client_that_is_killed_at_work_leaves_nothing(service):
    engine, server = service
    expected = await one_answer(server)
    program = PROGRAM.format(hidden=HIDDEN, layer=LAYER)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, server.address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 120)).strip() == b"ready"
        free = torch.cuda.mem_get_info(0)[0]
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await until(lambda: not len(engine.device_regions))
    await until(lambda: torch.cuda.mem_get_info(0)[0] - free > 2 << 30)  # the rank has let go of it
    assert torch.equal(await one_answer(server), expected)
    assert engine.status().generation == 1, "no rank was harmed"


async def one_answer(server) -> torch.Tensor:
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE) as region:
        return (await client.forward(LAYER, tokens(48), region=region)).clone()


async def test_leaving_while_calls_run_lets_them_end(service):
    engine, server = service
    x = tokens(4096)
    async with AsyncClient(server.address) as client:
        async with client.register_cuda_region(1 << 30) as region:
            expected = (await client.forward(LAYER, x, region=region)).clone()
            calls = [asyncio.ensure_future(client.forward(LAYER, x, region=region)) for _ in range(16)]
            await until(lambda: server._calls.in_flight > 4)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for each in found:
            if isinstance(each, torch.Tensor):
                assert torch.equal(each, expected), "memory stays while a tensor over it lives"
        await until(lambda: not len(engine.device_regions))
        assert (await client.forward(LAYER, tokens(5))).isfinite().all()


async def test_blocking_clients_and_streams_of_calls(service):
    _, server = service

    def run() -> bool:
        with Client(server.address) as client, client.register_cuda_region(SIZE) as region:
            x = region.empty((256, HIDDEN), torch.bfloat16)
            x.copy_(tokens(256))
            expected = client.forward(LAYER, x, region=region).clone()
            futures = [client.forward_async(LAYER, x, region=region) for _ in range(20)]
            return all(float((f.result(60) - expected).norm() / expected.norm()) < TOLERANCE for f in futures)

    assert await asyncio.to_thread(run)


async def test_a_region_of_a_gpu_without_a_rank_is_refused(service):
    _, server = service
    if torch.cuda.device_count() <= num_places():
        pytest.skip(f"every one of the {torch.cuda.device_count()} GPUs here has a rank")
    async with AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequest, match="gpu_uuid: no rank of this host"):
            async with client.register_cuda_region(SIZE, device=num_places()):
                pass


async def test_clients_on_two_gpus_share_steps(service):
    engine, server = service
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU here: two clients on two GPUs need two")
    steps = []
    engine.on_step(steps.append)
    async with (
        AsyncClient(server.address) as client,
        client.register_cuda_region(1 << 28, device=0) as first,
        client.register_cuda_region(1 << 28, device=1) as second,
    ):
        xs = [tokens(4096), tokens(4096).to("cuda:1")]
        want = await client.forward(LAYER, xs[0])
        calls = [(x, region) for x, region in zip(xs, (first, second), strict=True) for _ in range(6)]
        found = await asyncio.gather(*(client.forward(LAYER, x, region=region) for x, region in calls))
    for (x, _), y in zip(calls, found, strict=True):
        assert y.device == x.device
        close_enough(y, want)
    assert any(min(step.tokens_per_rank) >= 4096 for step in steps)


async def test_tritons_client_with_its_own_gpu_memory(service):
    _, server = service
    for module in ("tritonclient", "cuda.bindings"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{module} is not installed here")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.server.kserve.triton_cuda_session", server.address, str(LAYER), str(HIDDEN), "cuda",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    found = json.loads(out)
    assert "cuda_shared_memory" in found["extensions"]
    assert found["status"]["mine"]["byte_size"] == "65536"
    assert found["difference"] < 0.05
    assert found["no_bytes"]
    assert "byte_size: 0 + 131072 bytes" in found["too_large"][1]
    assert "handle: the driver cannot open" in found["unknown_handle"][1]
    assert "it has 65536" in found["out_of_bounds"][1]
    assert found["empty"] == {}


@pytest.mark.slow
async def test_a_rank_that_is_replaced_opens_its_regions_again(service):
    """Last: it kills a rank."""
    engine, server = service
    x = tokens(500)
    async with AsyncClient(server.address) as client, client.register_cuda_region(SIZE, device="cuda:0") as region:
        mine = region.empty(x.shape, x.dtype)
        mine.copy_(x)
        expected = (await client.forward(LAYER, mine, region=region)).clone()
        uuid = cuda_memory.gpu_uuid(0)
        (rank,) = [each for each in engine.status().ranks if each.gpu_uuid == uuid][:1]
        os.kill(rank.pid, signal.SIGKILL)
        y = await client.forward(LAYER, mine, region=region, timeout=240)
        assert engine.status().generation > 1
        close_enough(y, expected)
