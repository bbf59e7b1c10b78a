"""Clients that write nonsense into the words and the memory of their lanes. It harms nobody else."""

import asyncio
import os
import random
import socket
import struct
import time

import pytest
import torch

from epserve.client import Client, ClientOptions, RetryPolicy
from epserve.client.lanes import request as lane_request
from epserve.process import words
from epserve.protocol import lane_words as lw
from tests.support.fake_engine import FakeEngine, serving
from tests.support.grpc_calls import in_thread
from tests.support.lanes import Raw

LIMIT_S = 50
ONCE = ClientOptions(retry=RetryPolicy(attempts=1))
HIDDEN = 32

pytestmark = pytest.mark.skipif(bool(words.why_not()), reason=words.why_not() or "-")


async def test_headers_out_of_range_are_answered_and_harm_nobody():
    good = lw.header(mode=lw.BLOCK, layer=1, tokens=1)

    def calls(address):
        with Client(address) as client, client.open_lane(4, layers=(1, 2)) as lane:
            raw = Raw(lane)
            raw.ring(1, good)
            assert raw.answer(1) == lw.OK
            number = 1
            for header in (
                lw.header(mode=2, layer=1, tokens=1),
                lw.header(mode=3, layer=1, tokens=1),
                lw.header(mode=0, layer=3, tokens=1),
                lw.header(mode=0, layer=lw.MAX_LAYER, tokens=1),
                lw.header(mode=0, layer=1, tokens=0),
                lw.header(mode=0, layer=1, tokens=5),
                lw.header(mode=0, layer=1, tokens=lw.MAX_TOKENS),
            ):
                number += 1
                raw.ring(number, header)
                assert raw.answer(number) == lw.BAD_HEADER
            raw.ring(number - 2, good)  # replayed
            assert raw.answer(number - 2) == lw.BAD_HEADER
            raw.ring(number - 1, good)
            assert raw.answer(number - 1) == lw.OK, "the number after that counts"
            raw.ring(number + 99, good)
            assert raw.answer(number + 99) == lw.BAD_HEADER
            lane.x()[0] = float("inf")
            raw.ring(number + 100, good)
            assert raw.answer(number + 100) == lw.NOT_FINITE and lane.y()[0].isnan().all()
            lane.x()[0], lane.ids()[0], lane.weights()[0] = 1.0, 8, 1.0
            raw.ring(number + 101, lw.header(mode=lw.ROUTED, layer=1, tokens=1))
            assert raw.answer(number + 101) == lw.BAD_IDS

    async with serving(FakeEngine()) as server:
        await in_thread(calls, server.address)


async def test_numbers_go_round():
    def calls(address):
        with Client(address) as client, client.open_lane(1) as lane:
            raw = Raw(lane)
            raw.ring(0xFFFFFFFF, 0)  # out of turn, and the next one is 0
            assert raw.answer(0xFFFFFFFF) == lw.BAD_HEADER
            for number in (0, 1):
                raw.ring(number, lw.header(mode=0, layer=1, tokens=1))
                assert raw.answer(number) == lw.OK

    async with serving(FakeEngine()) as server:
        await in_thread(calls, server.address)


async def test_random_words_harm_no_other_lane():
    """Bells, answers, beats and reasons: one client writes them at random while another one computes."""

    def calls(address):
        chosen = random.Random(1)
        with Client(address) as client, client.open_lane(4, slots=2) as bad, client.open_lane(4) as good:
            deadline, right = time.monotonic() + 1.0, 0
            while time.monotonic() < deadline:
                for _ in range(20):
                    at = 8 * chosen.randrange(lw.ROWS_AT // 8)
                    bad._words.store(at, chosen.getrandbits(32), chosen.getrandbits(32))
                    bad._words.store(lw.bell_at(chosen.randrange(2)), chosen.getrandbits(32), chosen.getrandbits(32))
                os.eventfd_write(bad._bell, 1)
                x = torch.randn(3, HIDDEN)
                assert torch.equal(good.forward(1, x), x)
                right += 1
            assert right > 10

    async with serving(FakeEngine()) as server:
        await in_thread(calls, server.address)


async def test_rows_that_change_after_the_check_change_nothing():
    seen, changed = asyncio.Event(), asyncio.Event()

    async def slow(batch):
        seen.set()
        await changed.wait()
        assert bool((batch.ids < 8).all()) and bool(batch.hidden.isfinite().all())
        return batch.hidden

    def begin(lane):
        lane.x()[:1], lane.ids()[:1], lane.weights()[:1] = 1.0, 2, 0.5
        lane.start(1, 1, routed=True)

    def end(lane):
        lane.x()[:1], lane.ids()[:1] = float("nan"), 1 << 20
        changed_loop.call_soon_threadsafe(changed.set)
        assert torch.equal(lane.finish(), torch.ones(1, HIDDEN))
        lane.check()

    changed_loop = asyncio.get_running_loop()
    async with serving(FakeEngine(slow)) as server:
        with Client(server.address) as client:
            block = client.open_lane(4)
            lane = await in_thread(block.__enter__)
            await in_thread(begin, lane)
            await asyncio.wait_for(seen.wait(), LIMIT_S)
            await in_thread(end, lane)
            await in_thread(block.__exit__, None, None, None)


def hand_over(name, key):
    """The descriptors that the service's socket gives for a key."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect("\0" + name)
        sock.sendall(key)
        sock.shutdown(socket.SHUT_WR)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 2)
    return descriptors


async def test_one_client_gets_the_memory_which_nobody_can_cut_short():
    def calls(address, name):
        with Client(address, ONCE) as client:
            wanted = lane_request(max_tokens=1, slots=1, layers=(), timeout_s=9.0, priority="")
            call, reply = client._hold(client._stub.OpenLane, wanted, client._attempts(9.0), "open it")
            assert hand_over(name, b"short") == hand_over(name, bytes(lw.KEY_BYTES)) == []
            memory, bell = hand_over(name, reply.key)
            assert hand_over(name, reply.key) == [], "a second client on the lane"
            for size in (0, 4096, 2 * reply.byte_size):
                with pytest.raises(PermissionError):
                    os.ftruncate(memory, size)
            os.close(memory)
            os.close(bell)
            call.cancel()

    async with serving(FakeEngine()) as server:
        await in_thread(calls, server.address, server._lanes.name)


async def test_a_hole_in_the_memory_is_zeros():
    def calls(address):
        with Client(address) as client, client.open_lane(4) as lane:
            lane._map.madvise(9)  # MADV_REMOVE
            x = torch.randn(2, HIDDEN)
            assert torch.equal(lane.forward(1, x), x)

    async with serving(FakeEngine()) as server:
        await in_thread(calls, server.address)


def test_a_bell_is_one_word():
    word = 7 << 32 | lw.header(mode=lw.ROUTED, layer=123, tokens=4567)
    assert lw.parts(word) == (7, lw.ROUTED, 123, 4567)
    assert struct.pack("<Q", word)[:2] == struct.pack("<H", 4567)
    assert [lw.bell_at(1), lw.answer_at(1)] == [256, 320]
