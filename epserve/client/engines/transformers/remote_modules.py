"""Defines modules whose weights are in the service: they call it, and refuse every write to weights that are not here.

A write without effect would change the numbers of a local model and not those of the remote one, without an error. So an
emptied module has a subclass of its own class that refuses to set, register or load the removed weights, and a stand-in tensor
in the place of each weight refuses every operation on it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import nn

from epserve.errors import ConfigError

from . import operators
from .service import Service

NAME = "epserve"  # transformers' name of the experts implementation
BINDING = "_epserve_binding"  # an attribute of an experts module or an MoE block
REMEDY = (
    "change the checkpoint (merge adapters into it), serve that and load the model from it; weights outside the experts can be"
    " changed here"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Names the place of one module's work. `service` None: the module has its weights and works here."""

    service: Service | None
    layer: int = -1
    num_experts: int = 0


def refuse_write(what: str) -> NoReturn:
    """Raises ConfigError for a write to remote weights."""
    raise ConfigError(f"{what}: these weights are in the service, not in this process; {REMEDY}")


class AbsentWeight(torch.Tensor):
    """Stands for a removed weight: an empty tensor that answers questions about itself and refuses everything else."""

    _label: str

    @classmethod
    def of(cls, label: str, dtype: torch.dtype) -> AbsentWeight:
        made = torch.empty(0, dtype=dtype, device="cpu").as_subclass(cls)
        made._label = label
        made._is_hf_initialized = True  # type: ignore[attr-defined]  # for `_init_weights` of blocks above
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        label = next((each._label for each in _flattened((args, kwargs)) if isinstance(each, cls)), "a remote weight")
        name = getattr(func, "__name__", str(func))
        return refuse_write(f"{label}: {name}")

    def __deepcopy__(self, memo: dict) -> AbsentWeight:
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AbsentWeight({self._label})"


_QUESTIONS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad", "is_meta", "is_cpu", "is_cuda",
                     "is_leaf", "ndim", "nbytes", "itemsize", "is_sparse", "is_quantized", "grad_fn")
    ),
    torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.dim, torch.Tensor.size, torch.Tensor.element_size,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous, torch.Tensor.__len__,
    torch.Tensor.__hash__, torch.Tensor.stride, torch.Tensor.data_ptr,
}  # fmt: skip


def _flattened(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        yield value
        return
    for each in value:
        yield from _flattened(each)


class RemoteModule(nn.Module):
    """Is mixed into the class of every emptied module."""

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a model with remote experts cannot be pickled (torch.save): the file would have no experts; save its state_dict(),"
            " or load the model anew where it is needed"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(name, "set")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse(name, "delete")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._refuse(name, "register_parameter")
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self._refuse(name, "register_buffer")
        super().register_buffer(name, tensor, persistent)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        named = sorted(key for key in state_dict if key.startswith(prefix))
        if named:
            refuse_write(f"load_state_dict: {some(named)}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _refuse(self, name: str, what: str) -> None:
        stand_in = vars(self).get(name)
        if isinstance(stand_in, AbsentWeight):
            refuse_write(f"{stand_in._label}: {what}")


class RemoteExperts(RemoteModule):
    """Is mixed into the class of an experts module whose work is done in the service."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        binding: Binding = getattr(self, BINDING)
        check_implementation(getattr(self, "config", None))
        assert binding.service is not None
        return operators.experts(
            binding.service.name, binding.layer, binding.num_experts, hidden_states, top_k_index, top_k_weights
        )


class RemoteBlock(RemoteModule):
    """Is mixed into the class of an MoE block that the service runs whole: gate, experts and shared experts."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        binding: Binding = getattr(self, BINDING)
        assert binding.service is not None
        if self.training:
            check_no_jitter(self)
        return operators.block(binding.service.name, binding.layer, hidden_states)


def check_no_jitter(block: nn.Module) -> None:
    """Raises ConfigError where a block in training mode would add noise for its router, which is in the service."""
    for name in ("jitter_noise", "router_jitter_noise"):
        if noise := getattr(block, name, 0):
            raise ConfigError(
                f"{name}: {noise} for training, and the router is in the service, which adds no noise; set router_jitter_noise to"
                ' 0, call eval(), or connect with gate="local"'
            )


def check_implementation(config: Any) -> None:
    """Raises ConfigError when another experts implementation was set after loading."""
    wanted = getattr(config, "_experts_implementation", NAME)
    if wanted != NAME:
        raise ConfigError(
            f"experts_implementation {wanted!r}: the experts of this model are in the service, no other implementation has their"
            f" weights; set {NAME!r} again, or load the model without it"
        )


def bind(module: nn.Module, name: str, binding: Binding, mixin: type[RemoteModule]) -> set[str]:
    """Empties `module` and everything in it, binds it to a service and returns the names of the weights that it had."""
    emptied = {key for path, part in module.named_modules(prefix=name) for key in _empty(path, part)}
    for part in module.modules():
        part.__class__ = _subclass(type(part), mixin if part is module else RemoteModule)  # type: ignore[arg-type]
    vars(module)[BINDING] = binding
    return emptied


def remote_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the emptied modules of `model` by name. There are none in a model that is entirely local."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RemoteModule)}


def weights_of(name: str, module: nn.Module) -> list[str]:
    """Returns the names of the weights that were taken out of this module itself."""
    return [f"{name}.{key}" for key, value in vars(module).items() if isinstance(value, AbsentWeight)]


def some(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _empty(path: str, part: nn.Module) -> set[str]:
    """Takes every parameter and buffer out of one module, so that nothing of them is initialised or loaded.

    Plain attributes stay in their places, marked as initialised.
    """
    emptied = set()
    for held in (part._parameters, part._buffers):
        names = [name for name, value in held.items() if value is not None]
        for name in names:
            key = f"{path}.{name}"
            vars(part)[name] = AbsentWeight.of(key, held.pop(name).dtype)  # type: ignore[union-attr]
            emptied.add(key)
    vars(part)["_is_hf_initialized"] = True
    return emptied


@functools.cache
def _subclass(cls: type[nn.Module], mixin: type[RemoteModule]) -> type[nn.Module]:
    """Returns a subclass of the same name, since transformers and accelerate look for classes by name."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
