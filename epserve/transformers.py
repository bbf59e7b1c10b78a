"""Hugging Face models whose experts run in the service: attention here, experts there.

    import epserve.transformers

    with epserve.transformers.connect("10.0.0.5:50051"):
        model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="epserve")
        model.generate(**inputs)

Importing this module registers the experts implementation "epserve" with transformers. A model that is loaded with it has
experts modules without weights: those are neither allocated nor read. Requests that may succeed later (the service
restarts, its queue is full) are sent again until `retry_for_s` has passed, and generation goes on where it was.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel

from epserve.client import Client, ClientOptions, RetryPolicy
from epserve.errors import CheckpointError, ConfigError, EpserveError, Incompatible, InvalidRequest, NotReady
from epserve.models.expert_modules import ExpertsLayer, find_layers, is_experts
from epserve.models.tensors import read_index, read_json
from epserve.models.weights import fingerprint
from epserve.serving.wire import DTYPE_NAMES

NAME = "epserve"
BINDING = "_epserve_binding"  # attribute of an experts module or an MoE block
REGISTER_AGAIN_S = (
    1.0  # for a region in the place of one that is lost; the request goes over the wire where that takes longer
)
RETRY_FOR_S = 120.0  # longer than a service needs to replace a rank and load its weights again
# Families whose MoE block takes hidden states and returns them, nothing else: the service can run it whole.
BLOCK_FAMILIES = ("deepseek_v3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

log = logging.getLogger(__name__)


class Service:
    """A connection that models use for their experts. Made by `connect`; `close` it when the models are done."""

    def __init__(self, transport: Any, *, gate: str, shared_memory_bytes: int = 0):
        self.transport, self.gate = transport, gate
        self.model = transport.model()
        """GetModelReply: what is served, and the limits of a request."""
        self.closed = False
        self._shared_memory_bytes = shared_memory_bytes
        self._held = ExitStack()  # the region's registration
        self._region: Any = None

    @property
    def max_tokens(self) -> int:
        """Of one request; longer batches become several."""
        row = self.model.hidden * 4 + self.model.top_k * 8  # float32 rows, int32 ids, float32 weights
        return max(1, min(self.model.max_tokens_per_request, self.model.max_message_bytes // row))

    def forward(
        self,
        layer: int,
        hidden_MK: torch.Tensor,
        ids_Mt: torch.Tensor | None = None,
        weights_Mt: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer for `(M, K)`; pieces of a batch above the limit are under way at the same time."""
        if self.closed:
            raise ConfigError(
                "the connection of this model is closed: load it while epserve.transformers.connect is open"
            )
        if torch.is_grad_enabled() and hidden_MK.requires_grad:
            raise InvalidRequest(
                "hidden_states: the service computes no gradients; call the model under torch.no_grad()"
            )
        given = [value for value in (hidden_MK, ids_Mt, weights_Mt) if value is not None]
        if len(hidden_MK) <= self.max_tokens:
            return self._over_region(self.transport.forward, layer, given)
        pieces = list(zip(*(value.split(self.max_tokens) for value in given), strict=True))
        sent = [self._over_region(self.transport.forward_async, layer, piece) for piece in pieces]
        return torch.cat([self._result(future, layer, piece) for future, piece in zip(sent, pieces, strict=True)])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self in _open:
                _open.remove(self)
            self._held.close()
            self.transport.close()

    def __deepcopy__(self, memo: dict) -> Service:
        """Copies of a model share its service."""
        return self

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def register_region(self, timeout: float | None = None) -> None:
        """Make the shared memory known to the service; does nothing where there is none, or it is known. timeout: seconds,
        default: as long as a request is sent again."""
        if self._region is None and self._shared_memory_bytes:
            registration = self.transport.register_region(self._shared_memory_bytes, timeout=timeout)
            self._region = self._held.enter_context(registration)

    def _over_region(self, send: Callable[..., Any], layer: int, given: Sequence[torch.Tensor]) -> Any:
        """Through the shared memory; over the wire where there is none, it is full, or the service does not know it."""
        with suppress(EpserveError):  # a service that is just away: the request below waits for it
            self.register_region(REGISTER_AGAIN_S)
        if self._region is None:
            return send(layer, *given)
        try:
            return send(layer, *given, region=self._region)
        except (NotReady, InvalidRequest) as error:
            self._doubt_region(error)
        return send(layer, *given)

    def _result(self, future: Any, layer: int, given: Sequence[torch.Tensor]) -> torch.Tensor:
        try:
            return future.result()
        except (NotReady, InvalidRequest) as error:
            if self._region is None:
                raise
            self._doubt_region(error)
        return self.transport.forward(layer, *given)

    def _doubt_region(self, error: EpserveError) -> None:
        """A full region stays; after any other error the service may have restarted, and the next request registers anew."""
        if getattr(error, "field", "") != "region":
            self._region = None
            self._held.close()


