"""Finds the target of `epserve serve`: a configuration file, a model's folder, or a model in the hub's local cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from epserve.config import Config, load_config, parse_config, with_overrides
from epserve.errors import ConfigError

HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
MODEL_FILES = (".gguf",)


def load_target(target: str, overrides: dict[str, Any] | None = None) -> tuple[Config, bool]:
    """Returns the configuration to serve, and whether it was made from defaults because `target` is a model.

    Args:
        target: a YAML file, a folder with config.json, a model file, or ORGANISATION/NAME of a model that was downloaded before.
        overrides: dotted keys and their values, as `--set` gives them.

    Raises:
        ConfigError: nothing is there, a folder holds no model, or a value is wrong.
    """
    path = Path(target)
    if path.is_dir() or path.suffix in MODEL_FILES:
        return _defaults(path, overrides), True
    if not path.exists() and HUB_NAME.fullmatch(target) and not path.suffix:
        return _defaults(_from_cache(target), overrides), True
    if path.suffix == ".safetensors":
        raise ConfigError(f"{target} is one file of a model; name the folder that holds it and config.json")
    return load_config(path, overrides), False


def _defaults(model: Path, overrides: dict[str, Any] | None) -> Config:
    if model.is_dir() and not (model / "config.json").exists() and not list(model.glob("*.gguf")):
        raise ConfigError(
            f"{model} holds no config.json, so it is no model of Hugging Face's layout; name the folder that has it,"
            " or a configuration file"
        )
    data: dict[str, Any] = {"model": {"path": str(model)}, "engine": {"ranks": _num_gpus() or 1}}
    return parse_config(with_overrides(data, overrides), f"defaults for {model}")


def _from_cache(name: str) -> Path:
    """Returns the folder of a model that the hub's client has downloaded before. Nothing is fetched."""
    local = name.split("/")[-1]
    advice = f"download it first: hf download {name} --local-dir {local}, then epserve serve {local}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name} is neither a file nor a folder here; if it is a model of the hub, {advice}"
        ) from None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:
        text = f"{name} is neither a file nor a folder here, and the hub's local cache does not hold it whole"
        raise ConfigError(f"{text}; if it is a model of the hub, {advice}") from error


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def parse_overrides(items: list[str] | None) -> dict[str, Any]:
    """Parses KEY=VALUE, with the value in YAML. Raises ConfigError."""
    import yaml

    overrides = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item!r} is not KEY=VALUE")
        try:
            overrides[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {item!r}: {value!r} is not YAML") from None
    return overrides
