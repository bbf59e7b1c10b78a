"""The engine on a real Ray cluster of its own: four CPU ranks, a tiny checkpoint, transformers as the reference."""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import pytest_asyncio
import ray
import torch

from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    Overloaded,
    TooLarge,
    UnknownLayer,
)
from epserve.models import open_checkpoint
from epserve.models.demo import reference_block
from epserve.pool.members import check_gpus
from epserve.pool.ray_cluster import Cluster, Gang
from epserve.rank.gate import route
from epserve.rank.groups import interface_of
from epserve.rank.reports import RankFacts
from tests.support.checkpoints import LAYER, write

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
RANKS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write("deepseek_v3", tmp_path_factory.mktemp("runtime"), dtype=torch.float32, num_layers=3)


@pytest.fixture(scope="module")
def reference(path):
    return {layer: reference_block(path, layer) for layer in (1, 2)}


def make_config(path, *, ranks=RANKS, address="local", **scheduler):
    return parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": ranks, "device": "cpu", "max_tokens_per_rank": 32},
            "cluster": {"address": address, "start_timeout_s": 240},
            "scheduler": scheduler,
        }
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(path):
    engine = Engine(make_config(path, max_step_tokens=256, max_queued_tokens=2048, step_timeout_s=60))
    states = []
    engine.on_state_change(states.append)
    await engine.start()
    assert states == ["starting", "serving"]
    yield engine
    await asyncio.wait_for(engine.close(drain_s=5), 150)
    assert states[-2:] == ["draining", "stopped"]


def tokens(count, seed=0):
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(1000 * seed + count))


def batch(count, *, layer=LAYER, seed=0, seconds=120.0, **changes):
    values = {"layer": layer, "hidden": tokens(count, seed), "deadline": time.monotonic() + seconds}
    return Batch(**values | changes)


# Sizes, and why: the empty batch, fewer tokens than ranks, one for each, odd ones, above max_tokens_per_rank x ranks
# (rounds), above max_step_tokens (several steps).
@pytest.mark.parametrize("count", [0, 1, 3, 4, 37, 150, 700])
@pytest.mark.parametrize("layer", [1, 2])
async def test_block_equals_transformers(engine, reference, count, layer):
    got = await engine.forward(batch(count, layer=layer))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference[layer](tokens(count)), **TOLERANCE)


async def test_routed_equals_block_minus_the_shared_experts(engine, path, reference):
    layer = open_checkpoint(path).load_layer(LAYER, range(8))
    x = tokens(50)
    routing = route(x, layer.gate, engine.info.gate)
    got = await engine.forward(batch(50, ids=routing.ids_Mt, weights=routing.weights_Mt))
    torch.testing.assert_close(got, reference[LAYER](x) - layer.shared(x), **TOLERANCE)
    wide = await engine.forward(batch(50, ids=routing.ids_Mt.long(), weights=routing.weights_Mt))
    assert torch.equal(wide, got)
    one = await engine.forward(batch(50, ids=routing.ids_Mt[:, :1], weights=routing.weights_Mt[:, :1]))
    two = await engine.forward(batch(50, ids=routing.ids_Mt[:, 1:], weights=routing.weights_Mt[:, 1:]))
    torch.testing.assert_close(one + two, got, **TOLERANCE)


async def test_many_clients_at_once_share_steps(engine, reference):
    before = engine.status().steps
    batches = [batch(1 + number % 7, layer=1 + number % 2, seed=number) for number in range(60)]
    results = await asyncio.gather(*(engine.forward(each) for each in batches))
    for each, got in zip(batches, results, strict=True):
        torch.testing.assert_close(got, reference[each.layer](each.hidden), **TOLERANCE)
    assert engine.status().steps - before < 30
    assert engine.status().queue_tokens == 0


