"""Describes quantisation as data: the storage of a layer's weights and activations, and the shapes of their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epserve.errors import ConfigError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3 value
BLOCK = 128  # DeepSeek's block side


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """Describes the storage of weights and activations.

    scheme            weights                 activations            s13, s2                       a1, a2
    ----------------  ----------------------  ---------------------  ----------------------------  -------------------
    none              bf16, fp16, fp32        as weights             -                             -
    fp8_tensor        e4m3                    e4m3, per tensor       (e,) fp32                     (1,) fp32, or dynamic
    fp8_channel       e4m3                    e4m3, per token        (e, 2N), (e, K) fp32          -
    fp8_block         e4m3                    e4m3, per 1x128        (e, 2N/128, K/128) ... fp32   -
    int8_channel      int8                    int8, per token        (e, 2N), (e, K) fp32          -
    int4              uint8, two a byte       not quantised          (e, 2N, K/group) scale_dtype  -
    mxfp4             uint8, two a byte       not quantised          (e, 2N, K/32) e8m0 as uint8   -
    nvfp4             uint8, two a byte       not quantised          (e, 2N, K/16) fp32            -

    `dynamic`: the scales of activations are computed from the batch (always so where no a1/a2 is listed), one a token, so that
    no other row of the batch and no number of ranks changes them. int4 has offset 8. nvfp4: the global scale is multiplied in.
    """

    scheme: str = "none"
    dynamic: bool = False
    group: int = 128
    scale_dtype: torch.dtype = torch.float32
    """The dtype of the weights' scales in int4: the checkpoint's own."""

    SCHEMES = ("none", "fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "int4", "mxfp4", "nvfp4")

    def __post_init__(self):
        if self.scheme not in self.SCHEMES:
            raise ConfigError(f"quantisation {self.scheme!r} is not one of {', '.join(self.SCHEMES)}")

    @property
    def packed(self) -> bool:
        """Returns whether a byte holds two codes."""
        return self.scheme in ("int4", "mxfp4", "nvfp4")

    @property
    def stored(self) -> torch.dtype | None:
        """Returns the dtype of the codes. None: the model's own dtype."""
        if self.packed:
            return torch.uint8
        return {"none": None, "int8_channel": torch.int8}.get(self.scheme, FP8)

    @property
    def shared(self) -> int:
        """Returns how many neighbours of a row share a scale. 1: none of them, or the whole row."""
        return {"fp8_block": BLOCK, "int4": self.group, "mxfp4": 32, "nvfp4": 16}.get(self.scheme, 1)

    @property
    def dispatch_dtype(self) -> torch.dtype | None:
        """Returns the dtype in which rows may be dispatched with their scales. None: only in the model's own dtype."""
        return FP8 if self.scheme == "fp8_block" else None


UNQUANTIZED = QuantConfig()


def quantise_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises floats `(..., K)` to e4m3 `(..., K)` and float32 scales `(..., K/128)`, one for each 1x128 block of a row.

    The scale is amax/448 (amax at least 1e-10, so that a block of zeros has a finite one). Each block is scaled by its
    own largest value only: neighbours, however large, change nothing. Raises ConfigError when K has a partial block.
    """
    if x.shape[-1] % BLOCK:
        raise ConfigError(f"hidden size {x.shape[-1]} is not a multiple of {BLOCK}: it has no whole fp8 blocks")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    scaled = (blocks / scales[..., None]).clamp(-FP8_MAX, FP8_MAX)  # e4m3 has no infinity: a rounded 448.0001 is NaN
    return scaled.flatten(-2).to(FP8), scales


def dequantise_blocks(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverts `quantise_blocks`, in float32."""
    return (x.float().unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)
