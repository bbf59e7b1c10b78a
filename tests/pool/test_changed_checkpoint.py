"""A checkpoint whose files are replaced while the service runs: no rank ever reads from another one than the others did."""

import asyncio
import os
import shutil
import signal
import socket
import time
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from epserve.config import parse_config
from epserve.engine.engine import Batch, Engine
from epserve.errors import CheckpointError, NotReady, RankFailed
from epserve.models import Stamp, UnchangedCheckpoint, unchanged
from epserve.models.demo import reference_block
from epserve.modular_kernel import RankContext
from epserve.pool import supervisor
from epserve.rank.placement import Placement
from epserve.rank.step import Arrangement
from epserve.rank.weights.copies import HostCopies
from epserve.rank.worker import Worker
from tests.support.checkpoints import LAYER, edit, write
from tests.support.recovering import BACK_S, HEARTBEAT_S, NOTICE_S, STEP_TIMEOUT_S, ask, back, pids, spare, until

CHANGED = "has changed since the start: restart the service"
DIFFERENT = f"on {socket.gethostname()} is another checkpoint than the service has started with"
FILE = "model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return write("deepseek_v3", tmp_path / "model", dtype=torch.float32)


def other_values(path, out):
    """model.safetensors with the same names and shapes, each value of the expert weights doubled."""
    tensors = load_file(path / FILE)
    doubled = {name: tensor * 2 if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(doubled, out, metadata={"format": "pt"})
    assert out.stat().st_size == (path / FILE).stat().st_size
    return out


def elsewhere(stamp):
    """As another host would see the same files: its own times and numbers of files."""
    files = tuple(replace(each, modified_ns=each.modified_ns + 1, inode=each.inode + 1) for each in stamp.files)
    return replace(stamp, place=("another host", 1), files=files, digest="")


def test_times_count_on_the_same_host_and_contents_elsewhere(path, tmp_path):
    start = Stamp.take(path).with_digest()
    unchanged.check(start, Stamp.take(path))
    unchanged.check(start, elsewhere(start))
    os.utime(path / FILE, ns=(1, 1))
    with pytest.raises(CheckpointError, match=CHANGED):
        unchanged.check(start, Stamp.take(path))
    unchanged.check(start, elsewhere(Stamp.take(path)))
    os.replace(other_values(path, tmp_path / "other"), path / FILE)
    assert Stamp.take(path).files[1].size == start.files[1].size
    with pytest.raises(CheckpointError, match=DIFFERENT):
        unchanged.check(start, elsewhere(Stamp.take(path)))


def test_without_a_digest_another_host_is_not_believed(path):
    start = Stamp.take(path)
    with pytest.raises(CheckpointError, match=DIFFERENT):
        unchanged.check(start, elsewhere(start))


def test_replaced_with_the_old_times_is_noticed_by_its_contents(path, tmp_path):
    """`cp --preserve` and rename. The same bytes under another inode, as some network file systems show them, are good."""
    start, before = Stamp.take(path).with_digest(), (path / FILE).stat()
    other = other_values(path, tmp_path / "other")
    shutil.copy2(path / FILE, tmp_path / "same")
    os.replace(tmp_path / "same", path / FILE)
    assert Stamp.take(path).files != start.files
    unchanged.check(start, Stamp.take(path))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path / FILE)
    with pytest.raises(CheckpointError, match=CHANGED):
        unchanged.check(start, Stamp.take(path))


def test_a_large_file_is_sampled(path, monkeypatch):
    """A change of every value is found; headers are read whole."""
    monkeypatch.setattr(unchanged, "WHOLE_BYTES", 0)
    monkeypatch.setattr(unchanged, "SAMPLE_BYTES", 64)
    start = Stamp.take(path).with_digest()
    assert start == Stamp.take(path).with_digest()
    assert (
        start.digest
        != Stamp.take(edit(path, lambda each: each.update({n: t + 1 for n, t in each.items()}))).with_digest().digest
    )
    with (path / FILE).open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        before = Stamp.take(path).with_digest().digest
        file.seek(8 + length - 1)
        assert file.read(1) in b" }"
        file.seek(9)
        file.write(b"\t")
    assert Stamp.take(path).with_digest().digest != before


