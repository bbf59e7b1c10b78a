"""Defines method classes of quantised checkpoints: they bring matrices from each library's layout into `ExpertWeights`.

`load_weights` takes one matrix of one expert as the library stores it: `weight`, `weight_scale` and further tensors.
Nothing is requantised, except if gate and up of one expert have a scale each and the kernels take one for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from epserve.errors import CheckpointError, ConfigError, Incompatible

from .capability import LayerSpec
from .methods import Backends, FusedMoEMethodBase, UnquantizedFusedMoEMethod
from .quantization import FP8, FP8_MAX, QuantConfig
from .types import ExpertWeights
from .weights import copy_part, slot_view

Matrix = Mapping[str, torch.Tensor]


class QuantizedMethod(FusedMoEMethodBase):
    """Reads one quantisation library's layout. `CONFIGS`: the schemes that its layers may have. The spec names one of them."""

    CONFIGS: ClassVar[tuple[QuantConfig, ...]]

    def __init__(self, spec: LayerSpec, backends: Backends):
        super().__init__(spec, backends)
        known = {config.scheme for config in self.CONFIGS}
        if spec.quant.scheme not in known:
            names = ", ".join(sorted(known))
            raise CheckpointError(f"{type(self).__name__} stores {names}, the layer is declared as {spec.quant.scheme}")

    @classmethod
    def quant_config(cls) -> QuantConfig:
        return cls.CONFIGS[0]

    @classmethod
    def quant_configs(cls) -> tuple[QuantConfig, ...]:
        return cls.CONFIGS

    @classmethod
    def converted(cls, matrix: Matrix, quant: QuantConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns codes and scales as `QuantConfig` has them. Raises CheckpointError for a tensor missing or of another shape."""
        codes, scale = _of(matrix, "weight"), _of(matrix, "weight_scale")
        if quant.scheme == "fp8_tensor":
            return codes, scale.float().reshape(())
        if quant.scheme in ("fp8_channel", "int8_channel"):
            flat = scale.float().flatten()
            if flat.numel() not in (1, codes.shape[0]):
                raise CheckpointError(f"weight_scale: {flat.numel()} values for {codes.shape[0]} output channels")
            return codes, flat.expand(codes.shape[0])
        if quant.scheme == "fp8_block":
            return codes, scale.float()
        wanted = (codes.shape[0], codes.shape[1] * 2 // quant.shared)
        if tuple(scale.shape) != wanted:
            raise CheckpointError(
                f"weight_scale: {tuple(scale.shape)} for a packed weight of {tuple(codes.shape)}, expected {wanted}"
            )
        return codes, scale

    @classmethod
    def load_weights(cls, weights, slot, role, matrix, *, quant, interleaved=False):
        codes, scale = cls.converted(matrix, quant)
        if scale.ndim == 0 and role == "up":
            codes, scale = _one_scale_for_both(weights, slot, codes, scale)
        copy_part(slot_view(weights, slot, role, interleaved=interleaved), codes)
        copy_part(slot_view(weights, slot, f"{role}_scale", interleaved=interleaved), scale)


class Fp8MoEMethod(QuantizedMethod):
    """Reads `quant_method: fp8`: blocks (`weight_scale_inv`, DeepSeek), or per tensor (`weight_scale`, perhaps `input_scale`)."""

    CONFIGS = (
        QuantConfig(scheme="fp8_block", dynamic=True),
        QuantConfig(scheme="fp8_tensor"),
        QuantConfig(scheme="fp8_channel", dynamic=True),
    )
    QUANT_METHODS = ("fp8", "fbgemm_fp8")


class CompressedTensorsW8A8Fp8MoEMethod(QuantizedMethod):
    """Reads e4m3 of compressed-tensors: `weight_scale` `(rows, 1)` by channel with dynamic tokens, a scalar, or blocks."""

    CONFIGS = (
        QuantConfig(scheme="fp8_channel", dynamic=True),
        QuantConfig(scheme="fp8_tensor"),
        QuantConfig(scheme="fp8_block", dynamic=True),
    )
    QUANT_METHODS = ("compressed-tensors",)


class CompressedTensorsW8A8Fp8MoECutlassMethod(CompressedTensorsW8A8Fp8MoEMethod):
    """Reads the same checkpoints for CUTLASS alone. If CUTLASS cannot run, the layer is refused with the reason."""

    EXPERTS = "cutlass"

    def experts_names(self) -> Sequence[str]:
        others = [name for name in self.backends.prefer_experts if name != self.EXPERTS]
        if others and self.EXPERTS not in self.backends.prefer_experts:
            raise Incompatible(
                f"{type(self).__name__} multiplies with {self.EXPERTS!r}, configured is {', '.join(others)}", ()
            )
        return (self.EXPERTS,)


class CompressedTensorsW8A8Int8MoEMethod(QuantizedMethod):
    """Reads int8 of compressed-tensors: a scale for each channel. Tokens are quantised as they come."""

    CONFIGS = (QuantConfig(scheme="int8_channel", dynamic=True),)
    QUANT_METHODS = ("compressed-tensors",)


class ModelOptFp8FusedMoE(QuantizedMethod):
    """Reads e4m3 of modelopt: scalars `weight_scale` and `input_scale` for each projection, or a scale for each channel."""

    CONFIGS = (
        QuantConfig(scheme="fp8_tensor"),
        QuantConfig(scheme="fp8_channel", dynamic=True),
        QuantConfig(scheme="fp8_block", dynamic=True),
    )
    QUANT_METHODS = ("modelopt",)


class ModelOptNvFp4FusedMoE(QuantizedMethod):
    """Reads nvfp4: two e2m1 a byte (the even one low), an e4m3 scale for 16, one float32 for all.

    The two scales become one float32: modelopt's `weight_scale_2` multiplies, compressed-tensors' `weight_global_scale`
    divides. Activations stay in the model's dtype: `input_scale` is not used.
    """

    CONFIGS = (QuantConfig(scheme="nvfp4"),)
    QUANT_METHODS = ("modelopt", "compressed-tensors")

    @classmethod
    def converted(cls, matrix, quant):
        codes, _ = super().converted(matrix, quant)
        return codes, nvfp4_scale(matrix)


class CompressedTensorsWNA16MoEMethod(QuantizedMethod):
    """Reads int4 of compressed-tensors, and of AWQ and GPTQ without zero points: codes with offset 8, a scale for each group."""

    CONFIGS = (QuantConfig(scheme="int4"),)
    QUANT_METHODS = ("compressed-tensors", "awq", "gptq")


class Mxfp4MoEMethod(QuantizedMethod):
    """Reads mxfp4: two e2m1 a byte, a power of two (E8M0) for 32. gpt-oss has gate and up in turn, `_blocks` and `_scales`."""

    CONFIGS = (QuantConfig(scheme="mxfp4"),)
    QUANT_METHODS = ("mxfp4", "fp8", "modelopt", "compressed-tensors")

    @classmethod
    def converted(cls, matrix, quant):
        codes, scale = _of(matrix, "weight").flatten(1), _of(matrix, "weight_scale")
        if scale.dtype != torch.uint8:
            scale = scale.view(torch.uint8)
        return super().converted({"weight": codes.view(torch.uint8), "weight_scale": scale}, quant)


METHODS: tuple[type[FusedMoEMethodBase], ...] = (
    UnquantizedFusedMoEMethod,
    Fp8MoEMethod,
    CompressedTensorsW8A8Fp8MoEMethod,
    CompressedTensorsW8A8Int8MoEMethod,
    ModelOptFp8FusedMoE,
    ModelOptNvFp4FusedMoE,
    CompressedTensorsWNA16MoEMethod,
    Mxfp4MoEMethod,
    CompressedTensorsW8A8Fp8MoECutlassMethod,
)
"""All method classes of quantised layers. Those of one scheme are in order of preference."""


def method_for(scheme: str, experts_name: str = "", quant_method: str = "") -> type[FusedMoEMethodBase]:
    """Returns the method class whose weights are stored in `scheme`.

    If several fit, the one of this `quant_method` is taken, otherwise the first in METHODS. A class that multiplies with one
    experts backend alone is taken with that backend only.
    """
    found = [method for method in METHODS if scheme in {config.scheme for config in method.quant_configs()}]
    if not found:
        known = sorted({config.scheme for method in METHODS for config in method.quant_configs()})
        raise ConfigError(f"quantisation {scheme!r} has no method class (served: {', '.join(known)})")
    found = [method for method in found if quant_method in method.QUANT_METHODS] or found
    bound = [method for method in found if method.EXPERTS == experts_name != ""]
    return (bound or [method for method in found if not method.EXPERTS])[0]


def with_input_scales(
    weights: ExpertWeights, first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]
) -> ExpertWeights:
    """Returns the weights with static scales of activations, one for the layer: the largest of all its experts on all ranks."""

    def largest(scales: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.stack([each.float().reshape(()) for each in scales]).max().reshape(1).to(weights.w13_eNK.device)

    return replace(weights, a1=largest(first), a2=largest(second))


def nvfp4_scale(matrix: Matrix) -> torch.Tensor:
    """Joins the scales of 16 and the one of all into one float32 for 16, in the arithmetic of the tool that stored them."""
    scale = _of(matrix, "weight_scale").float()
    if "weight_global_scale" in matrix:
        return scale / matrix["weight_global_scale"].float()
    return scale * _of(matrix, "weight_scale_2").float()


def _of(matrix: Matrix, key: str) -> torch.Tensor:
    if key not in matrix:
        raise CheckpointError(f"{key} is missing; found: {', '.join(sorted(matrix)) or 'none'}")
    return matrix[key]


def _one_scale_for_both(
    weights: ExpertWeights, slot: int, codes: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the up projection's codes and the larger scale of gate and up. The codes of the other one are rounded to it."""
    assert weights.s13 is not None
    first = weights.s13[slot].to(scale.device)
    top = torch.maximum(first, scale)
    gate = slot_view(weights, slot, "gate")
    if not torch.equal(first, top):
        copy_part(gate, _rounded(gate, first / top))
    return codes if torch.equal(scale, top) else _rounded(codes, scale / top), top


def _rounded(codes: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (codes.float() * factor.to(codes.device)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
