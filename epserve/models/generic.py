"""Opens any transformers family that has an experts module, without a table of ours: names, layout and operations are its own.

The model is built from config.json on the meta device, which costs no memory. Its experts modules give the layout, and
transformers' conversion mapping gives the tensors of the checkpoint. The gate stays with the client: families differ in the
computation before the gate, and transformers does it there already.

Legend: E logical experts, K hidden size, N intermediate size, e experts loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from epserve.errors import CheckpointError
from epserve.modular_kernel import UNQUANTIZED, ExpertWeights, GateSpec, GateWeights, QuantConfig
from epserve.modular_kernel.weights import ExpertSizes, empty_weights, slot_view

from . import conversion
from .expert_modules import ExpertsLayer, ExpertsShape, find_layers, top_k
from .info import MODEL_DTYPES, ModelInfo
from .stored import declared
from .stored.experts import StoredExperts
from .stored.layouts import StoredTensor
from .stored.matrices import StoredReader, stored_tensors
from .tensors import TensorReader, check_values, read_index
from .wanted import check_wanted, with_stored
from .weights import LayerWeights, fingerprint

MAX_MODULES = 1 << 18
"""The most modules of a model that is built. The largest known model, with 2,048 experts as modules of their own, has 160,000."""
NORM = "post_expert_norm.weight"
AUTO_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",  # first: the next one may have the text alone
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)
"""Mappings of transformers' Auto classes. The first one with the configuration names the class of its checkpoints."""


