"""Applies transformers' own conversion mapping: which tensors make up an experts parameter, and by which operations.

transformers renames, merges, concatenates and transposes a checkpoint's tensors by rules that it keeps for each model type.
This module runs the same rules for the experts of one rank only. When the rules work expert by expert, the bytes of the
other experts are never read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epserve.errors import CheckpointError

from .stored.layouts import StoredTensor
from .stored.matrices import StoredReader

SHOWN = 3  # names in one error message


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Describes how one parameter of the model is made, or several parameters that one converter makes together.

    Args:
        sources: pattern -> names of tensors, in the order of their numbers.
        converter: the operations. None when only names differ.
        by_expert: no operation mixes experts. A source with one tensor holds the experts along its first dimension,
            any other source has one tensor an expert.
    """

    target: str
    converter: Any
    keys: tuple[str, ...]
    """Every parameter that the recipe makes."""
    sources: Mapping[str, tuple[str, ...]]
    by_expert: bool = False


def find_recipes(model: Any, tensors: Mapping[str, StoredTensor], wanted: Mapping[str, int]) -> dict[str, Recipe]:
    """Finds the recipe of each wanted parameter.

    Args:
        wanted: name of a parameter in `model` (on the meta device) -> its number of experts, 0 when all experts share it.

    Raises:
        CheckpointError: no tensor of the checkpoint leads to a parameter, or experts are missing or surplus.
    """
    found: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name, target, pattern, converter in destinations(model, tensors):
        if any(key in wanted for key in _targets(target, converter)):
            _, sources = found.setdefault(target, (converter, {}))
            sources.setdefault(pattern or target, []).append(name)
    tied = getattr(model, "all_tied_weights_keys", {})
    recipes = {}
    for target, (converter, sources) in found.items():
        keys = _targets(target, converter)
        fixed = {pattern: tuple(names) for pattern, names in sources.items()}
        recipe = Recipe(target=target, converter=converter, sources=fixed, keys=keys)
        for key in keys:
            if key in wanted:
                recipes[key] = _checked(recipe, tensors, wanted[key])
    for key in wanted:
        if key not in recipes and tied.get(key) in recipes:
            recipes[key] = recipes[tied[key]]
    missing = [key for key in wanted if key not in recipes]
    if missing:
        raise CheckpointError(f"nothing in the checkpoint leads to {_some(missing)} of {type(model).__name__}")
    return recipes


