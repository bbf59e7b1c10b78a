"""Experts by DeepGEMM's grouped products (package `deep_gemm`): e4m3 in blocks of 1x128 and 128x128, compute capability 9.0."""

from __future__ import annotations

import functools
import importlib.util
import inspect

import torch

from epserve.modular_kernel import Activation, ExpertsCapability, ExpertWeights, FusedMoEActivationFormat

from .triton import warmup as triton_warmup
from .triton.library_gemms import LibraryGemmExperts, Operand

PRODUCT = "m_grouped_fp8_gemm_nt_contiguous"


class DeepGemmExperts(LibraryGemmExperts):
    """Computes by DeepGEMM's products. Rows of an expert begin at a multiple of 128.

    Versions with `use_psum_layout` take the experts' ends and visit the tiles that have rows. Older ones take the expert of each
    row and visit every tile of the buffers, which have room for the slots of all ranks: on one rank of eight 5 times the time.

    NOTE: it compiles by itself, with nvcc, and keeps the results in ~/.deep_gemm: the first start takes minutes.
    """

    capability = ExpertsCapability(
        activation_formats=frozenset({FusedMoEActivationFormat.Standard}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16}),
        quant_schemes=frozenset({"fp8_block"}),
        activations=frozenset(Activation.KINDS),
        ungated=False,
        bias=False,
        block_aligned=True,
        cuda_graph=True,
    )
    align = 128
    fills_out = True

    @property
    def wants_owner(self) -> bool:
        return not takes_ends(getattr(_library(), PRODUCT))

    @classmethod
    def unavailable(cls):
        if importlib.util.find_spec("deep_gemm") is None:
            return "the package deep_gemm is not installed (github.com/deepseek-ai/DeepGEMM, version 2 or newer)"
        if reason := triton_warmup.unavailable():
            return reason
        if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
            # On 10.0 it would round the checkpoint's scales to powers of two.
            return f"DeepGEMM serves compute capability (9, 0) here, not {torch.cuda.get_device_capability()}"
        library = _library()
        if not hasattr(library, PRODUCT):
            return f"deep_gemm has no {PRODUCT}: version 2 or newer is needed"
        if (needed := alignment(library)) != cls.align:
            return f"deep_gemm wants experts to begin at multiples of {needed} rows, {cls.align} was expected"
        return None

    def multiply(self, x: Operand, weights: ExpertWeights, *, first: bool, out: torch.Tensor | None) -> torch.Tensor:
        w, scale = (weights.w13_eNK, weights.s13) if first else (weights.w2_eKN, weights.s2)
        assert out is not None
        product = getattr(_library(), PRODUCT)
        if x.ends is None:
            product((x.rows, x.scales), (w, scale), out, x.owner)
        else:
            product((x.rows, x.scales), (w, scale), out, x.ends, use_psum_layout=True)
        return out


@functools.cache
def takes_ends(product) -> bool:
    return "use_psum_layout" in inspect.signature(product).parameters


def alignment(library) -> int:
    """Returns the library's alignment in rows. The library renamed the function after version 2.1."""
    for name in ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"):
        if hasattr(library, name):
            return int(getattr(library, name)())
    return 0


def _library():
    import deep_gemm

    return deep_gemm