class GenericCheckpoint:
    """Reads one model's experts like `Checkpoint`, for models whose clients choose the experts. `open_generic` makes it."""

    def __init__(
        self,
        info: ModelInfo,
        tensors: Mapping[str, StoredTensor],
        model: Any,
        layers: Mapping[int, ExpertsLayer],
        recipes: Mapping[str, conversion.Recipe],
        experts: Mapping[int, StoredExperts],
    ):
        """experts: the layers whose matrices lie in the checkpoint as they are. transformers' operations make the others."""
        self.info = info
        self._tensors, self._model, self._layers, self._recipes = tensors, model, layers, recipes
        self._experts = experts
        self._served = {layer: kind.quant for kind in info.kinds for layer in kind.layers}

    def serve_as(self, served: Mapping[int, QuantConfig]) -> None:
        """Does the same as `Checkpoint.serve_as`."""
        self._served.update(served)

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device | str = "cpu") -> LayerWeights:
        """Returns the weights of `layer` for a rank that holds the logical `experts`, in this order. `experts` may be empty.

        Only these experts' bytes are read, unless an operation of the family mixes experts in one tensor: peak memory on the
        host is then twice the size of the result. Raises CheckpointError.
        """
        info, device = self.info, torch.device(device)
        check_wanted(info, layer, experts)
        with TensorReader() as files:
            reader, stored = StoredReader(files), self._experts.get(layer)
            if stored is not None:
                weights = stored.read(
                    experts, sizes=info.sizes, quant=self._served[layer], reader=reader, device=device
                )
            else:
                weights = self._converted(layer, experts, reader, device)
        gate = GateWeights(weight_EK=torch.empty((0, info.hidden), dtype=info.dtype, device=device))
        return LayerWeights(experts=weights, gate=gate, shared=None)

    def _converted(
        self, layer: int, experts: Sequence[int], reader: StoredReader, device: torch.device
    ) -> ExpertWeights:
        """Returns the experts' weights made by transformers' own operations, in floats."""
        found, info = self._layers[layer], self.info
        shape, first = found.shape, "gate_up_proj" if info.activation.gated else "up_proj"
        parts = {name: self._read(reader, f"{found.name}.{name}", experts) for name in shape.parameters()}
        norm = None if shape.norm_offset is None else self._read(reader, f"{found.name}.{NORM}", None)
        w13, w2 = parts[first], parts["down_proj"]
        b13, b2 = parts.get(f"{first}_bias"), parts.get("down_proj_bias")
        if shape.transposed:
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        if shape.interleaved:
            w13 = _gate_then_up(w13)
            b13 = None if b13 is None else _gate_then_up(b13)
        if (
            norm is not None and shape.norm_offset is not None
        ):  # the scale of the outputs goes into the weights, and the norm itself stays
            scale_K = norm + shape.norm_offset
            w2, b2 = w2 * scale_K[:, None], None if b2 is None else b2 * scale_K

        def place(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value.contiguous().to(device)

        return ExpertWeights(
            w13_eNK=w13.contiguous().to(device),
            w2_eKN=w2.contiguous().to(device),
            activation=info.activation,
            b13=place(b13),
            b2=place(b2),
        )

    def weight_names(self) -> tuple[str, ...]:
        """Returns the names of the checkpoint's tensors that hold the experts' matrices, without biases."""
        recipes = [recipe for key, recipe in self._recipes.items() if not key.endswith(("_bias", NORM))]
        return tuple(dict.fromkeys(name for recipe in recipes for names in recipe.sources.values() for name in names))

    def _read(self, reader: StoredReader, key: str, experts: Sequence[int] | None) -> torch.Tensor:
        value = conversion.read(
            self._recipes[key], key, experts=experts, tensors=self._tensors, reader=reader, model=self._model
        )
        if value.numel():
            check_values(key, value, self.info.dtype)
        return value.to(self.info.dtype)


def knows(model_type: Any) -> bool:
    """Returns whether transformers is installed and has this model_type."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return False
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def open_generic(path: Path, config: dict, dtype: str = "auto", layers: Sequence[int] = ()) -> GenericCheckpoint:
    """Opens a checkpoint like `open_checkpoint`, for a model_type without a table of ours. config: the contents of config.json.

    Raises:
        CheckpointError: transformers is missing or does not know the model, the model has no experts module, the experts
            are quantised, no kernel computes their function, or a tensor is missing.
    """
    said = declared.read(path, config)
    model, files = build_on_meta(path), read_index(path)
    tensors = stored_tensors(files, said)
    found = find_layers(model)
    shape = found[0].shape
    numbers = tuple(sorted(each.layer for each in found))
    unknown = sorted(set(layers) - set(numbers))
    if unknown:
        raise CheckpointError(f"{path}: layers {unknown} are not MoE layers; the model has {list(numbers)}")
    served = {each.layer: each for each in found if not layers or each.layer in layers}
    wanted = {f"{each.name}.{name}": shape.num_experts for each in served.values() for name in shape.parameters()}
    if shape.norm_offset is not None:
        wanted |= {f"{each.name}.{NORM}": 0 for each in served.values()}
    try:
        recipes = conversion.find_recipes(model, tensors, wanted)
    except CheckpointError:
        _check(each for name, each in tensors.items() if "experts." in name)  # says better why a matrix is not there
        raise
    _check(tensors[name] for recipe in recipes.values() for names in recipe.sources.values() for name in names)
    info = ModelInfo(
        family=str(config.get("model_type")),
        name=path.resolve().name,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=top_k(model.config, model, found[0]),
        dtype=_dtype(path, _declared(model) if said.method and dtype == "auto" else dtype, recipes, tensors),
        layers=tuple(sorted(served)),
        activation=shape.activation,
        bias=shape.bias,
        gate=GateSpec(scoring="client", top_k=top_k(model.config, model, found[0])),
        shared_intermediate=0,
        fingerprint=fingerprint(config, files),
        quant=UNQUANTIZED,
    )
    lying = {number: _as_stored(each, recipes, tensors, info.sizes) for number, each in served.items()}
    experts = {number: each for number, each in lying.items() if each is not None}
    kinds = experts | {
        number: StoredExperts(tensors={"": _all_sources(each, recipes, tensors)}, made=True)
        for number, each in served.items() if number not in experts
    }  # fmt: skip
    return GenericCheckpoint(with_stored(info, kinds, said), tensors, model, served, recipes, experts)


def _check(tensors: Iterable[StoredTensor]) -> None:
    for each in tensors:
        each.check()


def _as_stored(
    layer: ExpertsLayer,
    recipes: Mapping[str, conversion.Recipe],
    tensors: Mapping[str, StoredTensor],
    sizes: ExpertSizes,
) -> StoredExperts | None:
    """Returns the layer's matrices if they lie in the checkpoint as the model has them. None: operations must make them."""
    shape = layer.shape
    if shape.norm_offset is not None:
        return None
    found: dict[str, tuple[StoredTensor, ...]] = {}
    turns = set()
    for key in shape.parameters():
        sources = conversion.plain_sources(recipes[f"{layer.name}.{key}"], transposed=shape.transposed)
        if sources is None or len(sources[0]) > 1 + (not shape.interleaved):
            return None
        bias = key.endswith("_bias")
        roles = ("gate", "up") if len(sources[0]) == 2 else (key.removesuffix("_bias").removesuffix("_proj"),)
        found |= {
            role + "_bias" * bias: tuple(tensors[name] for name in names)
            for role, names in zip(roles, sources[0], strict=True)
        }
        turns |= set() if bias else {sources[1]}
    if len(turns) != 1:
        return None
    made = StoredExperts(tensors=found, transposed=turns.pop(), interleaved=shape.interleaved)
    return made if _fits(made, shape, sizes) else None


def _fits(experts: StoredExperts, shape: ExpertsShape, sizes: ExpertSizes) -> bool:
    one = empty_weights(sizes, UNQUANTIZED, 1, torch.device("meta"))
    for role, found in experts.tensors.items():
        wanted = tuple(slot_view(one, 0, role, transposed=experts.transposed).shape)
        every = {each.shape for each in found}
        if every != {wanted} and every != {(shape.num_experts, *wanted)}:
            return False
    return True


def _all_sources(
    layer: ExpertsLayer, recipes: Mapping[str, conversion.Recipe], tensors: Mapping[str, StoredTensor]
) -> tuple[StoredTensor, ...]:
    keys = (f"{layer.name}.{key}" for key in layer.shape.parameters() if not key.endswith("_bias"))
    return tuple(tensors[name] for key in keys for names in recipes[key].sources.values() for name in names)


def build_on_meta(path: Path) -> Any:
    """Builds the model of config.json without memory: every parameter is on the meta device."""
    import transformers
    from transformers.utils.generic import ContextManagers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # a family's own code may raise anything
        raise CheckpointError(f"{path}: transformers cannot read config.json: {_one_line(error)}") from None
    cls = _architecture(config)
    if cls is None:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} has no model class for model_type {config.model_type!r}"
        )
    config._experts_implementation = "eager"
    try:
        with _few_modules(), ContextManagers(cls.get_init_context(torch.float32, False, False, None)):
            return cls(config)
    except Exception as error:
        text = f"{path}: transformers cannot build {cls.__name__} from config.json: {_one_line(error)}"
        raise CheckpointError(text) from None


