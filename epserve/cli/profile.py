"""Defines `epserve profile`, which splits one layer's time into phases, and `epserve bench`, the source tree's benchmarks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

if TYPE_CHECKING:
    from .layer.profile import ProfileRequest

SIZES = {
    "cpu": {"hidden": 256, "intermediate": 128, "num_experts": 16, "top_k": 4, "shared": 128},
    "cuda": {"hidden": 7168, "intermediate": 2048, "num_experts": 256, "top_k": 8, "shared": 2048},
}
Size = Annotated[int | None, typer.Option(help="Default: DeepSeek-V3's on CUDA, a small one on the CPU.")]


def profile(
    pf_type: Annotated[
        str, typer.Option(help="All-to-all backend (prepare/finalize), by its name or its class; see --list.")
    ] = "",
    experts_type: Annotated[str, typer.Option(help="Experts backend, by its name or its class; see --list.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Every pair that runs here, or those of one backend if one is named.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Print every pair that fits, and end.")] = False,
    world_size: Annotated[int, typer.Option(help="Ranks, one process each, on this host.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(help="Tokens of each rank.")] = 128,
    quant: Annotated[
        str,
        typer.Option(
            help="How the experts' weights are stored: none (bf16), "
            "fp8_tensor, fp8_channel, fp8_block, int8_channel, int4, mxfp4, nvfp4."
        ),
    ] = "none",
    rank: Annotated[int, typer.Option(help="Rank whose trace is written.")] = 0,
    trace: Annotated[
        Path,
        typer.Option(help="Chrome-format trace: chrome://tracing, ui.perfetto.dev. --all adds the pair's names."),
    ] = Path("epserve_trace.json"),
    repeats: Annotated[int, typer.Option(help="Forwards to time, for the table's medians.")] = 20,
    hidden: Size = None,
    intermediate: Size = None,
    num_experts: Size = None,
    top_k: Size = None,
    shared: Annotated[int | None, typer.Option(help="Intermediate size of the shared expert; 0: none.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the whole run of one pair.", min=1)] = 180.0,
) -> None:
    """Trace one forward of a DeepSeek-V3-like layer on any compatible pair, and print the time of each phase."""
    from epserve import all2all, experts
    from epserve.errors import ConfigError

    from .compat import backend_name, listing
    from .layer.profile import ProfileRequest, profile_layer
    from .layer.synthetic import LayerSizes

    if show:
        print("\n".join(listing()))
        return
    pf_name = backend_name(all2all.REGISTRY, pf_type) if pf_type else ""
    experts_name = backend_name(experts.REGISTRY, experts_type) if experts_type else ""
    if not every and not (pf_name and experts_name):
        raise ConfigError("name a pair with --pf-type and --experts-type (--list prints them), or take --all")
    if device not in SIZES:
        raise ConfigError(f"device {device!r} is not {' or '.join(SIZES)}")
    chosen = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": num_experts,
        "top_k": top_k,
        "shared": shared,
    }
    given: dict[str, Any] = SIZES[device] | {name: size for name, size in chosen.items() if size is not None}
    sizes = LayerSizes(**given, scheme=quant)
    request = ProfileRequest(
        all2all=pf_name, experts=experts_name, trace=trace, sizes=sizes, world_size=world_size, device=device,
        tokens=tokens, rank=rank, repeats=repeats, timeout_s=timeout,
    )  # fmt: skip
    heading = (
        f"{world_size} ranks on {device}, {tokens} tokens a rank, hidden {sizes.hidden},"
        f" {sizes.num_experts} experts, top-{sizes.top_k}, {'bf16' if quant == 'none' else quant}; medians of {repeats}"
    )
    if every:
        profile_all(request, heading)
        return
    result = profile_layer(request)
    table = Table("phase", "us", "share", "slowest rank, us", box=None)
    for phase in result.phases:
        share = phase.us / result.total_us if result.total_us else 0.0
        table.add_row(phase.phase, f"{phase.us:.1f}", f"{share:.0%}", f"{phase.slowest_us:.1f}")
    table.add_row("forward", f"{result.total_us:.1f}", "", "")
    console = Console()
    console.print(f"{pf_name} + {experts_name}: {heading}")
    console.print(table)
    console.print(f"relative L2 error against float32: {result.error:.1e}")
    console.print(f"trace of rank {rank}: {result.trace}", soft_wrap=True)


def profile_all(request: ProfileRequest, heading: str) -> None:
    """Profiles every pair that runs here, with a trace each, and prints one table. Raises the first error at the end."""
    from epserve.errors import EpserveError, Incompatible

    from .compat import pairs
    from .layer.profile import PHASES, profile_layer

    spec = request.sizes.spec(request.world_size, request.device)
    named = [
        pair for pair in pairs(spec) if request.all2all in ("", pair.all2all) and request.experts in ("", pair.experts)
    ]
    here = [pair for pair in named if pair.usable]
    if not here:
        why = tuple(dict.fromkeys(reason for pair in named for reason in pair.reasons + pair.missing))
        raise Incompatible("no such pair can run this layer here:", why)
    table = Table(Column("pair, us", no_wrap=True), *PHASES, "forward", "error", box=None)
    failed: list[EpserveError] = []
    lines = []
    for pair in here:
        name, trace = f"{pair.all2all} + {pair.experts}", f"{request.trace.stem}_{pair.all2all}_{pair.experts}"
        asked = replace(request, all2all=pair.all2all, experts=pair.experts, trace=request.trace.with_stem(trace))
        try:
            result = profile_layer(asked)
        except EpserveError as error:
            failed.append(error)
            table.add_row(name, *[""] * len(PHASES), "", "failed")
            continue
        times = {phase.phase: f"{phase.us:.1f}" for phase in result.phases}
        cells = [times.get(phase, "") for phase in PHASES]
        table.add_row(name, *cells, f"{result.total_us:.1f}", f"{result.error:.1e}")
        lines.append(f"trace of {name}: {result.trace}")
    console = Console()
    console.print(heading)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if failed:
        raise failed[0]


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Benchmark to run. Without a name they are listed.")] = "",
) -> None:
    """Run a benchmark of the source tree: `epserve bench layer --cpu`. `epserve bench layer -- --help` lists its options."""
    from epserve.errors import ConfigError

    root = source_tree()
    found = benchmarks(root)
    if not name:
        table = Table("benchmark", "what it measures", box=None)
        for each, about in found.items():
            table.add_row(each, about)
        Console().print(table)
        return
    if name not in found:
        import difflib

        close = difflib.get_close_matches(name, found, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"benchmark {name!r} is unknown{hint} (known: {', '.join(found)})")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    words = [sys.executable, "-m", f"benchmarks.{name}", *context.args]
    raise typer.Exit(subprocess.run(words, env=os.environ | {"PYTHONPATH": path}).returncode)


def source_tree() -> Path:
    """Returns the folder that holds `benchmarks/`: beside this package, or the current one. A wheel has none."""
    from epserve.errors import ConfigError

    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "benchmarks" / "ep_layer.py").is_file() and (root / "tests" / "support" / "cases.py").is_file():
            return root
    raise ConfigError(
        "the benchmarks are in the source tree, not in the installed package: run this inside a checkout of the repository"
    )


def benchmarks(root: Path) -> dict[str, str]:
    """Returns the programs under `benchmarks/`: name -> the first sentence of the docstring."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
            found[path.stem] = " ".join(about.split())
    return found
