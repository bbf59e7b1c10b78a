"""Experts that move from rank to rank, in every quantisation: weights, scales and what is derived of them stay one unit."""

import contextlib
import dataclasses
import os
import random
import socket
import threading

import pytest
import torch
import torch.distributed as dist

import epserve.rank.worker
from epserve import experts
from epserve.config import parse_config
from epserve.errors import CheckpointError, NotReady
from epserve.experts.loop import LoopExperts
from epserve.models import open_checkpoint
from epserve.modular_kernel import ExpertsCapability, FusedMoEActivationFormat, QuantConfig, RankContext
from epserve.modular_kernel.methods_quant import METHODS
from epserve.rank.placement import Placement
from epserve.rank.step import StepPlan
from epserve.rank.weights import hand_over
from epserve.rank.weights.copies import LAYER_WIDE, HostCopies, _pick
from epserve.rank.weights.hand_over import ExpertServer, PeerSource
from epserve.rank.worker import Worker
from tests.support import triton_cases
from tests.support.checkpoints import LAYER, write
from tests.support.ranks import num_places, run_ranks

EXPERTS, MOVES, TOKENS = 8, 20, 12
SCHEMES = [*((scheme, False) for scheme in QuantConfig.SCHEMES), ("fp8_tensor", True)]


def case_of(scheme, dynamic):
    return triton_cases.Case(
        why=scheme, tokens=TOKENS, scheme=scheme, dynamic=dynamic, local=EXPERTS, total=EXPERTS, top_k=2
    )


class UnpackedLoop(LoopExperts):
    """The oracle for any quantisation. Multiplies with what it derives once: weights that came without theirs would be wrong."""

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cpu"}),
        quant_schemes=frozenset(QuantConfig.SCHEMES),
    )

    def prepare_weights(self, weights):
        case = case_of(self.spec.quant.scheme, self.spec.quant.dynamic)
        for name, codes, scale in (("w13", weights.w13_eNK, weights.s13), ("w2", weights.w2_eKN, weights.s2)):
            weights.derived[name] = triton_cases._widen(codes, scale, case).float()
        return weights

    def apply(self, output, prepared, *, weights, workspace):
        wide = dataclasses.replace(
            weights, w13_eNK=weights.derived["w13"], w2_eKN=weights.derived["w2"], s13=None, s2=None, derived={}
        )
        rows = torch.empty(output.shape, dtype=torch.float32)
        super().apply(rows, dataclasses.replace(prepared, x=prepared.x.float()), weights=wide, workspace=workspace)
        return output.copy_(rows)


class Stored:
    """A checkpoint whose experts are in `scheme`; the rest is the one in `path`. `reads` counts experts."""

    def __init__(self, path, scheme, dynamic):
        self._plain = open_checkpoint(path)
        self.info = dataclasses.replace(self._plain.info, quant=QuantConfig(scheme=scheme, dynamic=dynamic), stored=())
        self.every, _ = triton_cases.make_weights(case_of(scheme, dynamic), "cpu")
        self.reads = 0

    def serve_as(self, served):
        assert served == dict.fromkeys(served, self.info.quant)

    def load_layer(self, layer, wanted, device="cpu"):
        self.reads += len(wanted)
        index = torch.tensor(list(wanted), dtype=torch.int64)
        chosen = {
            name: (each if name in LAYER_WIDE else _pick(each, index)).to(device)
            for name, each in self.every.tensors().items()
        }
        layer_weights = self._plain.load_layer(layer, [], device)
        return dataclasses.replace(layer_weights, experts=dataclasses.replace(self.every, derived={}, **chosen))


@contextlib.contextmanager
def quantised(path, scheme, dynamic, device):
    stored = Stored(path, scheme, dynamic)
    before, epserve.rank.worker.open_checkpoint = epserve.rank.worker.open_checkpoint, lambda *args: stored
    experts.REGISTRY.register("unpacked_loop", "for this test", lambda: UnpackedLoop)
    try:
        yield stored
    finally:
        epserve.rank.worker.open_checkpoint = before
        del experts.REGISTRY._entries["unpacked_loop"]


