"""What lies behind metrics and status page: expert load, where experts lie, clocks of a step, the last minutes."""

import itertools
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from epserve.process.phases import PHASES, PhaseClock
from epserve.rank.expert_load import MAX_PROCESSES, LoadCounter, LoadTotals, by_layer
from epserve.server.watch.history import SAMPLES, History, bucket_of, percentiles
from epserve.server.watch.load import Layout, heat, hottest
from tests.support.observed import engine_status, rank_status

CPU = torch.device("cpu")


class TestExpertLoad:
    def test_counts_are_those_of_the_ids_and_missing_experts_count_nowhere(self):
        counter = LoadCounter((3, 5), 4, CPU)
        counter.add(5, torch.tensor([[0, 3], [3, -1], [-1, -1]], dtype=torch.int32))
        counter.add(5, torch.tensor([[3, 2]]))
        counter.add(3, torch.empty((0, 2), dtype=torch.int32))
        totals = LoadTotals((3, 5), 4)
        totals.update("process", counter.read())
        assert by_layer(totals) == {3: (0, 0, 0, 0), 5: (1, 0, 1, 3)}

    def test_a_lost_process_takes_no_count_along_and_a_renumbered_rank_counts_once(self):
        totals = LoadTotals((4, 9), 2)
        totals.update("a", np.array([[2, 2], [0, 1]]).tobytes())
        totals.update("a", np.array([[5, 7], [0, 2]]).tobytes())  # a later reading replaces the earlier one
        totals.update("b", np.array([[1, 0], [0, 0]]).tobytes())
        totals.update("a", b"")  # nothing new
        assert by_layer(totals) == {4: (6, 7), 9: (0, 2)}
        assert totals.of_layer(4).tolist() == [6, 7]

    def test_many_processes_one_after_the_other_need_no_more_memory(self):
        totals = LoadTotals((0,), 1)
        for process in range(MAX_PROCESSES + 500):
            totals.update(process, np.array([[1]]).tobytes())
        assert by_layer(totals) == {0: (MAX_PROCESSES + 500,)}
        assert len(totals._latest) == MAX_PROCESSES

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    def test_counting_on_a_gpu_never_waits_for_it(self):
        counter = LoadCounter((0,), 256, torch.device("cuda"))
        ids = torch.randint(-1, 256, (4096, 8), device="cuda")
        counter.add(0, ids)
        torch.cuda._sleep(2_000_000_000)  # about a second
        start = time.perf_counter()
        counter.add(0, ids)
        counter.read()
        assert time.perf_counter() - start < 0.2
        torch.cuda.synchronize()
        counter.read()  # starts a copy of what is there by now
        torch.cuda.synchronize()
        counts = np.frombuffer(counter.read(), dtype=np.int64)
        assert counts.tolist() == (2 * torch.bincount(ids.flatten() + 1, minlength=257)[1:]).tolist()


class TestLayout:
    def test_slots_and_the_hottest_follow_each_layers_own_placement(self):
        ranks = [rank_status(0, (0, 1)), rank_status(1, (2, 0))]
        status = engine_status(ranks, {3: (6, 1, 1), 5: (2, 2, 8)}, slots={3: (0, 1, 2, 0), 5: (2, 1, 0, 2)})
        layout, tokens = Layout.of(status), np.array([(6, 1, 1), (2, 2, 8)])
        assert layout.slot_loads(tokens).tolist() == [[3, 1, 1, 3], [4, 2, 2, 4]]
        assert layout.rank_loads(tokens).tolist() == [10, 10]
        made = heat(layout, tokens)
        assert made["percent"] == [[150, 50, 50, 150], [133, 67, 67, 133]]
        assert made["experts"] == [[0, 1, 2, 0], [2, 1, 0, 2]]
        first = next(hottest(layout, tokens))
        assert first == {"expert": 2, "tokens": 9, "percent": 135, "ranks": [0, 1]}

    def test_very_many_layers_share_rows(self):
        ranks = [rank_status(0, range(1000))]
        status = engine_status(ranks, {layer: tuple(range(1000)) for layer in range(61)})
        made = heat(Layout.of(status), np.ones((61, 1000), dtype=np.int64))
        assert made["rows"][0] == "layers 0 to 3"
        assert made["rows"][-1] == "layer 60"
        assert {value for row in made["percent"] for value in row} == {100}
        assert made["experts"][0] == []

    @pytest.mark.parametrize(
        "status",
        [
            pytest.param(engine_status([], {}), id="nothing is up"),
            pytest.param(engine_status([rank_status(0, ())], {1: (0, 0)}), id="ranks without experts"),
            pytest.param(engine_status([rank_status(0, (0, 1))], {1: (0, 0)}, slots={1: (0,)}), id="between two sizes"),
        ],
    )
    def test_there_is_none_while_ranks_change(self, status):
        assert Layout.of(status) is None


