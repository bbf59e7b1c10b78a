"""Shared-memory regions of several front ends on one host: a client may register at one of them and call another."""

import asyncio
import contextlib
import os

import grpc
import pytest
import torch

from epserve.config import ServerConfig
from epserve.errors import InvalidRequest
from epserve.joining import board as board_module
from epserve.joining.board import Board
from epserve.joining.peers import Peers
from epserve.joining.remote import RemoteEngine
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.protocol import inference_pb2 as kserve
from epserve.protocol import inference_pb2_grpc as kserve_grpc
from epserve.server.regions import Regions
from tests.support.fake_engine import FakeEngine, LocalExperts, serving
from tests.support.front_ends import SECRET, joining, ordering, service
from tests.support.grpc_calls import connect, status_of, tensor_of, until
from tests.support.region_calls import held, name_of, request_in, shared_memory, slice_


@pytest.fixture
def shm():
    with shared_memory() as memory:
        yield memory


def registries(servers) -> list[Regions]:
    return [each._calls.regions for each in servers]


def open_here(key: str) -> list[str]:
    """Descriptors of this process that are of that object."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of listdir itself
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [each for each in found if key in each]


class TestService:
    async def test_a_region_is_known_to_all_front_ends_until_its_call_ends(self, shm):
        experts, x = LocalExperts(), torch.randn(4, 32)
        async with service(FakeEngine(experts)) as (servers, _, _), connect(servers[1]) as channel:
            call = held(pb_grpc.ExpertsStub(channel), shm)
            region = await name_of(call)
            request = request_in(region, x, shm[2])
            shm[2].unlink()  # as our client does: the others open it where the first has it open
            for server in servers:
                async with connect(server) as other:
                    stub = pb_grpc.ExpertsStub(other)
                    assert torch.equal(tensor_of(await stub.Forward(request)), experts.forward(x))
                    (info,) = (await stub.ListRegions(pb.ListRegionsRequest())).regions
                    assert (info.region, info.key, info.byte_size) == (region, shm[0], 4096)
            call.cancel()
            await until(lambda: not any(map(len, registries(servers))))
            for server in servers:
                async with connect(server) as other:
                    error = await status_of(pb_grpc.ExpertsStub(other).Forward(request))
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert "no region" in error.details()
        assert not open_here(shm[0])

    async def test_results_go_into_it_through_any_front_end(self, shm):
        x = torch.randn(4, 32)
        async with service(FakeEngine()) as (servers, _, _), connect(servers[0]) as channel:
            region = await name_of(held(pb_grpc.ExpertsStub(channel), shm))
            for at, server in enumerate(servers):
                where = slice_(region, 1024 + 512 * at, x.nbytes)
                async with connect(server) as other:
                    await pb_grpc.ExpertsStub(other).Forward(request_in(region, x + at, shm[2], output=where))
            written = torch.frombuffer(bytearray(shm[2].read_bytes()[1024 : 1024 + 3 * 512]), dtype=torch.float32)
            assert torch.equal(written.view(3, 4, 32), torch.stack([x, x + 1, x + 2]))

    async def test_another_clients_region_is_as_unknown_there(self, shm, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text("aaa name=alice\nbbb name=bob\n")
        alice, bob = ((("authorization", f"Bearer {token}"),) for token in ("aaa", "bbb"))
        x, (key, proof, path) = torch.randn(4, 32), shm
        async with service(FakeEngine(), further=1, tokens_file=tokens) as (servers, _, _):  # noqa: SIM117
            async with connect(servers[0]) as here, connect(servers[1]) as there:
                asked = pb.HoldRegionRequest(key=key, byte_size=4096, proof=proof)
                call = pb_grpc.ExpertsStub(here).HoldRegion(asked, metadata=alice)
                request, stub = request_in(await name_of(call), x, path), pb_grpc.ExpertsStub(there)
                assert "no region" in (await status_of(stub.Forward(request, metadata=bob))).details()
                assert not (await stub.ListRegions(pb.ListRegionsRequest(), metadata=bob)).regions
                assert torch.equal(tensor_of(await stub.Forward(request, metadata=alice)), x)

    async def test_names_of_the_open_inference_protocol_are_one_set_for_all_front_ends(self, shm):
        mine = kserve.SystemSharedMemoryRegisterRequest(name="mine", key=shm[0], offset=0, byte_size=4096)
        async with service(FakeEngine()) as (servers, _, _), connect(servers[1]) as one, connect(servers[2]) as other:
            stubs = [kserve_grpc.GRPCInferenceServiceStub(each) for each in (one, other)]
            await stubs[0].SystemSharedMemoryRegister(mine)
            assert "registered already" in (await status_of(stubs[1].SystemSharedMemoryRegister(mine))).details()
            shown = await stubs[1].SystemSharedMemoryStatus(kserve.SystemSharedMemoryStatusRequest())
            assert shown.regions["mine"].byte_size == 4096
            await stubs[1].SystemSharedMemoryUnregister(kserve.SystemSharedMemoryUnregisterRequest(name="mine"))
            await until(lambda: not any(map(len, registries(servers))))
            await stubs[1].SystemSharedMemoryRegister(mine)
            assert [len(each) for each in registries(servers)] == [1, 1, 1]
            await stubs[0].SystemSharedMemoryUnregister(kserve.SystemSharedMemoryUnregisterRequest())
            await until(lambda: not any(map(len, registries(servers))))

    async def test_who_joins_later_knows_those_that_are_there_and_takes_its_own_along(self, shm):
        async with service(FakeEngine(), further=1) as (servers, port, _), connect(servers[1]) as channel:
            region = await name_of(held(pb_grpc.ExpertsStub(channel), shm))
            late = Peers()
            async with joining(port, peers=late) as remote, serving(remote, peers=late) as server:
                await until(lambda: len(server._calls.regions))
                with shared_memory() as another:
                    async with connect(server) as own:
                        call = held(pb_grpc.ExpertsStub(own), another)
                        await name_of(call)
                        assert [len(each) for each in registries(servers)] == [2, 2]
                        await remote.close()
                        await until(lambda: [len(each) for each in registries(servers)] == [1, 1])
                        await until(lambda: len(server._calls.regions) == 1)  # its own, and no other one's
            assert [each.name for each in registries(servers)[0].of("")] == [region]

    async def test_front_ends_of_another_host_do_not_hear_of_it(self, shm):
        engine, far = FakeEngine(), Peers()
        far.board.place = "another boot of another kernel/7"
        async with service(engine, further=1) as (servers, port, _):  # noqa: SIM117
            async with joining(port, peers=far) as remote, serving(remote, peers=far) as server:
                async with connect(servers[1]) as channel:
                    await name_of(held(pb_grpc.ExpertsStub(channel), shm))
                    assert [len(each) for each in (*registries(servers), server._calls.regions)] == [1, 1, 0]
                async with connect(server) as channel:
                    await name_of(held(pb_grpc.ExpertsStub(channel), shm))
                    await until(lambda: [len(each) for each in registries(servers)] == [0, 0])
                    assert len(server._calls.regions) == 1

    async def test_one_that_answers_nothing_delays_a_registration_and_no_more(self, shm, monkeypatch, caplog):
        monkeypatch.setattr(board_module, "POST_S", 0.2)
        async with service(FakeEngine()) as (servers, port, _), connect(servers[1]) as channel:
            for guest in port._guests:
                monkeypatch.setattr(guest._neighbour, "came", lambda header: None)
            assert await name_of(held(pb_grpc.ExpertsStub(channel), shm))
            assert "did not say within 0.2 s that it knows it" in caplog.text


class TestRegistry:
    async def test_another_object_under_the_same_name_or_number_is_not_adopted(self, shm, caplog):
        own = Regions(ServerConfig())
        region = own.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=64)
        good, other = region.describe(), Regions(ServerConfig())
        for change in (
            {"object": [0, 1]},
            {"key": "none", "fd": 0},
            {"key": "../etc/passwd", "pid": 1 << 30},
            {"pid": "x"},
        ):
            other._adopt('["me", "r"]', {**good, **change})
            assert not len(other), change
        assert caplog.text.count("calls with it fail here") == 4
        other._adopt('["me", "r"]', good)
        assert other.slice_of("me", slice_("r", 0, 32), 32, "x").read() == shm[1]
        assert not len(Regions(ServerConfig(regions=False), board=Board()))

    async def test_only_who_registered_decides_when_a_lease_is_over_and_hears_of_use_elsewhere(self, shm, monkeypatch):
        engine, peers = FakeEngine(), [Peers(), Peers()]
        async with ordering(engine, peers=peers[0]) as port:
            remote = await RemoteEngine.join(port.address, SECRET, timeout_s=30, peers=peers[1])
            here, there = (Regions(ServerConfig(region_lease_s=100), board=each.board) for each in peers)
            await until(lambda: peers[0].board._neighbours)
            region = here.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=64)
            await here.share(region)
            (adopted,) = there.of("me")
            region.last_used -= 90
            adopted.last_used -= 1000
            there.reclaim()
            assert len(there) == 1
            adopted.renew()
            there.reclaim()  # tells
            age = region.last_used
            await until(lambda: region.last_used > age)
            here.reclaim()
            assert len(here) == 1, "it was used elsewhere"
            region.last_used -= 200
            here.reclaim()
            assert not len(here)
            await until(lambda: not len(there))
            await remote.close()

    async def test_a_caller_that_goes_while_others_are_told_leaves_nothing(self, shm):
        class Silent:
            place = None

            def ask(self, header):
                return asyncio.get_running_loop().create_future()

            def tell(self, header):
                told.append(header["kind"])

        told, board = [], Board()
        board.joined(Silent())
        regions = Regions(ServerConfig(), board=board)
        sharing = asyncio.ensure_future(
            regions.share(regions.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=64))
        )
        await asyncio.sleep(0)
        sharing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sharing
        assert not len(regions)
        assert told == ["remove"]

    async def test_a_name_that_the_orderer_knows_already_is_refused(self, shm):
        board = Board()
        regions = Regions(ServerConfig(), board=board)

        class Knows:
            place = None

            def ask(self, header):
                future = asyncio.get_running_loop().create_future()
                future.set_result(False)
                return future

            def tell(self, header):
                pass

        board.joined(Knows())
        with pytest.raises(InvalidRequest, match="registered already"):
            await regions.share(regions.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=64))
        assert not len(regions)
