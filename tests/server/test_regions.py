"""Shared-memory regions: registration, bounds, owners, lifetimes."""

import asyncio
import os
import time
from pathlib import Path

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epserve.config import ServerConfig
from epserve.errors import InvalidRequest, Overloaded, TooLarge
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import epserve_pb2_grpc as pb_grpc
from epserve.server import regions as regions_module
from epserve.server.regions import Regions
from tests.support.fake_engine import FakeEngine, LocalExperts, echo_after, serving
from tests.support.grpc_calls import connect, status_of, tensor_of, until
from tests.support.region_calls import SHM, held, name_of, request_in, shared_memory, slice_


@pytest.fixture
def shm():
    with shared_memory() as memory:
        yield memory


class TestRegistry:
    @pytest.mark.parametrize(
        ("key", "why"),
        [
            ("../etc/passwd", "out of the folder"),
            ("/../etc/passwd", "out of the folder, as an absolute name"),
            ("..", "the parent folder"),
            ("a/b", "a folder below"),
            ("", "nothing"),
            ("/", "the folder itself"),
            ("x" * 201, "longer than any object's name"),
            ("nul\0byte", "a byte that ends C strings"),
            ("sp ace", "not among the allowed characters"),
            ("//double", "two slashes"),
        ],
    )
    def test_keys_stay_inside_the_folder(self, key, why):
        with pytest.raises(InvalidRequest, match="key: must name"):
            Regions(ServerConfig()).register_leased("me", uid=0, name="r", key=key, offset=0, size=64)

    def test_links_and_pipes_and_folders_are_not_regions(self, tmp_path):
        (tmp_path / "target").write_bytes(bytes(100))
        (tmp_path / "link").symlink_to(tmp_path / "target")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "folder").mkdir()
        registry = Regions(ServerConfig(), folder=tmp_path)
        before = len(os.listdir("/proc/self/fd"))
        for key in ("link", "pipe", "folder", "missing"):
            with pytest.raises(InvalidRequest):
                registry.register_leased("me", uid=0, name=key, key=key, offset=0, size=50)
        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize(
        ("offset", "size", "error"),
        [
            (0, 0, TooLarge),
            (0, 4097, InvalidRequest),
            (4096, 1, InvalidRequest),
            (4000, 97, InvalidRequest),
            (2**64 - 1, 1, InvalidRequest),
            (0, 2**64 - 1, TooLarge),
            (0, 1 << 20, TooLarge),
        ],
    )
    def test_a_region_lies_within_its_object_and_the_limit(self, shm, offset, size, error):
        registry = Regions(ServerConfig(max_region_bytes=8192))
        with pytest.raises(error):
            registry.register_leased("me", uid=0, name="r", key=shm[0], offset=offset, size=size)
        assert not len(registry)

    def test_only_who_can_write_the_memory_gets_it_registered(self, shm):
        key, proof, _ = shm
        registry = Regions(ServerConfig())
        for wrong in (b"", b"short", bytes(32), bytes(65)):
            with pytest.raises(InvalidRequest, match="proof"):
                registry.register_proven("me", key=key, offset=0, size=4096, proof=wrong)
        with pytest.raises(InvalidRequest, match="less than the 32 bytes of the proof"):
            registry.register_proven("me", key=key, offset=0, size=16, proof=proof)
        assert registry.register_proven("me", key=key, offset=0, size=4096, proof=proof).name

    def test_the_services_own_memory_cannot_be_named_without_a_proof(self):
        with pytest.raises(InvalidRequest, match="service's own"):
            Regions(ServerConfig()).register_leased("me", uid=0, name="r", key="/epserve-ring-0", offset=0, size=64)

    def test_a_name_is_an_owners_own(self, shm):
        registry = Regions(ServerConfig())
        registry.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=64)
        registry.register_leased(
            "you", uid=0, name="r", key=shm[0], offset=32, size=64
        )  # overlap: windows of the same memory
        with pytest.raises(InvalidRequest, match="registered already"):
            registry.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=64)
        with pytest.raises(InvalidRequest, match="no region 'r' of this client"):
            registry.slice_of("they", slice_("r", 0, 8), 8, "topk_ids")
        registry.unregister_all("me")
        with pytest.raises(InvalidRequest, match="no region"):
            registry.unregister("me", "r")
        assert [region.name for region in registry.of("you")] == ["r"]

    def test_the_number_of_regions_is_bounded(self, shm, monkeypatch):
        monkeypatch.setattr(regions_module, "MAX_REGIONS_PER_CLIENT", 3)
        registry = Regions(ServerConfig())
        for number in range(3):
            registry.register_leased("me", uid=0, name=str(number), key=shm[0], offset=0, size=64)
        with pytest.raises(Overloaded, match="3 regions of this client"):
            registry.register_leased("me", uid=0, name="4", key=shm[0], offset=0, size=64)
        registry.register_leased("you", uid=0, name="1", key=shm[0], offset=0, size=64)

    def test_regions_of_silent_clients_are_reclaimed_but_not_while_they_are_used(self, shm, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        registry = Regions(ServerConfig(region_lease_s=10))
        for name in ("idle", "busy", "asked"):
            registry.register_leased("me", uid=0, name=name, key=shm[0], offset=0, size=64)
        with registry.find("me", "busy", "x").used():
            now[0] += 11
            registry.find("me", "asked", "x").renew()
            registry.reclaim()
            assert {region.name for region in registry.of("me")} == {"busy", "asked"}
        registry.reclaim()
        assert "busy" in {region.name for region in registry.of("me")}, "use renews the lease"

    def test_unregistering_waits_for_whoever_reads(self, shm):
        registry = Regions(ServerConfig())
        before = len(os.listdir("/proc/self/fd"))
        registry.register_leased("me", uid=0, name="r", key=shm[0], offset=0, size=4096)
        part = registry.slice_of("me", slice_("r", 0, 32), 32, "hidden_states")
        with part.region.used():
            registry.unregister("me", "r")
            assert part.read() == shm[1]
        with pytest.raises(InvalidRequest, match="unregistered meanwhile"):
            part.read()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_an_object_that_is_cut_short_is_an_error_and_no_crash(self, shm):
        key, _, path = shm
        registry = Regions(ServerConfig())
        registry.register_leased("me", uid=0, name="r", key=key, offset=1024, size=3072)
        part = registry.slice_of("me", slice_("r", 1024, 2048), 2048, "hidden_states")
        os.truncate(path, 3000)
        with pytest.raises(InvalidRequest, match="hidden_states: the shared-memory object"):
            part.read()
        with pytest.raises(InvalidRequest, match="has become shorter"):
            part.write(memoryview(bytes(2048)))
        assert path.stat().st_size == 3000
        assert part.region.users == 0

    @given(
        offset=st.integers(0, 4200) | st.integers(0, 2**64 - 1),
        size=st.integers(0, 4200) | st.integers(0, 2**64 - 1),
        nbytes=st.integers(0, 4200),
    )
    @settings(max_examples=500, deadline=None)
    def test_slices_never_leave_the_region(self, offset, size, nbytes):
        with open(SHM / f"test-{os.getpid()}-slices", "wb+") as file:
            file.write(bytes(range(250)) * 20)
            file.flush()
            try:
                registry = Regions(ServerConfig())
                registry.register_leased("me", uid=0, name="r", key=Path(file.name).name, offset=100, size=4000)
                try:
                    part = registry.slice_of("me", slice_("r", offset, size), nbytes, "topk_ids")
                except InvalidRequest:
                    refused = True
                else:
                    refused = False
                    assert part.read() == (bytes(range(250)) * 20)[100 + offset :][:nbytes]
                assert refused == (size != nbytes or offset + nbytes > 4000)
                registry.unregister_all()
            finally:
                os.unlink(file.name)


class TestService:
    async def test_bytes_come_from_the_region_and_go_into_it(self, shm):
        experts, x = LocalExperts(), torch.randn(4, 32)
        async with serving(FakeEngine(experts)) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            region = await name_of(held(stub, shm))
            inline = await stub.Forward(request_in(region, x, shm[2]))
            assert torch.equal(tensor_of(inline), experts.forward(x))
            where = slice_(region, 512, x.nbytes)  # over the input: read before it is written
            reply = await stub.Forward(request_in(region, x, shm[2], output=where))
        assert not reply.hidden_states.data
        assert reply.hidden_states.region == where
        got = torch.frombuffer(bytearray(shm[2].read_bytes()[512 : 512 + x.nbytes]), dtype=torch.float32)
        assert torch.equal(got.view(4, 32), experts.forward(x))

    async def test_streams_take_them_too(self, shm):
        x = torch.randn(4, 32)
        async with serving(FakeEngine()) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            region = await name_of(held(stub, shm))
            stream = stub.ForwardStream()
            request = request_in(region, x, shm[2], output=slice_(region, 2048, x.nbytes))
            await stream.write(pb.RequestFrame(call=7, begin=request))
            frame = await asyncio.wait_for(stream.read(), 5)
        assert frame.call == 7
        assert frame.begin.hidden_states.region.offset == 2048
        assert shm[2].read_bytes()[2048 : 2048 + x.nbytes] == x.numpy().tobytes()

    async def test_bad_slices_fail_alone_and_say_why(self, shm):
        x = torch.randn(4, 32)
        async with serving(FakeEngine()) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            region = await name_of(held(stub, shm, size=2048))
            good = request_in(region, x, shm[2])
            for change, text in [
                ({"region": "other"}, "no region 'other'"),
                ({"offset": 2048 - 511}, "it has 2048"),
                ({"offset": 2**64 - 100}, "it has 2048"),
                ({"byte_size": 100}, "shape and dtype make 512"),
            ]:
                bad = pb.ForwardRequest.FromString(good.SerializeToString())
                for key, value in change.items():
                    setattr(bad.hidden_states.region, key, value)
                error = await status_of(stub.Forward(bad))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert text in error.details()
            both = pb.ForwardRequest.FromString(good.SerializeToString())
            both.hidden_states.data = b"x"
            assert "one of the two" in (await status_of(stub.Forward(both))).details()
            small = pb.ForwardRequest.FromString(good.SerializeToString())
            small.output.CopyFrom(slice_(region, 0, 8))
            assert "output: 8 bytes" in (await status_of(stub.Forward(small))).details()
            assert torch.equal(tensor_of(await stub.Forward(good)), x)

    async def test_another_clients_region_is_unknown(self, shm, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text("aaa name=alice\nbbb name=bob\n")
        alice, bob = ((("authorization", f"Bearer {token}"),) for token in ("aaa", "bbb"))
        x = torch.randn(4, 32)
        async with serving(FakeEngine(), tokens_file=tokens) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            key, proof, path = shm
            call = stub.HoldRegion(pb.HoldRegionRequest(key=key, byte_size=4096, proof=proof), metadata=alice)
            request = request_in(await name_of(call), x, path)
            assert "no region" in (await status_of(stub.Forward(request, metadata=bob))).details()
            assert torch.equal(tensor_of(await stub.Forward(request, metadata=alice)), x)
            assert not (await stub.ListRegions(pb.ListRegionsRequest(), metadata=bob)).regions
            (mine,) = (await stub.ListRegions(pb.ListRegionsRequest(), metadata=alice)).regions
            assert (mine.key, mine.byte_size, mine.users) == (key, 4096, 0)

    async def test_unregistering_in_flight_lets_the_call_finish(self, shm):
        release = asyncio.Event()
        engine, x = FakeEngine(echo_after(release)), torch.randn(4, 32)
        async with serving(engine) as server, connect(server) as channel:
            stub = pb_grpc.ExpertsStub(channel)
            call = held(stub, shm)
            region = await name_of(call)
            request = request_in(region, x, shm[2], output=slice_(region, 2048, x.nbytes))
            pending = asyncio.ensure_future(stub.Forward(request))
            await until(lambda: engine.running == 1)
            (info,) = (await stub.ListRegions(pb.ListRegionsRequest())).regions
            assert info.users == 1
            call.cancel()
            await until(lambda: not len(server._calls.regions))
            assert "no region" in (await status_of(stub.Forward(request))).details()
            release.set()
            assert (await pending).hidden_states.region.offset == 2048
        assert shm[2].read_bytes()[2048 : 2048 + x.nbytes] == x.numpy().tobytes()

    @pytest.mark.parametrize(
        "peer", ["ipv4:10.0.0.1:1234", "ipv6:%5B2001:db8::1%5D:1234", "ipv4:12.7.0.1:1", "", "dns:x"]
    )
    async def test_only_peers_on_this_host_may(self, peer, shm, monkeypatch):
        from epserve.server.calls import Caller

        async with serving(FakeEngine()) as server, connect(server) as channel:
            caller = server._calls.caller
            monkeypatch.setattr(
                server._calls, "caller", lambda context: Caller(peer=peer, account=caller(context).account)
            )
            error = await status_of(held(pb_grpc.ExpertsStub(channel), shm).read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "loopback or the Unix-domain socket" in error.details()

    async def test_the_switch_turns_them_off(self, shm):
        async with serving(FakeEngine(), regions=False) as server, connect(server) as channel:
            error = await status_of(held(pb_grpc.ExpertsStub(channel), shm).read())
        assert "server.regions" in error.details()
