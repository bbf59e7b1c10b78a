"""Method classes of quantised checkpoints: how their libraries store experts, brought into `ExpertWeights`.

`weights(experts, activation)` takes one mapping of tensors for each expert of this rank, in slot order, named as inside an
expert: `gate_proj.weight`, `up_proj.weight`, `down_proj.weight` and their scales. Nothing is requantised, except where gate
and up of one expert have a scale each and the kernels know one for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from epserve.errors import CheckpointError, Incompatible

from .capability import LayerSpec
from .methods import Backends, FusedMoEMethodBase
from .quantization import FP8, FP8_MAX, QuantConfig
from .types import Activation, ExpertWeights

ExpertTensors = Mapping[str, torch.Tensor]
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
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
    def quant_configs(cls) -> tuple[QuantConfig, ...]:
        return cls.CONFIGS

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


class CompressedTensorsW8A8Fp8MoECutlassMethod(CompressedTensorsW8A8Fp8MoEMethod):
    """The same checkpoints, multiplied by CUTLASS alone: where that cannot run, the layer is refused with the reason."""

    EXPERTS = "cutlass"

    def experts_names(self) -> Sequence[str]:
        others = [name for name in self.backends.prefer_experts if name != self.EXPERTS]
        if others and self.EXPERTS not in self.backends.prefer_experts:
            raise Incompatible(
                f"{type(self).__name__} multiplies with {self.EXPERTS!r}, configured is {', '.join(others)}", ()
            )
        return (self.EXPERTS,)


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

    The two scales are multiplied into one float32. Activations stay in the model's dtype: `input_scale` is not used.
    """

    CONFIGS = (QuantConfig(scheme="nvfp4"),)

    @classmethod
    def weights(cls, experts, activation=SILU):
        s13 = [torch.cat([_nvfp4_scale(expert, GATE), _nvfp4_scale(expert, UP)]) for expert in experts]
        s2 = [_nvfp4_scale(expert, DOWN) for expert in experts]
        return _pack(experts, activation, s13=torch.stack(s13), s2=torch.stack(s2)), cls.CONFIGS[0]


class Mxfp4MoEMethod(QuantizedMethod):
    """gpt-oss, mxfp4: `gate_up_proj_blocks` `(2N, K/32, 16)` and `_scales` `(2N, K/32)` with gate and up in turn, and biases."""

    CONFIGS = (QuantConfig(scheme="mxfp4"),)

    @classmethod
    def weights(cls, experts, activation=SILU):
        def joined(name: str) -> torch.Tensor:
            return torch.stack([_apart(_of(expert, f"gate_up_proj_{name}")) for expert in experts])

        def down(name: str) -> torch.Tensor:
            return torch.stack([_of(expert, f"down_proj_{name}") for expert in experts])

        biased = "gate_up_proj_bias" in experts[0]
        packed = ExpertWeights(
            w13_eNK=joined("blocks").flatten(2), w2_eKN=down("blocks").flatten(2), activation=activation,
            s13=joined("scales"), s2=down("scales"),
            b13=joined("bias") if biased else None, b2=down("bias") if biased else None,
        )  # fmt: skip
        return packed, cls.CONFIGS[0]


def _of(expert: ExpertTensors, key: str) -> torch.Tensor:
    if key not in expert:
        raise CheckpointError(f"expert tensor {key} is missing; found: {', '.join(sorted(expert)) or 'none'}")
    return expert[key]


def _apart(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up in turn -> the gate's rows, then the up's."""
    return torch.cat([rows[::2], rows[1::2]])


def _get(expert: ExpertTensors, projection: str, name: str) -> torch.Tensor:
    return _of(expert, f"{projection}.{name}")


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


def _nvfp4_scale(expert: ExpertTensors, projection: str) -> torch.Tensor:
    codes, scale = _get(expert, projection, "weight"), _get(expert, projection, "weight_scale").float()
    if scale.shape != (codes.shape[0], codes.shape[1] * 2 // NVFP4_GROUP):
        raise CheckpointError(
            f"{projection}.weight_scale: {tuple(scale.shape)} for a packed weight of {tuple(codes.shape)}"
        )
    return scale * _get(expert, projection, "weight_scale_2").float()