@contextmanager
def _few_modules() -> Iterator[None]:
    """Raises CheckpointError as soon as a model has more modules than any that is known, whatever key asks for them."""
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made > MAX_MODULES:
            raise CheckpointError(f"it has more than {MAX_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _architecture(config: Any) -> Any:
    """Returns the class of the configuration's `architectures` if transformers has it, otherwise the one of its Auto classes.

    Checkpoints on the hub name remote code, or spell a class in their own way. The Auto classes go by model_type.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if inspect.isclass(named) and getattr(named, "config_class", None) is type(config):
            return named
    for mapping in AUTO_MAPPINGS:
        found = getattr(modeling_auto, mapping, {})
        if type(config) in found:
            return found[type(config)]
    return None


def _declared(model: Any) -> str:
    """Returns the dtype of the tensors that a quantised checkpoint leaves in floats."""
    declared = model.config.dtype or model.config.get_text_config().dtype or torch.bfloat16
    return str(declared).removeprefix("torch.")


def _dtype(
    path: Path, wanted: str, recipes: Mapping[str, conversion.Recipe], tensors: Mapping[str, StoredTensor]
) -> torch.dtype:
    """Returns `wanted`, or for "auto" the experts' own dtype."""
    if wanted != "auto":
        return MODEL_DTYPES[wanted]
    matrices = [recipe for key, recipe in recipes.items() if not key.endswith(NORM)]
    names = {name for recipe in matrices for names in recipe.sources.values() for name in names}
    kinds = {tensors[name].dtype for name in names}
    known = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    if len(kinds) != 1 or not kinds <= known.keys():
        raise CheckpointError(f"{path}: the experts are stored as {', '.join(sorted(kinds))}; set model.dtype")
    return MODEL_DTYPES[known[kinds.pop()]]


def _gate_then_up(value: torch.Tensor) -> torch.Tensor:
    """Reorders the rows of `(e, 2N, ...)` from gate, up, gate, ... to N rows of gate, then N rows of up."""
    return torch.cat((value[:, 0::2], value[:, 1::2]), dim=1)
