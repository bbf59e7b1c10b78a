"""Turns a Hugging Face checkpoint folder into one rank's weights of one MoE layer, in the layout that every experts class knows.

`open_checkpoint` reads config.json and the headers of the safetensors files and checks every name and shape beneath the
served layers. `load_layer` then reads only the bytes of the requested experts.

Legend: K hidden size, N intermediate size, S intermediate size of the shared experts, E logical experts, e experts loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel import UNQUANTIZED, GateWeights, QuantConfig

from . import gguf_files
from .families import FAMILIES, Family, Key
from .info import MAX_EXPERTS, ConfigReader, ModelInfo, check_config
from .layout import Block, find_block
from .stored import declared
from .stored.layouts import StoredTensor
from .stored.matrices import StoredReader, stored_tensors
from .tensors import MAX_CONFIG_BYTES, TensorInfo, TensorReader, check_values, read_index, read_json
from .wanted import check_wanted, with_stored
from .weights import LayerWeights, SharedExperts, fingerprint

if TYPE_CHECKING:
    from .generic import GenericCheckpoint


class Checkpoint:
    """Reads one model's experts, by a table of `FAMILIES`. Holds headers only, no data and no open file.

    `open_checkpoint` makes it.
    """

    def __init__(
        self, info: ModelInfo, family: Family, tensors: Mapping[str, StoredTensor], blocks: Mapping[int, Block]
    ):
        self.info, self._family = info, family
        self._tensors, self._blocks = tensors, blocks
        self._served = {layer: kind.quant for kind in info.kinds for layer in kind.layers}

    def serve_as(self, served: Mapping[int, QuantConfig]) -> None:
        """Sets the scheme in which `load_layer` returns each layer's experts: the one that keeps them packed, or UNQUANTIZED."""
        self._served.update(served)

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device | str = "cpu") -> LayerWeights:
        """Returns the weights of `layer` for a rank that holds the logical `experts`, in this order. `experts` may be empty.

        Peak memory on the host is the size of the result plus one expert's largest tensor.

        Raises:
            CheckpointError: the layer or an expert is unknown, a file was cut, or a value is not finite.
        """
        info, device = self.info, torch.device(device)
        check_wanted(info, layer, experts)
        block = self._blocks[layer]
        with TensorReader() as files:
            reader = StoredReader(files)
            stored = block.experts(self._tensors, info.num_experts)
            return LayerWeights(
                experts=stored.read(experts, sizes=info.sizes, quant=self._served[layer], reader=reader, device=device),
                gate=self._load_gate(reader, block, device),
                shared=self._load_shared(reader, block, device),
            )

    def _load_gate(self, reader: StoredReader, block: Block, device: torch.device) -> GateWeights:
        info, names = self.info, self._family.gate_tensors
        dtype = torch.float32 if info.gate.logits_float32 else info.dtype
        dtypes = {"weight": dtype, "bias": dtype, "correction_bias": torch.float32}
        found = {role: self._dense(reader, block, name, dtypes[role], device) for role, name in names.items()}
        return GateWeights(
            weight_EK=found["weight"], bias_E=found.get("bias"), correction_bias_E=found.get("correction_bias")
        )

    def _load_shared(self, reader: StoredReader, block: Block, device: torch.device) -> SharedExperts | None:
        info, form = self.info, self._family.shared
        if form is None or not info.shared_intermediate:
            return None
        size = info.shared_intermediate
        w13_SK = torch.empty(2 * size, info.hidden, dtype=info.dtype, device=device)
        self._dense_into(reader, block, form.gate, w13_SK[:size])
        self._dense_into(reader, block, form.up, w13_SK[size:])
        sigmoid = form.sigmoid_gate
        return SharedExperts(
            w13_SK=w13_SK,
            w2_KS=self._dense(reader, block, form.down, info.dtype, device),
            activation=info.activation,
            gate_1K=self._dense(reader, block, sigmoid, info.dtype, device) if sigmoid else None,
        )

    def _dense(
        self, reader: StoredReader, block: Block, name: str, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        target = torch.empty(self._tensors[block.prefix + name].shape, dtype=dtype, device=device)
        self._dense_into(reader, block, name, target)
        return target

    def _dense_into(self, reader: StoredReader, block: Block, name: str, target: torch.Tensor) -> None:
        """Fills `target` with a dense weight in the model's dtype. A quantised weight is multiplied out here, once."""
        stored = self._tensors[block.prefix + name]
        if not stored.quantised:
            stored.check()
            reader.files.copy(stored.parts["weight"], target)
            return
        value = reader.values(stored)
        check_values(stored.name, value, target.dtype)
        target.copy_(value)


def open_checkpoint(
    path: Path | str, dtype: str = "auto", layers: Sequence[int] = ()
) -> Checkpoint | GenericCheckpoint:
    """Reads config.json and all headers, and checks every tensor beneath the MoE layers. Accepts GGUF files as well.

    A model_type that is not in FAMILIES is looked up in transformers, when that is installed.

    Args:
        path: the checkpoint's folder, a GGUF file, or a folder with GGUF files.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        layers: the layers to serve. Empty means all MoE layers.

    Raises:
        CheckpointError: the message names the key, tensor or file, and both shapes when shapes differ.
    """
    path = Path(path)
    if pieces := gguf_files.files_of(path):
        config, family, files, tensors = gguf_files.read(pieces)
        said = declared.Declared(method="gguf", source=str(path))
        return _opened(path, family, ConfigReader(config, str(path)), files, tensors, said, dtype, layers)
    config = read_json(path / "config.json", most=MAX_CONFIG_BYTES)
    check_config(config, str(path / "config.json"))
    reader, kind = ConfigReader(config, str(path / "config.json")), config.get("model_type")
    if isinstance(kind, str) and kind not in FAMILIES:
        from . import generic  # imports transformers, which takes a second

        if generic.knows(kind):
            return generic.open_generic(path, config, dtype, layers)
    family, files = reader.family(), read_index(path)
    said = declared.read(path, config)
    return _opened(path, family, reader, files, stored_tensors(files, said), said, dtype, layers)


def _opened(
    path: Path,
    family: Family,
    reader: ConfigReader,
    files: Mapping[str, TensorInfo],
    tensors: Mapping[str, StoredTensor],
    said: declared.Declared,
    dtype: str,
    layers: Sequence[int],
) -> Checkpoint:
    """Opens a checkpoint whose family has a table in FAMILIES."""
    moe_layers = reader.layers(family)
    unknown = sorted(set(layers) - set(moe_layers))
    if unknown or not moe_layers:
        raise CheckpointError(f"{path}: layers {unknown} are not MoE layers; the model has {list(moe_layers)}")
    num_experts = reader.size(family.num_experts, most=MAX_EXPERTS)
    gate = reader.gate(family, num_experts)
    info = ModelInfo(
        family=family.name,
        name=path.resolve().name,
        hidden=reader.size(Key("hidden_size")),
        intermediate=reader.size(family.intermediate),
        num_experts=num_experts,
        top_k=gate.top_k,
        dtype=reader.dtype(dtype),
        layers=tuple(sorted(set(layers))) or moe_layers,
        activation=reader.activation(family),
        bias=any("down_bias" in form.tensors for form in family.forms),
        gate=gate,
        shared_intermediate=reader.shared_intermediate(family),
        fingerprint=fingerprint(dict(reader.config), files),
        quant=UNQUANTIZED,
    )
    blocks = {layer: find_block(info, family, tensors, layer, path) for layer in info.layers}
    experts = {layer: block.experts(tensors, num_experts) for layer, block in blocks.items()}
    return Checkpoint(with_stored(info, experts, said), family, tensors, blocks)
