"""Checkpoints: every expert's bytes on the right rank, blocks equal to transformers' own, and each damage named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epserve.errors import CheckpointError
from epserve.experts.loop import expert_mlp
from epserve.models import Checkpoint, open_checkpoint
from epserve.models.demo import reference_block
from epserve.modular_kernel import Routing
from epserve.modular_kernel.quantization import FP8
from epserve.rank.gate import route
from epserve.rank.placement import Placement, to_physical
from tests.support.checkpoints import FAMILIES, FUSED_TOO, LAYER, all_tensors, edit, edit_config, write

FORMS = [(family, False) for family in FAMILIES] + [(family, True) for family in FUSED_TOO]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write("deepseek_v3", tmp_path_factory.mktemp("original"), dtype=torch.float32)


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy of a good checkpoint, to damage."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def moe_block(checkpoint: Checkpoint, x_MK: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The whole MoE block over all ranks of a placement, in plain torch and float32 sums."""
    loaded = [checkpoint.load_layer(LAYER, placement.experts_of(rank)) for rank in range(placement.layout.num_ranks)]
    routing: Routing = to_physical(route(x_MK, loaded[0].gate, checkpoint.info.gate), placement)
    out_MK = torch.zeros(x_MK.shape)
    for rank, weights in enumerate(loaded):
        for slot in range(weights.experts.num_experts):
            token, column = (routing.ids_Mt == placement.layout.offsets[rank] + slot).nonzero(as_tuple=True)
            y = expert_mlp(x_MK[token], weights.experts, slot).float()
            out_MK.index_add_(0, token, y * routing.weights_Mt[token, column].unsqueeze(1))
    if loaded[0].shared is not None:
        out_MK += loaded[0].shared(x_MK).float()
    return out_MK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "fused"), FORMS)
def test_block_equals_transformers(family, fused, dtype, tmp_path):
    write(family, tmp_path, dtype=dtype, fused=fused, top_k=3)
    names = all_tensors(tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name in names) == (fused or family == "gpt_oss")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.info.dtype == dtype
    x_MK = torch.randn(65, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = reference_block(tmp_path, LAYER)(x_MK).float()
    for ranks in (1, 2, 3):
        out = moe_block(checkpoint, x_MK, Placement.identity(8, ranks))
        assert (out - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("num_experts", "ranks"),
    [
        (60, 8),  # more experts on some ranks than on others
        (5, 2),
        (3, 4),  # a rank that holds none
    ],
)
def test_uneven_experts(num_experts, ranks, tmp_path):
    write("mixtral", tmp_path, num_experts=num_experts, dtype=torch.float32, hidden=32, intermediate=16)
    x_MK = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    out = moe_block(open_checkpoint(tmp_path), x_MK, Placement.identity(num_experts, ranks))
    expected = reference_block(tmp_path, LAYER)(x_MK)
    assert (out - expected).norm() <= 1e-5 * expected.norm()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_every_expert_tensor_on_exactly_one_rank(family, ranks, tmp_path):
    """Hashes of gate, up and down of every expert on disk against those of all ranks' slots."""
    write(family, tmp_path)
    down, gate, up = ("w2", "w1", "w3") if family == "mixtral" else ("down_proj", "gate_proj", "up_proj")
    tensors = {name: tensor for name, tensor in all_tensors(tmp_path).items() if ".layers.1." in name}

    def on_disk(expert: int, part: str) -> str:
        (tensor,) = [tensor for name, tensor in tensors.items() if name.endswith(f"experts.{expert}.{part}.weight")]
        return digest(tensor)

    wanted = {(e, part): on_disk(e, part) for e in range(8) for part in (gate, up, down)}
    assert len(set(wanted.values())) == 24
    checkpoint, placement = open_checkpoint(tmp_path), Placement.identity(8, ranks)
    found = []
    for rank in range(ranks):
        experts = checkpoint.load_layer(LAYER, placement.experts_of(rank)).experts
        assert experts.num_experts == 8 // ranks
        for slot, expert in enumerate(placement.experts_of(rank)):
            halves = experts.w13_eNK[slot].chunk(2)
            found += [((expert, gate), digest(halves[0])), ((expert, up), digest(halves[1]))]
            found.append(((expert, down), digest(experts.w2_eKN[slot])))
    assert len(found) == 24 and dict(found) == wanted


def test_experts_come_in_slot_order_and_may_repeat(original):
    checkpoint = open_checkpoint(original)
    all_experts = checkpoint.load_layer(LAYER, range(8)).experts
    some = checkpoint.load_layer(LAYER, (6, 1, 6)).experts
    assert torch.equal(some.w13_eNK, all_experts.w13_eNK[[6, 1, 6]])
    assert torch.equal(some.w2_eKN, all_experts.w2_eKN[[6, 1, 6]])


def test_only_the_asked_experts_are_read(folder):
    """Another rank's expert may hold anything: its bytes are not touched."""

    def spoil(tensors):
        tensors[f"model.layers.{LAYER}.mlp.experts.7.up_proj.weight"][3, 3] = float("nan")

    checkpoint = open_checkpoint(edit(folder, spoil))
    checkpoint.load_layer(LAYER, range(7))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.7\.up_proj\.weight holds values that are not finite"
    ):
        checkpoint.load_layer(LAYER, [7])


