"""Tiny checkpoints that vLLM's kernels for CPUs take, with experts that matter and a tokenizer of words."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.words import write_tokenizer

VOCAB = 512
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {"intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
                  "norm_topk_prob": True, "head_dim": 64},
    "qwen2_moe": {"intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256,
                  "num_experts": 16, "num_experts_per_tok": 4},
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
    "gpt_oss": {"intermediate_size": 128, "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64,
                "sliding_window": 16},
}  # fmt: skip
"""Qwen2-MoE has shared experts, gpt-oss a class of experts of its own and stacked tensors with biases."""


def write(family: str, folder: Path) -> Path:
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.ndim >= 2 or name.endswith("bias"):
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values if "embed" in name else values / tensor.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return folder
