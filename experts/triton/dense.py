"""Dense experts that every token visits, in two halves: what runs in the windows of an all-to-all.

cuBLAS is as fast alone and slower beside communication: its persistent kernels leave no multiprocessor free. Two H200s, 4,096
tokens, a shared expert of DeepSeek-V3 beside DeepEP's high-throughput mode: one after the other 1,052 us, cuBLAS inside the
windows 1,000 us, the kernels here 771 us. Alone: 475 us with cuBLAS, 495 us here.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from epserve.experts import rows
from epserve.experts.activation import activate
from epserve.experts.tiles.memory import SPARE, Gpu
from epserve.modular_kernel.types import Activation

MIN_ROWS = 512
"""Fewest rows for the Triton kernels. Below it, the weights take most of the time, and cuBLAS splits the inner size better."""
BM, BN, BK, GROUP, STAGES = 128, 256, 64, 8, 4
COLUMNS = 1024


def suits(x_MK: torch.Tensor, inner: int) -> bool:
    """Returns whether the Triton kernels take these rows. `inner`: the intermediate size."""
    return (
        x_MK.is_cuda
        and x_MK.shape[0] >= MIN_ROWS
        and x_MK.dtype in (torch.bfloat16, torch.float16)
        and x_MK.shape[1] % 8 == 0  # a TMA row is a multiple of 16 bytes
        and inner % 8 == 0
        and _has_kernels(x_MK.device)
    )


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    gpu = Gpu.of(device)  # compute capability 12.0 has TMA, too, and less than half of the shared memory
    fits = gpu.shared_memory >= STAGES * BK * (BM + BN) * 2 + SPARE
    return find_spec("triton") is not None and gpu.capability >= (9, 0) and fits


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """Multiplies `(M, K)` by `(N, K)` to `(M, N)`, summed in float32. Both are contiguous 2-byte floats on a CUDA device."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from epserve.experts.kernels import dense as kernels

    (rows, inner), columns = x_MK.shape, w_NK.shape[0]
    out = torch.empty((rows, columns), dtype=x_MK.dtype, device=x_MK.device)
    x = TensorDescriptor(x_MK, [rows, inner], [inner, 1], [BM, BK])
    w = TensorDescriptor(w_NK, [columns, inner], [inner, 1], [BN, BK])
    grid = -(-rows // BM) * -(-columns // BN)
    kernels.product[(grid,)](
        x, w, out, rows, N=columns, K=inner, BM=BM, BN=BN, BK=BK, GROUP=GROUP, num_warps=8, num_stages=STAGES
    )
    return out


def activate_rows(h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Computes `activation.activate`, in one pass if the kernel has the non-linearity. `h` must be contiguous."""
    from .launch import ACTIVATIONS

    if not activation.gated or activation.kind not in ACTIVATIONS:
        return activate(h, activation)
    from epserve.experts.kernels import dense as kernels

    rows, columns = h.shape[0], h.shape[1] // 2
    out = torch.empty((rows, columns), dtype=h.dtype, device=h.device)
    if rows:
        kernels.gated[(rows, -(-columns // COLUMNS))](
            h, out, N=columns, BLOCK=COLUMNS, ACT=ACTIVATIONS[activation.kind], LIMIT=float(activation.limit or 0.0),
            ALPHA=float(activation.alpha), num_warps=4,
        )  # fmt: skip
    return out


def first_half(x_MK: torch.Tensor, w13_SK: torch.Tensor, inner: int) -> torch.Tensor:
    return linear(x_MK, w13_SK) if suits(x_MK, inner) else rows.linear(x_MK, w13_SK)


def second_half(h: torch.Tensor, w2_KS: torch.Tensor, activation: Activation) -> torch.Tensor:
    inner = w2_KS.shape[1]
    a = activate_rows(h, activation) if suits(h, inner) else activate(h, activation)
    return linear(a, w2_KS) if suits(a, inner) else rows.linear(a, w2_KS)
