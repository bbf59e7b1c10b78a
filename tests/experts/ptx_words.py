"""The few PTX instructions of `experts/kernels/four_bits.py` on 32-bit words, so that its assembler runs without a GPU.

Exact where the kernel needs it: `fma.rn.bf16x2` rounds float64 and keeps subnormal numbers.
"""

from __future__ import annotations

import re
import struct


def halves(word: int) -> list[float]:
    """The two bf16 of 32 bits."""
    return [struct.unpack("<f", (half << 16).to_bytes(4, "little"))[0] for half in (word & 0xFFFF, word >> 16)]


def bf16(value: float) -> int:
    """Bits, rounded to nearest even."""
    wide = int.from_bytes(struct.pack("<f", value), "little")
    return (wide + 0x7FFF + (wide >> 16 & 1)) >> 16


def pair(low: float, high: float) -> int:
    """Two bf16 as 32 bits, each rounded once."""
    return bf16(low) | bf16(high) << 16


def _fma(a: int, b: int, c: int) -> int:
    return pair(*(x * y + z for x, y, z in zip(halves(a), halves(b), halves(c), strict=True)))


def _prmt(a: int, b: int, selector: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    chosen = [selector >> (4 * i) & 0xF for i in range(4)]
    assert max(chosen) < 8, "sign replication is not known here"
    return int.from_bytes(bytes(source[i] for i in chosen), "little")


def _lop3(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for case in range(8):
        hit = (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        found |= hit if table >> case & 1 else 0
    return found & 0xFFFFFFFF


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma,
}


def run(text: str, *inputs: int) -> int:
    """$0 after `text`, whose $1, $2, ... are `inputs`. An instruction that is not known raises KeyError."""
    values = {f"${i + 1}": value for i, value in enumerate(inputs)}

    def read(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    body = re.sub(r"\.reg \.b32 [^;]*;", "", text.strip().strip("{}"))
    for line in filter(None, (part.strip() for part in body.split(";"))):
        operation, operands = line.split(None, 1)
        target, *sources = (name.strip() for name in operands.split(","))
        values[target] = OPERATIONS[operation](*map(read, sources))
    return values["$0"]
