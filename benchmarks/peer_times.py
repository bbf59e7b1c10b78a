"""What the best peer's experts take for a number of (token, local expert) pairs on one H200, from `peers/h200.csv`.

The table holds one rank of DeepSeek-V3 at EP8: 32 experts, hidden 7,168, intermediate 2,048, where M tokens bring M local pairs.
Times are from bf16 rows to bf16 rows: sort, quantise, both products, weighted sum.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from benchmarks.expert_inputs import BYTES_PER_S, FLOPS_PER_S, SHAPES

PEERS = ("vllm_triton", "vllm_deepgemm", "vllm_cutlass", "sglang_triton", "triton_kernels", "deepgemm_contig",
         "deepgemm_masked", "torch_gmm", "hpc_ops")  # fmt: skip
SHAPE, EXPERTS = "dsv3_ep8", 32


def stored() -> list[dict[str, str]]:
    with open(Path(__file__).parent / "peers" / "h200.csv", newline="") as file:
        return list(csv.DictReader(file))


def best_peer(dtype: str, pairs: int, names: tuple[str, ...] = PEERS) -> dict:
    """Returns the fastest of `names`: {"peer", "us", "how"}.

    A time between two stored sizes is interpolated on logarithmic scales. Above the largest it follows the slope of the last two,
    which favours the peer, as its fixed costs are already paid there.
    """
    found = []
    for name in names:
        points = sorted(
            (int(row["M"]), float(row[name]))
            for row in stored()
            if row["shape"] == SHAPE and row["dtype"] == dtype and row[name]
        )
        if len(points) > 1 and (points[-1][0] >= pairs or points[-1][0] == 16384):
            us, how = _at(points, pairs)
            found.append({"peer": name, "us": us, "how": how})
    return min(found, key=lambda each: each["us"])


def best_rate(dtype: str, pairs: int) -> dict | None:
    """What a peer would take at the highest rate that any peer has in any cell of the table: a bound, not a measurement.

    None where reading the weights takes longer than that: the floor says all then.
    """
    rates = []
    for row in stored():
        shape = SHAPES[row["shape"]]
        local = int(row["M"]) * shape.topk * shape.local_experts / shape.global_experts
        operations = 6.0 * local * shape.hidden * shape.intermediate
        rates += [(operations / float(row[name]) * 1e6, name) for name in PEERS if row["dtype"] == dtype and row[name]]
    rate, name = max(rates)
    shape = SHAPES[SHAPE]
    us = 6.0 * pairs * shape.hidden * shape.intermediate / rate * 1e6
    if us < weights_us(dtype, pairs):
        return None
    return {"peer": name, "us": us, "how": f"{rate / 1e12:.0f} TFLOP/s, its best anywhere"}


def floor_us(dtype: str, pairs: int) -> float:
    shape = SHAPES[SHAPE]
    return max(6.0 * pairs * shape.hidden * shape.intermediate / FLOPS_PER_S[dtype] * 1e6, weights_us(dtype, pairs))


def weights_us(dtype: str, pairs: int) -> float:
    """Reading the weights of the experts that `pairs` pairs, evenly drawn, are expected to touch."""
    shape = SHAPES[SHAPE]
    active = EXPERTS * (1 - (1 - 1 / EXPERTS) ** pairs)
    return active * 3 * shape.hidden * shape.intermediate * (2 if dtype == "bf16" else 1) / BYTES_PER_S * 1e6


def _at(points: list[tuple[int, float]], pairs: int) -> tuple[float, str]:
    known = dict(points)
    if pairs in known:
        return known[pairs], "stored"
    (m0, t0), (m1, t1) = points[-2:]
    if pairs > m1:
        return t1 + (t1 - t0) / (m1 - m0) * (pairs - m1), f"extrapolated from {m0} and {m1}"
    m0, m1 = max(m for m in known if m < pairs), min(m for m in known if m > pairs)
    share = math.log(pairs / m0) / math.log(m1 / m0)
    return known[m0] ** (1 - share) * known[m1] ** share, f"interpolated between {m0} and {m1}"