def test_info(original):
    info = open_checkpoint(original).info
    assert (info.family, info.hidden, info.intermediate, info.num_experts, info.top_k) == ("deepseek_v3", 64, 32, 8, 2)
    assert (info.layers, info.shared_intermediate, info.bias, info.quant.scheme) == ((1,), 64, False, "none")
    assert info.activation.kind == "silu" and info.gate.num_groups == 4
    assert len(open_checkpoint(original).info.fingerprint) == 64


def test_fingerprint_follows_config_and_shapes(original, tmp_path):
    first = open_checkpoint(original).info.fingerprint
    again = shutil.copytree(original, tmp_path / "again")
    assert open_checkpoint(again).info.fingerprint == first
    assert open_checkpoint(edit_config(again, routed_scaling_factor=1.5)).info.fingerprint != first
    other = write("deepseek_v3", tmp_path / "other", dtype=torch.float32, intermediate=48)
    assert open_checkpoint(other).info.fingerprint != first


def test_layers(tmp_path):
    write("qwen3_moe", tmp_path, num_layers=4, mlp_only_layers=[2])
    assert open_checkpoint(tmp_path).info.layers == (0, 1, 3)
    checkpoint = open_checkpoint(tmp_path, layers=(3, 1))
    assert checkpoint.info.layers == (1, 3)
    with pytest.raises(CheckpointError, match=r"layer 0 is not a loaded MoE layer.*\(1, 3\)"):
        checkpoint.load_layer(0, [0])
    with pytest.raises(CheckpointError, match=r"layers \[2, 9\] are not MoE layers; the model has \[0, 1, 3\]"):
        open_checkpoint(tmp_path, layers=(1, 2, 9))


def test_dtype_override(original):
    plain, half = open_checkpoint(original), open_checkpoint(original, dtype="bfloat16")
    assert half.info.dtype == torch.bfloat16
    a, b = plain.load_layer(LAYER, [2]), half.load_layer(LAYER, [2])
    assert torch.equal(a.experts.w13_eNK.bfloat16(), b.experts.w13_eNK)
    assert b.shared.w2_KS.dtype == torch.bfloat16
    assert b.gate.weight_EK.dtype == torch.float32  # this family gates in float32 whatever the model's dtype


def test_override_that_overflows_is_refused(folder):
    def enlarge(tensors):
        tensors[f"model.layers.{LAYER}.mlp.experts.0.down_proj.weight"][0, 0] = 1e6

    checkpoint = open_checkpoint(edit(folder, enlarge), dtype="float16")
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj.* 1e\+06, more than float16 can hold"):
        checkpoint.load_layer(LAYER, [0])


def test_sharded_checkpoint(original, tmp_path):
    write("deepseek_v3", tmp_path, dtype=torch.float32, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    one, many = (open_checkpoint(path).load_layer(LAYER, range(8)) for path in (original, tmp_path))
    assert torch.equal(one.experts.w13_eNK, many.experts.w13_eNK) and torch.equal(
        one.experts.w2_eKN, many.experts.w2_eKN
    )


BLOCK = f"model.layers.{LAYER}.mlp."


def _drop(name):
    return lambda tensors: tensors.pop(name)


def _set(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop(BLOCK + "experts.5.up_proj.weight"), r"missing tensors .*experts\.5\.up_proj\.weight"),
        (_drop(BLOCK + "gate.weight"), r"missing tensors .*mlp\.gate\.weight"),
        (_drop(BLOCK + "gate.e_score_correction_bias"), r"missing tensors .*e_score_correction_bias"),
        (_drop(BLOCK + "shared_experts.down_proj.weight"), r"missing tensors .*shared_experts\.down_proj\.weight"),
        (_set(BLOCK + "experts.8.up_proj.weight", torch.zeros(32, 64)), r"surplus tensors .*experts\.8\.up_proj"),
        (_set(BLOCK + "experts.0.up_proj.scale", torch.zeros(1)), r"surplus tensors .*experts\.0\.up_proj\.scale"),
        (
            _set(BLOCK + "experts.3.down_proj.weight", torch.zeros(64, 31)),
            r"experts\.3\.down_proj\.weight is \(64, 31\) in model\.safetensors, config\.json makes it \(64, 32\)",
        ),
        (_set(BLOCK + "gate.weight", torch.zeros(7, 64)), r"gate\.weight is \(7, 64\).* makes it \(8, 64\)"),
    ],
)
def test_wrong_tensors_are_named_when_opened(change, message, folder):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(edit(folder, change))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gate.weight", float("inf"), "gate.weight holds values that are not finite"),
        (
            "shared_experts.up_proj.weight",
            float("nan"),
            "shared_experts.up_proj.weight holds values that are not finite",
        ),
        ("gate.e_score_correction_bias", float("-inf"), "e_score_correction_bias holds values that are not finite"),
    ],
)
def test_dense_weights_must_be_finite(name, value, message, folder):
    checkpoint = open_checkpoint(edit(folder, lambda tensors: tensors[BLOCK + name].view(-1)[-1:].fill_(value)))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_layer(LAYER, [])


