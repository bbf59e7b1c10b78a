"""Measures expert parallelism from 1, 2, 4 to N ranks of one host: one command, one JSON, one drawing, under 8 minutes.

    python -m benchmarks.scaling --ranks 8 --out results/       # N GPUs
    python -m benchmarks.scaling --ranks 2 --cpu --out /tmp     # gloo ranks, small sizes, no GPU needed

1. combinations: the case table of the modular kernel at N ranks for every pair that fits (tests/support/cases.py).
2. all2all: dispatch, combine and round trip of every all-to-all backend, 1 to 4,096 tokens a rank, hidden 7,168, 256 experts,
   top-8, bf16 and fp8, N ranks (`benchmarks/all2all.py`).
   GB/s as DeepEP's own tests count it: rows that a rank receives (one per token and rank, those from itself too), of 2H bytes
   or in fp8 H + H/32. Combine sends as many of 2H. Low latency: one row per token and expert that a rank sends.
3. layers: the whole DeepSeek-V3 layer with its shared expert (`benchmarks/ep_layer.py`) at 1, 2, 4 and N ranks over each
   backend, the all-gather / reduce-scatter one among them, and `replicas`: as many independent ranks that hold all experts,
   with the same tokens.
4. efficiency, weak: a rank's tokens stay the same, so it is time at the reference / time at w ranks. `from_1`: against one rank
   that holds all experts. `from_2`: against the same backend on two ranks.

Each section has a share of --budget-s. Parts without time are left out and listed, as are failed parts, with the reason. Parts
that were left out are begun again at the end if other sections were quicker. The exit status is 1 when something failed or was
wrong or a section has no result at all, 0 when parts were only left out or are not available here.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import drawing, plot_scaling, reports
from benchmarks.all2all import LEFT_OUT, UNAVAILABLE, Ranks, copy_to_next_gpu, run_candidate, supervise
from benchmarks.all2all_candidates import CANDIDATES
from benchmarks.ep_layer import BACKENDS, REPLICAS, measure
from epserve.cli.layer.synthetic import LayerSizes
from epserve.modular_kernel import RankContext
from tests.kernel.test_modular_kernel_combinations import PAIRS, missing, reasons, run_case
from tests.support.cases import CASES, TOLERANCE

AGAIN_S = 45  # less is not worth a start of processes
SHARES = {"combinations": 0.25, "all2all": 0.6, "layers": 1.0}  # of the budget, counted from the start
GPU = {
    "sizes": LayerSizes(scheme="fp8_block"),
    "tokens": [1, 8, 32, 128, 512, 1024, 4096],
    "layers": [1, 8, 32, 128, 512, 4096],
}
CPU = {
    "sizes": LayerSizes(hidden=256, intermediate=128, num_experts=16, top_k=4, shared=128),
    "tokens": [1, 16],
    "layers": [1, 16, 64],
}
ALL2ALL = ("nvlink", "nvlink_fp8", "deepep_ht_bf16", "deepep_ht_fp8", "deepep_ll_bf16", "deepep_ll_fp8", "all_to_all",
           "all_to_all_fp8", "allgather_reducescatter", "allgather_reducescatter_fp8", "all_to_all_batched",
           "all_to_all_batched_fp8", "ours_deepep_ht_bf16", "ours_deepep_ht_fp8", "ours_deepep_ll_bf16", "ours_deepep_ll_fp8",
           "nvlink_batched", "nvlink_batched_fp8", "nccl_a2a", "nccl_ag_rs", "deepep_v2", "nvshmem")  # fmt: skip
OURS = tuple(name for name in ALL2ALL if name.startswith(("nvlink", "ours_", "all")))
ANCHORS = (
    {"what": "dispatch", "tokens": 4096, "unit": "GB/s", "public": 320.0, "by": "UCCL-EP on 8 H200s"},
    {"what": "combine", "tokens": 4096, "unit": "GB/s", "public": 319.0, "by": "UCCL-EP on 8 H200s"},
    {"what": "dispatch", "tokens": 128, "unit": "us", "public": 40.0, "by": "DeepEP, low latency, 8 GPUs"},
    {"what": "combine", "tokens": 128, "unit": "us", "public": 70.0, "by": "DeepEP, low latency, 8 GPUs"},
)


def run_pair(name: str, ranks: Ranks, options):
    """Returns a cell for each case that the pair fits. A wrong result is a cell. An exception ends the pair."""
    pf_name, experts_name = name.split(" + ")
    kind = ranks.device.type
    group = dist.group.WORLD if ranks.world > 1 else None
    context = RankContext(rank=ranks.rank, world_size=ranks.world, device=ranks.device, group=group)
    for case in CASES.values():
        if reasons(pf_name, experts_name, case.spec(ranks.world, kind)):
            continue
        parts = ranks.gather(run_case(context, pf_name, experts_name, case.name))
        error, norm = (sum(part) for part in zip(*parts, strict=True))
        relative = (error / norm) ** 0.5 if norm else error
        limit = TOLERANCE[case.dtype]
        yield {"pair": name, "case": case.name, "error": relative, "allowed": limit, "right": relative <= limit}


def run_layer(name: str, ranks: Ranks, options):
    for _, cell in measure(name, ranks, options.sizes, options.layer_tokens):
        yield cell


class Run:
    def __init__(self, options):
        self.options = options
        self.begin = time.monotonic()
        self.left: list[tuple] = []
        self.report: dict = {"meta": meta(options)}
        self.report |= {"combinations": [], "all2all": [], "layers": [], "failures": {}, "seconds": {}}

    def stop(self, section: str) -> float:
        return self.begin + self.options.budget_s * SHARES[section]

    def jobs(self, section: str, names: Iterable[str], run, *, world: int, stop: float, key: str = "") -> None:
        """Run them until `stop`. What was left out is remembered for the end."""
        started, options, names = time.monotonic(), self.options, list(names)
        settings = SimpleNamespace(**vars(options) | {"world": world, "json": None})
        cells, failures = supervise(names, settings, run, stop=stop)
        field = "pair" if section == "combinations" else "backend"
        again = [cell for cell in self.report[section] if cell[field] in names and cell.get("world") == world]
        self.report[section] = [cell for cell in self.report[section] if cell not in again]
        self.report[section] += [cell | {"world": world} for cell in cells]
        for name in names:
            self.report["failures"].pop(f"{section}{key}/{name}", None)
        self.report["failures"] |= {f"{section}{key}/{name}": text for name, text in failures.items()}
        left = [name for name in names if failures.get(name, "").startswith(LEFT_OUT)]
        if left:
            self.left.append((section, left, run, world, key))
        spent = self.report["seconds"].get(section + key, 0.0) + time.monotonic() - started
        self.report["seconds"][section + key] = round(spent, 1)
        self.write()
        print(f"{section}{key}: {len(cells)} results, {len(failures)} not done, {self.elapsed():.0f} s", flush=True)

    def once_more(self) -> None:
        """What was left out, as far as the time goes."""
        while self.left and self.options.budget_s - self.elapsed() > AGAIN_S:
            section, names, run, world, key = self.left.pop(0)
            self.jobs(section, names, run, world=world, stop=self.begin + self.options.budget_s, key=key)

    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def everything(self) -> None:
        options = self.options
        pairs = [(pf, mine) for pf, mine in PAIRS if self.fits(pf, mine)]
        pairs.sort(
            key=lambda pair: ("triton" not in pair[1], pair[0] == "nvshmem")
        )  # the default first, DeepEP's rival last
        self.jobs(
            "combinations",
            [f"{pf} + {mine}" for pf, mine in pairs],
            run_pair,
            world=options.ranks,
            stop=self.stop("combinations"),
        )
        if options.ranks > 1:
            if not options.cpu:
                inbox = mp.get_context("spawn").SimpleQueue()
                mp.spawn(copy_to_next_gpu, (options.ranks, inbox), 1)
                options.copy_gbps, _ = inbox.get()
                self.report["meta"]["copy_gbps"] = options.copy_gbps
            names = [name for name in ALL2ALL if name in CANDIDATES]
            self.jobs("all2all", names, run_candidate, world=options.ranks, stop=self.stop("all2all"))
        worlds = [options.ranks, *(world for world in (2, 1, 4) if world < options.ranks)]
        for i, world in enumerate(worlds):
            left = self.stop("layers") - time.monotonic()
            stop = time.monotonic() + left * (0.4 if i == 0 and len(worlds) > 1 else 1 / (len(worlds) - i))
            names = [BACKENDS[0], REPLICAS, *BACKENDS[1:]] if world == options.ranks else list(BACKENDS)
            names = [REPLICAS] if world == 1 else names
            self.jobs("layers", names, run_layer, world=world, stop=stop, key=f"@{world}")
        self.once_more()
        self.report |= conclude(self.report, options.ranks)
        self.write()

    def fits(self, pf_name: str, experts_name: str) -> bool:
        """Returns whether the pair fits and can run here. Reasons against it go into the report."""
        kind, world = ("cpu" if self.options.cpu else "cuda"), self.options.ranks
        why = reasons(pf_name, experts_name)
        text = "; ".join(why) if why else missing(pf_name, experts_name, kind)
        if not text and all(reasons(pf_name, experts_name, case.spec(world, kind)) for case in CASES.values()):
            text = f"refuses every case at {world} ranks: " + reasons(
                pf_name, experts_name, CASES["bf16"].spec(world, kind)
            )[0]  # fmt: skip
        if text and not why:
            self.report["failures"][f"combinations/{pf_name} + {experts_name}"] = UNAVAILABLE + text
        return not text

    def write(self) -> None:
        options = self.options
        options.out.mkdir(parents=True, exist_ok=True)
        self.report["meta"]["seconds"] = round(self.elapsed())
        reports.save(self.path(), self.report)

    def path(self) -> Path:
        kind = "cpu" if self.options.cpu else self.report["meta"]["gpu"].split()[-1].lower()
        return self.options.out / f"scaling_{kind}x{self.options.ranks}.json"


def meta(options) -> dict:
    sizes = options.sizes
    found = {"ranks": options.ranks, "gpu": None if options.cpu else torch.cuda.get_device_name(), "copy_gbps": None}
    found |= {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    found |= {"commit": options.commit, "date": time.strftime("%Y-%m-%d"), "budget_s": options.budget_s}
    layer = {
        name: getattr(sizes, name) for name in ("hidden", "intermediate", "num_experts", "top_k", "shared", "scheme")
    }
    return found | {"layer": layer | {"dtype": str(sizes.dtype).removeprefix("torch.")}}


def conclude(report: dict, ranks: int) -> dict:
    """What the cells say: efficiency, expert parallelism against replicas, and the public anchors at 8 ranks."""
    at = {(cell["backend"], cell["world"], cell["tokens"]): cell["us"] for cell in report["layers"]}
    efficiency = []
    for (backend, world, tokens), us in sorted(at.items()):
        one, two = at.get((REPLICAS, 1, tokens)), at.get((backend, 2, tokens))
        row = {"backend": backend, "world": world, "tokens": tokens, "us": us}
        row |= {"from_1": one / us if one else None, "from_2": two / us if two and world >= 2 else None}
        efficiency.append(row)
    against = []
    for (backend, world, tokens), us in sorted(at.items(), key=lambda item: item[0][2]):
        if backend == REPLICAS and world == ranks > 1:
            others = {
                name: at[name, world, tokens] for name in BACKENDS if (name, world, tokens) in at and name != REPLICAS
            }
            if others:
                best = min(others, key=lambda name: others[name])
                row = {"tokens_per_rank": tokens, "total_tokens": tokens * world, "replicas_us": us, "best": best}
                gathered = others.get("allgather_reducescatter")
                row |= {"best_us": others[best], "best_over_replicas": others[best] / us}
                against.append(row | {"best_over_allgather": others[best] / gathered if gathered else None})
    losing = [row["tokens_per_rank"] for row in against if row["best_over_replicas"] >= 1]
    wins = [row["tokens_per_rank"] for row in against if row["tokens_per_rank"] > max(losing, default=0)]
    return {
        "efficiency": efficiency,
        "against_replicas": against,
        "ep_wins_from_tokens_per_rank": min(wins, default=None),
        "anchors": [anchor_row(anchor, report["all2all"]) for anchor in ANCHORS] if ranks == 8 else [],
    }


def anchor_row(anchor: dict, cells: list[dict]) -> dict:
    """The best of ours beside a public figure."""
    field = "gbps" if anchor["unit"] == "GB/s" else "us"
    ours = [
        (cell[anchor["what"]][field], cell["backend"])
        for cell in cells
        if cell["backend"] in OURS and cell["tokens"] == anchor["tokens"]
    ]
    best, name = (max(ours) if field == "gbps" else min(ours)) if ours else (None, None)
    return anchor | {"ours": best, "backend": name}


def print_report(report: dict) -> None:
    cells = report["combinations"]
    pairs = {cell["pair"] for cell in cells}
    wrong = [cell for cell in cells if not cell["right"]]
    print(f"\ncombinations: {len(cells)} cases of {len(pairs)} pairs, {len(wrong)} wrong")
    for cell in wrong:
        print(f"  WRONG {cell['pair']} {cell['case']}: {cell['error']:.1e}, allowed {cell['allowed']:.0e}")
    print("all2all, us (GB/s): backend, tokens, dispatch, combine, round trip")
    for cell in report["all2all"]:
        figures = "  ".join(
            f"{cell[p]['us']:9.1f} ({cell[p]['gbps']:5.1f})" for p in ("dispatch", "combine", "round trip")
        )
        print(f"  {cell['backend']:28} {cell['tokens']:5d} {figures}")
    print("layers, us: backend, ranks, tokens, time, efficiency from 1 and from 2 ranks")
    for row in report["efficiency"]:
        ratios = " ".join(f"{row[name]:6.2f}" if row[name] else "     -" for name in ("from_1", "from_2"))
        print(f"  {row['backend']:24} {row['world']:2d} {row['tokens']:5d} {row['us']:10.1f} {ratios}")
    for row in report["against_replicas"]:
        print(f"  {row['tokens_per_rank']} tokens a rank: {row['best']} / replicas = {row['best_over_replicas']:.2f}")
    print(f"expert parallelism wins from {report['ep_wins_from_tokens_per_rank']} tokens a rank on")
    for row in report["anchors"]:
        ours = f"{row['ours']} {row['unit']} ({row['backend']})"
        print(f"  {row['what']} at {row['tokens']}: {ours}, public {row['public']} ({row['by']})")
    for name, text in report["failures"].items():
        print(f"not done: {name}: {text}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cpu", action="store_true", help="gloo ranks and small sizes; the default without a GPU")
    parser.add_argument(
        "--scheme", choices=("none", "fp8_block"), help="of the layer's experts; default fp8_block on GPUs"
    )
    parser.add_argument("--budget-s", type=float, default=440, help="for everything")
    parser.add_argument("--limit-s", type=float, default=100, help="the longest that a rank waits for another")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the JSON and the drawing")
    parser.add_argument("--commit", default="", help="recorded in the result")
    options = parser.parse_args()
    options.cpu = options.cpu or not torch.cuda.is_available()
    chosen = CPU if options.cpu else GPU
    available = 64 if options.cpu else torch.cuda.device_count()
    if not 1 <= options.ranks <= available:
        parser.error(
            f"--ranks {options.ranks}: this host has {available} {'CPU ranks at most' if options.cpu else 'GPUs'}"
        )
    sizes = chosen["sizes"]
    assert isinstance(sizes, LayerSizes)
    if sizes.num_experts % options.ranks:
        parser.error(f"--ranks {options.ranks} does not divide the {sizes.num_experts} experts")
    fields = {
        name: getattr(sizes, name) for name in ("hidden", "intermediate", "num_experts", "top_k", "shared", "scheme")
    }
    options.sizes = LayerSizes(**fields | ({"scheme": options.scheme} if options.scheme else {}))
    options.tokens, options.layer_tokens = chosen["tokens"], chosen["layers"]
    options.hidden, options.experts, options.topk = [sizes.hidden], [sizes.num_experts], sizes.top_k
    options.copy_gbps, options.gpu = math.inf, None
    run = Run(options)
    run.everything()
    print_report(run.report)
    image = run.path().with_suffix(".svg")
    drawing.save(image, *plot_scaling.picture(run.report))
    print(f"{run.path()} and {image}: {run.elapsed():.0f} s")
    bad = [text for text in run.report["failures"].values() if not text.startswith((UNAVAILABLE, LEFT_OUT))]
    empty = [section for section in SHARES if not run.report[section] and (section != "all2all" or options.ranks > 1)]
    return 1 if bad or empty or not all(cell["right"] for cell in run.report["combinations"]) else 0


if __name__ == "__main__":
    sys.exit(main())
