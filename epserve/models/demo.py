"""Writes tiny random checkpoints in the real format, and offers transformers' own MoE block as the reference.

`epserve demo` and the tests use it. It needs transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from epserve.errors import ConfigError


def write_demo_checkpoint(
    family: str,
    path: Path | str,
    *,
    hidden: int = 64,
    intermediate: int = 32,
    num_experts: int = 8,
    top_k: int = 2,
    num_layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    fused: bool = False,
    max_shard_size: str = "5GB",
    **config: Any,
) -> None:
    """Writes a random model of `family` with transformers' save_pretrained.

    Every MoE weight is scaled so that a block keeps about the size of its input and differs clearly from expert to expert.

    Args:
        fused: stores experts as 3-D tensors rather than in the family's published form.
        config: further keys of config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    check_family(family)
    sizes = _SIZES[family](intermediate, num_experts, top_k) | {"num_experts_per_tok": top_k}
    model_config = AutoConfig.for_model(
        family,
        vocab_size=32,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **{"max_position_embeddings": 64} | sizes | config,
    )
    model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        if ".mlp." in name:
            tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(path, save_original_format=not fused, max_shard_size=max_shard_size)


def check_family(family: str) -> None:
    """Raises ConfigError when the family has no demo checkpoint."""
    if family not in _SIZES:
        raise ConfigError(f"family {family!r} has no demo checkpoint (known: {', '.join(_SIZES)})")


def write_demo_tokenizer(path: Path | str) -> None:
    """Writes a tokenizer of single characters for the 32 words of a demo checkpoint, so that it can generate text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz", " ", ".", ",", "?", "'"]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(path)


def reference_module(path: Path | str, layer: int) -> torch.nn.Module:
    """Returns transformers' own MoE block of `layer`, loaded from the checkpoint, with its plain loop over experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="eager")
    return model.model.layers[layer].mlp.eval()


def reference_block(path: Path | str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function `(M, K)` -> `(M, K)` that transformers computes for the MoE block of `layer`, with shared experts."""
    block = reference_module(path, layer)

    @torch.no_grad()
    def run(x_MK: torch.Tensor) -> torch.Tensor:
        out = block(x_MK.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).squeeze(0)

    return run


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns normal values. Matrices are scaled by 1/sqrt(columns), and each expert by a factor of 1/2 .. 2."""
    values = torch.randn(tensor.shape, generator=generator)
    if tensor.ndim >= 2:
        values /= tensor.shape[-1] ** 0.5
    if tensor.ndim == 3:
        values *= 2 ** torch.linspace(-1, 1, tensor.shape[0]).view(-1, 1, 1)
    if name.endswith("bias"):
        values *= 0.1
    return values


def _deepseek_sizes(intermediate: int, num_experts: int, top_k: int) -> dict[str, Any]:
    grouped = num_experts % 4 == 0 and top_k <= num_experts // 2
    return {
        "intermediate_size": 2 * intermediate,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": num_experts,
        "n_group": 4 if grouped and num_experts >= 8 else 1,
        "topk_group": 2 if grouped and num_experts >= 8 else 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }


_SIZES: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "mixtral": lambda N, E, t: {"intermediate_size": N, "num_local_experts": E, "head_dim": 16},
    "qwen3_moe": lambda N, E, t: {
        "intermediate_size": 2 * N,
        "moe_intermediate_size": N,
        "num_experts": E,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "qwen2_moe": lambda N, E, t: {
        "intermediate_size": 2 * N,
        "moe_intermediate_size": N,
        "shared_expert_intermediate_size": N + 8,
        "num_experts": E,
    },
    "olmoe": lambda N, E, t: {"intermediate_size": N, "num_experts": E},
    "gpt_oss": lambda N, E, t: {"intermediate_size": N, "num_local_experts": E, "head_dim": 16},
    "deepseek_v3": _deepseek_sizes,
}
