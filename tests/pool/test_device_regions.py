"""Regions on GPUs, from client to rank, with made-up GPUs: what is checked where, and that the rows go where they shall."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from epserve.client import AsyncClient
from epserve.config import ServerConfig
from epserve.errors import InvalidRequest, Overloaded
from epserve.rank.device_memory import RankRegions, Refused, StepRows
from epserve.rank.step import PartRows, RegionRows
from epserve.server import regions as regions_module
from epserve.server.cuda_regions import CudaRegistry
from epserve.server.regions import Regions
from tests.support.fake_device_memory import (
    HIDDEN,
    SIZE,
    FakeDeviceMemory,
    FakeGpuMemory,
    clients_on_made_up_gpus,
    tokens,
)
from tests.support.fake_engine import FakeEngine, serving
from tests.support.region_calls import slice_


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    with clients_on_made_up_gpus(monkeypatch) as made:
        yield made


class TestRank:
    """`RankRegions` and `StepRows` alone."""

    def opened(self, memory: FakeGpuMemory, regions: RankRegions, number: int = 7, **changes):
        asked = {"open": number, "handle": memory.handle.hex(), "offset": 0, "size": memory.size, "proof": ""}
        return regions.told({**asked, **changes})

    def test_the_rank_bounds_a_region_by_the_allocation_itself(self):
        memory, device = FakeGpuMemory(4096, 0), FakeDeviceMemory(0)
        regions = RankRegions(device)
        try:
            memory.piece(0, 16)[1].copy_(torch.arange(16, dtype=torch.uint8))
            proof = bytes(range(16)).hex()
            for changes, text, field in [
                ({"size": 4097}, "0 + 4097 bytes, but the allocation that the handle opens has 4096", "byte_size"),
                ({"offset": 4096, "size": 1}, "4096 + 1 bytes", "byte_size"),
                ({"handle": b"gpu1-x".ljust(64, b"\0").hex()}, "cannot open this handle", "handle"),
                ({"handle": b"gpu0-gone".ljust(64, b"\0").hex()}, "cannot open this handle", "handle"),
                ({"proof": bytes(16).hex()}, "does not start with these bytes", "proof"),
            ]:
                refused = self.opened(memory, regions, **changes)["refused"]
                assert text in refused["text"]
                assert refused["field"] == field
                assert device.num_open == 0, "what is refused is closed"
            assert self.opened(memory, regions, proof=proof) == {}
            assert device.num_open == 1
            assert regions.told({"close": 7}) == regions.told({"close": 7}) == {}
            assert device.num_open == 0
            assert "runs on no GPU" in self.opened(memory, RankRegions(None))["refused"]["text"]
        finally:
            memory.free()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rows_come_from_and_go_to_where_they_shall(self, dtype):
        memory, regions = FakeGpuMemory(1 << 16, 0), RankRegions(FakeDeviceMemory(0))
        try:
            self.opened(memory, regions)
            x, host = tokens(6).to(dtype), tokens(3, seed=1)
            memory.piece(512, x.nbytes)[1].view(dtype).view(6, HIDDEN).copy_(x)
            source = RegionRows(region=7, offset=512, dtype=dtype)
            target = RegionRows(region=7, offset=32768, dtype=dtype)
            parts = (
                PartRows(rows=4, source=source, target=target),
                PartRows(rows=3),
                PartRows(rows=2, source=source.row(4, HIDDEN)),
            )
            rows = StepRows(regions, parts, host)
            got = rows.to(torch.device("cpu"))
            assert torch.equal(got, torch.cat([x[:4].float(), host, x[4:].float()]))
            home = rows.put(2 * got, None)
            rows.finish()
            assert torch.equal(home, 2 * torch.cat([host, x[4:].float()]))
            put = memory.piece(32768, 4 * HIDDEN * dtype.itemsize)[1].view(dtype).view(4, HIDDEN)
            assert torch.equal(put, (2 * x[:4].float()).to(dtype))
            assert not rows.refused
        finally:
            memory.free()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_results_that_are_not_finite_where_they_go_are_told_by_row(self, dtype):
        """Rows of 1e30 are finite in float32, also where their sum is not, and infinite in a region of float16."""
        memory, regions = FakeGpuMemory(1 << 16, 0), RankRegions(FakeDeviceMemory(0))
        try:
            self.opened(memory, regions)
            target = RegionRows(region=7, offset=0, dtype=dtype)
            parts = (
                PartRows(rows=3, target=target),
                PartRows(rows=2),
                PartRows(rows=3, target=target.row(3, HIDDEN)),
            )
            rows = StepRows(regions, parts, tokens(8))
            y = rows.to(torch.device("cpu")).clone()
            y[1], y[3], y[6], y[7, 5] = 1e30, float("nan"), 3e38, float("-inf")
            rows.put(y, None)
            y.zero_()  # the next step's
            rows.finish()
            assert rows.not_finite == ({0: [1], 2: [1, 2]} if dtype == torch.float16 else {2: [2]})
            assert not rows.refused, "row 3 goes to the host, where it is looked at"
        finally:
            memory.free()

    def test_values_that_are_not_finite_are_found_and_large_ones_are_not_taken_for_such(self):
        memory, regions = FakeGpuMemory(1 << 16, 0), RankRegions(FakeDeviceMemory(0))
        try:
            self.opened(memory, regions)
            whole = memory.piece(0, 8 * HIDDEN * 4)[1].view(torch.float32).view(8, HIDDEN)
            whole.fill_(3e38)  # the sum is infinite, no value is
            whole[5, 9] = float("nan")
            source = RegionRows(region=7, offset=0, dtype=torch.float32)
            parts = tuple(PartRows(rows=4, source=source.row(row, HIDDEN)) for row in (0, 4))
            rows = StepRows(regions, parts, torch.empty(0, HIDDEN))
            rows.put(rows.to(torch.device("cpu")), None)
            rows.finish()
            assert rows.refused == {1: {"row": 1, "column": 9, "value": "nan"}}
            whole[5, 9] = 1e30
            half = StepRows(regions, parts, torch.empty(0, HIDDEN, dtype=torch.float16))
            half.put(half.to(torch.device("cpu")), None)
            half.finish()
            assert half.refused[0] == {"row": 0, "column": 0, "value": "inf"}, "as the model's dtype has it"
        finally:
            memory.free()

    def test_a_region_that_is_not_there_is_the_requests_trouble_and_not_the_ranks(self):
        regions = RankRegions(FakeDeviceMemory(0))
        where = RegionRows(region=3, offset=0, dtype=torch.float32)
        parts = (PartRows(rows=2, source=where, target=where), PartRows(rows=1))
        rows = StepRows(regions, parts, torch.ones(1, HIDDEN))
        got = rows.to(torch.device("cpu"))
        assert torch.equal(got, torch.cat([torch.zeros(2, HIDDEN), torch.ones(1, HIDDEN)]))
        assert torch.equal(rows.put(got, torch.empty(1, HIDDEN)), torch.ones(1, HIDDEN))
        assert rows.refused == {0: {"text": "the region was unregistered meanwhile", "field": "region"}}
        with pytest.raises(Refused):
            regions.view(where, 1, HIDDEN)


async def test_without_ranks_on_gpus_or_with_the_switch_off_it_says_so():
    async with serving(FakeEngine()) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequest, match="no ranks are here that could share memory of a GPU"):
            async with client.register_cuda_region(SIZE):
                pass
    async with serving(FakeEngine(), cuda_regions=False) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequest, match=r"server\.cuda_regions"):
            async with client.register_cuda_region(SIZE):
                pass


def test_a_proof_that_anybody_could_know_is_none(tmp_path):
    (tmp_path / "zeros").write_bytes(bytes(4096))
    with pytest.raises(InvalidRequest, match="proof: 1 different bytes in it, at least 8 are needed"):
        Regions(ServerConfig(), folder=tmp_path).register_proven(
            "me", key="zeros", offset=0, size=4096, proof=bytes(16)
        )


class Ranks:
    """As `DeviceRegions`; `open_ones` are not closed yet."""

    offered = True

    def __init__(self):
        self.open_ones = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def open(self, *, handle, offset, size, proof=b"", gpu_uuid="", device_id=None):
        await self.gate.wait()
        region = SimpleNamespace(number=len(self.open_ones), handle=handle, offset=offset, size=size, gpu_uuid="0")
        self.open_ones.add(region.number)
        return region

    def close(self, region):
        self.open_ones.discard(region.number)


async def test_leased_regions_are_forgotten_when_unused_and_closed_after_their_last_call(monkeypatch):
    now, ranks = [1000.0], Ranks()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limits = ServerConfig(region_lease_s=10)
    regions = Regions(limits)
    registry = CudaRegistry(regions, limits, lambda: ranks)
    for name in ("idle", "busy"):
        await registry.register_leased("me", name=name, handle=bytes(64), device_id=0, size=4096)
    with regions.find("me", "busy", "x").used():
        now[0] += 11
        regions.reclaim()
        assert [region.name for region in regions.of("me")] == ["busy"]
        assert len(ranks.open_ones) == 1
        regions.unregister("me", "busy", on_gpu=True)
        assert len(ranks.open_ones) == 1, "a call uses it"
    assert not ranks.open_ones


async def test_a_name_that_was_taken_while_the_rank_opened_is_refused_and_closed_again(monkeypatch):
    ranks, limits = Ranks(), ServerConfig()
    regions = Regions(limits)
    registry = CudaRegistry(regions, limits, lambda: ranks)
    ranks.gate.clear()
    calls = [
        asyncio.ensure_future(registry.register_leased("me", name="r", handle=bytes(64), device_id=0, size=64))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    ranks.gate.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(each, InvalidRequest) and "registered already" in str(each) for each in found) == 1
    assert len(ranks.open_ones) == len(regions) == 1
    monkeypatch.setattr(regions_module, "MAX_REGIONS_PER_CLIENT", 1)
    with pytest.raises(Overloaded, match="1 regions of this client"):
        await registry.register_leased("me", name="s", handle=bytes(64), device_id=0, size=64)
    await registry.register_leased("you", name="r", handle=bytes(64), device_id=0, size=64)
    with pytest.raises(InvalidRequest, match="no region 'r' of this client"):
        regions.slice_of("they", slice_("r", 0, 8), 8, "hidden_states")