def same(one, other):
    bits = [each.cpu().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def move_on_ranks(ranks: RankContext, path, scheme, dynamic, name):
    """MOVES placements, experts from peers. This rank's outputs, where its experts came from, and reads of the checkpoint."""
    engine = {
        "ranks": ranks.world_size, "device": ranks.device.type, "experts": name, "combine_order": "slot",
        "dispatch_quantised": False, "max_tokens_per_rank": 16,
    }  # fmt: skip
    if name != "unpacked_loop":
        engine["combine_order"] = "rank"
    config = parse_config({"model": {"path": str(path), "layers": [LAYER]}, "engine": engine})
    with quantised(path, scheme, dynamic, ranks.device.type) as stored:
        worker = Worker(config, ranks)
        worker.load()
        worker.warm_up()
        server = ExpertServer(worker.weights.held)
        addresses = [None] * ranks.world_size
        dist.all_gather_object(addresses, server.address, group=ranks.group)
        loaded, came_from = stored.reads, {}
        x = torch.randn((TOKENS, 256), generator=torch.Generator().manual_seed(1)).bfloat16()
        share = TOKENS // ranks.world_size
        rows, mine = (share,) * ranks.world_size, slice(share * ranks.rank, share * (ranks.rank + 1))

        def step(version):
            plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=rows, placement=version)
            return worker.step(plan, x[mine], None, None).cpu()

        outputs, chance = [step(0)], random.Random(11)
        for version in range(1, MOVES + 1):
            present = worker.placements[LAYER]
            slots = list(range(EXPERTS))
            chance.shuffle(slots)
            placement = dataclasses.replace(present, version=version, physical_to_logical=tuple(slots))
            holders = {e: [addresses[r]] for r in range(ranks.world_size) for e in present.experts_of(r)}
            source = PeerSource(worker.weights.held, holders, fallback=worker)
            assert worker.stage(LAYER, placement, source=source)
            for where, count in source.came_from.items():
                came_from[where] = came_from.get(where, 0) + count
            dist.barrier(group=ranks.group)  # all hold the next one; peers ask no more
            outputs += [step(version - 1), step(version)]
            worker.adopt(LAYER, version)
            outputs.append(step(version))
            held = worker.weights.layers[LAYER].experts
            for slot, expert in enumerate(placement.experts_of(ranks.rank)):
                for tensor, wanted in stored.every.tensors().items():
                    if tensor not in LAYER_WIDE:
                        assert same(getattr(held, tensor)[slot], wanted[expert]), f"{tensor} of expert {expert}"
        server.close()
        worker.close()
        return outputs, came_from, stored.reads - loaded


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"hidden": 256, "intermediate": 256, "num_experts": EXPERTS}
    return write("deepseek_v3", tmp_path_factory.mktemp("hand over"), dtype=torch.bfloat16, **sizes)


@pytest.mark.parametrize(("scheme", "dynamic"), SCHEMES, ids=str)
def test_outputs_are_bit_equal_over_moves_in_every_quantisation(path, scheme, dynamic):
    for outputs, came_from, reads in run_ranks(move_on_ranks, 2, path, scheme, dynamic, "unpacked_loop"):
        assert len(outputs) == 1 + 3 * MOVES and outputs[0].abs().sum() > 0
        assert all(torch.equal(each, outputs[0]) for each in outputs)
        assert reads == 0 and came_from["peer"] > MOVES and came_from.keys() == {"here", "peer"}


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "dynamic"), SCHEMES, ids=str)
def test_outputs_are_bit_equal_over_moves_on_gpus(path, scheme, dynamic):
    if num_places() < 2:
        pytest.skip("needs 2 CUDA GPUs")
    results = run_ranks(move_on_ranks, 2, path, scheme, dynamic, "triton", device="cuda", timeout=300)
    for outputs, came_from, reads in results:
        # Partial sums of ranks are rounded to bf16: where two of them nearly cancel, an element says little by itself.
        want = outputs[0].float()
        assert all((each.float() - want).norm() < 1e-2 * want.norm() for each in outputs)
        assert reads == 0 and came_from["peer"] > MOVES


