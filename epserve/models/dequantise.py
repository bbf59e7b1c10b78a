"""Quantised tensors of a checkpoint, read as floats: for families whose experts have no quantised layout of ours.

fp8 in blocks (DeepSeek's format): `NAME` in e4m3 and `NAME_scale_inv`, one float32 for each 128 x 128 block; they multiply.
mxfp4 (gpt-oss): `NAME_blocks` with two 4-bit floats a byte, the even one low, and `NAME_scales`, an exponent for 32 of them;
together they are `NAME` with its last two dimensions swapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel.quantization import BLOCK

from .tensors import TensorInfo, TensorReader, shown

SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
MXFP4 = "MXFP4"  # dtype of a tensor that is put together from its blocks and scales
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def method(config: Mapping[str, Any], source: str) -> str:
    """The checkpoint's quantisation as far as it can be read here, or "". Raises CheckpointError for any other."""
    text = config.get("text_config")
    declared = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if not declared:
        return ""
    if not isinstance(declared, dict):
        raise CheckpointError(f"{source}: quantization_config must be an object, got {shown(declared)}")
    name, block = declared.get("quant_method"), declared.get("weight_block_size")
    if name == "mxfp4" or (name == "fp8" and block == [BLOCK, BLOCK]):
        return name
    raise CheckpointError(
        f"{source}: quantisation {name!r} with weight_block_size {block} is not loaded for model_type"
        f" {config.get('model_type')!r}; known: 'fp8' with [128, 128], 'mxfp4', or none"
    )


def with_whole_tensors(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Blocks and scales of mxfp4 become one entry each, under the name and with the shape of what they stand for."""
    found = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix(BLOCKS)
        if whole != name and whole + SCALES in tensors:
            if len(blocks.shape) != 4:
                raise CheckpointError(f"tensor {name} has shape {blocks.shape}, mxfp4 blocks have 4 dimensions")
            experts, rows, groups, half = blocks.shape
            found[whole] = replace(blocks, name=whole, dtype=MXFP4, shape=(experts, groups * half * 2, rows))
    return found


class FloatReader:
    """As TensorReader, for what `with_whole_tensors` gave. Quantised tensors come out in float32, others as they are."""

    def __init__(self, reader: TensorReader, tensors: Mapping[str, TensorInfo]):
        self._reader, self._tensors = reader, tensors

    def read(self, info: TensorInfo, index: int | None = None) -> torch.Tensor:
        """The tensor, or `tensor[index]` along the first dimension; the caller's own."""
        if info.dtype == MXFP4:
            return self._mxfp4(info, index)
        if info.dtype != "F8_E4M3":
            return self._reader.read(info, index).clone()
        if info.name + SCALE not in self._tensors:
            raise CheckpointError(f"tensor {info.name} is in fp8 and {info.name + SCALE} is missing")
        value = self._reader.read(info, index).float()
        scale = self._reader.read(self._tensors[info.name + SCALE], index).float()
        rows, columns = value.shape[-2:]
        wanted = (*value.shape[:-2], -(-rows // BLOCK), -(-columns // BLOCK))
        if scale.shape != wanted:
            raise CheckpointError(f"tensor {info.name + SCALE}: {tuple(scale.shape)} scales, its blocks need {wanted}")
        spread = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
        return value.mul_(spread)

    def _mxfp4(self, info: TensorInfo, index: int | None) -> torch.Tensor:
        """`(K, rows)`, or with all experts `(E, K, rows)`."""
        packed = self._reader.read(self._tensors[info.name + BLOCKS], index).clone()
        exponent = self._reader.read(self._tensors[info.name + SCALES], index).int() - EXPONENT_BIAS
        if exponent.shape != packed.shape[:-1]:
            found, wanted = tuple(exponent.shape), tuple(packed.shape[:-1])
            raise CheckpointError(f"tensor {info.name + SCALES}: {found} scales, its blocks need {wanted}")
        values = torch.tensor(E2M1)
        pairs = torch.stack(
            (values[(packed & 0xF).long()], values[(packed >> 4).long()]), dim=-1
        )  # (..., groups, 16, 2)
        whole = torch.ldexp(pairs.flatten(-2), exponent.unsqueeze(-1)).flatten(-2)
        return whole.transpose(-1, -2).contiguous()
