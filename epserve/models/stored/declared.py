"""Reads a checkpoint's declaration of its quantisation: config.json, or the file that a tool leaves beside it.

The tensors' names and dtypes give their layout. The declaration gives the facts that tensors cannot show (bits of a code,
sides of a block, whether activations are quantised). Both must agree.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epserve.errors import CheckpointError
from epserve.models.tensors import read_json, shown

BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""The files of modelopt, AutoGPTQ and AutoAWQ. They are read when config.json has no quantization_config."""
KNOWN = ("fp8", "fbgemm_fp8", "mxfp8", "compressed-tensors", "modelopt", "mxfp4", "awq", "gptq")
IGNORED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")
DYNAMIC, STATIC, NONE = "dynamic", "static", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Describes the modules that one part of the configuration is about. A field that is None is not declared.

    Args:
        block: the rows and columns that share a scale.
        group: the columns that share a scale.
        activations: the way in which activations are quantised.
    """

    targets: tuple[str, ...] = ()
    """Names, prefixes, regular expressions ("re:...") or classes. Empty: every linear module."""
    bits: int | None = None
    block: tuple[int, int] | None = None
    group: int | None = None
    symmetric: bool = True
    activations: str = DYNAMIC
    act_order: bool = False
    """GPTQ's desc_act: the columns of a group do not lie together."""
    zero_point_offset: int = 0
    """The number to add to GPTQ's stored zero points: 1, and 0 in its version 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Holds a declaration. `method`: empty when nothing is declared. `source`: the file with the declaration."""

    method: str = ""
    source: str = ""
    rules: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = field(default=())

    def rule(self, name: str) -> Rule | None:
        """Returns the rule for the module with this tensor. None: the module is not quantised."""
        module = name.removesuffix(".weight")
        if any(matches(module, pattern) for pattern in self.ignored):
            return None
        for rule in self.rules:
            if not rule.targets or any(_is_class(each) or matches(module, each) for each in rule.targets):
                return rule
        return None


def matches(module: str, pattern: str) -> bool:
    """Matches as the tools do: "re:" and a regular expression, a name with *, or whole parts of the dotted name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."


def _is_class(target: str) -> bool:
    """Returns whether a target is a class ("Linear", or a class of experts) rather than a name."""
    return target[:1].isupper() and "." not in target


def read(path: Path, config: Mapping[str, Any]) -> Declared:
    """Returns the declaration of the checkpoint. Raises CheckpointError for an unknown method."""
    source = str(path / "config.json")
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    found: Any = next(
        (each for holder in (config, text) for key in ("quantization_config", "compression_config")
         if (each := holder.get(key))), None,
    )  # fmt: skip
    for name in BESIDE:
        if found is None and (path / name).exists():
            found, source = read_json(path / name), str(path / name)
            inner = found.get("quantization", found)
            found = {"quant_method": _method_of(name), **inner} if isinstance(inner, Mapping) else inner
    if not found:
        return Declared()
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source}: quantization_config must be an object, got {shown(found)}")
    method = str(found.get("quant_method") or ("modelopt" if found.get("quant_algo") else ""))
    if method not in KNOWN:
        raise CheckpointError(
            f"{source}: quantisation {shown(found.get('quant_method'))} cannot be loaded; known: {', '.join(KNOWN)}, or none"
        )
    try:
        ignored = tuple(str(each) for name in IGNORED for each in found.get(name) or ())
        return Declared(method=method, source=source, rules=_rules(method, found, source), ignored=ignored)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: quantization_config of {method!r} is not understood: {error}") from None


def _method_of(file: str) -> str:
    return {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}[file]


def _rules(method: str, found: Mapping[str, Any], source: str) -> tuple[Rule, ...]:
    match method:
        case "fp8" | "mxfp8":
            block = found.get("weight_block_size") or ((1, 32) if method == "mxfp8" else None)
            scheme = found.get("activation_scheme") or DYNAMIC
            return (
                Rule(bits=8, block=_pair(block, source), activations=scheme if scheme in (STATIC, NONE) else DYNAMIC),
            )
        case "compressed-tensors":
            groups = (found.get("config_groups") or {}).values()
            return tuple(_group(each, source) for each in groups)
        case "awq" | "gptq":
            bits = found.get("bits", found.get("w_bit"))
            group = found.get("group_size", found.get("q_group_size"))
            symmetric = bool(found.get("sym", False)) if method == "gptq" else not found.get("zero_point", True)
            if method == "awq" and (found.get("version") or "gemm").lower() != "gemm":
                raise CheckpointError(f"{source}: version {found['version']!r} of awq cannot be loaded; known: 'gemm'")
            if bits not in ((4,) if method == "awq" else (2, 4, 8)):
                raise CheckpointError(
                    f"{source}: bits {bits!r} of {method}; known: {'4' if method == 'awq' else '2, 4, 8'}"
                )
            offset = int(method == "gptq" and found.get("checkpoint_format") != "gptq_v2")
            rule = Rule(
                bits=bits,
                group=_group_size(group),
                symmetric=symmetric,
                activations=NONE,
                act_order=bool(found.get("desc_act")),
                zero_point_offset=offset,
            )
            return (rule,)
    return (Rule(),)


def _group(found: Mapping[str, Any], source: str) -> Rule:
    """Returns the rule of one of compressed-tensors' config_groups."""
    weights, activations = found.get("weights") or {}, found.get("input_activations")
    scheme = NONE if activations is None else DYNAMIC if activations.get("dynamic", False) else STATIC
    return Rule(
        targets=tuple(map(str, found.get("targets") or ())),
        bits=weights.get("num_bits"),
        block=_pair(weights.get("block_structure"), source),
        group=_group_size(weights.get("group_size")),
        symmetric=bool(weights.get("symmetric", True)),
        activations=scheme,
    )


def _group_size(value: Any) -> int | None:
    """Returns the group's columns. None: the whole row is one group (some tools write -1)."""
    return value if isinstance(value, int) and value > 0 else None


def _pair(value: Any, source: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # old releases write "128x128"
        value = [int(each) for each in re.findall(r"\d+", value)]
    sides = list(value) if isinstance(value, (list, tuple)) else []
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{source}: weight_block_size must be two positive integers, got {value!r}")
    return sides[0], sides[1]
