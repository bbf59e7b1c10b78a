"""Layouts of quantised checkpoints for tests: one row each, a matrix -> the tensors that a tool stores, and what they mean.

What they mean is said by the tool itself where it is installed (compressed-tensors, transformers), else by the published formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Suffix of a module's name -> tensor; and the values in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """store: a matrix in float32 and its number -> what a tool makes of it. scheme: in which kernels take it, or "none".

    words: of the plan's row. settings: quantization_config, or with `file` what lies beside config.json.
    """

    name: str
    store: Callable[[torch.Tensor, int], Stored]
    settings: dict[str, Any]
    scheme: str
    words: str
    file: str = ""
    why: str = field(default="")


def _blocked(w: torch.Tensor, r: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = w.shape
    tiles = w.reshape(rows // r, r, columns // c, c)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-9) / 448
    return (tiles / scale[:, None, :, None]).reshape(w.shape).to(FP8), scale


def _out(codes: torch.Tensor, scale: torch.Tensor, r: int, c: int) -> torch.Tensor:
    """transformers' own reading of e4m3 (or packed fp4) with a grid of scales."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)


def fp8_blocks(suffix: str, *, r: int = 128, c: int = 128, dtype: torch.dtype = torch.float32):
    def store(w: torch.Tensor, number: int) -> Stored:
        codes, scale = _blocked(w, r, c)
        if dtype in (E8M0, torch.uint8):
            exponent = torch.ceil(torch.log2(scale))
            scale = exponent.exp2().to(E8M0) if dtype == E8M0 else (exponent + 127).to(torch.uint8)
            wide = exponent.exp2().repeat_interleave(r, 0).repeat_interleave(c, 1)
            codes = (w / wide).clamp(-448, 448).to(FP8)
        else:
            scale = scale.to(dtype)
        return {"weight": codes, suffix: scale}, _out(codes, scale, r, c)

    return store


def fp8_tensor(static: bool):
    def store(w: torch.Tensor, number: int) -> Stored:
        scale = w.abs().max() / 448
        codes = (w / scale).to(FP8)
        made = {"weight": codes, "weight_scale": scale.reshape(1)}
        if static:
            made["input_scale"] = torch.tensor([0.1 + 0.001 * number])
        return made, codes.float() * scale

    return store


def _compressed(kind: str, scale: Callable[[torch.Tensor], dict[str, torch.Tensor]], **weights: Any):
    """By compressed-tensors: its compressor of `kind` writes, and reads again."""

    def store(w: torch.Tensor, number: int) -> Stored:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
        tool = BaseCompressor.get_value_from_registry(kind)
        given = {name: value.bfloat16() if value.dtype == torch.float32 and value.ndim > 1 else value
                 for name, value in scale(w).items()}  # fmt: skip
        made = tool.compress({"weight": w.bfloat16(), **given}, scheme)
        own = tool.decompress(dict(made), scheme)["weight"].detach()
        if "weight_global_scale" in made:  # its own path is in bfloat16 throughout
            codes = unpack_fp4_from_uint8(made["weight_packed"], *w.shape, dtype=torch.float32)
            scale32, outer = made["weight_scale"].float(), made["weight_global_scale"]
            values = dequantize(x_q=codes, scale=scale32, args=args, global_scale=outer, dtype=torch.float32)
        else:
            wide = dict(made)
            if wide["weight_scale"].dtype != torch.uint8:
                wide["weight_scale"] = wide["weight_scale"].float()
            values = tool.decompress(wide, scheme)["weight"].detach().float()
            assert torch.equal(values.bfloat16(), own.bfloat16()), "in the model's dtype the tool says the same"
        return made, values

    return store


def _amax(w: torch.Tensor, group: int, top: float) -> torch.Tensor:
    return w.unflatten(-1, (-1, group)).abs().amax(-1).clamp(min=1e-6) / top


def _channel(top: float):
    return lambda w: {"weight_scale": w.abs().amax(1, keepdim=True) / top}


