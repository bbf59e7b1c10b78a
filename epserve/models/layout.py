"""Finds the tensors of a checkpoint that are one MoE layer of a family with a table. Pure functions of names and shapes.

Legend: K hidden size, N intermediate size, S intermediate size of the shared experts, E logical experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel import UNQUANTIZED
from epserve.modular_kernel.weights import empty_weights, slot_view

from .families import ExpertForm, Family
from .info import ModelInfo
from .stored.experts import StoredExperts
from .stored.layouts import StoredTensor

SHOWN = 5  # names in one error message
BASE_PREFIX = "model."  # transformers' base_model_prefix of every family with a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Describes one MoE layer's place in the checkpoint: the prefix of its names and the form of its experts."""

    prefix: str
    form: ExpertForm

    def experts(self, tensors: Mapping[str, StoredTensor], num_experts: int) -> StoredExperts:
        def of(pattern: str) -> tuple[StoredTensor, ...]:
            every = range(num_experts) if "{e}" in pattern else (0,)
            return tuple(tensors[self.prefix + pattern.format(e=expert)] for expert in every)

        form = self.form
        found = {role: of(pattern) for role, pattern in form.tensors.items()}
        return StoredExperts(tensors=found, transposed=form.transposed, interleaved=form.interleaved)


def find_block(info: ModelInfo, family: Family, tensors: Mapping[str, StoredTensor], layer: int, path: Path) -> Block:
    """Returns the prefix and form that fit the names of this layer best, after a check of every name and shape.

    Raises CheckpointError for missing, surplus and misshapen tensors, and for tensors in no known layout.
    """
    prefixes = [each.format(layer=layer) for each in family.blocks]
    prefixes += [each.removeprefix(BASE_PREFIX) for each in prefixes]  # saved by the base model, without its head
    choices = [Block(prefix=prefix, form=form) for prefix in prefixes for form in family.forms]
    block = max(choices, key=lambda block: sum(name in tensors for name in expected_shapes(info, family, block)))
    expected = expected_shapes(info, family, block)
    present = {name for name in tensors if name.startswith(block.prefix)}
    for name in sorted(present):
        tensors[name].check()
    for what, names in (("missing", expected.keys() - present), ("surplus", present - expected.keys())):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise CheckpointError(f"{path}: layer {layer} of family {info.family}: {what} tensors {shown}{more}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            found = f"{tensors[name].shape} in {tensors[name].parts['weight'].file.name}"
            raise CheckpointError(f"{path}: tensor {name} is {found}, config.json makes it {shape}")
    return block


def expected_shapes(info: ModelInfo, family: Family, block: Block) -> dict[str, tuple[int, ...]]:
    """Returns every matrix and vector that must lie beneath the block, with its shape after multiplying out."""
    K = info.hidden
    gate = {"weight": (info.num_experts, K), "bias": (info.num_experts,), "correction_bias": (info.num_experts,)}
    shapes = {family.gate_tensors[role]: gate[role] for role in family.gate_tensors}
    shapes |= _expert_shapes(info, block.form)
    if family.shared and info.shared_intermediate:
        form, size = family.shared, info.shared_intermediate
        shapes |= {form.gate: (size, K), form.up: (size, K), form.down: (K, size)}
        if form.sigmoid_gate:
            shapes[form.sigmoid_gate] = (1, K)
    return {block.prefix + name: shape for name, shape in shapes.items()}


def _expert_shapes(info: ModelInfo, form: ExpertForm) -> dict[str, tuple[int, ...]]:
    one = empty_weights(info.sizes, UNQUANTIZED, 1, torch.device("meta"))
    shapes: dict[str, tuple[int, ...]] = {}
    for role, pattern in form.tensors.items():
        part = slot_view(one, 0, role, transposed=form.transposed)
        if "{e}" in pattern:
            shapes |= {pattern.format(e=expert): tuple(part.shape) for expert in range(info.num_experts)}
        else:
            shapes[pattern] = (info.num_experts, *part.shape)
    return shapes