class TestPhaseClock:
    def test_rounds_add_up_and_a_new_step_starts_over(self, monkeypatch):
        ticks = itertools.count()
        monkeypatch.setattr("epserve.process.phases.time", SimpleNamespace(perf_counter=lambda: 0.5 * next(ticks)))
        clock = PhaseClock(CPU)
        for phase in (*PHASES, "prepare", "experts", "finalize"):
            clock.enter(phase)
        clock.enter("idle")
        once, twice = dict.fromkeys(PHASES[:3], 0.5), dict.fromkeys(PHASES[3:], 1.0)
        assert list(clock.seconds()) == list(PHASES)
        assert clock.seconds() == once | twice
        clock.enter("check")
        clock.enter("idle")
        assert clock.seconds() == {"check": 0.5}
        assert clock.phase == "idle"

    def test_a_rank_on_a_cpu_reads_the_real_clock(self):
        clock = PhaseClock(CPU)
        clock.enter("check")
        time.sleep(0.002)
        clock.enter("idle")
        assert clock.seconds()["check"] >= 0.002

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    def test_on_a_gpu_it_is_the_devices_time(self):
        clock = PhaseClock(torch.device("cuda"))
        clock.enter("check")
        clock.enter("experts")
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        clock.enter("idle")
        torch.cuda.synchronize()
        assert clock.seconds()["experts"] > 0.05 > clock.seconds()["check"]


class TestHistory:
    def test_percentiles_are_within_a_bucket_of_the_truth(self):
        latencies = np.random.default_rng(0).lognormal(-5, 1, 5000)
        history = History()
        for each in latencies:
            history.request(float(each))
        history.sample(0.0, 1.0, queue_tokens=0, load={})
        found = history.latency()
        for p, value in ((50, found.p50_ms), (90, found.p90_ms), (99, found.p99_ms)):
            assert value == pytest.approx(np.percentile(latencies, p) * 1e3, rel=0.03)
        assert found.count == 5000

    @pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e-5, 1e4])
    def test_no_latency_breaks_the_buckets(self, seconds):
        assert percentiles({bucket_of(seconds): 1}).p50_ms == pytest.approx(max(seconds, 1e-5) * 1e3, rel=0.03)

    def test_memory_is_bounded_and_old_minutes_are_forgotten(self):
        history = History()
        for second in range(2 * SAMPLES):
            history.request(5.0 if second < SAMPLES else 0.001)
            history.step(10)
            history.sample(float(second), 1.0, queue_tokens=second, load={0: (second, 2 * second)})
        assert len(history.samples) == SAMPLES
        assert history.latency().p99_ms < 1.1
        assert history.rate("tokens") == 10
        recent = history.recent_load()
        assert 55 <= recent[0, 0] <= 60 and recent[0, 1] == 2 * recent[0, 0]
        assert len(history._loads) < 20

    def test_a_quiet_minute_shows_the_load_since_the_start(self):
        history = History()
        for second in range(100):
            history.sample(float(second), 1.0, queue_tokens=0, load={0: (3, 4)})
        assert history.recent_load().tolist() == [[3, 4]]
        assert math.isclose(history.rate("requests"), 0.0)
        assert history.series()["p50_ms"] == [None] * 100
