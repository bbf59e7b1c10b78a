"""Turns one layer's stored experts into `ExpertWeights`, packed or multiplied out.

The tables (`layout.py`) and the generic path (`generic.py`) say which matrices those are. The rest is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from epserve.errors import CheckpointError
from epserve.models.tensors import check_values
from epserve.modular_kernel import UNQUANTIZED, ExpertWeights, QuantConfig, UnquantizedFusedMoEMethod
from epserve.modular_kernel.methods_quant import method_for, with_input_scales
from epserve.modular_kernel.weights import ExpertSizes, slot_view, why_not_stored

from .declared import Declared
from .layouts import StoredTensor
from .matrices import StoredReader


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAs:
    """Groups layers that are stored alike.

    Args:
        name: the layout in words.
        quant: the scheme that keeps the layers packed. UNQUANTIZED: there is none.
        method: the checkpoint's name for its quantisation.
    """

    layers: tuple[int, ...]
    name: str
    quant: QuantConfig
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """Holds one layer's experts by their tensors.

    Args:
        tensors: role -> one matrix an expert, or one stack of all experts. `slot_view` lists the roles.
        transposed: the model's matrices are (in, out).
        interleaved: the rows of gate_up alternate gate, up, gate, ...
    """

    tensors: Mapping[str, tuple[StoredTensor, ...]]
    transposed: bool = False
    interleaved: bool = False
    made: bool = False
    """The tensors are not the matrices themselves. Operations make the matrices from them."""

    def of(self, role: str, expert: int) -> tuple[StoredTensor, int | None]:
        """Returns the tensor, and the expert's index in it. None: the tensor is the expert's own."""
        found = self.tensors[role]
        whole = 2 if role.endswith("_bias") else 3
        return (found[0], expert) if len(found[0].shape) == whole else (found[expert], None)

    def matrices(self) -> Iterator[StoredTensor]:
        for role, found in self.tensors.items():
            if not role.endswith("_bias"):
                yield from found

    def describe(self) -> str:
        kinds = {each.layout.describe(each) if each.quantised else each.dtype for each in self.matrices()}
        return " and ".join(sorted(kinds))

    def scheme(self, sizes: ExpertSizes) -> QuantConfig:
        """Returns the scheme that keeps the whole layer packed. UNQUANTIZED: it is not quantised, or has no such form."""
        if self.made:
            return UNQUANTIZED
        kinds = {each.layout.scheme(each) for each in self.matrices()}
        turned = any(each.layout.swapped != self.transposed for each in self.matrices())
        quant = kinds.pop()
        if kinds or turned or why_not_stored(sizes, quant) or (self.interleaved and quant.scheme == "fp8_block"):
            return UNQUANTIZED
        return quant

    def read(
        self,
        experts: Sequence[int],
        *,
        sizes: ExpertSizes,
        quant: QuantConfig,
        reader: StoredReader,
        device: torch.device,
    ) -> ExpertWeights:
        """Returns the weights of a rank's experts, in this order, in the scheme `quant`.

        Peak memory on the host is the size of the result plus one expert's largest matrix.
        """
        method = method_for(quant.scheme)
        weights = method.create_weights(sizes, quant, len(experts), device)
        packed = method is not UnquantizedFusedMoEMethod
        for role in self.tensors:
            for slot, expert in enumerate(experts):
                stored, index = self.of(role, expert)
                stored.check()
                if not stored.quantised and not packed:
                    view = slot_view(weights, slot, role, transposed=self.transposed, interleaved=self.interleaved)
                    reader.files.copy(stored.parts["weight"], view, index)
                elif role.endswith("_bias"):
                    view = slot_view(weights, slot, role, interleaved=self.interleaved)
                    reader.files.copy(stored.parts["weight"], view, index)
                elif packed:
                    matrix = stored.layout.matrix(reader.parts(stored, index), stored)
                    method.load_weights(weights, slot, role, matrix, quant=quant, interleaved=self.interleaved)
                else:
                    self._multiply_out(weights, slot, role, stored, index, reader)
        if quant.scheme == "fp8_tensor" and not quant.dynamic:
            weights = with_input_scales(weights, *(self._input_scales(reader, down) for down in (False, True)))
        return weights

    def _multiply_out(self, weights: ExpertWeights, slot: int, role: str, stored, index, reader: StoredReader) -> None:
        value = reader.values(stored, index)
        turned = self.transposed != stored.layout.swapped
        view = slot_view(weights, slot, role, transposed=turned, interleaved=self.interleaved)
        check_values(stored.name if index is None else f"{stored.name}[{index}]", value, view.dtype)
        view.copy_(value.view(view.shape))

    def _input_scales(self, reader: StoredReader, down: bool) -> list[torch.Tensor]:
        """Returns the input scales of every expert, since ranks must agree on the largest."""
        found = []
        for role, each in self.tensors.items():
            if role.endswith("_bias") or (role == "down") is not down:
                continue
            for stored in each:
                if "input_scale" not in stored.parts:
                    raise CheckpointError(
                        f"tensor {stored.name}: its input_scale is missing, others of its layer have one"
                    )
                found += list(
                    reader.files.read(stored.parts["input_scale"], buffer="input_scale").clone().float().flatten()
                )
        return found


def groups(layers: Mapping[int, tuple[str, QuantConfig]], method: str) -> tuple[StoredAs, ...]:
    """Groups layers that are stored alike, the largest group first."""
    found: dict[tuple[str, QuantConfig], list[int]] = {}
    for layer, kind in sorted(layers.items()):
        found.setdefault(kind, []).append(layer)
    made = [StoredAs(layers=tuple(of), name=name, quant=quant, method=method) for (name, quant), of in found.items()]
    return tuple(sorted(made, key=lambda each: -len(each.layers)))


def check_declared(layers: Iterable[StoredExperts], said: Declared) -> None:
    """Raises CheckpointError when the configuration says that experts are quantised, and none is."""
    every = [each for experts in layers for each in experts.matrices()]
    if not said.method or any(each.quantised for each in every):
        return
    meant = [each for each in every if said.rule(each.name) is not None]
    if len(meant) == len(every):
        first = meant[0]
        raise CheckpointError(
            f"{said.source} declares quantisation {said.method!r}, but tensor {first.name} is stored as {first.dtype} and has no"
            " scales, as all experts; remove quantization_config, or name the experts among the modules that it leaves out"
        )