def test_integer_weights_are_refused(folder):
    change = _set(BLOCK + "experts.0.up_proj.weight", torch.zeros(32, 64, dtype=torch.int8))
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.up_proj\.weight is stored as I8 and is in none of the known layouts"
    ):
        open_checkpoint(edit(folder, change)).load_layer(LAYER, [0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": None}, r"config\.json: key hidden_size is missing"),
        ({"n_routed_experts": None}, r"key n_routed_experts or num_local_experts is missing"),
        ({"num_experts_per_tok": None}, r"key num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None}, r"key moe_intermediate_size is missing"),
        ({"num_hidden_layers": "2"}, r"num_hidden_layers must be an integer of at least 1, got '2'"),
        ({"num_experts_per_tok": 9}, r"top_k 9 is more than the 8 experts"),
        ({"model_type": "deepseek_v33"}, r"'deepseek_v33' is unknown; did you mean 'deepseek_v3'\?"),
        ({"hidden_act": "mish"}, r"activation 'mish' is not one of"),
        ({"dtype": "int8"}, r"dtype 'int8' is not one of"),
        ({"quantization_config": {"quant_method": "awq"}}, r"bits None of awq; known: 4"),
        ({"moe_intermediate_size": 33}, r"is \(32, 64\) in model.safetensors, config.json makes it \(33, 64\)"),
        ({"first_k_dense_replace": 2}, r"the model has \[\]"),
    ],
)
def test_wrong_config_keys_are_named(keys, message, folder):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(edit_config(folder, **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 8},
            "top_k 8 is more than the experts of 1 groups of 4",
        ),
        ({"n_group": 3}, "8 experts do not divide into 3 groups"),
        ({"n_group": 2, "topk_group": 3}, r"top_groups must lie in 1\.\.num_groups \(2\), got 3"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', only 'sigmoid' is known"),
    ],
)
def test_a_gate_that_is_not_computed_is_left_to_clients(keys, message, folder):
    """Its experts are served all the same."""
    wanted = open_checkpoint(folder).load_layer(LAYER, [3]).experts.w2_eKN
    found = open_checkpoint(edit_config(folder, **keys))
    assert found.info.gate.scoring == "client"
    assert re.search(message, found.info.gate.refusal)
    assert torch.equal(found.load_layer(LAYER, [3]).experts.w2_eKN, wanted)


