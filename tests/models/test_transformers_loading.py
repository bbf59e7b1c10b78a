"""The loader for any transformers family: what it reads, what it makes of it, what it refuses."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

from epserve import experts
from epserve.all2all.local import LocalPrepareAndFinalize
from epserve.errors import CheckpointError
from epserve.experts.loop import expert_mlp
from epserve.models import open_checkpoint
from epserve.models.expert_modules import find_layers, number_layers, recognise, recognise_norm
from epserve.models.generic import open_generic
from epserve.models.tensors import TensorReader, read_json
from epserve.modular_kernel import UNQUANTIZED, Activation, ExpertLayout, ExpertShape, ExpertWeights, LayerSpec, why_not

from .coverage_families import CASES, Case, architecture
from .coverage_table import quantise_experts, write_checkpoint

FORMS = {
    "granitemoe": "stacked, gate and up in one tensor under other names",
    "qwen3_next": "one tensor an expert and matrix",
    "aria": "stacked and transposed",
    "openai_privacy_filter": "transposed with biases",
    "nemotron_h": "not gated",
    "inkling2": "interleaved on disk, concatenated in the module",
    "ernie4_5_vl_moe": "two expert groups in one list of tensors",
    "jamba": "MoE in some layers only",
    "muse_spark": "a norm after each expert",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = write_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def opened(path, **kwargs):
    return open_generic(path, read_json(path / "config.json"), **kwargs)


def equal(one, other):
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", FORMS)
def test_a_part_of_the_experts_in_any_order_is_that_part_of_the_whole(checkpoint, family):
    found = opened(checkpoint(family))
    layer = found.info.layers[-1]
    whole = found.load_layer(layer, range(found.info.num_experts)).experts.tensors()
    for chosen in ([5, 2], [7], [], [0, 1, 2, 3]):
        part = found.load_layer(layer, chosen).experts.tensors()
        assert part.keys() == whole.keys()
        for name, value in part.items():
            assert torch.equal(value, whole[name][chosen]), (name, chosen)


@pytest.mark.parametrize("family", ["granitemoe", "qwen3_next", "aria", "inkling2", "nemotron_h"])
def test_only_the_bytes_of_ones_own_experts_are_read(checkpoint, family, monkeypatch):
    read = []
    original = TensorReader._fill
    monkeypatch.setattr(
        TensorReader,
        "_fill",
        lambda self, info, offset, view: read.append(len(view)) or original(self, info, offset, view),
    )
    found = opened(checkpoint(family))
    assert not read, "opening reads headers only"
    total = []
    for rank in range(4):
        read.clear()
        weights = found.load_layer(found.info.layers[0], [2 * rank, 2 * rank + 1]).experts
        kept = sum(value.nbytes for value in weights.tensors().values())
        assert sum(read) == kept
        total.append(kept)
    assert len(set(total)) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_expert_is_on_exactly_one_rank(checkpoint, num_ranks):
    found = opened(checkpoint("granitemoe"))

    def hashes(experts):
        weights = found.load_layer(0, experts).experts
        pairs = zip(weights.w13_eNK, weights.w2_eKN, strict=True)
        return [hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest() for a, b in pairs]

    parts = [each for rank in range(num_ranks) for each in hashes(range(8)[rank::num_ranks])]
    assert sorted(parts) == sorted(hashes(range(8)))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_our_tables_and_transformers_mapping_agree_bit_for_bit(checkpoint, family):
    """Six families have a table of ours, for gates in the service; their experts must be the same by either way."""
    path = checkpoint(family)
    table, generic = open_checkpoint(path), opened(path)
    assert type(table) is not type(generic)
    for name in (
        "hidden",
        "intermediate",
        "num_experts",
        "top_k",
        "layers",
        "activation",
        "bias",
        "fingerprint",
        "dtype",
    ):
        assert getattr(table.info, name) == getattr(generic.info, name), name
    for layer in table.info.layers:
        assert equal(table.load_layer(layer, [3, 0]).experts, generic.load_layer(layer, [3, 0]).experts)


def test_open_checkpoint_takes_families_without_a_table(checkpoint):
    found = open_checkpoint(checkpoint("qwen3_next"), layers=[1])
    assert (found.info.family, found.info.layers, found.info.gate.scoring) == ("qwen3_next", (1,), "client")


def test_dtype(checkpoint):
    path = checkpoint("granitemoe")
    assert opened(path).info.dtype == torch.float32
    wanted = opened(path, dtype="bfloat16")
    assert wanted.load_layer(0, [1]).experts.w13_eNK.dtype == torch.bfloat16


def changed(path, tmp_path, tensors=None, config=None):
    """A copy of the checkpoint with other tensors (None: left out) or keys of config.json."""
    all_tensors = load_file(path / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in all_tensors.items() if value is not None}, tmp_path / "model.safetensors")
    text = json.dumps(read_json(path / "config.json") | (config or {}))
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def test_a_missing_expert(checkpoint, tmp_path):
    name = "model.layers.0.mlp.experts.4.down_proj.weight"
    path = changed(checkpoint("qwen3_next"), tmp_path, {name: None})
    with pytest.raises(
        CheckpointError, match=r"7 tensors match .*one for each of 8 experts; the first that is missing is 4"
    ):
        opened(path)


def test_a_surplus_expert(checkpoint, tmp_path):
    path = changed(
        checkpoint("qwen3_next"), tmp_path, {"model.layers.0.mlp.experts.8.up_proj.weight": torch.zeros(16, 32)}
    )
    with pytest.raises(CheckpointError, match=r"9 tensors match .* one for each of 8 experts"):
        opened(path)


def test_a_missing_layer(checkpoint, tmp_path):
    names = [
        name for name in load_file(checkpoint("granitemoe") / "model.safetensors") if ".1.block_sparse_moe.in" in name
    ]
    path = changed(checkpoint("granitemoe"), tmp_path, dict.fromkeys(names))
    with pytest.raises(CheckpointError, match=r"nothing in the checkpoint leads to model\.layers\.1\..*gate_up_proj"):
        opened(path)


def test_another_number_of_experts_than_the_configuration_says(checkpoint, tmp_path):
    path = changed(checkpoint("granitemoe"), tmp_path, config={"num_local_experts": 6})
    with pytest.raises(
        CheckpointError, match=r"the checkpoint makes shape \(8, 96, 32\) of it, expected \(6, 96, 32\)"
    ):
        opened(path).load_layer(0, [0, 1])


def test_values_that_are_not_finite(checkpoint, tmp_path):
    name = "model.layers.0.mlp.experts.4.down_proj.weight"
    path = changed(checkpoint("qwen3_next"), tmp_path, {name: torch.full((32, 16), float("nan"))})
    with pytest.raises(CheckpointError, match=r"experts\.4\.down_proj\.weight holds values that are not finite"):
        opened(path).load_layer(0, [4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, [0]), r"layer 7 is not a loaded MoE layer of .*; those are \(0, 1\)"),
        ((0, [8]), r"experts \[8\] are outside 0\.\.7"),
    ],
)
def test_a_layer_or_expert_that_is_not_there(checkpoint, arguments, message):
    with pytest.raises(CheckpointError, match=message):
        opened(checkpoint("granitemoe")).load_layer(*arguments)


def test_layers_that_are_not_moe_layers(checkpoint):
    with pytest.raises(CheckpointError, match=r"layers \[0\] are not MoE layers; the model has \[1, 3\]"):
        opened(checkpoint("jamba"), layers=[0])


def test_a_quantisation_that_is_not_loaded(checkpoint, tmp_path):
    path = changed(checkpoint("granitemoe"), tmp_path, config={"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(CheckpointError, match=r"quantisation 'hqq' cannot be loaded; known: fp8, .* or none"):
        opened(path)


@pytest.mark.parametrize(
    ("family", "architectures"),
    [
        ("granitemoe", ["GraniteMoeForPoetry"]),  # of remote code
        ("granitemoe", []),
        ("granitemoe", None),
        ("granitemoe", ["LlamaForCausalLM"]),  # of another model_type
        ("phimoe", ["PhiMoEForCausalLM"]),  # the hub's spelling, as in the next two
        ("bailing_hybrid", ["BailingMoeV2_5ForCausalLM"]),
        ("kimi_k25", ["KimiK25ForConditionalGeneration"]),
    ],
)
def test_model_type_says_which_class_it_is_where_architectures_do_not(
    checkpoint, tmp_path, family, architectures, monkeypatch
):
    experts = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    monkeypatch.setitem(
        CASES, "kimi_k25", Case(overrides={"text_config": experts})
    )  # its experts are of another family
    path = changed(checkpoint(family), tmp_path, config={"architectures": architectures})
    found, wanted = opened(path), opened(checkpoint(family))
    assert found.info.layers == wanted.info.layers
    layer = found.info.layers[-1]
    assert equal(found.load_layer(layer, [3, 0]).experts, wanted.load_layer(layer, [3, 0]).experts)


def test_a_model_type_without_a_model(checkpoint, tmp_path):
    path = changed(
        checkpoint("granitemoe"), tmp_path, config={"model_type": "siglip_vision_model", "architectures": None}
    )
    with pytest.raises(CheckpointError, match="SiglipVisionModel has no experts module"):
        opened(path)


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "qwen3_next"]
)
def test_a_checkpoint_of_the_base_model_without_its_head(checkpoint, tmp_path, family):
    """transformers writes the names of a base model without `model.`, and reads either form into either class."""
    path = checkpoint(family)
    AutoModel.from_pretrained(path).save_pretrained(tmp_path)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    found, wanted = open_checkpoint(tmp_path), open_checkpoint(path)
    assert (type(found), found.info.layers) == (type(wanted), wanted.info.layers)
    for layer in found.info.layers:
        ours, theirs = found.load_layer(layer, [3, 0]), wanted.load_layer(layer, [3, 0])
        assert equal(ours.experts, theirs.experts)
        assert torch.equal(ours.gate.weight_EK, theirs.gate.weight_EK)


def test_a_family_without_experts(checkpoint, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    path = changed(checkpoint("granitemoe"), tmp_path, config=config)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM has no experts module"):
        open_checkpoint(path)


def test_fp8_in_blocks_needs_its_scales(checkpoint, tmp_path):
    path, _ = quantise_experts(checkpoint("qwen3_next"), tmp_path)
    name = "model.layers.0.mlp.experts.4.down_proj.weight_scale_inv"
    (tmp_path / "a").mkdir()
    broken = changed(path, tmp_path / "a", {name: None})
    with pytest.raises(CheckpointError, match=f"stored as F8_E4M3 .*{name} is missing"):
        opened(broken).load_layer(0, [4])
    (tmp_path / "b").mkdir()
    broken = changed(path, tmp_path / "b", {name: torch.ones(2, 1)})
    with pytest.raises(CheckpointError, match=r"\(2, 1\) scales, .* needs \(1, 1\) for blocks of 128x128"):
        opened(broken).load_layer(0, [4])


def test_fp8_reads_a_ranks_own_experts_only_and_keeps_the_dtype_of_the_model(checkpoint, tmp_path, monkeypatch):
    path, _ = quantise_experts(checkpoint("granitemoe"), tmp_path)
    read = []
    original = TensorReader._fill
    monkeypatch.setattr(
        TensorReader,
        "_fill",
        lambda self, info, offset, view: read.append(len(view)) or original(self, info, offset, view),
    )
    weights = opened(path).load_layer(0, [3]).experts
    assert weights.w13_eNK.dtype == torch.float32
    values = weights.w13_eNK.numel() + weights.w2_eKN.numel()
    assert sum(read) == values + 4 * 2  # one scale for each of the two small matrices


def test_gpt_oss_in_mxfp4_is_what_transformers_makes_of_it(checkpoint, tmp_path):
    """The published form of gpt-oss: blocks and scales of the transposed matrices."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    tensors, wanted, intermediate = {}, {}, 64  # a multiple of 32, the size of a block
    for name, rows, columns in (("gate_up_proj", 2 * intermediate, 32), ("down_proj", 32, intermediate)):
        key, shape = f"model.layers.0.mlp.experts.{name}", (8, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
        tensors |= {key: None, f"{key}_blocks": blocks, f"{key}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors["model.layers.0.mlp.experts.gate_up_proj_bias"] = torch.zeros(8, 2 * intermediate)
    config = {"intermediate_size": intermediate, "quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    path = changed(checkpoint("gpt_oss"), tmp_path, tensors, config)
    gate_up = wanted["gate_up_proj"][[6, 1]].transpose(1, 2)
    for found in (open_checkpoint(path, layers=[0]), opened(path)):
        assert found.info.quant.scheme == "mxfp4" and found.info.stored[0].name == "mxfp4"
        packed = found.load_layer(0, [6, 1]).experts
        assert packed.w13_eNK.shape == (2, 2 * intermediate, 16) and packed.s2.dtype == torch.uint8
        found.serve_as({0: UNQUANTIZED})
        got = found.load_layer(0, [6, 1]).experts
        assert torch.equal(got.w13_eNK, torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1))
        assert torch.equal(got.w2_eKN, wanted["down_proj"][[6, 1]].transpose(1, 2))


class Gate(nn.Module):
    """An experts module as far as `recognise` looks."""

    def __init__(self, apply_gate, *, is_concatenated=True, **numbers):
        super().__init__()
        self.has_gate, self.is_concatenated = True, is_concatenated
        self._apply_gate = apply_gate
        vars(self).update(numbers)


def silu_clamped(h):
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate.clamp(max=3.5)) * up.clamp(-3.5, 3.5)


def gpt_oss_like(h):
    gate, up = h[..., ::2].clamp(max=7), h[..., 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.5 * gate) * (up + 1)


def swapped(h):
    up, gate = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (Gate(silu_clamped, limit=3.5), (Activation(limit=3.5), False)),
        (Gate(silu_clamped), None),  # clamps at a number that the module does not show
        (
            Gate(gpt_oss_like, limit=7.0, slope=1.5, is_concatenated=False),
            (Activation(kind="swigluoai", limit=7.0, alpha=1.5), True),
        ),
        (Gate(swapped), None),  # up before gate is not what `is_concatenated` means
    ],
)
def test_non_linearities_are_recognised_by_what_they_compute(module, wanted):
    assert recognise(module) == wanted


