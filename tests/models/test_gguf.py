"""GGUF files: written and multiplied out by the package `gguf`, served as the Hugging Face folder of the same values."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from epserve.errors import CheckpointError
from epserve.models import UnchangedCheckpoint, open_checkpoint
from epserve.models.gguf_files import ARCHS
from tests.support.checkpoints import LAYER, edit_config, write

E, K, N = 4, 256, 256
PARTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
Q = gguf.GGMLQuantizationType


def convert(plain, file, arch, kind, keys, *, bias=(), rename=None):
    """The folder's MoE blocks as llama.cpp stores them; the folder then holds what the file means."""
    tensors = load_file(plain / "model.safetensors")
    writer = gguf.GGUFWriter(file, arch)
    for name, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_bool if isinstance(value, bool) else add)(f"{arch}.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((4, K), dtype=np.float32))
    prefix = next(name.split("experts.")[0] for name in tensors if ".experts." in name).replace(".1.", ".{}.")
    prefix = prefix.replace(".0.", ".{}.")
    for layer in range(2):
        block = prefix.format(layer)
        names = [name for name in tensors if name.startswith(block) and ".experts." not in name]
        for name in names:
            writer.add_tensor(f"blk.{layer}.{rename[name.removeprefix(block)]}", tensors[name].float().numpy())
        for part, target in PARTS.items():
            inner = next(
                (old for old, new in OF_MIXTRAL.items() if new == part and f"{block}experts.0.{old}.weight" in tensors),
                part,
            )
            keys_of = [f"{block}experts.{expert}.{inner}.weight" for expert in range(E)]
            if keys_of[0] not in tensors:
                continue
            stack = torch.stack([tensors[key].float() for key in keys_of]).numpy()
            if kind in (Q.F32, Q.F16):
                raw = stack.astype(np.float16 if kind == Q.F16 else np.float32)
                writer.add_tensor(f"blk.{layer}.{target}.weight", raw)
                means = raw.astype(np.float32)
            else:
                raw = quantised(stack, kind)
                writer.add_tensor(f"blk.{layer}.{target}.weight", raw, raw_dtype=kind)
                means = gguf.quants.dequantize(raw, kind)
            tensors |= {key: torch.from_numpy(means[expert].copy()) for expert, key in enumerate(keys_of)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({name: value.float().contiguous() for name, value in tensors.items()}, plain / "model.safetensors")
    edit_config(plain, dtype="float32")


def quantised(stack, kind):
    """The package cannot write the K types: their bytes are drawn, with small numbers for scales, and mean what they mean."""
    try:
        return gguf.quants.quantize(stack, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(0).integers(
            0, 64, (*stack.shape[:-1], stack.shape[-1] // block, size), dtype=np.uint8
        )
        half = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
        at = {Q.Q4_K: (0, 2), Q.Q6_K: (size - 2,)}[kind]
        for start in at:
            raw[..., start : start + 2] = half
        return raw.reshape(*stack.shape[:-1], -1)


QWEN = {"embedding_length": K, "block_count": 2, "expert_count": E, "expert_used_count": 2, "feed_forward_length": N,
        "expert_feed_forward_length": N}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """kind -> (the GGUF file of a qwen3_moe, the folder with the same values)."""
    done = {}

    def get(kind):
        if kind not in done:
            folder = tmp_path_factory.mktemp("gguf")
            plain = write("qwen3_moe", folder / "plain", hidden=K, intermediate=N, num_experts=E, seed=2)
            edit_config(plain, norm_topk_prob=True)
            file = folder / f"model-{kind.name}.gguf"
            convert(plain, file, "qwen3moe", kind, QWEN, rename={"gate.weight": "ffn_gate_inp.weight"})
            done[kind] = file, plain
        return done[kind]

    return get


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0, Q.Q4_0, Q.Q4_K, Q.Q6_K, Q.MXFP4], ids=lambda kind: kind.name)
def test_each_type_is_what_the_package_makes_of_it(made, kind):
    file, plain = made(kind)
    found, wanted = open_checkpoint(file), open_checkpoint(plain)
    stored = {Q.F32: "F32", Q.F16: "F16"}.get(kind, f"gguf {kind.name}")
    assert [each.name for each in found.info.stored] == [stored] and found.info.quant.scheme == "none"
    assert found.info.gate == wanted.info.gate and found.info.layers == wanted.info.layers
    assert found.info.dtype == torch.bfloat16
    got, want = (each.load_layer(LAYER, [3, 0]) for each in (found, wanted))
    assert torch.equal(got.experts.w13_eNK, want.experts.w13_eNK.bfloat16())
    assert torch.equal(got.experts.w2_eKN, want.experts.w2_eKN.bfloat16())
    assert torch.equal(got.gate.weight_EK.float(), want.gate.weight_EK.bfloat16().float())


def test_mixtral_is_of_the_architecture_llama(tmp_path):
    plain = write("mixtral", tmp_path / "plain", hidden=K, intermediate=N, num_experts=E, seed=4)
    keys = {name: value for name, value in QWEN.items() if name != "expert_feed_forward_length"}
    convert(plain, tmp_path / "m.gguf", "llama", Q.Q8_0, keys, rename={"gate.weight": "ffn_gate_inp.weight"})
    found, wanted = open_checkpoint(tmp_path), open_checkpoint(plain)  # a folder without config.json
    assert found.info.family == "mixtral" and found.info.gate == wanted.info.gate
    got, want = (each.load_layer(LAYER, [1]).experts for each in (found, wanted))
    assert torch.equal(got.w13_eNK, want.w13_eNK.bfloat16()) and torch.equal(got.w2_eKN, want.w2_eKN.bfloat16())


def test_pieces_are_one_model_and_several_models_are_none(made, tmp_path):
    file, _ = made(Q.Q8_0)
    shutil.copy(file, tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).info.num_experts == E
    shutil.copy(file, tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"holds several GGUF models: a, b; name one file"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "b.gguf").info.name == "b.gguf"


def test_a_file_that_changes_is_noticed(made, tmp_path):
    file = tmp_path / "a.gguf"
    shutil.copy(made(Q.Q8_0)[0], file)
    seen = UnchangedCheckpoint(file)
    assert seen.stamp.with_digest().digest
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="has changed since the start"):
        seen.load_layer(LAYER, [0])


def test_other_architectures_and_damaged_files_are_one_line(made, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    known = ", ".join(ARCHS)
    with pytest.raises(
        CheckpointError, match=rf"GGUF of architecture 'falcon': not supported \(known: {known}\); serve"
    ):
        open_checkpoint(tmp_path / "other.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(CheckpointError, match=r"broken\.gguf is not a GGUF file") as error:
        open_checkpoint(tmp_path / "broken.gguf")
    assert "\n" not in str(error.value)
    whole = made(Q.Q8_0)[0].read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        open_checkpoint(tmp_path / "cut.gguf").load_layer(LAYER, [E - 1])
