"""Makes Triton's interpreter convert and compute bf16 and e4m3 exactly as torch does. For tests only: it patches internals.

Without it the interpreter multiplies raw bits of bf16, truncates f32 -> bf16 and loses mantissa carries in f32 -> e4m3.
`check()` shows that the patch holds with the Triton that is installed. Import it before launching kernels, with
TRITON_INTERPRET=1 set before Triton is imported.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before Triton is imported"

FLOATS = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5, tl.float16)
Builder = interpreter.InterpreterBuilder
_cast, _fp_to_fp, _dot, _binary = Builder.cast_impl, Builder.create_fp_to_fp, Builder.create_dot, Builder.binary_op


def _convert(handle, to):
    to = to.scalar
    bits = np.ascontiguousarray(handle.data).view(BITS[handle.data.dtype.itemsize])
    value = torch.from_numpy(bits).view(FLOATS[handle.dtype.scalar])
    if to == tl.float8e4nv:
        value = value.float().clamp(-448, 448)  # the hardware's conversion saturates
    data = value.to(FLOATS[to]).contiguous().view(torch.uint8).numpy().view(interpreter._get_np_dtype(to))
    return interpreter.TensorHandle(data.reshape(handle.data.shape), to)


def _both_floats(source, to):
    return source.dtype.scalar in FLOATS and to.scalar in FLOATS


def _cast_impl(self, source, to):
    differ = source.dtype.scalar != to.scalar
    return _convert(source, to) if differ and _both_floats(source, to) else _cast(self, source, to)


def _create_fp_to_fp(self, source, to, rounding):
    return _convert(source, to) if _both_floats(source, to) else _fp_to_fp(self, source, to, rounding)


def _create_dot(self, a, b, c, *rest):
    a, b = (_convert(v, tl.float32) if v.dtype.scalar in NARROW else v for v in (a, b))
    return _dot(self, a, b, c, *rest)


def _binary_op(self, left, right, op):
    if left.dtype.scalar == tl.bfloat16 and right.dtype.scalar == tl.bfloat16:
        out = _binary(self, _convert(left, tl.float32), _convert(right, tl.float32), op)
        return _convert(out, tl.bfloat16) if out.data.dtype == np.float32 else out
    return _binary(self, left, right, op)


OPERATIONS = {
    "fadd": np.add, "fmul": np.multiply, "fsub": np.subtract, "fdiv": np.divide, "maxnumf": np.fmax, "minnumf": np.fmin,
    "fcmpOLT": np.less, "fcmpOGT": np.greater, "fcmpOLE": np.less_equal, "fcmpOGE": np.greater_equal,
}  # fmt: skip


def install() -> None:
    Builder.cast_impl, Builder.create_fp_to_fp = _cast_impl, _create_fp_to_fp
    Builder.create_dot, Builder.binary_op = _create_dot, _binary_op
    Builder.create_fp_ext = Builder.create_fp_trunc = lambda self, source, to: self.cast_impl(source, to)
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui"):
        setattr(Builder, "create_" + name, lambda self, source, to: self.cast_impl(source, to))
    for name, op in OPERATIONS.items():
        setattr(Builder, "create_" + name, functools.partialmethod(_binary_op, op=op))


@triton.jit
def _cast_kernel(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


def check() -> None:
    """Raises AssertionError when casts of this Triton are still not torch's."""
    x = torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 50, torch.tensor([1.9375, 448.0])])
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    for to in (torch.bfloat16, torch.float8_e4m3fn):
        out = torch.empty(2048, dtype=to)
        _cast_kernel[(1,)](x, out, 2048)
        assert torch.equal(out.float(), x.clamp(-448, 448).to(to).float() if to.itemsize == 1 else x.to(to).float())


install()