def destinations(model: Any, names: Iterable[str], rules: Any = None) -> Iterator[tuple[str, str, str | None, Any]]:
    """Yields for each tensor of a checkpoint its name, its first target parameter in `model`, the pattern and the converter.

    Pattern and converter are None when only names differ. rules: a conversion mapping, by default the model's own.
    """
    from transformers import conversion_mapping, core_model_loading

    mapping = conversion_mapping.get_model_conversion_mapping(model) if rules is None else rules
    renamings = [rule for rule in mapping if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, core_model_loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    for name in sorted(names, key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = core_model_loading.rename_source_key(name, [], [], prefix, state)
        yield name, target, pattern, by_pattern[pattern] if pattern is not None else None


def read(
    recipe: Recipe,
    key: str,
    *,
    experts: Sequence[int] | None,
    tensors: Mapping[str, StoredTensor],
    reader: StoredReader,
    model: Any,
) -> torch.Tensor:
    """Returns parameter `key` for these experts in this order: `(e, ...)`, with the other dimensions that the model declares.

    experts: None returns all of them.
    """
    shape = model.get_parameter(key).shape
    experts = range(shape[0]) if experts is None else experts
    if not experts:
        return torch.empty((0, *shape[1:]))
    collected: dict[str, list[torch.Tensor]] = {}
    for pattern, names in recipe.sources.items():
        if not recipe.by_expert:
            collected[pattern] = [reader.read(tensors[name]) for name in names]
        elif len(names) == 1:
            info = tensors[names[0]]
            collected[pattern] = [torch.stack([reader.read(info, expert) for expert in experts])]
        else:
            collected[pattern] = [reader.read(tensors[names[expert]]) for expert in experts]
    if recipe.converter is None:
        value = next(iter(collected.values()))[0]
    else:
        converter = copy.deepcopy(recipe.converter)
        converter.collected_tensors = collected
        stand_in = _StandIn(model, len(experts)) if recipe.by_expert else model
        made = converter.convert(recipe.target, model=stand_in, config=model.config)
        value = made[key][0] if isinstance(made[key], list) else made[key]
    if not recipe.by_expert:
        value = value[list(experts)] if value.shape[0] == shape[0] else value
    if value.shape != (len(experts), *shape[1:]):
        raise CheckpointError(f"{key}: the checkpoint makes shape {tuple(value.shape)} of it, expected {tuple(shape)}")
    return value


class _StandIn:
    """Stands for the model when operations run: a parameter's shape has only the experts that are read."""

    def __init__(self, model: Any, num_experts: int):
        self._model, self._num_experts = model, num_experts
        self.config = model.config

    def get_parameter(self, name: str) -> torch.Tensor:
        shape = self._model.get_parameter(name).shape
        return torch.empty((self._num_experts, *shape[1:]), device="meta")


def _targets(target: str, converter: Any) -> tuple[str, ...]:
    if converter is None:
        return (target,)
    first = converter.target_patterns[0]
    return tuple(target.replace(first, each) for each in converter.target_patterns)


def _checked(recipe: Recipe, tensors: Mapping[str, StoredTensor], num_experts: int) -> Recipe:
    """Returns the recipe with `by_expert` decided. Raises CheckpointError when an expert's tensor is missing or surplus."""
    if len(recipe.keys) > 1 or not all(_keeps_experts(step) for step in getattr(recipe.converter, "operations", ())):
        return recipe
    for pattern, names in recipe.sources.items():
        if "*" not in pattern:
            if len(names) != 1 or tensors[names[0]].shape[:1] != (num_experts,):
                return recipe
            continue
        absent = [number for number in range(num_experts) if number >= len(names) or f".{number}." not in names[number]]
        if absent or len(names) > num_experts:
            raise CheckpointError(
                f"{recipe.target}: {len(names)} tensors match {pattern} ({_some(names)}), there must be one for each of"
                f" {num_experts} experts" + (f"; the first that is missing is {absent[0]}" if absent else "")
            )
    return replace(recipe, by_expert=True)


def _keeps_experts(step: Any) -> bool:
    """Returns whether an operation works expert by expert, on tensors whose first dimension is the expert."""
    match type(step).__name__:
        case "MergeModulelist":
            return step.dim == 0
        case "Concatenate" | "Interleave":
            return step.dim != 0
        case "Transpose":
            return 0 not in (step.dim0, step.dim1)
        case "Inkling2LoopDequantizeExperts":
            return True
    return False


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def plain_sources(recipe: Recipe, *, transposed: bool) -> tuple[tuple[tuple[str, ...], ...], bool] | None:
    """Returns the tensors that make the parameter when written one below the other, and whether they are (in, out).

    transposed: the parameter is (in, out). Returns None when operations do more than stack, join and turn matrices.
    """
    if not recipe.by_expert:
        return None
    if recipe.converter is None:
        return tuple(recipe.sources.values()), transposed
    names = [type(step).__name__ for step in recipe.converter.operations]
    steps = dict(zip(names, recipe.converter.operations, strict=True))
    if names != [each for each in ("MergeModulelist", "Concatenate", "Transpose") if each in steps]:
        return None
    if "Concatenate" in steps and steps["Concatenate"].dim != 1:
        return None
    if "Transpose" in steps and {steps["Transpose"].dim0 % 3, steps["Transpose"].dim1 % 3} != {1, 2}:
        return None
    turned = transposed != ("Transpose" in steps)
    if turned and "Concatenate" in steps:
        return None
    patterns = [each for each in recipe.converter.source_patterns if each in recipe.sources]
    if len(patterns) != len(recipe.sources) or (len(patterns) > 1 and "Concatenate" not in steps):
        return None
    return tuple(recipe.sources[pattern] for pattern in patterns), turned