# What goes wrong.


class Layers:
    """`HeldLayers.held` and a fallback that counts, without a worker."""

    def __init__(self, path, experts_here, version=0, scheme="fp8_block"):
        self.stored = Stored(path, scheme, False)
        slots = (*experts_here, *(e for e in range(EXPERTS) if e not in experts_here))
        identity = Placement.identity(EXPERTS, (len(experts_here), EXPERTS - len(experts_here)))
        self.placement = dataclasses.replace(identity, version=version, physical_to_logical=slots)
        self.weights = self.stored.load_layer(LAYER, experts_here)
        self.stored.reads = 0

    def __call__(self, layer):
        assert layer == LAYER
        return self.placement, self.placement.experts_of(0), self.weights


def whole(path, got, wanted):
    expected = Stored(path, "fp8_block", False).load_layer(LAYER, wanted).experts.tensors()
    assert got.experts.tensors().keys() == expected.keys() and not got.experts.derived
    assert all(same(each, expected[name]) for name, each in got.experts.tensors().items())


def take(here, peer, wanted, fallback=None):
    source = PeerSource(here, {expert: [peer] for expert in range(4, 8)}, fallback=fallback or here.stored)
    return source.load_layer(LAYER, wanted, torch.device("cpu")), source.came_from


@pytest.fixture
def server(path):
    server = ExpertServer(Layers(path, (4, 5, 6, 7)))
    yield server
    server.close()


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 22])
def test_experts_come_in_chunks_of_any_size(path, server, monkeypatch, chunk):
    monkeypatch.setattr(hand_over, "CHUNK_BYTES", chunk * 16)
    here = Layers(path, (0, 1, 2, 3))
    got, came_from = take(here, server.address, (5, 1, 7))
    whole(path, got, (5, 1, 7))
    assert came_from == {"peer": 2, "here": 1} and here.stored.reads == 0


def test_over_tcp_too(path):
    server = ExpertServer(Layers(path, (4, 5, 6, 7)), host="127.0.0.1")
    got, came_from = take(Layers(path, (0, 1, 2, 3)), server.address, (4, 0))
    server.close()
    whole(path, got, (4, 0))
    assert came_from == {"peer": 1, "here": 1}


def test_a_peer_that_moved_on_or_is_gone_is_replaced_by_the_checkpoint(path, server):
    here = Layers(path, (0, 1, 2, 3), version=1)  # the peer is at version 0
    got, came_from = take(here, server.address, (6, 2, 5))
    whole(path, got, (6, 2, 5))
    assert came_from == {"checkpoint": 2, "here": 1} and here.stored.reads == 2
    server.close()
    got, came_from = take(Layers(path, (0, 1, 2, 3)), dataclasses.replace(server.address, name="nobody"), (6, 2))
    whole(path, got, (6, 2))
    assert came_from == {"checkpoint": 1, "here": 1}


def test_a_peer_that_hangs_costs_one_deadline(path, monkeypatch):
    monkeypatch.setattr(hand_over, "PEER_TIMEOUT_S", 0.3)
    silent = socket.create_server(("127.0.0.1", 0))
    address = hand_over.LinkAddress(host="127.0.0.1", port=silent.getsockname()[1], token="x", protocol="experts")
    got, came_from = take(Layers(path, (0, 1, 2, 3)), address, (4, 5, 6, 7))
    whole(path, got, (4, 5, 6, 7))
    assert came_from == {"checkpoint": 4}
    silent.setblocking(False)
    silent.accept()[0].close()
    with pytest.raises(BlockingIOError):  # it was asked for the first expert and for none of the others
        silent.accept()
    silent.close()


def test_damaged_bytes_are_not_taken(path, monkeypatch):
    server = ExpertServer(Layers(path, (4, 5, 6, 7)))
    sent, real_send = [], hand_over.wire.send

    def send(sock, header, tensors=()):
        if tensors and threading.current_thread().name == "experts of one peer" and len(sent) < 1:
            sent.append(header)
            header = {**header, "crc": header["crc"] ^ 1}
        return real_send(sock, header, tensors)

    monkeypatch.setattr(hand_over.wire, "send", send)
    got, came_from = take(Layers(path, (0, 1, 2, 3)), server.address, (4, 0))
    server.close()
    whole(path, got, (4, 0))
    assert sent and came_from == {"checkpoint": 1, "here": 1}


