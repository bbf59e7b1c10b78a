"""Describes the layouts of quantised matrices in checkpoints as data: one class for each, for the tables and the generic path.

A layout gives the names and dtypes by which its tensors are recognised, the shape of the matrix, its numbers in float32
(`values`), and the scheme in which a kernel takes it packed (`scheme`, `matrix`). A matrix is `(out, in)` here, and a stack of
experts is `(E, out, in)`. Legend: r rows (out), c columns (in).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from epserve.errors import CheckpointError
from epserve.models.tensors import DTYPES, TensorInfo
from epserve.modular_kernel import UNQUANTIZED, QuantConfig
from epserve.modular_kernel.methods_quant import nvfp4_scale
from epserve.modular_kernel.quantization import BLOCK, FP8

from . import bit_codes
from .bit_codes import scale_values, scaled
from .declared import NONE, Rule

Parts = Mapping[str, torch.Tensor]
BYTE_SCALES = frozenset({"F8_E8M0", "U8"})
FLOAT_SCALES = frozenset({"F32", "BF16", "F16", "F64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Holds the tensors of one matrix (or of a stack of matrices) of a checkpoint.

    Args:
        shape: the shape of the matrix, as the model knows it.
        block: the rows and columns that share a scale, 0 for all of them.
        problem: the reason why it cannot be read. `check` raises it when the matrix is wanted.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    parts: Mapping[str, TensorInfo]
    rule: Rule = Rule()
    block: tuple[int, int] = (1, 1)
    problem: str = ""

    @property
    def dtype(self) -> str:
        """Returns the dtype of the codes, by its name in the file."""
        return self.parts["weight"].dtype

    @property
    def quantised(self) -> bool:
        return self.layout is not PLAIN

    def check(self) -> None:
        if self.problem:
            raise CheckpointError(self.problem)


class Layout:
    """Describes one layout. Names are templates of `name` (the model's name of the matrix) and `module` (without ".weight")."""

    name: str = "floats"
    codes: str = "{name}"
    dtypes: frozenset[str] = frozenset()
    """Dtypes of the codes."""
    parts: Mapping[str, tuple[str, ...]] = {}
    """Further tensors that must be there, each with its possible names."""
    optional: Mapping[str, tuple[str, ...]] = {}
    scales: frozenset[str] = frozenset()
    """Dtypes of `weight_scale`."""
    foreign: tuple[str, ...] = ()
    """Names of tensors that rule this layout out."""
    swapped = False
    """The model's (in, out) matrix is stored as (out, in)."""

    def describe(self, stored: StoredTensor) -> str:
        return self.name

    def shape(self, parts: Mapping[str, TensorInfo], rule: Rule) -> tuple[int, ...]:
        """Returns the shape `(..., r, c)`. Raises CheckpointError."""
        return parts["weight"].shape

    def block(self, shape: tuple[int, ...], parts: Mapping[str, TensorInfo], rule: Rule) -> tuple[int, int]:
        """Returns the rows and columns that share a scale. Raises CheckpointError for scales that do not fit the codes."""
        return block_of(shape, parts["weight"], parts["weight_scale"], rule)

    def values(self, parts: Parts, stored: StoredTensor) -> torch.Tensor:
        """Returns the numbers, float32 `(..., r, c)`."""
        raise NotImplementedError

    def scheme(self, stored: StoredTensor) -> QuantConfig:
        """Returns the scheme in which a kernel takes the matrix without a loss. UNQUANTIZED: there is none."""
        return UNQUANTIZED

    def matrix(self, parts: Parts, stored: StoredTensor) -> Parts:
        """Returns the tensors that `load_weights` of a method class takes: `weight` and its scales, `(r, ...)`."""
        return parts


class Plain(Layout):
    def values(self, parts, stored):
        return parts["weight"]


class ScaledCodes(Layout):
    """Codes of eight bits with a scale for each tensor, channel, group or block. Scales multiply, even if named `scale_inv`."""

    parts = {"weight_scale": ("{name}_scale_inv", "{name}_scale", "{module}.scale", "{module}.qscale_weight")}
    optional = {"input_scale": ("{module}.input_scale", "{module}.activation_scale", "{name}_activation_scale",
                                "{module}.qscale_act")}  # fmt: skip
    scales = FLOAT_SCALES | BYTE_SCALES
    foreign = ("{name}_amax",)  # such a matrix has two scales, and transformers' own conversion combines them

    def describe(self, stored):
        match stored.block:
            case (0, 0):
                how = "a scale a tensor" + (", static activations" if "input_scale" in stored.parts else "")
            case (1, 0):
                how = "a scale a channel"
            case (r, c):
                how = f"blocks of {r}x{c}"
        weight_only = ", weights only" if stored.rule.activations == NONE else ""
        return f"{self.name}, {how}{weight_only}"

    def values(self, parts, stored):
        codes = parts["weight"]
        values = bit_codes.e4m3_values(codes) if codes.dtype == FP8 else codes.float()
        return scaled(values, scale_values(parts["weight_scale"]), stored.block)

    def matrix(self, parts, stored):
        return {**parts, "weight_scale": self._spread_rows(scale_values(parts["weight_scale"]), stored)}

    def _spread_rows(self, scale: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
        """Returns the scales of the kernels' blocks. A larger stored block becomes several of them."""
        r, c = (side // BLOCK for side in stored.block)
        rows, columns = stored.shape[-2:]
        if not _is_block(stored) or (r, c) == (1, 1):
            return scale
        wide = scale.repeat_interleave(r, -2).repeat_interleave(c, -1)
        return wide[..., : -(-rows // BLOCK), : -(-columns // BLOCK)]


class Fp8(ScaledCodes):
    name = "fp8"
    dtypes = frozenset({"F8_E4M3"})

    def scheme(self, stored):
        if stored.rule.activations == NONE:  # the kernels that take fp8 weights quantise activations too
            return UNQUANTIZED
        if _is_block(stored):
            return QuantConfig(scheme="fp8_block", dynamic=True)
        match stored.block:
            case (0, 0) if "input_scale" in stored.parts:
                return QuantConfig(scheme="fp8_tensor")
            case (0, 0) | (1, 0):  # a channel's own scale is exact for both halves of gate and up
                return QuantConfig(scheme="fp8_channel", dynamic=True)
        return UNQUANTIZED


class Int8(ScaledCodes):
    name = "int8"
    dtypes = frozenset({"I8"})
    scales = FLOAT_SCALES

    def scheme(self, stored):
        if stored.rule.activations == NONE or stored.block not in ((0, 0), (1, 0)) or "input_scale" in stored.parts:
            return UNQUANTIZED
        return QuantConfig(scheme="int8_channel", dynamic=True)


class Mxfp4(Layout):
    """Two e2m1 codes a byte, with a power of two for 32 of them."""

    name = "mxfp4"
    dtypes = frozenset({"U8", "I8"})
    parts = {"weight_scale": ("{name}_scale", "{module}.scale", "{name}_scale_inv")}
    optional = {"input_scale": ("{module}.input_scale",)}
    scales = BYTE_SCALES
    foreign: tuple[str, ...] = ("{name}_scale_2",)

    def shape(self, parts, rule):
        *lead, columns = parts["weight"].shape
        return (*lead, columns * 2)

    def block(self, shape, parts, rule):
        return _group(shape, parts, 32)

    def values(self, parts, stored):
        codes, scale = bit_codes.as_bytes(parts["weight"]), parts["weight_scale"]
        numbers = bit_codes.pairs(codes, "e2m1")
        return numbers.unflatten(-1, (-1, 32)).mul_(scale_values(scale).unsqueeze(-1)).flatten(-2)

    def scheme(self, stored):
        return QuantConfig(scheme="mxfp4")


class Mxfp4Packed(Mxfp4):
    codes = "{module}.weight_packed"
    dtypes = frozenset({"U8"})
    parts = {"weight_scale": ("{module}.weight_scale",)}
    foreign = ("{module}.weight_global_scale",)


class Mxfp4Blocks(Mxfp4):
    """The layout of gpt-oss: `(E, r, c/32, 16)` and `(E, r, c/32)`. The model's own parameter is `(E, c, r)`."""

    codes = "{name}_blocks"
    dtypes = frozenset({"U8"})
    parts = {"weight_scale": ("{name}_scales",)}
    optional = {}
    foreign = ()
    swapped = True

    def shape(self, parts, rule):
        *lead, groups, half = parts["weight"].shape
        return (*lead, groups * half * 2)

    def values(self, parts, stored):
        return super().values({**parts, "weight": parts["weight"].flatten(-2)}, stored)

    def matrix(self, parts, stored):
        return {**parts, "weight": parts["weight"].flatten(-2)}


class Nvfp4(Layout):
    """Two e2m1 codes a byte, an e4m3 scale for 16 of them, and a float for all. modelopt's float multiplies."""

    name = "nvfp4"
    dtypes = frozenset({"U8"})
    parts = {"weight_scale": ("{name}_scale",), "weight_scale_2": ("{name}_scale_2",)}
    optional = {"input_scale": ("{module}.input_scale",)}
    scales = frozenset({"F8_E4M3"})

    def shape(self, parts, rule):
        *lead, columns = parts["weight"].shape
        return (*lead, columns * 2)

    def block(self, shape, parts, rule):
        return _group(shape, parts, 16)

    def values(self, parts, stored):
        outer = {name: _against_stack(each) for name, each in parts.items() if name in OUTER}
        scale = nvfp4_scale({"weight_scale": parts["weight_scale"], **outer})
        numbers = bit_codes.pairs(parts["weight"], "e2m1")
        return numbers.unflatten(-1, (-1, 16)).mul_(scale.unsqueeze(-1)).flatten(-2)

    def scheme(self, stored):
        return QuantConfig(scheme="nvfp4")


class Nvfp4Packed(Nvfp4):
    """The layout of compressed-tensors: the float divides."""

    codes = "{module}.weight_packed"
    parts = {"weight_scale": ("{module}.weight_scale",), "weight_global_scale": ("{module}.weight_global_scale",)}
    optional = {"input_scale": ("{module}.input_global_scale",)}


OUTER = ("weight_scale_2", "weight_global_scale")


class Integers(Layout):
    """Codes of a few bits in int32 words, with a scale for each group of columns."""

    dtypes = frozenset({"I32"})
    scales = FLOAT_SCALES

    def describe(self, stored):
        return f"{self.name} of {stored.rule.bits} bits, groups of {stored.block[1]}"

    def block(self, shape, parts, rule):
        groups = parts["weight_scale"].shape[-1]
        return self._group(shape, parts["weight_scale"], groups, rule)

    def _group(self, shape: tuple[int, ...], scale: TensorInfo, groups: int, rule: Rule) -> tuple[int, int]:
        columns = shape[-1]
        if not groups or columns % groups or (rule.group and -(-columns // rule.group) != groups):
            of = f"groups of {rule.group}" if rule.group else "whole groups"
            raise CheckpointError(f"tensor {scale.name} {scale.shape}: {groups} scales for {columns} columns, not {of}")
        return 1, columns // groups

    def scheme(self, stored):
        group = stored.block[1]
        if stored.rule.bits != 4 or not stored.rule.symmetric or group % 8 or "weight_g_idx" in stored.parts:
            return UNQUANTIZED
        kind = DTYPES[stored.parts["weight_scale"].dtype]
        return QuantConfig(scheme="int4", group=group, scale_dtype=kind)


class Wna16(Integers):
    """The layout pack-quantized of compressed-tensors: codes have the offset of half their range."""

    name = "int"
    codes = "{module}.weight_packed"
    parts = {"weight_scale": ("{module}.weight_scale",)}
    optional = {
        "weight_zero_point": ("{module}.weight_zero_point",),
        "weight_g_idx": ("{module}.weight_g_idx",),
        "weight_shape": ("{module}.weight_shape",),
    }

    def shape(self, parts, rule):
        *lead, words = parts["weight"].shape
        if rule.bits not in (2, 4, 8):
            raise CheckpointError(f"tensor {parts['weight'].name}: num_bits {rule.bits!r} of it; known: 2, 4, 8")
        return (*lead, words * (32 // rule.bits))

    def values(self, parts, stored):
        bits = stored.rule.bits
        assert bits is not None
        if bits == 4:
            numbers = bit_codes.pairs(bit_codes.as_bytes(parts["weight"]), "int4")
        else:
            numbers = bit_codes.along_columns(parts["weight"], bits).float().sub_(1 << (bits - 1))
        scale = parts["weight_scale"].float()
        zero = None
        if "weight_zero_point" in parts and not stored.rule.symmetric:
            zero = bit_codes.along_rows(parts["weight_zero_point"], bits).float() - (1 << (bits - 1))
        if "weight_g_idx" in parts:
            index = parts["weight_g_idx"].long()
            scale, zero = scale[..., index], None if zero is None else zero[..., index]
            return (numbers if zero is None else numbers - zero) * scale
        numbers = numbers.unflatten(-1, (-1, stored.block[1]))
        if zero is not None:
            numbers -= zero.unsqueeze(-1)
        return numbers.mul_(scale.unsqueeze(-1)).flatten(-2)

    def matrix(self, parts, stored):
        return {**parts, "weight": bit_codes.as_bytes(parts["weight"])}


class Awq(Integers):
    """The layout "gemm" of AutoAWQ: `(c, r/8)` words, `(c/g, r/8)` words of zero points, `(c/g, r)` scales."""

    name = "awq"
    codes = "{module}.qweight"
    parts = {"weight_scale": ("{module}.scales",), "weight_zero_point": ("{module}.qzeros",)}

    def shape(self, parts, rule):
        *lead, columns, words = parts["weight"].shape
        return (*lead, words * 8, columns)

    def block(self, shape, parts, rule):
        scale = parts["weight_scale"]
        return self._group(shape, scale, scale.shape[-2], rule)

    def values(self, parts, stored):
        codes, zeros = (bit_codes.awq_columns(parts[name]) for name in ("weight", "weight_zero_point"))
        numbers = codes.float().unflatten(-2, (-1, stored.block[1])).sub_(zeros.float().unsqueeze(-2))
        return numbers.mul_(parts["weight_scale"].float().unsqueeze(-2)).flatten(-3, -2).transpose(-1, -2).contiguous()

    def scheme(self, stored):
        return UNQUANTIZED  # no kernel takes zero points


class Gptq(Integers):
    """The layout of AutoGPTQ: `(c/8, r)` words, `(c/g, r/8)` words of zero points, `(c/g, r)` scales, and each column's group."""

    name = "gptq"
    codes = "{module}.qweight"
    parts = {"weight_scale": ("{module}.scales",), "weight_zero_point": ("{module}.qzeros",)}
    optional = {"weight_g_idx": ("{module}.g_idx",)}

    def shape(self, parts, rule):
        *lead, words, rows = parts["weight"].shape
        if rule.bits is None:
            raise CheckpointError(f"tensor {parts['weight'].name}: nothing declares its bits; known: 2, 4, 8")
        return (*lead, rows, words * (32 // rule.bits))

    def block(self, shape, parts, rule):
        scale = parts["weight_scale"]
        return self._group(shape, scale, scale.shape[-2], rule)

    def values(self, parts, stored):
        bits, group = stored.rule.bits, stored.block[1]
        assert bits is not None
        codes = bit_codes.along_rows(parts["weight"], bits)
        zeros = bit_codes.along_columns(parts["weight_zero_point"], bits).float() + stored.rule.zero_point_offset
        scale = parts["weight_scale"].float()
        index = parts.get("weight_g_idx", torch.arange(codes.shape[-2]) // group).long()
        return ((codes.float() - zeros[..., index, :]) * scale[..., index, :]).transpose(-1, -2).contiguous()

    def scheme(self, stored):
        if stored.rule.act_order:
            return UNQUANTIZED
        return super().scheme(replace(stored, parts={k: v for k, v in stored.parts.items() if k != "weight_g_idx"}))

    def matrix(self, parts, stored):
        """Returns codes and scales of a matrix with zero points of 8 and columns in order.

        Raises CheckpointError when the tensors differ from that, since the configuration alone may be wrong.
        """
        bits, group, module = 4, stored.block[1], stored.name.removesuffix(".weight")
        zeros = bit_codes.along_columns(parts["weight_zero_point"], bits) + stored.rule.zero_point_offset
        if not bool((zeros == bit_codes.INT4_OFFSET).all()):
            raise CheckpointError(
                f"tensor {module}.qzeros: zero points other than 8, but the configuration says sym: true"
            )
        index = parts.get("weight_g_idx")
        if index is not None and not torch.equal(index.long(), torch.arange(len(index)) // group):
            raise CheckpointError(
                f"tensor {module}.g_idx: columns in another order, but the configuration says desc_act: false"
            )
        codes = bit_codes.along_rows(parts["weight"], bits).transpose(-1, -2).contiguous()
        return {
            "weight": bit_codes.two_a_byte(codes),
            "weight_scale": parts["weight_scale"].transpose(-1, -2).contiguous(),
        }


PLAIN = Plain()
LAYOUTS: tuple[Layout, ...] = (
    Fp8(), Int8(), Mxfp4(), Mxfp4Packed(), Mxfp4Blocks(), Nvfp4(), Nvfp4Packed(), Wna16(), Awq(), Gptq(),
)  # fmt: skip


def block_of(shape: tuple[int, ...], codes: TensorInfo, scale: TensorInfo, rule: Rule) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, 0 for all. Raises CheckpointError with both shapes."""
    *lead, rows, columns = shape
    declared = rule.block or ((1, rule.group) if rule.group else None)
    if declared and scale.shape == (*lead, -(-rows // declared[0]), -(-columns // declared[1])):
        return declared
    if math.prod(scale.shape) == 1 or scale.shape in (tuple(lead), (*lead, 1), (*lead, 1, 1)):
        return 0, 0
    if scale.shape in ((*lead, rows), (*lead, rows, 1)):
        return 1, 0
    if scale.shape == (*lead, 1, columns):
        return 0, 1
    if not declared and len(scale.shape) == len(shape) and scale.shape[: len(lead)] == tuple(lead):
        a, b = scale.shape[-2:]
        if a and b and rows % a == 0 and columns % b == 0:
            return rows // a, columns // b
    r, c = declared or (1, columns)
    of = f" for blocks of {r}x{c}" if declared else ""
    needed = (*lead, -(-rows // r), -(-columns // c))
    raise CheckpointError(f"tensor {scale.name}: {scale.shape} scales, {codes.name} {codes.shape} needs {needed}{of}")


def _group(shape: tuple[int, ...], parts: Mapping[str, TensorInfo], group: int) -> tuple[int, int]:
    scale, wanted = parts["weight_scale"], (*shape[:-1], shape[-1] // group)
    if shape[-1] % group or scale.shape != wanted:
        codes = parts["weight"]
        raise CheckpointError(f"tensor {scale.name}: {scale.shape} scales, {codes.name} {codes.shape} needs {wanted}")
    return 1, group


def _is_block(stored: StoredTensor) -> bool:
    """Returns whether scales are by the kernels' blocks, or by larger blocks that are made of them."""
    return all(side and side % BLOCK == 0 for side in stored.block)


def _against_stack(outer: torch.Tensor) -> torch.Tensor:
    """Shapes one float for each expert to multiply `(E, r, groups)`. A single float becomes a scalar."""
    return outer.reshape(()) if outer.numel() == 1 else outer.reshape(-1, 1, 1)
