"""Method classes of quantised checkpoints: how their libraries store experts, brought into `ExpertWeights`.

`weights(experts, activation)` takes one mapping of tensors for each expert of this rank, in slot order, named as inside an
expert: `gate_proj.weight`, `up_proj.weight`, `down_proj.weight` and their scales. Nothing is requantised, except where gate
and up of one expert have a scale each and the kernels know one for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from epserve.errors import CheckpointError

from .capability import LayerSpec
from .methods import Backends, FusedMoEMethodBase
from .quantization import FP8, FP8_MAX, UNQUANTIZED, QuantConfig
from .types import Activation, ExpertWeights

ExpertTensors = Mapping[str, torch.Tensor]
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NVFP4_GROUP = 16
SILU = Activation()


class QuantizedMethod(FusedMoEMethodBase):
    """One quantisation library's layout. `CONFIGS`: the schemes that its layers may have; the spec names one of them."""

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
    def weights(
        cls, experts: Sequence[ExpertTensors], activation: Activation = SILU
    ) -> tuple[ExpertWeights, QuantConfig]:
        """The rank's weights and the scheme that they are in. Raises CheckpointError that names a missing tensor."""
        raise AssertionError(f"{cls.__name__} has no layout")


class Fp8MoEMethod(QuantizedMethod):
    """`quant_method: fp8`. In blocks (`weight_scale_inv`, DeepSeek), or per tensor (`weight_scale`, perhaps `input_scale`)."""

    CONFIGS = (QuantConfig(scheme="fp8_block", dynamic=True), QuantConfig(scheme="fp8_tensor"))

    @classmethod
    def weights(cls, experts, activation=SILU):
        if any(f"{GATE}.weight_scale_inv" in expert for expert in experts):
            s13 = torch.stack([_gate_up(expert, "weight_scale_inv") for expert in experts]).float()
            s2 = torch.stack([_get(expert, DOWN, "weight_scale_inv") for expert in experts]).float()
            return _pack(experts, activation, s13=s13, s2=s2), cls.CONFIGS[0]
        return _per_tensor(experts, activation)


class CompressedTensorsW8A8Fp8MoEMethod(QuantizedMethod):
    """compressed-tensors, e4m3: `weight_scale` `(rows, 1)` a channel with dynamic tokens, or a scalar a tensor."""

    CONFIGS = (QuantConfig(scheme="fp8_channel", dynamic=True), QuantConfig(scheme="fp8_tensor"))

    @classmethod
    def weights(cls, experts, activation=SILU):
        if _get(experts[0], GATE, "weight_scale").numel() == 1:
            return _per_tensor(experts, activation)
        return _per_channel(experts, activation), cls.CONFIGS[0]


class CompressedTensorsW8A8Int8MoEMethod(QuantizedMethod):
    """compressed-tensors, int8: a scale a channel, tokens quantised as they come."""

    CONFIGS = (QuantConfig(scheme="int8_channel", dynamic=True),)

    @classmethod
    def weights(cls, experts, activation=SILU):
        return _per_channel(experts, activation), cls.CONFIGS[0]


class ModelOptFp8FusedMoE(QuantizedMethod):
    """modelopt, e4m3: scalars `weight_scale` and `input_scale` a projection."""

    CONFIGS = (QuantConfig(scheme="fp8_tensor"),)

    @classmethod
    def weights(cls, experts, activation=SILU):
        return _per_tensor(experts, activation)


class ModelOptNvFp4FusedMoE(QuantizedMethod):
    """modelopt, nvfp4: two e2m1 a byte (the even one low), an e4m3 scale for 16, one float32 for all (`weight_scale_2`).

    NOTE: multiplied out once, at load, into bfloat16: no kernel here reads 4-bit weights yet, so they take four times the memory.
    """

    CONFIGS = (UNQUANTIZED,)

    @classmethod
    def weights(cls, experts, activation=SILU):
        w13 = [torch.cat([_nvfp4(expert, GATE), _nvfp4(expert, UP)]) for expert in experts]
        w2 = [_nvfp4(expert, DOWN) for expert in experts]
        return ExpertWeights(w13_eNK=torch.stack(w13), w2_eKN=torch.stack(w2), activation=activation), UNQUANTIZED