def test_a_file_that_is_replaced_while_it_is_read(path, tmp_path):
    checkpoint, other = UnchangedCheckpoint(path), other_values(path, tmp_path / "other")
    real = checkpoint.checkpoint.load_layer

    def load_layer(*args):
        read = real(*args)
        os.replace(other, path / FILE)
        return read

    checkpoint.checkpoint.load_layer = load_layer
    with pytest.raises(CheckpointError, match=CHANGED):
        checkpoint.load_layer(LAYER, [0], CPU)


def test_a_rank_takes_no_other_checkpoint_but_copies_made_in_time(path):
    start = Stamp.take(path).with_digest()
    opened = UnchangedCheckpoint(path, start=start)
    copies = HostCopies(opened, 8, opened.info.layers)
    config = parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu", "experts": "loop"}})
    (path / FILE).unlink()
    with pytest.raises(CheckpointError, match=CHANGED):
        UnchangedCheckpoint(path, start=start)
    with pytest.raises(CheckpointError, match=CHANGED):
        HostCopies(opened, 8, opened.info.layers)
    worker = Worker(config, RankContext(), source=copies, checkpoint=opened)
    assert worker.load().experts == tuple(range(8))


def test_an_arrangement_that_failed_is_not_taken_for_done(path, tmp_path):
    """What was given up before the reading failed is read again."""
    config = parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu", "experts": "loop", "ranks": 2}})
    worker = Worker(config, RankContext(rank=0, world_size=2))
    worker.load()
    half, old = dict(worker.weights.layers), Arrangement(config=config, placements=dict(worker.placements))
    alone = parse_config({"model": {"path": str(path)}, "engine": {"device": "cpu", "experts": "loop"}})
    whole = Arrangement(config=alone, placements=dict.fromkeys(worker.plan.layers, Placement.identity(8, 1)))
    assert worker.out_of_reach(0, whole) == ()
    keep, other = tmp_path / "kept", other_values(path, tmp_path / "other")
    os.rename(path / FILE, keep)
    os.replace(other, path / FILE)
    assert worker.out_of_reach(0, whole) == worker.plan.layers and worker.out_of_reach(0, old) == ()
    with pytest.raises(CheckpointError, match=CHANGED):
        worker.arrange(0, whole)
    assert worker.weights.layers == half  # nothing was given up
    worker.arrange(0, old)
    os.replace(keep, path / FILE)
    real, layers = worker.checkpoint.checkpoint.load_layer, []

    def load_layer(layer, *args):
        layers.append(layer)
        if len(layers) == len(whole.placements):
            raise CheckpointError("cut")
        return real(layer, *args)

    worker.checkpoint.checkpoint.load_layer = load_layer
    with pytest.raises(CheckpointError, match="cut"):
        worker.arrange(0, whole)
    worker.checkpoint.checkpoint.load_layer = real
    worker.arrange(0, old)
    for layer, weights in half.items():
        assert torch.equal(worker.weights.layers[layer].experts.w13_eNK, weights.experts.w13_eNK)


