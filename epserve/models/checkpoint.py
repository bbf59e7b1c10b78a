"""A Hugging Face checkpoint folder -> one rank's weights of one MoE layer, in the layout that every experts class knows.

`open_checkpoint` reads config.json and the headers of the safetensors files and checks every name and shape beneath the
served layers; `load_layer` then reads only the bytes of the experts that it is asked for.

Legend: K hidden size, N intermediate size, S intermediate size of the shared experts, E logical experts, e experts loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from epserve.errors import CheckpointError
from epserve.modular_kernel import ExpertWeights, GateWeights
from epserve.modular_kernel.quantization import BLOCK, FP8

from .families import FAMILIES, Key
from .info import MAX_EXPERTS, ConfigReader, ModelInfo
from .layout import SCALE_SUFFIX, Block, allocate, find_block, slot_view
from .tensors import TensorInfo, TensorReader, read_index, read_json
from .weights import LayerWeights, SharedExperts, fingerprint

if TYPE_CHECKING:
    from .generic import GenericCheckpoint


class Checkpoint:
    """Made by `open_checkpoint`. Holds headers only, no data and no open file."""

    def __init__(self, info: ModelInfo, tensors: dict[str, TensorInfo], blocks: dict[int, Block]):
        self.info = info
        self._tensors, self._blocks = tensors, blocks

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device | str = "cpu") -> LayerWeights:
        """The weights of `layer` for a rank that holds the logical `experts`, in this order (none is allowed).

        Peak memory on the host is what is kept plus one expert's largest tensor.
        Raises CheckpointError for an unknown layer or expert, a file that was cut, and values that are not finite.
        """
        info = self.info
        if layer not in self._blocks:
            raise CheckpointError(f"layer {layer} is not a loaded MoE layer of {info.name}; those are {info.layers}")
        wrong = [expert for expert in experts if not 0 <= expert < info.num_experts]
        if wrong:
            raise CheckpointError(f"experts {wrong} are outside 0..{info.num_experts - 1}")
        block, device = self._blocks[layer], torch.device(device)
        with TensorReader() as reader:
            return LayerWeights(
                experts=self._load_experts(reader, block, tuple(experts), device),
                gate=self._load_gate(reader, block, device),
                shared=self._load_shared(reader, block, device),
            )

    def _load_experts(
        self, reader: TensorReader, block: Block, experts: tuple[int, ...], device: torch.device
    ) -> ExpertWeights:
        weights = allocate(self.info, len(experts), device)
        for role, pattern in block.form.tensors.items():
            for slot, expert in enumerate(experts):
                tensor = self._tensors[block.prefix + pattern.format(e=expert)]
                view = slot_view(weights, slot, role, block.form)
                reader.copy(tensor, view, None if "{e}" in pattern else expert)
        return weights

    def _load_gate(self, reader: TensorReader, block: Block, device: torch.device) -> GateWeights:
        info, names = self.info, FAMILIES[self.info.family].gate_tensors
        dtype = torch.float32 if info.gate.logits_float32 else info.dtype
        dtypes = {"weight": dtype, "bias": dtype, "correction_bias": torch.float32}
        found = {role: self._dense(reader, block, name, dtypes[role], device) for role, name in names.items()}
        return GateWeights(
            weight_EK=found["weight"], bias_E=found.get("bias"), correction_bias_E=found.get("correction_bias")
        )

    def _load_shared(self, reader: TensorReader, block: Block, device: torch.device) -> SharedExperts | None:
        info, form = self.info, FAMILIES[self.info.family].shared
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
        self, reader: TensorReader, block: Block, name: str, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        target = torch.empty(self._tensors[block.prefix + name].shape, dtype=dtype, device=device)
        self._dense_into(reader, block, name, target)
        return target

    def _dense_into(self, reader: TensorReader, block: Block, name: str, target: torch.Tensor) -> None:
        """Dense weights stay in the model's dtype: quantised ones are multiplied out here, once."""
        tensor, scale = self._tensors[block.prefix + name], self._tensors.get(block.prefix + name + SCALE_SUFFIX)
        if scale is None:
            reader.copy(tensor, target)
            return
        weight = torch.empty(tensor.shape, dtype=FP8)
        scales = torch.empty(scale.shape, dtype=torch.float32)
        reader.copy(tensor, weight)
        reader.copy(scale, scales)
        rows, columns = tensor.shape
        spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        target.copy_(weight.float() * spread)


def open_checkpoint(
    path: Path | str, dtype: str = "auto", layers: Sequence[int] = ()
) -> Checkpoint | GenericCheckpoint:
    """Read config.json and all headers, and check every tensor beneath the MoE layers.

    A model_type that is not in FAMILIES is looked up in transformers, where that is installed; so is one in mxfp4.
    dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16". layers: serve only these; empty: all.
    Raises CheckpointError that names the key, tensor or file, and for shapes both of them.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    reader = ConfigReader(config, str(path / "config.json"))
    quantised, kind = config.get("quantization_config"), config.get("model_type")
    packed = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"  # our tables have no such form
    if isinstance(kind, str) and (packed or kind not in FAMILIES):
        from . import generic  # imports transformers, which takes a second

        if generic.knows(kind):
            return generic.open_generic(path, config, dtype, layers)
    family, tensors = reader.family(), read_index(path)
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
        fingerprint=fingerprint(config, tensors),
        quant=reader.quant(),
    )
    return Checkpoint(info, tensors, {layer: find_block(info, tensors, layer, path) for layer in info.layers})