def test_damaged_files_are_named(original, tmp_path):
    def copy(name: str) -> Path:
        return Path(shutil.copytree(original, tmp_path / name))

    cut = copy("cut") / "model.safetensors"
    data = cut.read_bytes()
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut/model\.safetensors.* truncated"):
            open_checkpoint(cut.parent)
    cut.write_bytes(data + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has surplus bytes"):
        open_checkpoint(cut.parent)
    cut.write_bytes(data[:8] + b"not json" + data[16:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        open_checkpoint(cut.parent)
    cut.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(cut.parent)
    (cut.parent / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_checkpoint(cut.parent)
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_file_cut_after_it_was_opened(folder):
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors ended within tensor .*; it was cut"):
        checkpoint.load_layer(LAYER, range(8))


def test_shards_and_index_must_agree(tmp_path):
    write("deepseek_v3", tmp_path, max_shard_size="40KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    name = BLOCK + "experts.5.up_proj.weight"
    right = index["weight_map"][name]
    other = next(shard for shard in index["weight_map"].values() if shard != right)
    for shard, message in (
        (other, rf"tensor {name} is not in .*{other}"),
        ("model-77.safetensors", rf"model-77\.safetensors does not exist, but .* places tensor {name}"),
        ("../weights", "'../weights', which is not a file name"),
    ):
        index["weight_map"][name] = shard
        index_file.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path)


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    scale = blocks.abs().amax(dim=(1, 3)) / 448.0
    quantised = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return quantised.to(FP8), scale


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory) -> Path:
    """DeepSeek-V3's published form: e4m3 weights, float32 scales of 128 x 128 blocks; hidden 192 ends in half a block."""
    path = write(
        "deepseek_v3", tmp_path_factory.mktemp("fp8"), hidden=192, intermediate=128, dtype=torch.bfloat16, seed=9
    )

    def quantise(tensors):
        for name in [name for name in tensors if BLOCK in name and "experts" in name]:
            tensors[name], tensors[name + "_scale_inv"] = quantise_blocks(tensors[name].float())

    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    return edit_config(edit(path, quantise), quantization_config=method)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_block_scales_travel_with_their_experts(fp8_folder, ranks):
    """Each rank holds exactly its experts' scales, gate rows before up rows."""
    tensors, checkpoint, placement = all_tensors(fp8_folder), open_checkpoint(fp8_folder), Placement.identity(8, ranks)
    assert checkpoint.info.quant.scheme == "fp8_block" and checkpoint.info.dtype == torch.bfloat16
    for rank in range(ranks):
        experts = checkpoint.load_layer(LAYER, placement.experts_of(rank)).experts
        assert (
            experts.w13_eNK.dtype == FP8 and experts.s13.shape == (8 // ranks, 2, 2) and experts.s2.shape[1:] == (2, 1)
        )
        for slot, expert in enumerate(placement.experts_of(rank)):
            for part, weight, scale in (
                ("gate_proj", experts.w13_eNK[slot, :128], experts.s13[slot, :1]),
                ("up_proj", experts.w13_eNK[slot, 128:], experts.s13[slot, 1:]),
                ("down_proj", experts.w2_eKN[slot], experts.s2[slot]),
            ):
                name = f"{BLOCK}experts.{expert}.{part}.weight"
                assert digest(weight) == digest(tensors[name])
                assert torch.equal(scale, tensors[name + "_scale_inv"])


def test_quantised_shared_experts_are_multiplied_out(fp8_folder, tmp_path):
    plain = write("deepseek_v3", tmp_path, hidden=192, intermediate=128, dtype=torch.bfloat16, seed=9)
    x_MK = torch.randn(9, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, expected = (open_checkpoint(path).load_layer(LAYER, []).shared(x_MK).float() for path in (fp8_folder, plain))
    assert (out - expected).norm() < 0.05 * expected.norm()  # e4m3 keeps three bits of mantissa


def test_missing_scale_and_nan_of_fp8(fp8_folder, tmp_path):
    folder, name = Path(shutil.copytree(fp8_folder, tmp_path / "copy")), BLOCK + "experts.2.up_proj.weight"
    edit(folder, lambda tensors: tensors[name].view(torch.uint8)[0, 0].fill_(0x7F))
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight holds values that are not finite"):
        open_checkpoint(folder).load_layer(LAYER, [2])
    with pytest.raises(
        CheckpointError, match=r"experts\.2\.up_proj\.weight is stored as F8_E4M3 .*weight_scale_inv is missing"
    ):
        open_checkpoint(edit(folder, _drop(name + "_scale_inv")))


# NOTE: VmHWM, not ru_maxrss: a child's ru_maxrss starts at its parent's, so it never shows a small child.
PEAK_PROGRAM = """
import pathlib, sys
from epserve.models import open_checkpoint

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

checkpoint = open_checkpoint(sys.argv[1])
checkpoint.load_layer(0, [0])  # everything that loading imports and touches once
base = peak()
kept = [checkpoint.load_layer(layer, range(8)).experts for layer in checkpoint.info.layers]
print(peak() - base, sum(t.numel() * t.element_size() for w in kept for t in w.tensors().values()))
"""


@pytest.mark.parametrize("fused", [False, True])
def test_peak_memory_of_a_load(fused, tmp_path):
    """Below 1.3 x of what is kept: no second copy, neither of a layer nor as mapped pages."""
    write("mixtral", tmp_path, hidden=1024, intermediate=2048, num_layers=2, fused=fused)
    command = [sys.executable, "-c", PEAK_PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    grown, kept = map(int, done.stdout.split())
    assert kept == 2 * 8 * 3 * 1024 * 2048 * 2  # 200 MB
    assert 0.9 * kept < grown < 1.3 * kept