_open: list[Service] = []
_loading: ContextVar[Service | None] = ContextVar("epserve_loading", default=None)


def connect(
    target: Any,
    *,
    options: ClientOptions | None = None,
    retry_for_s: float = RETRY_FOR_S,
    gate: str = "local",
    shared_memory_bytes: int = 0,
) -> Service:
    """Connect to a service at "host:port". Until it is closed, models loaded with "epserve" use it (the last one opened).

    target: an address, or an object with the methods of `epserve.client.Client`.
    options: token, TLS, priority, balance; its timeout and retries are replaced by `retry_for_s`.
    gate: "local": this process gates and computes shared experts. "remote": the service does both, and their weights are
    not loaded here either; for families whose block returns hidden states only.
    shared_memory_bytes: for a service on this host: tensors go through so much shared memory instead of messages.
    Raises EpserveError where the service cannot be reached.
    """
    if gate not in ("local", "remote"):
        raise ConfigError(f"gate must be 'local' or 'remote', got {gate!r}")
    if isinstance(target, str):
        given = options or ClientOptions()
        target = Client(target, replace(given, timeout_s=retry_for_s, retry=RetryPolicy()))  # until the deadline
    try:
        service = Service(target, gate=gate, shared_memory_bytes=shared_memory_bytes)
        service.register_region()
    except EpserveError:
        target.close()
        raise
    _open.append(service)
    return service


def from_pretrained(
    path: str | Path, service: Service, *, model_class: Any = transformers.AutoModelForCausalLM, **kwargs: Any
) -> Any:
    """As `model_class.from_pretrained(path, ...)` with experts in this `service`, whichever others are open."""
    with _use(service):
        return model_class.from_pretrained(path, experts_implementation=NAME, **kwargs)


@contextmanager
def _use(service: Service) -> Iterator[None]:
    token = _loading.set(service)
    try:
        yield
    finally:
        _loading.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where one module's work is done. `service` None: here, the module has its weights."""

    service: Service | None
    layer: int = -1
    num_experts: int = 0


def attach(model: PreTrainedModel, service: Service, dtype: torch.dtype) -> None:
    """Take the weights out of `model`, whose parameters are on the meta device, and bind its experts to `service`.

    Raises Incompatible with every difference between the two, CheckpointError where experts cannot be separated.
    """
    layers = find_layers(model)
    reasons = differences(service.model, layers, dtype, str(model.config.name_or_path))
    if service.gate == "remote" and service.model.family not in BLOCK_FAMILIES:
        known = ", ".join(BLOCK_FAMILIES)
        reasons.append(f"gate 'remote' is for {known}; of {service.model.family} only the experts can be remote")
    if reasons:
        raise Incompatible(
            f"{type(model).__name__} does not fit the service of {service.model.name!r}:", tuple(reasons)
        )
    for module in model.modules():
        if is_experts(module):
            vars(module)[BINDING] = Binding(service=None)
    emptied: set[str] = set()
    for layer in layers:
        binding = Binding(service=service, layer=layer.layer, num_experts=layer.shape.num_experts)
        name, module = layer.name, layer.module
        if service.gate == "remote":
            name = layer.name.rpartition(".")[0]
            module = model.get_submodule(name)
            vars(module)["forward"] = partial(_block_forward, binding)
        vars(layer.module)[BINDING] = binding
        emptied |= _empty(name, module)
    model._keys_to_ignore_on_load_unexpected = {  # read by transformers; elsewhere they would be reported as surplus
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(f"^(.*\\.)?{re.escape(name)}$" for name in emptied),
    }
    model.all_tied_weights_keys = {
        key: source for key, source in model.all_tied_weights_keys.items() if key not in emptied
    }
    vars(model)["save_pretrained"] = _refuse_to_save


