"""Where each tensor of a checkpoint belongs in the canonical layout of `ExpertWeights`. Pure functions of names and shapes.

Legend: K hidden size, N intermediate size, S intermediate size of the shared experts, E logical experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel import ExpertWeights
from epserve.modular_kernel.quantization import BLOCK, FP8

from .families import FAMILIES, ExpertForm
from .info import ModelInfo
from .tensors import TensorInfo

SCALE_SUFFIX = "_scale_inv"  # DeepSeek's name; in spite of it the values multiply
SHOWN = 5  # names in one error message
BASE_PREFIX = "model."  # transformers' base_model_prefix of every family with a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How one MoE layer lies in the checkpoint: the prefix of its names and the form of its experts."""

    prefix: str
    form: ExpertForm


def allocate(info: ModelInfo, num_experts: int, device: torch.device) -> ExpertWeights:
    """The stacked tensors of `num_experts` experts, each allocated once, with undefined contents."""
    wide, K, N = _rows_13(info), info.hidden, info.intermediate
    blockwise = info.quant.scheme == "fp8_block"

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((num_experts, *shape), dtype=dtype, device=device)

    return ExpertWeights(
        activation=info.activation,
        w13_eNK=empty(FP8 if blockwise else info.dtype, wide, K),
        w2_eKN=empty(FP8 if blockwise else info.dtype, K, N),
        b13=empty(info.dtype, wide) if info.bias else None,
        b2=empty(info.dtype, K) if info.bias else None,
        s13=empty(torch.float32, _blocks(wide), _blocks(K)) if blockwise else None,
        s2=empty(torch.float32, _blocks(K), _blocks(N)) if blockwise else None,
    )


def slot_view(weights: ExpertWeights, slot: int, role: str, form: ExpertForm) -> torch.Tensor:
    """The part of one slot that `role` fills, as a view whose elements come in the order of the file."""
    matrix = next(name for name in ("gate_up", "gate", "up", "down") if role.startswith(name))
    kind = role.removeprefix(matrix).removeprefix("_")
    field = {"": ("w13_eNK", "w2_eKN"), "bias": ("b13", "b2"), "scale": ("s13", "s2")}[kind][matrix == "down"]
    part = getattr(weights, field)[slot]
    if matrix in ("gate", "up") and weights.activation.gated:
        half = part.shape[0] // 2
        part = part[:half] if matrix == "gate" else part[half:]
    if matrix == "gate_up" and form.interleaved:
        part = part.unflatten(0, (2, -1)).transpose(0, 1)  # (N, 2, ...): gate and up of one row side by side
    if form.transposed and kind != "bias":
        part = part.movedim(-1, 0)
    return part


def find_block(info: ModelInfo, tensors: Mapping[str, TensorInfo], layer: int, path: Path) -> Block:
    """The prefix and form that fit the names of this layer best; every name and shape is then checked.

    Raises CheckpointError for missing, surplus and misshapen tensors.
    """
    family = FAMILIES[info.family]
    prefixes = [each.format(layer=layer) for each in family.blocks]
    prefixes += [each.removeprefix(BASE_PREFIX) for each in prefixes]  # saved by the base model, without its head
    choices = [Block(prefix=prefix, form=_with_scales(info, form)) for prefix in prefixes for form in family.forms]
    block = max(choices, key=lambda block: sum(name in tensors for name in expected_shapes(info, block)))
    expected = expected_shapes(info, block)
    present = {name for name in tensors if name.startswith(block.prefix)}
    for what, names in (("missing", expected.keys() - present), ("surplus", present - expected.keys())):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise CheckpointError(f"{path}: layer {layer} of family {info.family}: {what} tensors {shown}{more}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = f"{tensors[name].shape} in {tensors[name].file.name}"
            raise CheckpointError(f"{path}: tensor {name} is {found}, config.json makes it {shape}")
    return block


def expected_shapes(info: ModelInfo, block: Block) -> dict[str, tuple[int, ...]]:
    """Every tensor that must lie beneath the block, with its shape on disk."""
    family, K = FAMILIES[info.family], info.hidden
    gate = {"weight": (info.num_experts, K), "bias": (info.num_experts,), "correction_bias": (info.num_experts,)}
    shapes = {family.gate_tensors[role]: gate[role] for role in family.gate_tensors}
    shapes |= _expert_shapes(info, block.form)
    if family.shared and info.shared_intermediate:
        form, size = family.shared, info.shared_intermediate
        dense = {form.gate: (size, K), form.up: (size, K), form.down: (K, size)}
        if info.quant.scheme == "fp8_block":
            dense |= {name + SCALE_SUFFIX: (_blocks(rows), _blocks(columns)) for name, (rows, columns) in dense.items()}
        if form.sigmoid_gate:
            dense[form.sigmoid_gate] = (1, K)
        shapes |= dense
    return {block.prefix + name: shape for name, shape in shapes.items()}


def _expert_shapes(info: ModelInfo, form: ExpertForm) -> dict[str, tuple[int, ...]]:
    one = allocate(info, 1, torch.device("meta"))
    shapes: dict[str, tuple[int, ...]] = {}
    for role, pattern in form.tensors.items():
        part = slot_view(one, 0, role, replace(form, interleaved=False))
        if "{e}" in pattern:
            shapes |= {pattern.format(e=expert): tuple(part.shape) for expert in range(info.num_experts)}
        else:
            shapes[pattern] = (info.num_experts, *part.shape)
    return shapes


def _with_scales(info: ModelInfo, form: ExpertForm) -> ExpertForm:
    """In a block-quantised checkpoint each weight has its scales beside it."""
    if info.quant.scheme != "fp8_block":
        return form
    scales = {f"{role}_scale": name + SCALE_SUFFIX for role, name in form.tensors.items() if not role.endswith("_bias")}
    return replace(form, tensors={**form.tensors, **scales})


def _rows_13(info: ModelInfo) -> int:
    if info.quant.scheme == "fp8_block" and info.activation.gated and info.intermediate % BLOCK:
        raise CheckpointError(
            f"block-quantised experts: intermediate size {info.intermediate} does not divide by {BLOCK}"
        )
    return info.intermediate * (2 if info.activation.gated else 1)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)
