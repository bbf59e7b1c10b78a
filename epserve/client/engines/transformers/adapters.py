"""Checks adapters of PEFT on a model with remote experts: those on local weights work, those on experts are refused.

PEFT looks for its targets among a model's parameters and skips missing ones. It would silently skip remote experts, and the
model's numbers would lack the adapter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.utils import is_peft_available

from .remote_modules import refuse_write, remote_modules, some, weights_of


@functools.cache
def guard() -> None:
    """Wraps the one method by which PEFT puts an adapter into a model. It does nothing if PEFT is not installed."""
    if not is_peft_available():
        return
    from peft.tuners.tuners_utils import BaseTuner

    original = BaseTuner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if remote_modules(model):
            check(self.peft_config[adapter_name], model)
        return original(self, model, adapter_name, *args, **kwargs)

    BaseTuner.inject_adapter = inject_adapter  # type: ignore[method-assign]


def check(config: Any, model: nn.Module) -> None:
    """Raises ConfigError when an adapter of this PeftConfig has targets among the remote weights of `model`."""
    hit = sorted(dict.fromkeys(_targets(_as_of_this_transformers(config, model), model)))
    if hit:
        refuse_write(f"adapter: its targets {some(hit)}")


def _targets(config: Any, model: nn.Module) -> Iterator[str]:
    from peft.tuners.tuners_utils import check_target_module_exists

    parameters = tuple(getattr(config, "target_parameters", None) or ())
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    for name, module in remote_modules(model).items():
        if getattr(config, "target_modules", None) and check_target_module_exists(config, name):
            yield name
        if any(_names(name, each) for each in saved):
            yield name
        for weight in weights_of(name, module):
            if any(_names(weight, each) for each in parameters):
                yield weight


def _names(whole: str, target: str) -> bool:
    return whole == target or whole.endswith(f".{target}")


def _as_of_this_transformers(config: Any, model: nn.Module) -> Any:
    """Returns a copy with the targets that PEFT will look for: adapters for one Linear an expert become those of stacks."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = copy.deepcopy(config)
    conversions = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    convert_peft_config_for_transformers(found, model=model, conversions=conversions)
    if getattr(found, "target_modules", None):
        found = _maybe_include_all_linear_layers(found, model)
    return found