def _zeros(w: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    parts = w.unflatten(-1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6)
    return {"weight_scale": scale, "weight_zero_point": (-8 - low / scale).round().clamp(-8, 7).to(torch.int8)}


def _powers(w: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight_scale": torch.exp2(torch.ceil(torch.log2(_amax(w, 32, 6.0))))}


def _nvfp4_scales(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outer = 448 * 6 / w.abs().max()
    return (_amax(w, 16, 6.0) * outer).clamp(max=448).to(FP8), outer


def _nv_given(w: torch.Tensor) -> dict[str, torch.Tensor]:
    scale, outer = _nvfp4_scales(w)
    return {"weight_scale": scale.float(), "weight_global_scale": outer.float()}


def modelopt_nvfp4(w: torch.Tensor, number: int) -> Stored:
    """modelopt's published layout: two e2m1 a byte, e4m3 scales, and a float that multiplies."""
    scale, outer = _nvfp4_scales(w)
    factor = 1 / outer
    wide = (scale.float() * factor).repeat_interleave(16, 1)
    codes = (w / wide).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    made = {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": factor.reshape(()),
        "input_scale": torch.ones(()),
    }
    return made, E2M1[codes] * wide


def packed_fp4(w: torch.Tensor, number: int) -> Stored:
    """DeepSeek-V4: I8, two e2m1 a byte, `NAME.scale` in E8M0 for 1x32."""
    scale = torch.exp2(torch.ceil(torch.log2(_amax(w, 32, 6.0))))
    codes = (w / scale.repeat_interleave(32, 1)).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8).view(torch.int8)
    scale = scale.to(E8M0)
    return {"weight": packed, "scale": scale}, _out(packed, scale, 1, 32)


def _words(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`(..., 8 c)` codes of four bits -> int32 `(..., c)`: nibble i of a word is column order[i] of its eight."""
    eight = codes.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    words = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


PLAIN_ORDER, AWQ_PACKS = (0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7)


def awq(w: torch.Tensor, number: int, group: int = 64) -> Stored:
    """AutoAWQ's gemm: everything (in, out), in its own order of nibbles, with zero points."""
    made = _zeros(w, group)
    scale, zero = made["weight_scale"].half(), made["weight_zero_point"].float() + 8
    wide = scale.float().repeat_interleave(group, 1), zero.repeat_interleave(group, 1)
    codes = (w / wide[0] + wide[1]).round().clamp(0, 15)
    stored = {
        "qweight": _words(codes.T.contiguous(), AWQ_PACKS),
        "qzeros": _words(zero.T.contiguous(), AWQ_PACKS),
        "scales": scale.T.contiguous(),
    }
    return stored, (codes - wide[1]) * wide[0]


def gptq(*, act_order: bool = False, symmetric: bool = True, version: int = 1, group: int = 32):
    """AutoGPTQ: (in/8, out) words; version 1 stores zero points less one."""

    def store(w: torch.Tensor, number: int) -> Stored:
        columns = w.shape[1]
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(number))
            if act_order
            else torch.arange(columns)
        )
        group_of = torch.empty(columns, dtype=torch.int32)
        group_of[order] = torch.arange(columns, dtype=torch.int32) // group
        scale = torch.stack([w[:, group_of == each].abs().amax(1) for each in range(columns // group)], 1) / 7
        scale = scale.half()
        zero = torch.full_like(scale, 8.0).float()
        if not symmetric:
            zero += torch.arange(zero.numel()).view(zero.shape) % 3
        index = group_of.long()
        codes = (w / scale.float()[:, index] + zero[:, index]).round().clamp(0, 15)
        stored = {
            "qweight": _words(codes.contiguous(), PLAIN_ORDER).T.contiguous(),
            "qzeros": _words((zero - int(version == 1)).T.contiguous(), PLAIN_ORDER),
            "scales": scale.T.contiguous(),
            "g_idx": group_of,
        }
        return stored, (codes - zero[:, index]) * scale.float()[:, index]

    return store


FINE = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LEFT_OUT = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]


def _config(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": LEFT_OUT,
        "config_groups": {"group_0": group},
    }


_E4M3, _INT = {"num_bits": 8, "type": "float", "symmetric": True}, {"num_bits": 4, "type": "int", "symmetric": True}
_TOKEN8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
_CHANNEL, _BLOCK = {**_E4M3, "strategy": "channel"}, {**_E4M3, "strategy": "block", "block_structure": [128, 128]}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_G32, _ASYM = (
    {**_INT, "strategy": "group", "group_size": 32},
    {**_INT, "strategy": "group", "group_size": 32, "symmetric": False},
)
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_NV, _MX = {**_FP4, "strategy": "tensor_group", "group_size": 16}, {**_FP4, "strategy": "group", "group_size": 32}
_MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}

ROWS = (
    Row(name="fp8 blocks", store=fp8_blocks("weight_scale_inv"), settings=FINE, scheme="fp8_block",
        words="fp8, blocks of 128x128", why="DeepSeek-V3, Qwen3-FP8"),
    Row(name="fp8 blocks, E8M0", store=fp8_blocks("scale", dtype=E8M0), settings={**FINE, "scale_fmt": "ue8m0"},
        scheme="fp8_block", words="fp8, blocks of 128x128", why="DeepSeek-V4's fp8 layers"),
    Row(name="fp8 blocks, bf16 scales", store=fp8_blocks("weight_scale_inv", dtype=torch.bfloat16), settings=FINE,
        scheme="fp8_block", words="fp8, blocks of 128x128"),
    Row(name="fp8 blocks of 1x32, bytes", store=fp8_blocks("weight_scale_inv", r=1, c=32, dtype=torch.uint8),
        settings={**FINE, "weight_block_size": [1, 32]}, scheme="none", words="fp8, blocks of 1x32", why="MXFP8"),
    Row(name="fp8 blocks of 64x64", store=fp8_blocks("weight_scale_inv", r=64, c=64),
        settings={**FINE, "weight_block_size": [64, 64]}, scheme="none", words="fp8, blocks of 64x64"),
    Row(name="qscale_weight", store=fp8_blocks("qscale_weight"), settings=FINE, scheme="fp8_block",
        words="fp8, blocks of 128x128", why="Mistral Large 4's name"),
    Row(name="fp8 a tensor, static", store=fp8_tensor(True), settings={"quant_method": "fp8", "activation_scheme": "static"},
        scheme="fp8_tensor", words="fp8, a scale a tensor, static activations"),
    Row(name="fp8 a tensor, dynamic", store=fp8_tensor(False), settings={"quant_method": "fp8", "activation_scheme": "dynamic"},
        scheme="fp8_channel", words="fp8, a scale a tensor"),
    Row(name="modelopt fp8", store=fp8_tensor(True), settings={"quant_method": "modelopt", "quant_algo": "FP8"},
        scheme="fp8_tensor", words="fp8, a scale a tensor, static activations"),
    Row(name="modelopt nvfp4", store=modelopt_nvfp4, settings=_MODELOPT, file="hf_quant_config.json", scheme="nvfp4",
        words="nvfp4", why="the configuration lies beside config.json"),
    Row(name="compressed fp8, channels", store=_compressed("float-quantized", _channel(448), **_CHANNEL),
        settings=_config("float-quantized", _CHANNEL, _TOKEN8), scheme="fp8_channel", words="fp8, a scale a channel"),
    Row(name="compressed fp8, weights only", store=_compressed("float-quantized", _channel(448), **_CHANNEL),
        settings=_config("float-quantized", _CHANNEL), scheme="none", words="fp8, a scale a channel, weights only"),
    Row(name="compressed fp8, blocks", store=fp8_blocks("weight_scale"),
        settings=_config("float-quantized", _BLOCK, _TOKEN8), scheme="fp8_block", words="fp8, blocks of 128x128"),
    Row(name="compressed int8", store=_compressed("int-quantized", _channel(127), **_INT8),
        settings=_config("int-quantized", _INT8, {**_TOKEN8, "type": "int"}), scheme="int8_channel",
        words="int8, a scale a channel"),
    Row(name="compressed int4", store=_compressed("pack-quantized", lambda w: {"weight_scale": _amax(w, 32, 7.0)}, **_G32),
        settings=_config("pack-quantized", _G32), scheme="int4", words="int of 4 bits, groups of 32", why="Kimi-K2-Thinking"),
    Row(name="compressed int4, zero points", store=_compressed("pack-quantized", lambda w: _zeros(w, 32), **_ASYM),
        settings=_config("pack-quantized", _ASYM), scheme="none", words="int of 4 bits, groups of 32"),
    Row(name="compressed nvfp4", settings=_config("nvfp4-pack-quantized", _NV), scheme="nvfp4", words="nvfp4",
        store=_compressed("nvfp4-pack-quantized",
                          _nv_given, **_NV)),
    Row(name="compressed mxfp4", store=_compressed("mxfp4-pack-quantized", _powers, **_MX),
        settings=_config("mxfp4-pack-quantized", _MX), scheme="mxfp4", words="mxfp4"),
    Row(name="packed fp4", store=packed_fp4, settings={**FINE, "scale_fmt": "ue8m0"}, scheme="mxfp4", words="mxfp4",
        why="DeepSeek-V4's experts"),
    Row(name="awq", store=awq, settings=_AWQ,
        scheme="none", words="awq of 4 bits, groups of 64"),
    Row(name="gptq", store=gptq(), settings=_GPTQ, scheme="int4", words="gptq of 4 bits, groups of 32"),
    Row(name="gptq, version 2", store=gptq(version=2), settings={**_GPTQ, "checkpoint_format": "gptq_v2"}, scheme="int4",
        words="gptq of 4 bits, groups of 32"),
    Row(name="gptq, act-order", store=gptq(act_order=True), settings={**_GPTQ, "desc_act": True}, scheme="none",
        words="gptq of 4 bits, groups of 32"),
    Row(name="gptq, zero points", store=gptq(symmetric=False), settings={**_GPTQ, "sym": False}, scheme="none",
        words="gptq of 4 bits, groups of 32"),
)  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}


def meaning(weights, quant):
    """w13 and w2 in float32, by the table of `QuantConfig`."""
    found = []
    for codes, scale in ((weights.w13_eNK, weights.s13), (weights.w2_eKN, weights.s2)):
        if quant.scheme == "none":
            found.append(codes.float())
            continue
        if quant.packed:
            two = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
            values = E2M1[two] if quant.scheme != "int4" else two.float() - 8
            scale = torch.exp2(scale.float() - 127) if quant.scheme == "mxfp4" else scale.float()
            found.append(values * scale.repeat_interleave(values.shape[-1] // scale.shape[-1], -1))
            continue
        if quant.scheme == "fp8_block":
            wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : codes.shape[1], : codes.shape[2]]
        else:
            wide = scale.view(*scale.shape, *(1,) * (3 - scale.ndim))
        found.append(codes.float() * wide)
    return found


def write_stored(
    row: Row, folder: Path, *, family: str = "qwen3_moe", keep: Callable[[str], bool] = lambda name: False, **sizes: Any
) -> tuple[Path, Path]:
    """A checkpoint in the row's layout, and one in float32 with what its tensors mean. keep: matrices that stay as they are."""
    sizes = {"hidden": 256, "intermediate": 128, "num_experts": 4, "dtype": torch.bfloat16, "seed": 3} | sizes
    plain = write(family, folder / "plain", **sizes)
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    stored, means = {}, {}
    for number, (name, value) in enumerate(sorted(tensors.items())):
        if ".experts." not in name or not name.endswith(".weight") or keep(name):
            stored[name], means[name] = value, value.float() if value.is_floating_point() else value
            continue
        made, values = row.store(value.float(), number)
        stored |= {f"{name.removesuffix('weight')}{suffix}": each.contiguous() for suffix, each in made.items()}
        means[name] = values
    path = folder / "stored"
    path.mkdir()
    save_file(stored, path / "model.safetensors")
    save_file({name: value.contiguous() for name, value in means.items()}, plain / "model.safetensors")
    beside = {} if row.file else {"quantization_config": row.settings}
    (path / "config.json").write_text(json.dumps(config | beside))
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}))
    if row.file:
        (path / row.file).write_text(json.dumps(row.settings))
    return path, plain
