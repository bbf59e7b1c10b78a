"""Clients of lanes for tests: some that call without pause, and one that writes what it likes."""

import asyncio
import os
import threading
import time

import torch

from epserve.client import Client
from epserve.protocol import lane_words as lw
from tests.support.checkpoints import LAYER
from tests.support.recovering import BACK_S, TOLERANCE, until

LIMIT_S = 200
CALL_S = BACK_S + 60


class Raw:
    """A client that writes what it likes into the words of its lane."""

    def __init__(self, lane):
        self.lane, self.words = lane, lane._words

    def ring(self, number, header, slot=0):
        self.words.store(lw.bell_at(slot), number, header)
        os.eventfd_write(self.lane._bell, 1)

    def answer(self, number, slot=0):
        """The status of call `number`."""
        end = time.monotonic() + LIMIT_S
        while (word := self.words.load(lw.answer_at(slot))) >> 32 != number & 0xFFFFFFFF:
            assert time.monotonic() < end, "never answered"
            self.words.wait(lw.answer_at(slot), word >> 32, end)
        return word & 0xFFFFFFFF


def tokens(count, seed=0):
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(1000 * seed + count))


class Clients:
    """Threads that call one layer without pause, over lanes and over gRPC. Every answer is compared."""

    def __init__(self, address, reference, *, lanes=2, messages=1):
        self._address, self._reference = address, reference
        self.over_lanes, self.over_grpc = [0] * lanes, [0] * messages
        self.errors = []
        self._stop = threading.Event()
        work = [(self._lane, number) for number in range(lanes)] + [(self._grpc, number) for number in range(messages)]
        self._threads = [threading.Thread(target=self._watched, args=each) for each in work]
        for thread in self._threads:
            thread.start()

    def _watched(self, function, number):
        try:
            function(number)
        except BaseException as error:
            self.errors.append(error)

    def _lane(self, number):
        with Client(self._address) as client, client.open_lane(16, slots=2, call_timeout=CALL_S) as lane:
            x = tokens(1 + 5 * number, number)
            expected = self._reference(x)
            while not self._stop.is_set():
                lane.x()[: len(x)] = x
                torch.testing.assert_close(lane.call(LAYER, len(x)).clone(), expected, **TOLERANCE)
                lane.check()
                torch.testing.assert_close(lane.forward(LAYER, x), expected, **TOLERANCE)
                self.over_lanes[number] += 2

    def _grpc(self, number):
        with Client(self._address) as client:
            x = tokens(3 + number, 50 + number)
            expected = self._reference(x)
            while not self._stop.is_set():
                torch.testing.assert_close(client.forward(LAYER, x, timeout=CALL_S), expected, **TOLERANCE)
                self.over_grpc[number] += 1

    async def more(self, count=5):
        """Returns when each client has had so many answers more."""
        want = [done + count for done in (*self.over_lanes, *self.over_grpc)]
        await until(
            lambda: self.errors or all(has >= each for has, each in zip((*self.over_lanes, *self.over_grpc), want, strict=True)),
            LIMIT_S, "answers",
        )  # fmt: skip
        assert not self.errors, self.errors

    async def end(self):
        self._stop.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, LIMIT_S)
        assert not self.errors, self.errors
