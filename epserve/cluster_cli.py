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
) -> None:
    """Start Ray on all nodes, wait until every one has joined, then start the service."""
    _cluster(file).up(restart=restart, restart_service=restart_service, check=check)


@app.command()
def status(
    file: File, json_: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False
) -> None:
    """Show the nodes and the service; the exit code is 0 only when all is well."""
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
def logs(file: File, lines: Annotated[int, typer.Option("--lines", "-n", help="From the end.")] = 100) -> None:
    """Print the end of the service's log."""
    print(_cluster(file).logs(lines))


@app.command()
def down(
    file: File,
    grace: Annotated[float, typer.Option(help="Seconds that the service has to finish what it accepted.")] = 5.0,
) -> None:
    """Stop the service, then Ray on the workers, then on the head. Other clusters on these nodes are left alone."""
    problems = _cluster(file).down(grace=grace)
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        raise typer.Exit(1)
