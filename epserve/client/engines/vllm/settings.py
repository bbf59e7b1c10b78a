"""What a configuration of vLLM asks for."""

from __future__ import annotations

from typing import Any

from epserve.client.engines.asked import Asked, asked

LOAD_FORMAT = "epserve"
SOURCE = "--additional-config epserve"


def asked_by(config: Any) -> Asked | None:
    """Returns what a VllmConfig asks for. Raises ConfigError."""
    additional = config.additional_config
    return asked(additional.get("epserve") if isinstance(additional, dict) else None, SOURCE)