def test_nobody_without_the_token_gets_weights(path, server):
    stranger = dataclasses.replace(server.address, token="guess")
    _, came_from = take(Layers(path, (0, 1, 2, 3)), stranger, (4,))
    assert came_from == {"checkpoint": 1}


def test_peers_serve_when_the_checkpoint_has_changed(path, tmp_path):
    """Their weights are those of the start; only what no rank holds would have to be read."""
    model = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    config = parse_config(
        {"model": {"path": str(model), "layers": [LAYER]}, "engine": {"device": "cpu", "experts": "loop"}}
    )
    worker = Worker(config, RankContext())
    worker.load()
    worker.warm_up()
    os.utime(model / "model.safetensors", ns=(1, 1))
    placement = worker.plan.placement.with_version(1)
    assert worker.stage(LAYER, placement, source=PeerSource(worker.weights.held, {}, fallback=worker))
    with pytest.raises(CheckpointError, match="has changed since the start"):
        worker.load_layer(LAYER, (0,), torch.device("cpu"))


def test_copies_in_host_memory_keep_what_is_the_layers(path):
    stored = Stored(path, "fp8_tensor", False)
    copies = HostCopies(stored, EXPERTS, [LAYER])
    got, wanted = copies.load_layer(LAYER, (5, 0), torch.device("cpu")), stored.load_layer(LAYER, (5, 0))
    assert got.experts.a1 is not None
    assert all(same(each, wanted.experts.tensors()[name]) for name, each in got.experts.tensors().items())


def test_too_little_memory_for_copies_is_told_before_it_runs_out(path, monkeypatch):
    stored = Stored(path, "none", False)
    monkeypatch.setattr("epserve.rank.weights.copies.free_bytes", lambda: 5 << 20)
    with pytest.raises(NotReady, match=r"need another 12 MiB of host memory, 5 MiB are free .*spare_weights: host"):
        HostCopies(stored, EXPERTS, [LAYER] * 5)
    assert stored.reads == EXPERTS  # one layer
    HostCopies(stored, EXPERTS, [LAYER])


def test_all_of_256_experts_move_at_once_in_bounded_chunks(tmp_path, monkeypatch):
    """T18: every slot changes; nothing larger than a chunk is in flight, and the old ones serve until all are there."""
    model = write("deepseek_v3", tmp_path / "many", dtype=torch.float32, num_experts=256)
    engine = {"device": "cpu", "experts": "loop"}
    worker = Worker(parse_config({"model": {"path": str(model), "layers": [LAYER]}, "engine": engine}), RankContext())
    worker.load()
    worker.warm_up()
    monkeypatch.setattr(hand_over, "CHUNK_BYTES", 1 << 12)
    sizes = []
    real = hand_over._chunks
    monkeypatch.setattr(hand_over, "_chunks", lambda t: [sizes.append(c.numel()) or c for c in real(t)])
    x = torch.randn((9, 64), generator=torch.Generator().manual_seed(1))

    def step(version):
        plan = StepPlan(step=0, layer=LAYER, mode="block", tokens_per_rank=(9,), placement=version)
        return worker.step(plan, x, None, None)

    before = step(0)
    placement = dataclasses.replace(worker.plan.placement, version=1, physical_to_logical=tuple(reversed(range(256))))
    source = PeerSource(worker.weights.held, {}, fallback=worker)
    assert worker.stage(LAYER, placement, source=source)
    assert source.came_from == {"here": 256} and max(sizes) <= 1 << 12
    assert torch.equal(step(0), before)
    torch.testing.assert_close(step(1), before, rtol=1e-5, atol=1e-6)


def test_every_method_is_covered():
    known = {config.scheme for method in METHODS for config in method.quant_configs()}
    assert known == {scheme for scheme, _ in SCHEMES}
