"""Holds the weights of one layer on one rank, for checkpoints of every kind.

Legend: M tokens, K hidden size, S intermediate size of the shared experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from epserve.experts import rows
from epserve.experts.activation import activate
from epserve.experts.triton import dense
from epserve.modular_kernel import Activation, ExpertWeights, GateWeights

from .tensors import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts:
    """Computes the dense experts that every token visits. `w13_SK` `(2S, K)` has gate rows then up rows, `w2_KS` is `(K, S)`.

    `gate_1K`: the output is multiplied by sigmoid(x . gate). None: the family has no such gate.
    """

    w13_SK: torch.Tensor
    w2_KS: torch.Tensor
    activation: Activation
    gate_1K: torch.Tensor | None = None

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        return self.begin(x_MK)()

    def begin(self, x_MK: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Runs the first projection and returns a function for the rest. The halves run beside dispatch and beside combine."""
        h = dense.first_half(x_MK, self.w13_SK, self.w2_KS.shape[1])

        def finish() -> torch.Tensor:
            y_MK = dense.second_half(h, self.w2_KS, self.activation)
            return y_MK if self.gate_1K is None else torch.sigmoid(rows.linear(x_MK, self.gate_1K)) * y_MK

        return finish

    def differentiable(self, x_MK: torch.Tensor) -> torch.Tensor:
        """The same by operators that have a derivative, which the kernels lack."""
        y_MK = rows.linear(activate(rows.linear(x_MK, self.w13_SK), self.activation), self.w2_KS)
        return y_MK if self.gate_1K is None else torch.sigmoid(rows.linear(x_MK, self.gate_1K)) * y_MK

    def fitted(self) -> SharedExperts:
        """Returns the weights in the device's preferred layout. On the CPU, zeros follow the rows."""
        gate = self.gate_1K if self.gate_1K is None else rows.with_zeros(self.gate_1K)
        return replace(self, w13_SK=rows.with_zeros(self.w13_SK), w2_KS=rows.with_zeros(self.w2_KS), gate_1K=gate)

    def warm_up(self) -> None:
        """Compiles the kernels that a large batch would otherwise compile first."""
        self(self.w13_SK.new_zeros((dense.MIN_ROWS if self.w13_SK.is_cuda else 0, self.w13_SK.shape[1])))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Holds one layer for one rank: its experts in slot order, and the gate and shared experts, which all ranks hold."""

    experts: ExpertWeights
    gate: GateWeights
    shared: SharedExperts | None


def fingerprint(config: dict, tensors: Mapping[str, TensorInfo]) -> str:
    """Returns a hash that changes with the configuration and with any tensor's name, dtype or shape."""
    described = [(name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())]
    text = json.dumps([config, described], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
