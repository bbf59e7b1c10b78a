"""Tiny configurations of every transformers family that has an experts module: the default one, shrunk, with what must differ.

Not a test: the table that tests/models/coverage_table.py walks.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

HIDDEN, VOCAB = 32, 96
# Keys of configurations, and of their parts, that decide how large a model is. Everything else stays at its default.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size", "d_model", "text_hidden_size", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_attention_heads", "swa_num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "num_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "sliding_window", "sliding_window_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "position_embedding_size"), 256),
    **dict.fromkeys(("depth", "n_layers", "encoder_layers", "n_groups"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "mel_vocab_size"), VOCAB),
    "unpadded_vocab_size": 90,
    "qk_head_dim": None,
    "index_topk": 4,
    "mamba_dt_rank": 4,
    "image_size": 28,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 90,
    "image_token_index": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
}
MAX_LAYERS = 5  # a model has one layer of each kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """overrides: of the shrunk configuration, nested for its parts. architecture: where it is not the obvious one."""

    overrides: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    generates: str = ""
    """Why this family has no `generate` to compare; empty: it has."""


def _text(**overrides: Any) -> Case:
    return Case(overrides={"text_config": overrides})


def _plain(**overrides: Any) -> Case:
    return Case(overrides=overrides)


_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_GEMMA = {"per_layer_config": {}, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
_SWA = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16}
_SWA |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CASES: dict[str, Case] = {
    "deepseek_ocr2": _text(mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    "deepseek_v2": _plain(num_experts_per_tok=2, first_k_dense_replace=1),
    "deepseek_v3": _plain(n_group=2, first_k_dense_replace=1),
    "diffusion_gemma": Case(
        overrides={"text_config": _GEMMA, "canvas_length": 16},
        architecture="DiffusionGemmaForBlockDiffusion",
    ),
    "dots1": _plain(
        n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=16,
        n_shared_experts=1, num_experts_per_tok=2,
    ),
    "dots3_note": Case(
        overrides={
            "per_layer_config": {1: _SWA}, "num_hidden_layers": 2,
            "layer_types": ["indexed_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
        },
        architecture="Dots3NoteForCausalLM",
    ),
    "ernie4_5_vl_moe": _text(moe_intermediate_size=[16, 8], rope_parameters={**_ROPE, "mrope_section": [1, 1, 2]}),
    "flint": _plain(
        num_hidden_layers=3, mlp_only_layers=[0], layer_types=["full_attention", "full_attention", "sliding_attention"]
    ),
    "gemma4": _text(enable_moe_block=True, **_GEMMA),
    "glm4v_moe": _text(rope_parameters={**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}),
    "glm5_next": _text(num_key_value_heads=4, index_topk=4, index_kpool=2, qk_rope_head_dim=0, head_dim=0),
    "granitemoehybrid": _plain(layer_types=["mamba", "attention"], num_hidden_layers=2),
    "hunyuan_v1_moe": _plain(head_dim=8, num_experts=8, moe_topk=2),
    "hy_v4_vl": _text(rope_parameters={**_ROPE, "mrope_section": [2, 1, 1]}),
    "inkling": Case(architecture="InklingForCausalLM"),  # its vision tower needs scipy
    "jamba": _plain(
        num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1
    ),
    "lfm2_moe": _plain(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
    "mistral4": _plain(head_dim=16),
    "muse_spark": _plain(
        projector_hidden_size=32, audio_config={"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    ),
    "openai_privacy_filter": Case(generates="classifies tokens and generates none"),
    "qwen3_omni_moe": Case(
        overrides={"vision_start_token_id": 93}, architecture="Qwen3OmniMoeThinkerForConditionalGeneration"
    ),
    "qwen4_exp": _text(
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=4
    ),
    "zaya": _plain(num_experts_per_tok=1),
}  # fmt: skip


def families() -> list[str]:
    """Every model of the installed transformers with a class that is marked for the experts interface."""
    models = Path(transformers.__file__).parent / "models"
    found = [path.parent.name for path in sorted(models.glob("*/modeling_*.py")) if _is_marked(path)]
    return sorted(set(found))


def architecture(family: str) -> type[PreTrainedModel]:
    """The class that checkpoints of this family name, with a language model head where there is one."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    case = CASES.get(family, Case())
    if case.architecture:
        return getattr(module, case.architecture)
    classes = {
        name: cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
    }
    whole = [name for name in classes if _is_whole(name, classes[name])]
    chosen = whole or [name for name in classes if name.endswith("ForCausalLM")] or list(classes)
    return classes[chosen[-1]]


def tiny_config(family: str, *, wide: bool = False) -> Any:
    """wide: experts whose sizes every layout of quantised weights divides."""
    cls = architecture(family).config_class
    assert cls is not None
    config = _shrink(cls().to_dict(), CASES.get(family, Case()).overrides)
    return cls.from_dict(_widened(config) if wide else config)


def _widened(config: dict) -> dict:
    """Twice or four times the intermediate sizes, which stay apart where they differ."""
    widths: dict[Any, int] = {8: 32, 16: 64, 48: 96}
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and str(key).endswith("_config"):
            made[key] = _widened(value)
        elif str(key).endswith("intermediate_size"):
            made[key] = (
                [widths.get(each, each) for each in value] if isinstance(value, list) else widths.get(value, value)
            )
        else:
            made[key] = value
    return made


def _is_marked(path: Path) -> bool:
    return re.search(r"^@use_experts_implementation", path.read_text(), re.MULTILINE) is not None


def _is_whole(name: str, cls: Any) -> bool:
    """A ForConditionalGeneration of the family's own configuration rather than of one of its parts."""
    stem = name.removesuffix("ForConditionalGeneration")
    return stem != name and cls.config_class is not None and cls.config_class.__name__ == f"{stem}Config"


def _shrink(config: dict, overrides: dict) -> dict:
    """Sizes from SIZES, one layer of each kind, parts likewise; then the overrides."""
    parts = {key for key, value in config.items() if isinstance(value, dict) and key.endswith("_config")}
    parts.discard("per_layer_config")
    count = config.get("num_hidden_layers")
    layers = _one_of_each(config, count) if count else []
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    shrunk: dict[str, Any] = {}
    for key, value in config.items():
        if key in parts:
            shrunk[key] = _shrink(value, overrides.get(key, {}))
        elif key == "num_hidden_layers" and count:
            shrunk[key] = len(layers)
        elif count and isinstance(value, list) and len(value) == count:
            shrunk[key] = [value[layer] for layer in layers]
        elif key in SIZES and (value is not None or key in tokens):
            shrunk[key] = SIZES[key]
        elif key != "transformers_version":
            shrunk[key] = value
    heads = config.get("num_key_value_heads")
    if config.get("kv_lora_rank") or (heads is not None and heads == config.get("num_attention_heads")):
        shrunk["num_key_value_heads"] = SIZES["num_attention_heads"]  # no grouped queries by default: keep it so
    return shrunk | {key: value for key, value in overrides.items() if key not in parts}


def _one_of_each(config: dict, count: int) -> list[int]:
    """The first layer of each combination of what lists of one entry a layer say; at least two layers."""
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == count]
    firsts: dict[str, int] = {}
    for layer, kinds in enumerate(zip(*lists, strict=True)):
        firsts.setdefault(repr(kinds), layer)
    chosen = list(firsts.values()) or [0]
    while len(chosen) < 2:
        chosen.append(chosen[-1] + 1)
    return chosen[:MAX_LAYERS]