def differences(served: Any, layers: tuple[ExpertsLayer, ...], dtype: torch.dtype, path: str) -> list[str]:
    """What differs between a service's GetModelReply and a model's experts. Empty: they fit."""
    shape = layers[0].shape
    missing = sorted({layer.layer for layer in layers} - set(served.layers))
    names = DTYPE_NAMES[served.dtype], str(dtype).removeprefix("torch.")
    own = local_fingerprint(path)
    checks = [
        (not missing, f"layers {missing} are not served (served: {list(served.layers)})"),
        (served.hidden == shape.hidden, f"hidden size: served {served.hidden}, the model has {shape.hidden}"),
        (served.intermediate == shape.intermediate,
         f"intermediate size: served {served.intermediate}, the model has {shape.intermediate}"),
        (served.num_experts == shape.num_experts,
         f"experts: served {served.num_experts}, the model has {shape.num_experts}"),
        (names[0] == names[1], f"dtype: served {names[0]}, the model is loaded as {names[1]}; pass dtype={names[0]!r}"),
        (own is None or own == served.fingerprint,
         f"fingerprint: served {served.fingerprint[:12]}, {path} has {(own or '')[:12]}: another revision or configuration"),
    ]  # fmt: skip
    return [text for fits, text in checks if not fits]


def local_fingerprint(path: str) -> str | None:
    """Of the checkpoint that is being loaded; None, with a warning, where its files are not safetensors in a folder."""
    try:
        found = transformers.utils.cached_file(path, "config.json", local_files_only=True)
        folder = Path(str(found)).parent
        return fingerprint(read_json(folder / "config.json"), read_index(folder))
    except (CheckpointError, OSError, TypeError) as error:
        log.warning("%s: not compared with the service, only shapes are: %s", path, error)
        return None


def _empty(prefix: str, module: nn.Module) -> set[str]:
    """Take every parameter and buffer out of `module` and return their names: nothing of them is initialised or loaded.

    Plain attributes without elements stay in their places, marked as initialised, for `_init_weights` of blocks above.
    """
    emptied = set()
    for path, part in module.named_modules(prefix=prefix):
        for held in (part._parameters, part._buffers):
            names = [name for name, value in held.items() if value is not None]
            for name in names:
                stand_in = torch.empty(0, dtype=held.pop(name).dtype, device="cpu")  # type: ignore[union-attr]
                stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
                vars(part)[name] = stand_in
            emptied |= {f"{path}.{name}" for name in names}
        vars(part)["_is_hf_initialized"] = True
    return emptied


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ConfigError("a model with remote experts cannot be saved: its checkpoint would have none")


def _experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The implementation "epserve" of transformers' experts interface."""
    binding = vars(self).get(BINDING)
    if binding is None:
        raise ConfigError(
            f"{type(self).__name__} was not loaded with remote experts: call epserve.transformers.connect(address) before"
            " from_pretrained(..., experts_implementation='epserve')"
        )
    if binding.service is None:
        return type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[attr-defined]
    ids_Mt = top_k_index.reshape(-1, top_k_index.shape[-1])
    ids_Mt = torch.where(ids_Mt < binding.num_experts, ids_Mt, -1).int()  # transformers: the number of experts = none
    weights_Mt = top_k_weights.reshape(ids_Mt.shape).float()
    hidden_MK = hidden_states.reshape(-1, hidden_states.shape[-1])
    out_MK = binding.service.forward(binding.layer, hidden_MK, ids_Mt, weights_Mt)
    return out_MK.view(hidden_states.shape).to(hidden_states.device)


def _block_forward(binding: Binding, hidden_states: torch.Tensor) -> torch.Tensor:
    """A whole MoE block: gate, experts and shared experts in the service."""
    assert binding.service is not None
    out_MK = binding.service.forward(binding.layer, hidden_states.reshape(-1, hidden_states.shape[-1]))
    return out_MK.view(hidden_states.shape).to(hidden_states.device)


def _wants_remote(model: PreTrainedModel) -> bool:
    configs = (getattr(module, "config", None) for module in (model, *filter(is_experts, model.modules())))
    return any(getattr(config, "_experts_implementation", None) == NAME for config in configs)


def _register() -> None:
    """The implementation by name, and the one point of `from_pretrained` between building and reading a model.

    NOTE: transformers has no hook there. `_get_dtype_plan` is called once on the outermost model, when all its modules are
    on the meta device and before the device map, the conversion mapping and the reads are made from its parameters.
    """
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(NAME, _experts_forward)
    original = PreTrainedModel._get_dtype_plan

    @functools.wraps(original)
    def _get_dtype_plan(self: PreTrainedModel, dtype: torch.dtype) -> dict:
        on_meta = any(parameter.is_meta for parameter in self.parameters())
        if on_meta and _wants_remote(self):
            service = _loading.get() or (_open[-1] if _open else None)
            if service is None:
                raise ConfigError(
                    "experts_implementation='epserve' needs a service: call epserve.transformers.connect(address) first"
                )
            attach(self, service, dtype)
        return original(self, dtype)

    PreTrainedModel._get_dtype_plan = _get_dtype_plan  # type: ignore[method-assign]


_register()
