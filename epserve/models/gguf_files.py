"""Opens GGUF files (one file, the pieces of one, or a folder with them) for the architectures in the table below.

The package `gguf` reads headers and multiplies out. The metadata become the keys of a config.json, so that the same tables and
checks serve. Matrices are stacks `(E, out, in)` in blocks of bytes, one layout for each of GGML's types.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from epserve.errors import CheckpointError

from .families import FAMILIES, ExpertForm, Family, SharedForm
from .stored.layouts import PLAIN, Layout, StoredTensor
from .tensors import TensorInfo

SUFFIX = ".gguf"
PIECE = re.compile(r"-\d{5}-of-\d{5}$")
FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
OURS = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "exp_probs_b", "shexp")
"""Parts of the names that belong to an MoE block."""
EXPERTS = {"gate": "ffn_gate_exps.weight", "up": "ffn_up_exps.weight", "down": "ffn_down_exps.weight"}
BIASES = {f"{role}_bias": name.replace(".weight", ".bias") for role, name in EXPERTS.items()}
GATE = {"weight": "ffn_gate_inp.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """Maps an architecture to a family. family: the table of ours that computes the same.

    constant: keys of the family's configuration whose values llama.cpp has as code.
    """

    family: str
    gate_tensors: Mapping[str, str] = field(default_factory=lambda: dict(GATE))
    bias: bool = False
    shared: bool = False
    constant: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> Family:
        found, shared = FAMILIES[self.family], None
        if self.shared:
            assert found.shared is not None
            names = {part: f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")}
            sigmoid = "ffn_gate_inp_shexp.weight" if found.shared.sigmoid_gate else ""
            shared = SharedForm(intermediate=found.shared.intermediate, sigmoid_gate=sigmoid, **names)
        form = ExpertForm(tensors=EXPERTS | (BIASES if self.bias else {}))
        gate = dict(self.gate_tensors)
        return replace(found, blocks=("blk.{layer}.",), gate_tensors=gate, forms=(form,), shared=shared)


ARCHS = {
    "llama": Arch(family="mixtral"),
    "qwen2moe": Arch(family="qwen2_moe", shared=True, constant={"norm_topk_prob": False}),
    "qwen3moe": Arch(family="qwen3_moe", constant={"norm_topk_prob": True}),
    "olmoe": Arch(family="olmoe", constant={"norm_topk_prob": False}),
    "gpt-oss": Arch(family="gpt_oss", bias=True, gate_tensors=GATE | {"bias": "ffn_gate_inp.bias"}),
    "deepseek2": Arch(family="deepseek_v3", shared=True, gate_tensors=GATE | {"correction_bias": "exp_probs_b.bias"}),
}
KEYS = {
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
"""Names of metadata, without the name of the architecture, and the keys of config.json with the same meaning."""


class Blocks(Layout):
    """Describes one of GGML's types: rows are blocks of bytes with their own scales."""

    def __init__(self, kind: str):
        self.kind = kind
        self.name = f"gguf {kind}"

    def values(self, parts, stored):
        gguf = package()
        kind = gguf.GGMLQuantizationType[self.kind]
        return torch.from_numpy(gguf.quants.dequantize(parts["weight"].numpy(), kind))


@functools.cache
def layout_of(kind: str) -> Layout:
    return PLAIN if kind in FLOATS else Blocks(kind)


def package() -> Any:
    try:
        import gguf
    except ImportError:
        raise CheckpointError("GGUF files need the package gguf: pip install gguf") from None
    return gguf


def files_of(path: Path) -> list[Path]:
    """Returns all pieces, or nothing if it is no GGUF. Raises CheckpointError for a folder with several models."""
    if path.is_dir():
        found = [] if (path / "config.json").exists() else sorted(path.glob(f"*{SUFFIX}"))
        stems = {PIECE.sub("", each.stem) for each in found}
        if len(stems) > 1:
            raise CheckpointError(f"{path} holds several GGUF models: {', '.join(sorted(stems))}; name one file")
        return found
    if path.suffix != SUFFIX:
        return []
    stem = PIECE.sub("", path.stem)
    return [path] if stem == path.stem else sorted(path.parent.glob(f"{stem}-*{SUFFIX}"))


def read(files: Sequence[Path]) -> tuple[dict[str, Any], Family, dict[str, TensorInfo], dict[str, StoredTensor]]:
    """Returns a configuration, the family, all tensors of the files, and the matrices of MoE blocks. Raises CheckpointError."""
    gguf = package()
    metadata: dict[str, Any] = {}
    found: dict[str, TensorInfo] = {}
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            reader = gguf.GGUFReader(file)
            metadata |= {
                name: each.contents() for name, each in reader.fields.items() if not name.startswith("tokenizer.")
            }
            for tensor in reader.tensors:
                info, shape = _info(file, tensor)
                found[info.name] = info
                if any(part in info.name for part in OURS):
                    layout = layout_of(tensor.tensor_type.name)
                    stored[info.name] = StoredTensor(name=info.name, shape=shape, layout=layout, parts={"weight": info})
        except CheckpointError:
            raise
        except Exception as error:  # the package may raise anything for a damaged file
            raise CheckpointError(f"{file} is not a GGUF file: {type(error).__name__}: {error}") from None
    config, family = _config(files[0], metadata, stored)
    return config, family, found, stored


def _info(file: Path, tensor: Any) -> tuple[TensorInfo, tuple[int, ...]]:
    """Returns the tensor in bytes (or floats), and its shape in numbers. GGUF names the innermost dimension first."""
    kind, shape = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape))
    if tensor.name.endswith("ffn_gate_inp_shexp.weight"):
        shape = (1, *shape[-1:])
    nbytes = int(tensor.n_bytes)
    inner = shape if kind in FLOATS else (*shape[:-1], nbytes * shape[-1] // max(1, int(tensor.n_elements)))
    dtype = FLOATS.get(kind, "U8")
    info = TensorInfo(
        name=tensor.name, file=file, dtype=dtype, shape=inner, offset=int(tensor.data_offset), nbytes=nbytes
    )
    return info, shape


def _config(file: Path, metadata: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> tuple[dict, Family]:
    name = metadata.get("general.architecture")
    if name not in ARCHS or not stored:
        what = f"GGUF of architecture {name!r}" + ("" if name not in ARCHS else " without experts")
        raise CheckpointError(
            f"{file}: {what}: not supported (known: {', '.join(ARCHS)}); serve the model's Hugging Face folder instead"
        )
    arch = ARCHS[name]
    config: dict[str, Any] = {"model_type": arch.family, "dtype": "bfloat16", **arch.constant}
    for key, names in KEYS.items():
        if (value := metadata.get(f"{name}.{key}")) is not None:
            config |= dict.fromkeys(names, value)
    if name == "deepseek2":
        gating, groups = metadata.get(f"{name}.expert_gating_func"), metadata.get(f"{name}.expert_group_count")
        if gating != 2 or groups is None:
            raise CheckpointError(
                f"{file}: deepseek2 with expert_gating_func {gating} and expert_group_count {groups}; known: 2 (sigmoid) with"
                " groups; convert the model again with a newer llama.cpp, or serve its Hugging Face folder"
            )
    return config, arch.table()
