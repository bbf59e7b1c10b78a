"""Tiny random checkpoints for tests: written by transformers, edited tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from epserve.models.demo import write_demo_checkpoint

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss")
LAYER = 1  # an MoE layer in every demo checkpoint
FUSED_TOO = ("mixtral", "qwen3_moe", "deepseek_v3")


def write(family: str, path: Path, **sizes) -> Path:
    """A checkpoint of 8 experts, hidden 64, intermediate 32, top-2, two layers, unless `sizes` says otherwise."""
    write_demo_checkpoint(family, path, **sizes)
    return path


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Rewrite model.safetensors after `change` to its tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def edit_config(path: Path, **keys) -> Path:
    """Set keys of config.json; None removes a key."""
    config = json.loads((path / "config.json").read_text())
    for key, value in keys.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