def _get(expert: ExpertTensors, projection: str, name: str) -> torch.Tensor:
    key = f"{projection}.{name}"
    if key not in expert:
        raise CheckpointError(f"expert tensor {key} is missing; found: {', '.join(sorted(expert)) or 'none'}")
    return expert[key]


def _gate_up(expert: ExpertTensors, name: str) -> torch.Tensor:
    return torch.cat([_get(expert, GATE, name), _get(expert, UP, name)])


def _pack(experts: Sequence[ExpertTensors], activation: Activation, **scales) -> ExpertWeights:
    return ExpertWeights(
        w13_eNK=torch.stack([_gate_up(expert, "weight") for expert in experts]),
        w2_eKN=torch.stack([_get(expert, DOWN, "weight") for expert in experts]),
        activation=activation,
        **scales,
    )


def _per_channel(experts: Sequence[ExpertTensors], activation: Activation) -> ExpertWeights:
    s13 = torch.stack([_gate_up(expert, "weight_scale").flatten() for expert in experts]).float()
    s2 = torch.stack([_get(expert, DOWN, "weight_scale").flatten() for expert in experts]).float()
    packed = _pack(experts, activation, s13=s13, s2=s2)
    for name, scale, rows in (("s13", s13, packed.w13_eNK.shape[1]), ("s2", s2, packed.w2_eKN.shape[1])):
        if scale.shape[1] != rows:
            raise CheckpointError(f"weight_scale ({name}): {scale.shape[1]} values for {rows} output channels")
    return packed


def _per_tensor(experts: Sequence[ExpertTensors], activation: Activation) -> tuple[ExpertWeights, QuantConfig]:
    """One scale an expert for gate and up together: the larger of the two, and the other's codes are rounded to it.

    The scale of activations is one for the layer, so the largest of the experts'; without any they are scaled row by row.
    """
    w13, s13 = zip(*(_joined(expert) for expert in experts), strict=True)
    s2 = torch.stack([_get(expert, DOWN, "weight_scale").float().reshape(()) for expert in experts])
    static = f"{GATE}.input_scale" in experts[0]
    a1 = a2 = None
    if static:
        both = [_get(expert, name, "input_scale").float().reshape(()) for expert in experts for name in (GATE, UP)]
        a1 = torch.stack(both).max().reshape(1)
        a2 = torch.stack([_get(e, DOWN, "input_scale").float().reshape(()) for e in experts]).max().reshape(1)
    packed = ExpertWeights(
        w13_eNK=torch.stack(w13), w2_eKN=torch.stack([_get(expert, DOWN, "weight") for expert in experts]),
        activation=activation, s13=torch.stack(s13), s2=s2, a1=a1, a2=a2,
    )  # fmt: skip
    return packed, QuantConfig(scheme="fp8_tensor", dynamic=not static)


def _joined(expert: ExpertTensors) -> tuple[torch.Tensor, torch.Tensor]:
    scales = [_get(expert, name, "weight_scale").float().reshape(()) for name in (GATE, UP)]
    top = torch.maximum(*scales)
    parts = []
    for name, scale in zip((GATE, UP), scales, strict=True):
        codes = _get(expert, name, "weight")
        if not torch.equal(scale, top):
            codes = (codes.float() * (scale / top)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        parts.append(codes)
    return torch.cat(parts), top


def _nvfp4(expert: ExpertTensors, projection: str) -> torch.Tensor:
    codes = _get(expert, projection, "weight")
    scale, whole = _get(expert, projection, "weight_scale").float(), _get(expert, projection, "weight_scale_2").float()
    values = torch.tensor(E2M1, device=codes.device)
    pairs = torch.stack((values[(codes & 0xF).long()], values[(codes >> 4).long()]), dim=-1).flatten(-2)
    if scale.shape != (pairs.shape[0], pairs.shape[1] // NVFP4_GROUP):
        raise CheckpointError(f"{projection}.weight_scale: {tuple(scale.shape)} for a weight of {tuple(pairs.shape)}")
    return (pairs * scale.repeat_interleave(NVFP4_GROUP, 1) * whole).to(torch.bfloat16)