def test_norms_of_outputs_are_recognised_by_what_they_compute():
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm as ScaleLast
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextInputScaledRMSNorm as OffsetNorm

    with torch.device("meta"):
        assert recognise_norm(OffsetNorm(8, eps=1e-5)) == (1e-5, 1.0)
        assert recognise_norm(ScaleLast(8, eps=1e-5)) is None  # its scale cannot go into the weights before it


def test_a_norm_after_each_expert():
    """The oracle against the formula, and a backend without it against the capability check."""
    generator = torch.Generator().manual_seed(0)
    activation = Activation(output_norm_eps=1e-4)
    weights = ExpertWeights(
        w13_eNK=torch.randn(2, 8, 16, generator=generator), w2_eKN=torch.randn(2, 16, 4, generator=generator),
        activation=activation,
    )  # fmt: skip
    x = torch.randn(3, 16, generator=generator)
    plain = expert_mlp(x, replace(weights, activation=Activation()), 1)
    wanted = plain / (plain.square().mean(-1, keepdim=True) + 1e-4).sqrt()
    torch.testing.assert_close(expert_mlp(x, weights, 1), wanted)
    shape = ExpertShape(hidden=16, intermediate=4, num_experts=2, top_k=1, dtype=torch.float32)
    spec = LayerSpec(shape=shape, layout=ExpertLayout.even(2, 1), activation=activation)
    local = LocalPrepareAndFinalize.capability
    fits = {name: why_not(local, experts.REGISTRY.get(name).capability, spec) for name in ("loop", "triton")}
    assert fits["loop"] == ()
    assert "the experts do not normalise their outputs" in fits["triton"]


def test_layer_numbers():
    assert number_layers(["model.layers.3.mlp.experts", "model.layers.10.mlp.experts"]) == [3, 10]
    assert number_layers(["a.layers.0.experts", "b.layers.0.experts"]) == [0, 1]
    assert number_layers(["mlp.experts"]) == [0]


def test_experts_with_other_shapes_than_declared_are_not_separable(checkpoint):
    from epserve.models.generic import build_on_meta

    model = build_on_meta(checkpoint("granitemoe"))
    assert isinstance(model, architecture("granitemoe"))
    first = find_layers(model)[0]
    first.module.gate_up_proj = nn.Parameter(torch.empty(8, 97, 32, device="meta"))
    with pytest.raises(CheckpointError, match="the experts are not separable"):
        find_layers(model)