async def test_one_bad_request_among_good_ones_fails_alone(engine, reference):
    bad_ids = torch.tensor([[0, 1], [8, 2]], dtype=torch.int32)
    weights = torch.ones(2, 2)
    wrong = [
        (batch(2, ids=bad_ids, weights=weights), InvalidRequest, "id 8 is outside 0..7"),
        (batch(2, ids=bad_ids.clamp(max=0) + 2**31 - 1, weights=weights), InvalidRequest, str(2**31 - 1)),
        (batch(2, ids=bad_ids.float(), weights=weights), InvalidRequest, "not an integer type"),
        (batch(2, ids=torch.zeros(3, 2).int(), weights=torch.ones(3, 2)), InvalidRequest, "hidden_states has 2 tokens"),
        (batch(2, ids=torch.zeros(2, 3).int(), weights=torch.ones(2, 3)), TooLarge, "3 experts a token"),
        (batch(2, ids=torch.zeros(2, 2).int()), InvalidRequest, "come together"),
        (batch(2, hidden=torch.zeros(2, 65)), InvalidRequest, r"\(2, 65\)"),
        (batch(2, hidden=torch.zeros(2, 64, dtype=torch.float16)), InvalidRequest, "float16"),
        (batch(2, layer=0), UnknownLayer, "served: 1, 2"),
        (batch(4000), TooLarge, "max_queued_tokens is 2048"),
    ]
    good = [batch(5, seed=number) for number in range(5)]
    answers = await asyncio.gather(
        *(engine.forward(each) for each, _, _ in wrong),
        *(engine.forward(each) for each in good),
        return_exceptions=True,
    )
    for (_, error, message), answer in zip(wrong, answers, strict=False):
        with pytest.raises(error, match=message):
            raise answer
    for each, got in zip(good, answers[len(wrong) :], strict=True):
        torch.testing.assert_close(got, reference[LAYER](each.hidden), **TOLERANCE)
    assert engine.state() == "serving"


async def test_deadline_of_a_millisecond(engine, reference):
    with pytest.raises(DeadlineExceeded):
        await engine.forward(batch(200, seconds=0.001))
    torch.testing.assert_close(await engine.forward(batch(9)), reference[LAYER](tokens(9)), **TOLERANCE)


async def test_cancelled_calls_leave_nothing_behind(engine, reference):
    await engine.forward(batch(3))
    threads = threading.active_count()
    for number in range(300):
        call = asyncio.ensure_future(engine.forward(batch(1 + number % 50)))
        await asyncio.sleep(0 if number % 4 else 0.003)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    torch.testing.assert_close(await engine.forward(batch(11)), reference[LAYER](tokens(11)), **TOLERANCE)
    status = engine.status()
    assert status.queue_tokens == 0
    assert status.state == "serving"
    assert not any(member.link.num_pending for member in engine._pool.members)
    await _until(lambda: threading.active_count() <= threads, seconds=30)


