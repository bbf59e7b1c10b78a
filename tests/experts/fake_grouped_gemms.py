"""Stand-ins on the CPU for two libraries' grouped products: the same calls, checks and layouts, in plain float32.

They are strict where the libraries are: dtypes, strides, scales, alignment. What a library leaves unwritten is NaN here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FP8 = torch.float8_e4m3fn
ALIGN = 128


class DeepGemm:
    """The package `deep_gemm` 2 on compute capability 9.0, as far as experts use it, before it took experts' ends."""

    def __init__(self) -> None:
        self.calls = 0

    @staticmethod
    def get_mk_alignment_for_contiguous_layout() -> int:
        return ALIGN

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, m_indices, recipe=None, compiled_dims="nk",
                                         disable_ue8m0_cast=False):  # fmt: skip
        (x, x_scales), (w, w_scales) = a, b
        (m, k), (groups, n, inner) = x.shape, w.shape
        assert x.dtype == w.dtype == FP8 and x.stride(1) == 1 and w.is_contiguous() and inner == k
        assert x_scales.dtype == w_scales.dtype == torch.float32
        assert x_scales.shape == (m, k // 128) and w_scales.shape == (groups, n // 128, k // 128)
        assert d.dtype == torch.bfloat16 and d.shape == (m, n) and d.stride(1) == 1
        assert m_indices.dtype == torch.int32 and m_indices.is_contiguous() and m_indices.numel() == m
        assert m % ALIGN == 0, "rows come in whole tiles"
        self.calls += 1
        d.fill_(float("nan"))
        wide = x.float() * x_scales.repeat_interleave(128, 1)
        for start in range(0, m, ALIGN):
            owners = m_indices[start : start + ALIGN]
            if (owner := int(owners[0])) < 0:
                assert bool((owners < 0).all()), "a tile is skipped by its first row"
                continue
            assert bool(((owners == owner) | (owners < 0)).all()), "a tile has one expert"
            weight = w[owner].float() * w_scales[owner].repeat_interleave(128, 0).repeat_interleave(128, 1)
            d[start : start + ALIGN] = (wide[start : start + ALIGN] @ weight.T).bfloat16()


class DeepGemmByEnds(DeepGemm):
    """A version with `use_psum_layout`: ends[e] is one past expert e's last row, and each expert begins at a whole tile."""

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, recipe=None, compiled_dims="nk",
                                         disable_ue8m0_cast=False, use_psum_layout=False):  # fmt: skip
        assert use_psum_layout and grouped_layout.dtype == torch.int32 and grouped_layout.shape == (b[0].shape[0],)
        owner, start = torch.full((a[0].shape[0],), -1, dtype=torch.int32), 0
        for expert, end in enumerate(grouped_layout.tolist()):
            assert start <= end <= len(owner), "experts overlap"
            owner[start:end] = expert
            start = -(-end // ALIGN) * ALIGN
        super().m_grouped_fp8_gemm_nt_contiguous(a, b, d, owner, recipe, compiled_dims, disable_ue8m0_cast)


def private_scaled_grouped_mm(mat_a, mat_b, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None,
                              use_fast_accum=False):  # fmt: skip
    """`torch._scaled_grouped_mm`, 2-dimensional by 3-dimensional."""
    (rows, k), (groups, inner, n) = mat_a.shape, mat_b.shape
    assert mat_a.dtype == mat_b.dtype == FP8 and inner == k and k % 16 == 0 and n % 16 == 0
    assert mat_a.stride(1) == 1 and mat_b.stride(1) == 1, "a is row-major, b column-major"
    assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.is_contiguous() and scale_b.is_contiguous()
    assert scale_a.shape == (rows,) and scale_b.shape == (groups, n)
    assert offs is not None and offs.dtype == torch.int32 and offs.shape == (groups,) and out_dtype == torch.bfloat16
    assert bias is None and scale_result is None
    out, start = torch.full((rows, n), float("nan"), dtype=torch.bfloat16), 0
    for group, end in enumerate(offs.tolist()):
        assert start <= end <= rows
        product = (mat_a[start:end].float() * scale_a[start:end, None]) @ (mat_b[group].float() * scale_b[group])
        out[start:end] = product.bfloat16()
        start = end
    return out


def public_scaled_grouped_mm(mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None,
                             swizzle_b=None, bias=None, offs=None, output_dtype=torch.bfloat16, contraction_dim=(),
                             use_fast_accum=False):  # fmt: skip
    """`torch.nn.functional.scaled_grouped_mm`."""
    assert scale_recipe_a == scale_recipe_b == F.ScalingType.RowWise and not contraction_dim
    assert swizzle_a is None and swizzle_b is None
    return private_scaled_grouped_mm(mat_a, mat_b, scale_a, scale_b, offs=offs, bias=bias, out_dtype=output_dtype,
                                     use_fast_accum=use_fast_accum)  # fmt: skip