# Through the engine.


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return write("deepseek_v3", tmp_path_factory.mktemp("changed"), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(served):
    return reference_block(served, LAYER)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(served):
    config = {
        "model": {"path": str(served)},
        "engine": {
            "ranks": 3,
            "device": "cpu",
            "experts": "loop",
            "spares": 1,
            "spare_weights": "host",
            "standbys": 0,
        },
        "cluster": {"start_timeout_s": 280},
        "scheduler": {"step_timeout_s": STEP_TIMEOUT_S, "heartbeat_s": HEARTBEAT_S},
    }
    engine = Engine(parse_config(config))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def replaced(served, tmp_path):
    """The checkpoint with other values, for one test; call it to put the old file back."""
    kept, other = tmp_path / "kept", other_values(served, tmp_path / "other")
    os.rename(served / FILE, kept)
    os.replace(other, served / FILE)

    def put_back():
        if kept.exists():
            os.replace(kept, served / FILE)

    yield put_back
    put_back()


engine_test = pytest.mark.asyncio(loop_scope="module")
long = pytest.mark.timeout(600)


@long
@engine_test
async def test_more_ranks_take_experts_from_those_that_serve(engine, reference, replaced):
    assert (await engine.scale(4)).after == 4
    await ask(engine, reference)
    assert (await engine.scale(3)).after == 3
    await ask(engine, reference)


@long
@engine_test
async def test_fewer_ranks_take_experts_from_those_that_go(engine, reference, replaced):
    before = engine.status()
    whole = sum(rank.weights_bytes for rank in before.ranks)
    assert (await engine.scale(1)).after == 1
    await ask(engine, reference)
    alone = engine.status()
    assert [rank.weights_bytes for rank in alone.ranks] == [whole]  # and not what it held at the start
    assert alone.backends.startswith("all-to-all local") and before.backends.startswith("all-to-all all_to_all")
    assert "not local" in before.backends and "not local" not in alone.backends
    replaced()
    assert (await engine.scale(3)).after == 3
    again = engine.status()
    assert [rank.weights_bytes for rank in again.ranks] == [rank.weights_bytes for rank in before.ranks]
    assert again.backends.startswith("all-to-all all_to_all") and "local: 3 ranks, at most 1" in again.backends
    await ask(engine, reference)


@long
@engine_test
@pytest.mark.parametrize(
    "error", [CheckpointError("cut"), RankFailed("no group")], ids=["at once", "after some attempts"]
)
async def test_a_change_that_fails_in_its_pause_is_undone(engine, reference, monkeypatch, error):
    """All have left the old arrangement when it fails."""
    pool, before, unite, failed = engine._pool, pids(engine), engine._pool.unite, []
    held = [rank.experts for rank in engine.status().ranks]

    async def fails(marks=None):
        if pool.num_ranks == 3:
            return await unite(marks)
        failed.append(error)
        await unite(marks)
        raise error

    monkeypatch.setattr(pool, "unite", fails)
    expected = CheckpointError if isinstance(error, CheckpointError) else NotReady
    with pytest.raises(expected, match="cut" if expected is CheckpointError else "3 -> 2 ranks failed.*goes on with 3"):
        await engine.scale(2)
    assert len(failed) == (1 if expected is CheckpointError else supervisor.PLANNED_ATTEMPTS)
    assert pids(engine) == before and [rank.experts for rank in engine.status().ranks] == held
    assert engine.state() == "serving"
    await ask(engine, reference)


@long
@engine_test
async def test_a_lost_rank_is_replaced_by_copies_made_in_time_or_not_at_all(engine, reference, replaced, monkeypatch):
    """Health says NOT_SERVING, calls get the reason at once; with the old file back it goes on."""
    monkeypatch.setattr(supervisor, "STUCK_RETRY_S", 1.0)
    await spare(engine)
    os.kill(pids(engine)[1], signal.SIGKILL)
    await until(lambda: engine.state() != "serving", NOTICE_S, "noticing the kill")
    await back(engine)
    assert engine._pool.recoveries[-1].by == "spare"
    await ask(engine, reference)
    os.kill(pids(engine)[2], signal.SIGKILL)
    await until(lambda: engine.state() != "serving", NOTICE_S, "noticing the second kill")
    waiting = asyncio.ensure_future(ask(engine, reference))  # came before anybody knew
    await until(lambda: engine._pool.stuck, BACK_S, "knowing that it is stuck")
    with pytest.raises(NotReady, match=CHANGED):
        await asyncio.wait_for(waiting, 5)
    start = time.monotonic()
    with pytest.raises(NotReady, match=CHANGED):
        await engine.forward(Batch(layer=LAYER, hidden=torch.ones(2, 64), deadline=start + 60))
    with pytest.raises(NotReady, match=CHANGED):
        await asyncio.wait_for(engine.scale(2), 10)
    assert time.monotonic() - start < 15 and engine.state() == "recovering"
    assert CHANGED in engine.status().backends
    replaced()
    await back(engine)
    await ask(engine, reference)
    assert CHANGED not in engine.status().backends
