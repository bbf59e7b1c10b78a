"""`epserve cluster up | status | logs | down FILE` and `epserve plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Bring a Ray cluster up and run the service on all of its ranks.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="Ray cluster file; deploy/ has one for each kind of cluster.")]


def _cluster(file: Path):
    from epserve.cluster.file import load_cluster_file
    from epserve.cluster.launch import Cluster

    return Cluster(load_cluster_file(file), say=print)


@app.command()
def up(
    file: File,
    restart: Annotated[bool, typer.Option(help="Restart Ray, and with it every actor, where it already runs.")] = False,
    restart_service: Annotated[bool, typer.Option(help="Restart the service, to apply a new configuration.")] = False,
    check: Annotated[bool, typer.Option(help="Look at every node first and refuse when something is wrong.")] = True,
    direct: Annotated[bool, typer.Option(help="Run the file's commands over ssh, without `ray up`.")] = False,
) -> None:
    """Start Ray on all nodes, wait until every one has joined, then start the service."""
    _cluster(file).up(restart=restart, restart_service=restart_service, check=check, direct=direct)


@app.command()
def status(
    file: File, json_: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False
) -> None:
    """Show the nodes and the service. The exit code is 0 only when all is well."""
    from epserve.errors import ClusterError

    found = _cluster(file).status()
    if json_:
        facts = {
            host: {"error": str(fact)} if isinstance(fact, ClusterError) else fact for host, fact in found.facts.items()
        }
        shown = {"good": found.good, "up": found.up, "nodes": found.nodes, "facts": facts}
        print(json.dumps({**shown, "service": found.service, "problems": found.problems}, indent=2))
    else:
        table = Table("node", "ray", "cpus", "gpus", "python", "ray version", box=None)
        for host, fact in found.facts.items():
            node = found.nodes.get(host, {"alive": False, "cpus": 0, "gpus": 0})
            versions = ("", "") if isinstance(fact, ClusterError) else (fact["python"], fact["packages"]["ray"])
            table.add_row(
                host, "alive" if node["alive"] else "not there", f"{node['cpus']:g}", f"{node['gpus']:g}", *versions
            )
        Console().print(table)
        if found.service is not None:
            ready, state = found.service["ready"], found.service["state"] or {}
            where = f"ready on {ready['host']}:{ready['port']}" if ready else "not ready"
            print(f"service: {where}, {state.get('state', 'not started')}, {state.get('restarts', 0)} restarts")
        for problem in found.problems:
            print(f"problem: {problem}")
    if not found.good:
        raise typer.Exit(1)


@app.command()
def logs(file: File, lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines to print.")] = 100) -> None:
    """Print the end of the service's log."""
    print(_cluster(file).logs(lines))


@app.command()
def down(
    file: File,
    grace: Annotated[float, typer.Option(help="Seconds in which the service may finish accepted requests.")] = 5.0,
) -> None:
    """Stop the service, then Ray on the workers, then on the head. Other clusters on these nodes are left alone."""
    problems = _cluster(file).down(grace=grace)
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        raise typer.Exit(1)


def plan(
    model: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")],
    ranks: Annotated[int, typer.Option(help="Expert-parallel ranks.")] = 1,
    max_tokens_per_rank: Annotated[int, typer.Option(help="Cap of one round on each rank.")] = 1024,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; cuda can be planned without a GPU.")] = "auto",
    all2all: Annotated[str, typer.Option(help="All-to-all backend; see `epserve compat`.")] = "auto",
    experts: Annotated[str, typer.Option(help="Experts backend; see `epserve compat`.")] = "auto",
    memory_gib: Annotated[float | None, typer.Option(help="Memory of one rank; default: this machine's.")] = None,
    reserve_gib: Annotated[float | None, typer.Option(help="Memory that the runtime takes for itself.")] = None,
    hosts: Annotated[int, typer.Option(help="Hosts that the ranks are spread over, as evenly as possible.", min=1)] = 1,
    rdma: Annotated[bool, typer.Option(help="Whether these hosts have RDMA devices.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False,
) -> None:
    """Print the bytes that each rank will need and whether they fit. It reads headers and allocates nothing."""
    from dataclasses import asdict

    from epserve.config import parse_config
    from epserve.errors import ConfigError
    from epserve.rank.setup.memory import parse_gib, plan_memory
    from epserve.rank.setup.topology import imagined

    if hosts > ranks:
        raise ConfigError(f"--hosts {hosts} is more than --ranks {ranks}; a host has at least one rank")
    engine = {
        "ranks": ranks, "device": device, "all2all": all2all, "experts": experts,
        "max_tokens_per_rank": max_tokens_per_rank,
    }  # fmt: skip
    config = parse_config({"model": {"path": str(model)}, "engine": engine}, "options")
    places = imagined([ranks // hosts + (host < ranks % hosts) for host in range(hosts)], rdma=rdma)
    found = plan_memory(config, memory=parse_gib(memory_gib) or 0, reserve=parse_gib(reserve_gib), topology=places)
    if json_:
        print(json.dumps({**asdict(found), "fits": found.fits}, indent=2))
    else:
        _show_plan(found)
    if found.memory and not found.fits:
        raise typer.Exit(1)


def _show_plan(found) -> None:
    names = ("weights", "dense", "workspaces", "buffers", "in_flight", "graphs", "runtime", "total")
    unit, name = (1 << 30, "GiB") if found.worst.total >= 8 << 30 else (1 << 20, "MiB")
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("rank", "experts", *(name.replace("_", " ") for name in names)):
        table.add_column(title, no_wrap=True, justify="right")
    shown: dict[tuple, list[int]] = {}
    for rank in found.ranks:  # ranks with equal needs share one line
        shown.setdefault((rank.experts, *(getattr(rank, name) for name in names)), []).append(rank.rank)
    for (count, *sizes), members in shown.items():
        label = str(members[0]) if len(members) == 1 else f"{members[0]}..{members[-1]}"
        table.add_row(label, str(count), *(f"{size / unit:.2f}" for size in sizes))
    print(
        f"{found.model} on {len(found.ranks)} {found.device} ranks, {found.backends},"
        f" at most {found.max_tokens_per_rank} tokens a rank; {name}:"
    )
    Console().print(table)
    for line in (*found.layers, *(f"not {reason}" for reason in found.passed_over)):
        print(line)
    need, have = (f"{size / unit:.2f} {name}" for size in (found.worst.total, found.memory))
    if not found.memory:
        print("memory of a rank: unknown here; --memory-gib says it")
    elif found.fits:
        print(f"fits: {need} of {have}; max_tokens_per_rank may be {found.largest_cap}")
    else:
        # Ranks of a CPU share their machine's memory: with more ranks, each has less.
        needed = "more ranks" if found.device == "cuda" else "fewer ranks on a machine, or more machines,"
        remedy = f"max_tokens_per_rank {found.largest_cap} would fit" if found.largest_cap else f"{needed} are needed"
        print(f"does not fit: {need} of {have}; {remedy}")
