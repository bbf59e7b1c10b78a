"""What a client sees of shared-memory regions: no bytes are sent, memory comes back, nothing is left over."""

import asyncio
import gc
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from epserve.client import AsyncClient, Client, ClientOptions, RetryPolicy
from epserve.client.region import ClientRegion
from epserve.config import ServerConfig
from epserve.errors import DeadlineExceeded, EpserveError, InvalidRequest, NotReady
from epserve.protocol import wire
from tests.support.fake_engine import FakeEngine, LocalExperts, echo_after, serving
from tests.support.grpc_calls import until
from tests.support.region_calls import SHM

DYING_CLIENT = """
import sys, time
from epserve.client import Client
client = Client(sys.argv[1])
registration = client.register_region(1 << 20)
region = registration.__enter__()
print(region.name, flush=True)
time.sleep(60)
"""


class TestClient:
    async def test_results_are_those_of_inline_calls(self):
        experts = LocalExperts()
        x, ids, weights = torch.randn(9, 32), torch.randint(0, 8, (9, 3)), torch.rand(9, 3)
        async with serving(FakeEngine(experts)) as server:

            def work():
                with Client(server.address) as client, client.register_region(1 << 20) as region:
                    inside = region.empty(x.shape, torch.float32)
                    inside.copy_(x)
                    strided = x.t().contiguous().t()
                    for hidden in (inside, inside[1:], x, strided):
                        got = client.forward(1, hidden, region=region)
                        assert torch.equal(got, experts.forward(hidden.contiguous()))
                        assert region.slice_of(wire.encode(got, "x").data) is not None, "the result lies in the region"
                    routed = client.forward(1, x.numpy(), ids.numpy(), weights.numpy(), region=region)
                    assert isinstance(routed, np.ndarray)
                    assert np.array_equal(routed, experts.forward(x, ids, weights).numpy())
                    assert client.forward(1, x[:0], region=region).shape == (0, 32)
                    return got  # outlives the region

            got = await asyncio.to_thread(work)
            assert torch.equal(got, experts.forward(x))
            await until(lambda: not len(server._calls.regions))

    async def test_no_tensor_bytes_are_sent_and_memory_comes_back(self):
        engine, x = FakeEngine(), torch.randn(2000, 32)
        async with serving(engine) as server, AsyncClient(server.address) as client:  # noqa: SIM117
            async with client.register_region(1 << 20) as region:
                sent, send = [], region.async_bell.send
                region.async_bell.send = lambda data: (sent.append(len(data)), send(data))
                for _ in range(20):  # 20 times two blocks of 256,000 bytes
                    assert torch.equal(await client.forward(1, x, region=region), x)
                assert max(sent) < 300
                kept = [await client.forward(1, x, region=region) for _ in range(2)]
                with pytest.raises(InvalidRequest, match="are wanted"):
                    await client.forward(1, x, region=region), await client.forward(1, x, region=region)
                del kept
                gc.collect()
                assert torch.equal(await client.forward(1, x, region=region), x)

    async def test_a_killed_client_leaves_nothing(self):
        async with serving(FakeEngine()) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", DYING_CLIENT, server.address, stdout=subprocess.PIPE
            )
            try:
                name = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
                assert [region.name for region in server._calls.regions.of("")] == [name]
            finally:
                process.kill()
                await process.wait()
            await until(lambda: not len(server._calls.regions))
        assert not list(SHM.glob(f"epserve-client-{process.pid}-*"))

    async def test_memory_of_a_call_that_was_given_up_is_not_used_again(self):
        release = asyncio.Event()
        x = torch.ones(4, 32)
        async with serving(FakeEngine(echo_after(release))) as server:
            async with AsyncClient(server.address) as client, client.register_region(4096) as region:
                for _ in range(8):
                    with pytest.raises(DeadlineExceeded):
                        await client.forward(1, x, region=region, timeout=0.05)
                release.set()
                with pytest.raises(InvalidRequest, match="region: 512 bytes are wanted"):  # 8 of 8 are set aside
                    await client.forward(1, x, region=region)
            async with AsyncClient(server.address) as client, client.register_region(4096) as region:
                for _ in range(20):  # a refusal is certain: nothing is written
                    with pytest.raises(EpserveError):
                        await client.forward(99, x, region=region)
                assert torch.equal(await client.forward(1, x, region=region), x)

    async def test_a_server_that_stopped_is_noticed(self):
        policy = ClientOptions(retry=RetryPolicy(attempts=1))
        async with serving(FakeEngine()) as server:
            client = AsyncClient(server.address, policy)
            context = client.register_region(4096)
            region = await context.__aenter__()
        await until(lambda: region._lost)
        with pytest.raises(NotReady, match="no longer registered"):
            await client.forward(1, torch.ones(1, 32), region=region)
        await context.__aexit__(None, None, None)
        with pytest.raises(NotReady, match="is closed"):
            await client.forward(1, torch.ones(1, 32), region=region)
        await client.close()

    def test_blocks_are_aligned_apart_and_merge_again(self):
        region = ClientRegion(1 << 16)
        tensors = [region.empty((number, 3), torch.bfloat16) for number in range(1, 60)]
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
        assert all(start % 64 == 0 for start, _ in spans)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        view = tensors[7][2:]
        del tensors[::2], tensors, spans
        gc.collect()
        region.block(1)
        assert len(region._blocks._spans._free) == 2, "what a view needs is kept, the rest is in one piece on each side"
        del view
        gc.collect()
        assert len(region.block(1 << 16)) == 1 << 16
        region.close()

    @pytest.mark.parametrize("size", [0, -1, 1 << 60])
    def test_impossible_sizes_are_refused(self, size):
        with pytest.raises(InvalidRequest):
            ClientRegion(size)


class TestUnixSocket:
    async def test_it_serves_the_same_and_regions_too(self, tmp_path):
        path, experts, x = tmp_path / "socket", LocalExperts(), torch.randn(3, 32)
        async with serving(FakeEngine(experts), unix_socket=path) as server:
            assert path.stat().st_mode & 0o777 == 0o600
            async with AsyncClient(f"unix:{path}") as client, client.register_region(8192) as region:
                assert torch.equal(await client.forward(1, x), experts.forward(x))
                assert torch.equal(await client.forward(1, x, region=region), experts.forward(x))
            async with AsyncClient(server.address) as client:
                assert torch.equal(await client.forward(1, x), experts.forward(x))
        assert not path.exists()

    async def test_a_stale_socket_is_replaced_and_one_in_use_is_not(self, tmp_path):
        import socket

        from epserve.errors import ConfigError
        from epserve.server.server import Server

        path = tmp_path / "socket"
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        async with serving(FakeEngine(), unix_socket=path):
            with pytest.raises(ConfigError, match=r"server\.unix_socket.*another server"):
                await Server(FakeEngine(), ServerConfig(port=0, unix_socket=path)).start()
            assert path.exists()
        with pytest.raises(ConfigError, match=r"server\.unix_socket"):
            await Server(FakeEngine(), ServerConfig(port=0, unix_socket=tmp_path / "no" / "folder")).start()