async def test_overload_is_refused_and_passes(engine):
    answers = await asyncio.gather(
        *(engine.forward(batch(400, seed=number)) for number in range(12)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) == 7  # five times 400 tokens fit into 2048
    assert all(answer.retry_after_s > 0 and answer.retryable for answer in refused)
    assert sum(isinstance(answer, torch.Tensor) for answer in answers) == 5
    assert (await engine.forward(batch(400))).shape == (400, 64)


async def test_status_names_every_rank(engine):
    before = engine.status()
    await engine.forward(batch(10))
    status = engine.status()
    assert (status.state, status.generation, status.recoveries) == ("serving", 1, 0)
    assert [rank.rank for rank in status.ranks] == [0, 1, 2, 3]
    assert [rank.experts for rank in status.ranks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert len({rank.pid for rank in status.ranks}) == 4
    assert all(Path(f"/proc/{rank.pid}").exists() and rank.alive and rank.device == "cpu" for rank in status.ranks)
    assert all(rank.weights_bytes == 2 * 2 * 3 * 64 * 32 * 4 for rank in status.ranks)
    done = [after.tokens_done - old.tokens_done for after, old in zip(status.ranks, before.ranks, strict=True)]
    assert done == [3, 3, 2, 2]
    assert status.backends.startswith("all-to-all all_to_all, experts grouped_mm")


async def test_a_cluster_that_is_too_small_says_both_numbers(engine, path):
    config = parse_config({"model": {"path": str(path)}, "engine": {"ranks": 500}, "cluster": {"cpus_per_rank": 2}})
    with pytest.raises(ConfigError, match=r"500 ranks need 1000 CPU, the cluster has \d+; add nodes"):
        Gang(config, "cpu").reserve(500)


async def test_a_gang_that_finds_no_place_says_so(engine, path):
    placement = {"placement": "STRICT_SPREAD", "start_timeout_s": 2}
    config = parse_config({"model": {"path": str(path)}, "engine": {"ranks": 2}, "cluster": placement})
    with pytest.raises(ConfigError, match=r"no place for 2 ranks .* STRICT_SPREAD on 1 nodes within 2 s"):
        Gang(config, "cpu").reserve(2)


async def test_a_start_that_is_given_up_while_it_waits_for_a_place(engine, path):
    """The thread that waits in Ray must be gone before Ray is."""
    config = make_config(path, ranks=2).model_dump(mode="json")
    config["cluster"]["placement"] = "STRICT_SPREAD"
    other = Engine(parse_config(config))
    starting = asyncio.ensure_future(other.start())
    await _until(lambda: other._pool is not None and other._pool._reserving is not None, seconds=60)
    await asyncio.sleep(0.5)
    reserving = other._pool._reserving
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert reserving.done() and other.state() == "stopped"
    assert (await engine.forward(batch(2))).shape == (2, 64)


async def test_start_and_stop_again_and_again(engine, path, reference):
    """On the running cluster of the other engine: what one engine leaves behind would show in the next ones."""
    threads, files, pids = [], [], []
    for _ in range(2):
        other = Engine(make_config(path, ranks=2, step_timeout_s=60))
        with pytest.raises(NotReady, match="stopped"):
            await other.forward(batch(3))
        await other.start()
        torch.testing.assert_close(await other.forward(batch(21)), reference[LAYER](tokens(21)), **TOLERANCE)
        pids += [rank.pid for rank in other.status().ranks]
        await other.close(drain_s=1)
        await other.close()
        assert other.state() == "stopped"
        with pytest.raises(NotReady, match="stopped"):
            await other.forward(batch(3))
        threads.append(threading.active_count())
        files.append(len(os.listdir("/proc/self/fd")))
    await _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=60)
    await _until(lambda: threading.active_count() <= threads[0] + 1, seconds=30)
    await _until(lambda: len(os.listdir("/proc/self/fd")) <= files[0] + 2, seconds=30)
    assert (await engine.forward(batch(2))).shape == (2, 64)  # the first engine did not notice


async def test_a_failing_start_stops_everything_and_names_the_cause(engine, path, monkeypatch):
    """The checkpoint vanishes between the check and the load."""
    other = Engine(make_config(path, ranks=2))
    hidden = path.with_name("gone")
    path.rename(hidden)
    try:
        with pytest.raises(Exception, match=r"config\.json") as info:
            await other.start()
    finally:
        hidden.rename(path)
    assert info.type.__name__ == "CheckpointError"
    assert other.state() == "stopped"


async def _until(condition, *, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.05)


SCRIPT = """
import asyncio, json, sys, time, torch
from epserve.config import parse_config
from epserve.errors import ConfigError
from epserve.engine.engine import Batch, Engine

async def main(config, good):
    engine = Engine(parse_config(config))
    start = time.monotonic()
    try:
        await engine.start()
    except ConfigError as error:
        print(json.dumps([str(error), engine.state(), time.monotonic() - start]))
    config["cluster"]["address"] = good
    engine = Engine(parse_config(config))
    await engine.start()
    y = await engine.forward(Batch(layer=1, hidden=torch.ones(5, 64), deadline=time.monotonic() + 60))
    await engine.close()
    print(json.dumps(y.tolist()))

asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2]))
"""


async def test_joining_a_cluster_and_one_that_cannot_be_reached(engine, path, reference):
    """In a process of its own, since this one is connected already: first a dead address, then this one's cluster."""
    config = {
        "model": {"path": str(path)},
        "engine": {"device": "cpu", "ranks": 2},
        "cluster": {"address": "127.0.0.1:1", "start_timeout_s": 200, "data_path": "sockets"},
    }
    good = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", SCRIPT, json.dumps(config), good]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    refused, answer = (json.loads(line) for line in done.stdout.splitlines())
    assert "no Ray cluster answers at '127.0.0.1:1'" in refused[0]
    assert refused[1] == "stopped"
    assert refused[2] < 100, "start_timeout_s, which is longer, was not waited for"
    torch.testing.assert_close(torch.tensor(answer), reference[1](torch.ones(5, 64)), **TOLERANCE)
    assert (await engine.forward(batch(2))).shape == (2, 64)  # the cluster that was joined goes on


async def test_no_running_cluster_to_join(path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(
        ConfigError, match=r"no Ray cluster answers at 'auto': Could not find any running Ray instance\."
    ):
        Cluster.connect(make_config(path, address="auto"))
    with pytest.raises(ConfigError, match="'somewhere' is not 'local', 'auto' or host:port"):
        Cluster.connect(make_config(path, address="somewhere"))


OTHER_RAY = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.11.7
This process on Ray node 10.0.0.2 was started with:
    Ray: 2.50.0
    Python: 3.12.1
"""


@pytest.mark.parametrize("address", ["auto", "{listening}", "local"])
async def test_all_that_ray_says_is_told_in_one_line(path, monkeypatch, address):
    """Its first line ends in a colon, and the versions stand in those that follow."""

    def other(**_):
        raise RuntimeError(OTHER_RAY)

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", other)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = address.format(listening="127.0.0.1:" + str(listening.getsockname()[1]))
        with pytest.raises(ConfigError) as told:
            Cluster.connect(make_config(path, address=address))
    text = str(told.value)
    assert "\n" not in text and "Ray: 2.60.0 Python: 3.11.7" in text and "Ray: 2.50.0 Python: 3.12.1" in text
    assert address == "local" or text.endswith("; start epserve with the cluster's versions of Ray and Python, or the cluster"
                                               " with these")  # fmt: skip


def refuse(**_):
    raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")


async def test_bytes_go_through_memory_that_the_ranks_share(engine, reference):
    arena = engine._pool.arena
    x = engine._pool.empty((300, 64), torch.float32).copy_(tokens(300))
    got = await engine.forward(batch(300, hidden=x))  # two steps
    torch.testing.assert_close(got, reference[LAYER](tokens(300)), **TOLERANCE)
    one = await engine.forward(batch(200))
    assert arena.offset_of(one) is not None, "the ranks wrote it there"
    assert all(member.link._arena is arena for member in engine._pool.members)
    del x, got, one
    # Whoever handed the result over lets go of it a round of the event loop later.
    await _until(lambda: gc.collect() >= 0 and arena.room() == (arena.size, arena.size), seconds=30)


async def test_two_ranks_on_one_gpu_are_refused():
    def facts(rank, uuid):
        return RankFacts(rank=rank, pid=1, node_id="n", node_ip="10.0.0.1", device="cuda:0", gpu_uuid=uuid)

    check_gpus([facts(0, "GPU-a"), facts(1, "GPU-b")])
    check_gpus([facts(0, ""), facts(1, "")])
    three = [facts(0, "GPU-a"), facts(1, "GPU-b"), facts(2, "GPU-a")]
    with pytest.raises(
        ConfigError, match=r"ranks 0 and 2 on node 10\.0\.0\.1 both see GPU GPU-a: .*gpus_per_rank at 1"
    ):
        check_gpus(three)
    check_gpus(three, ranks_per_gpu=2)
    with pytest.raises(ConfigError, match=r"ranks 0, 2 and 3 on .* all see GPU GPU-a, cluster\.gpus_per_rank allows 2"):
        check_gpus([*three, facts(3, "GPU-a")], ranks_per_gpu=2)


async def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") == ""
