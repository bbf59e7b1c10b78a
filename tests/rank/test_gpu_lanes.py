"""The thread that serves lanes on a rank's GPU, as it is built for use, on a stand-in for the driver. A client here is this test,
which writes bells into a page and waits for its words."""

from __future__ import annotations

import mmap
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from epserve.config import parse_config
from epserve.modular_kernel import RankContext
from epserve.process import words
from epserve.protocol import lane_words as lw
from epserve.rank.device_memory import Refused
from epserve.rank.lanes import native
from epserve.rank.lanes.lanes import RankLanes
from tests.support.cases import CASES
from tests.support.gpu_driver import CallbackGraphs, MadeUpDevice, installed, why_not
from tests.support.gpu_driver.door import handing_out

pytestmark = pytest.mark.skipif(bool(why_not() or words.why_not()), reason=why_not() or words.why_not() or "-")

LIMIT_S = 30.0
SPEC = CASES["plain"].spec(1)
HIDDEN, TOP_K, EXPERTS = SPEC.shape.hidden, SPEC.shape.top_k, 8
LAYERS = (1, 2, 7)
BUCKETS = (4, 16)
CAP = 16


def expected(layer: int, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """What a layer of the made-up worker computes."""
    more = 0.0 if ids is None else ids.float().sum(1, keepdim=True)
    return x * (layer + 1) + more


class Worker:
    """A worker whose steps are a line of arithmetic, and graphs of them."""

    def __init__(self, *, world_size: int = 1, graphs: bool = True, version: int = 0):
        self.ranks, self.info = RankContext(world_size=world_size), SimpleNamespace(num_experts=EXPERTS)
        self.placements = {layer: SimpleNamespace(version=version) for layer in LAYERS}
        self.graphs = CallbackGraphs(RankContext(), SPEC, BUCKETS) if graphs else None
        path = SimpleNamespace(graphs=self.graphs)
        kernels = SimpleNamespace(first=path)
        self.kernels = SimpleNamespace(of=lambda layer: kernels, first=SimpleNamespace(notes=lambda: ["local: eager"]))
        self.seen: list[tuple[int, str, int]] = []
        if self.graphs is not None:
            for layer in LAYERS:
                for mode in ("block", "routed"):
                    self.graphs.capture((layer, version, mode), self._run(layer, mode))

    def _run(self, layer, mode):
        def run(batch):
            beyond = batch.beyond()
            x = batch.padded(beyond)
            self.seen.append((layer, mode, int(batch.count_1)))
            return expected(layer, x, batch.padded_routing(beyond).ids_Mt if mode == "routed" else None)

        return run


class Client:
    """Words and rows of one lane, and the socket that hands the words out."""

    def __init__(self, lanes: RankLanes, number: int = 1, *, slots: int = 2, layers=LAYERS, cap: int = CAP):
        self.layout = lw.Layout(slots=slots, cap=cap, hidden=HIDDEN, top_k=TOP_K, itemsize=4, on_gpu=True)
        self.memory = words.sealed_memory("lane", self.layout.shared)
        self.map = mmap.mmap(self.memory, self.layout.shared)
        self.words = words.Words(self.map)
        self.rows = torch.zeros(self.layout.gpu_bytes, dtype=torch.uint8)
        self.numbers = [0] * slots
        self.lanes, self.number, self.layers = lanes, number, layers

    def asked(self, name: str, key: bytes):
        parts = {part: self.layout.part(0, part)[0] for part in ("x", "y", "ids", "weights")}
        return {
            "socket": name, "key": key.hex(), "size": self.layout.shared, "slots": self.layout.slots,
            "layers": list(self.layers), "most": self.layout.cap,
            "slot": {**parts, "bytes": self.layout.slot_bytes, "routing_bytes": self.layout.routing_bytes},
        }  # fmt: skip

    def open(self) -> int:
        with handing_out(self.memory) as name:
            return self.lanes.open(self.number, self.rows, self.asked(name, bytes(32)))

    def part(self, name: str, slot: int, dtype: torch.dtype) -> torch.Tensor:
        offset, size = self.layout.part(slot, name)
        if name in ("ids", "weights"):
            return torch.frombuffer(self.map, dtype=dtype, count=size // 4, offset=offset).view(self.layout.cap, -1)
        return self.rows[offset : offset + size].view(dtype).view(self.layout.cap, -1)

    def ring(self, slot: int, *, layer: int, tokens: int, mode: int = lw.BLOCK, number: int | None = None) -> None:
        self.words._halves[(lw.answer_at(slot) + lw.ARRIVED_AT) >> 2] = 0
        self.numbers[slot] = self.numbers[slot] + 1 if number is None else number
        self.words.store(lw.bell_at(slot), self.numbers[slot], lw.header(mode=mode, layer=layer, tokens=tokens))

    def status(self, slot: int) -> int:
        """Waits for the answer."""
        until = time.monotonic() + LIMIT_S
        while not self.words._halves[(lw.answer_at(slot) + lw.ARRIVED_AT) >> 2]:
            assert time.monotonic() < until, "no answer"
            time.sleep(0)
        word = self.words.load(lw.answer_at(slot))
        assert word >> 32 == self.numbers[slot]
        return word & 0xFFFFFFFF

    def call(self, slot: int, x: torch.Tensor, *, layer: int = 1, routing=None) -> tuple[int, torch.Tensor]:
        self.part("x", slot, torch.float32)[: len(x)] = x
        if routing is not None:
            self.part("ids", slot, torch.int32)[: len(x)], self.part("weights", slot, torch.float32)[: len(x)] = routing
        self.ring(slot, layer=layer, tokens=len(x), mode=lw.BLOCK if routing is None else lw.ROUTED)
        status = self.status(slot)
        return status, self.part("y", slot, torch.float32)[: len(x)].clone()

    def good(self, slot: int, tokens: int = 3, layer: int = 2) -> None:
        x = torch.randn(tokens, HIDDEN)
        status, y = self.call(slot, x, layer=layer)
        assert status == lw.OK
        assert torch.equal(y, expected(layer, x))


@pytest.fixture
def driver():
    with installed() as library:
        yield library


@pytest.fixture
def lanes(driver):
    made = RankLanes(MadeUpDevice())
    made.configure(
        parse_config({"model": {"path": "/none"}, "scheduler": {"join_wait_ms": 500, "join_wait_share": 1.0}})
    )
    yield made
    made.close_all()


def test_calls_of_every_size_mode_and_layer(lanes):
    worker = Worker()
    lanes.ready(worker)
    client = Client(lanes)
    assert client.open() == CAP
    for tokens in (1, 4, 5, 16):
        for layer in LAYERS:
            x = torch.randn(tokens, HIDDEN)
            status, y = client.call(tokens % 2, x, layer=layer)
            assert (status, torch.equal(y, expected(layer, x))) == (lw.OK, True)
            ids = torch.randint(-1, EXPERTS, (tokens, TOP_K)).int()
            status, y = client.call(1, x, layer=layer, routing=(ids, torch.rand(tokens, TOP_K)))
            assert (status, torch.equal(y, expected(layer, x, ids))) == (lw.OK, True)
    assert {count for *_, count in worker.seen} >= {1, 4, 5, 16}
    shown = lanes.shown()["lanes"][1]
    assert (shown["calls"], shown["tokens"], shown["refused"], shown["joined"]) == (24, 6 * 26, 0, 0)


def test_a_bell_that_is_out_of_range_is_refused_before_anything_is_launched(lanes, driver):
    lanes.ready(Worker())
    client = Client(lanes, layers=(1, 2))
    client.open()
    client.good(0)
    before = driver.made_up_launches()
    for bad in (
        {"layer": 1, "tokens": 0},
        {"layer": 1, "tokens": 17},
        {"layer": 1, "tokens": 65535},
        {"layer": 7, "tokens": 1},
        {"layer": 16383, "tokens": 1},
        {"layer": 1, "tokens": 1, "mode": 2},
        {"layer": 1, "tokens": 1, "mode": 3},
        {"layer": 1, "tokens": 1, "number": 77},
    ):
        client.ring(0, **bad)
        assert client.status(0) == lw.BAD_HEADER, bad
    assert driver.made_up_launches() == before
    client.good(0)
    client.good(1)
    assert lanes.shown()["lanes"][1]["refused"] == 8


@pytest.mark.parametrize("number", [0xFFFFFFFF, 0x7FFFFFFF])
def test_numbers_go_round(lanes, number):
    lanes.ready(Worker())
    client = Client(lanes)
    client.words.store(lw.answer_at(0), number)
    client.numbers[0] = number
    client.words.store(lw.bell_at(0), number)
    client.open()
    for _ in range(3):
        x = torch.randn(2, HIDDEN)
        client.numbers[0] = client.numbers[0] + 1 & 0xFFFFFFFF
        client.part("x", 0, torch.float32)[:2] = x
        client.ring(0, layer=1, tokens=2, number=client.numbers[0])
        assert client.status(0) == lw.OK
        assert torch.equal(client.part("y", 0, torch.float32)[:2], expected(1, x))


def test_bad_values_make_their_own_call_nan_and_no_other_one(lanes, driver):
    """Both calls share steps, and the bad one comes first."""
    lanes.ready(Worker())
    bad, good = Client(lanes, 1), Client(lanes, 2)
    bad.open(), good.open()
    ids, weights = torch.zeros(2, TOP_K).int(), torch.ones(2, TOP_K)
    odd = torch.zeros(2, HIDDEN)
    odd[1, 3] = float("nan")
    cases = [
        (odd, None, lw.NOT_FINITE),
        (torch.full((2, HIDDEN), float("inf")), None, lw.NOT_FINITE),
        (torch.full((2, HIDDEN), 3e38), None, lw.NOT_FINITE),  # the layer's result is not finite
        (torch.ones(2, HIDDEN), (ids + EXPERTS, weights), lw.BAD_IDS),
        (torch.ones(2, HIDDEN), (ids - 2, weights), lw.BAD_IDS),
        (torch.ones(2, HIDDEN), (ids + 0x7FFFFFFF, weights), lw.BAD_IDS),
        (torch.ones(2, HIDDEN), (ids, weights * float("nan")), lw.NOT_FINITE),
        (torch.ones(2, HIDDEN), (ids - 1, weights * float("nan")), lw.OK),  # the weight of no expert may be anything
    ]
    for x, routing, status in cases:
        mine = torch.randn(3, HIDDEN)
        driver.made_up_stall(3000)
        good.good(1)  # two calls of this step's kind come while it runs
        lanes._loop.hold()
        for client, rows, given in (
            (bad, x, routing),
            (good, mine, routing and (torch.zeros(3, TOP_K).int(), torch.ones(3, TOP_K))),
        ):
            client.part("x", 0, torch.float32)[: len(rows)] = rows
            if given is not None:
                (
                    client.part("ids", 0, torch.int32)[: len(rows)],
                    client.part("weights", 0, torch.float32)[: len(rows)],
                ) = given
            client.ring(0, layer=1, tokens=len(rows), mode=lw.BLOCK if given is None else lw.ROUTED)
        lanes._loop.release()
        assert bad.status(0) == status, status
        y = bad.part("y", 0, torch.float32)[:2]
        assert bool(y.isnan().all()) == (status != lw.OK)
        assert good.status(0) == lw.OK
        given_ids = torch.zeros(3, TOP_K).int() if routing else None
        assert torch.equal(good.part("y", 0, torch.float32)[:3], expected(1, mine, given_ids))
    until = time.monotonic() + LIMIT_S
    while (shown := lanes.shown()["lanes"])[1]["failed"] < len(cases) - 1 and time.monotonic() < until:
        time.sleep(0.001)  # the thread counts a step a moment after its answer
    assert shown[1]["joined"] == shown[2]["joined"] == len(cases)
    assert shown[1]["failed"] == len(cases) - 1 and shown[2]["failed"] == 0


def test_a_page_of_garbage_harms_no_other_lane(lanes):
    lanes.ready(Worker())
    wild, good = Client(lanes, 1), Client(lanes, 2)
    wild.open(), good.open()
    stop = threading.Event()

    def scribble():
        rng = random.Random(1)
        while not stop.is_set():
            wild.words._words[rng.randrange(16, 16 + 64)] = rng.getrandbits(64)
            wild.rows[rng.randrange(len(wild.rows))] = rng.getrandbits(8)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for count in range(300):
            good.good(count % 2, 1 + count % CAP, LAYERS[count % 3])
    finally:
        stop.set()
        thread.join()
    assert lanes.error == ""


def test_steps_of_the_engine_and_lanes_take_turns_on_one_batch(lanes):
    """The engine's replays fill the same static batch, and count its rows anew after a lane has."""
    worker = Worker()
    lanes.ready(worker)
    client = Client(lanes)
    client.open()
    errors = []

    def steps():
        for count in range(200):
            x = torch.randn(1 + count % 4, HIDDEN)
            with lanes.turn():
                y = worker.graphs.replay((7, 0, "block"), 4, x)
            if not torch.equal(y, expected(7, x)):
                errors.append(count)

    thread = threading.Thread(target=steps)
    thread.start()
    for count in range(200):
        client.good(count % 2, 1 + count % CAP, LAYERS[count % 3])
    thread.join()
    assert not errors


def test_calls_wait_while_the_ranks_are_rebuilt_and_go_on_with_the_new_graphs(lanes):
    lanes.ready(Worker())
    client = Client(lanes)
    client.open()
    client.good(0)
    lanes.pause()
    x = torch.randn(2, HIDDEN)
    client.part("x", 0, torch.float32)[:2] = x
    client.ring(0, layer=1, tokens=2)
    with pytest.raises(Refused, match="being rebuilt"):
        Client(lanes, 2).open()
    rounds = lanes._loop.launched
    time.sleep(0.02)
    assert lanes._loop.launched == rounds
    lanes.ready(Worker(version=3))
    assert client.status(0) == lw.OK
    assert torch.equal(client.part("y", 0, torch.float32)[:2], expected(1, x))


def test_another_rank_computes_the_call_that_was_under_way(lanes):
    """The bell has no answer, so the new rank takes it: the rows still lie there."""
    client = Client(lanes)
    x = torch.randn(2, HIDDEN)
    client.part("x", 1, torch.float32)[:2] = x
    client.ring(1, layer=1, tokens=2)  # seen by a rank that is gone
    lanes.ready(Worker())
    client.open()
    assert client.status(1) == lw.OK
    assert torch.equal(client.part("y", 1, torch.float32)[:2], expected(1, x))


def test_a_lane_closes_after_its_calls_and_its_page_is_not_looked_at_again(lanes, driver):
    lanes.ready(Worker())
    first, second = Client(lanes, 1), Client(lanes, 2)
    first.open(), second.open()
    driver.made_up_stall(20_000)
    first.part("x", 0, torch.float32)[:2] = 1.0
    first.ring(0, layer=1, tokens=2)
    while lanes._loop.launched == 0:
        time.sleep(0)
    lanes.close(1)
    assert first.words._halves[(lw.answer_at(0) + lw.ARRIVED_AT) >> 2] == 1, "the call that had begun is answered"
    driver.made_up_stall(0)
    first.ring(1, layer=1, tokens=2)
    second.good(0)
    assert first.words._halves[(lw.answer_at(1) + lw.ARRIVED_AT) >> 2] == 0
    lanes.close(1)
    third = Client(lanes, 3)
    third.open()
    third.good(0)


def test_a_driver_that_fails_ends_the_thread_and_is_told(lanes, driver):
    lanes.ready(Worker())
    client = Client(lanes)
    client.open()
    client.good(0)
    driver.made_up_failure(1)
    client.ring(0, layer=1, tokens=1)
    until = time.monotonic() + LIMIT_S
    while not lanes.error and time.monotonic() < until:
        time.sleep(0.001)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in lanes.error


def test_what_cannot_be_served_says_why(lanes, monkeypatch):
    for worker, text in (
        (Worker(world_size=2), "need one rank, there are 2"),
        (Worker(graphs=False), "engine.cuda_graph_tokens.: local: eager"),
    ):
        lanes.ready(worker)
        with pytest.raises(Refused, match=text):
            Client(lanes).open()
    with pytest.raises(Refused, match="runs on no GPU"):
        Client(RankLanes(None)).open()
    monkeypatch.setattr(native, "_compiler", lambda: None)
    native._built.cache_clear()
    other = RankLanes(MadeUpDevice())
    other.configure(parse_config({"model": {"path": "/none"}}))
    other.ready(Worker())
    try:
        with pytest.raises(Refused, match="no C compiler is here"):
            Client(other).open()
        assert other.note == "lanes on GPUs go through the queue: no C compiler is here (cc, gcc, clang)"
    finally:
        native._built.cache_clear()


def test_the_thread_naps_while_no_bell_rings(lanes):
    lanes.ready(Worker())
    client = Client(lanes)
    client.open()
    client.good(0)
    time.sleep(0.3)
    before, start = time.process_time(), time.monotonic()
    cpu = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
    time.sleep(0.5)
    share = (time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID) - cpu) / (time.monotonic() - start)
    assert share < 0.1, (share, before)


@pytest.mark.slow
def test_eight_lanes_with_random_calls_stalls_and_endings(lanes, driver):
    """Every answer is right and every call is answered, while lanes close and open, graphs change and the engine steps."""
    worker = Worker()
    lanes.ready(worker)
    stop, errors, answered = threading.Event(), [], [0] * 8

    def watched(function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)
            stop.set()

    def client(number):
        rng = random.Random(number)
        torch.manual_seed(number)
        while not stop.is_set():
            mine = Client(lanes, number, slots=rng.randint(1, 4))
            with changing:
                mine.open()
            for _ in range(rng.randint(1, 60)):
                rung = []
                for slot in range(mine.layout.slots):
                    tokens, layer, routed = rng.randint(1, CAP), rng.choice(LAYERS), rng.random() < 0.5
                    x, ids = torch.randn(tokens, HIDDEN), torch.randint(-1, EXPERTS, (tokens, TOP_K)).int()
                    mine.part("x", slot, torch.float32)[:tokens] = x
                    if routed:
                        mine.part("ids", slot, torch.int32)[:tokens] = ids
                        mine.part("weights", slot, torch.float32)[:tokens] = 0.5
                    mine.ring(slot, layer=layer, tokens=tokens, mode=lw.ROUTED if routed else lw.BLOCK)
                    rung.append((slot, tokens, expected(layer, x, ids if routed else None)))
                for slot, tokens, y in rung:
                    assert mine.status(slot) == lw.OK
                    assert torch.equal(mine.part("y", slot, torch.float32)[:tokens], y)
                    answered[number] += 1
            if rng.random() < 0.5:  # it ends with a call under way
                mine.ring(0, layer=1, tokens=1)
            with changing:
                lanes.close(number)

    def changes():
        rng, version = random.Random(99), 0
        while not stop.is_set():
            time.sleep(0.01)
            driver.made_up_stall(rng.choice((0, 0, 500, 2000)))
            with changing:
                version += 1
                lanes.pause()
                lanes.ready(Worker(version=version))
            x = torch.randn(3, HIDDEN)
            with changing, lanes.turn():
                y = lanes._worker.graphs.replay((7, version, "block"), 4, x)
            assert torch.equal(y, expected(7, x))

    changing = threading.Lock()  # as the rank's step thread has them one by one
    threads = [threading.Thread(target=watched, args=(client, number)) for number in range(8)]
    threads.append(threading.Thread(target=watched, args=(changes,)))
    for thread in threads:
        thread.start()
    stop.wait(15)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert min(answered) > 0 and lanes.error == ""
