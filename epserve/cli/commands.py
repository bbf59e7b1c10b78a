"""The command line: `epserve serve | call | top | doctor | compat | demo`. Each command is a few lines over a module."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from epserve import __version__
from epserve.errors import EpserveError
from epserve.process import early_signals, logs

from . import admin as admin_cli
from . import cluster as cluster_cli
from . import config as config_cli
from . import generate as generate_cli
from . import profile as profile_cli
from . import tune as tune_cli
from .admin import Authority, Certificate, Key, Name, tls_of

TokenFile = Annotated[
    Path | None,
    typer.Option(help="File whose first word is the bearer token.", exists=True, dir_okay=False, readable=True),
]

app = typer.Typer(
    help="Experts as a service: serve the expert layers of a Mixture-of-Experts model from a cluster.\n\n"
    "A first run on any machine, no GPU needed:  [bold]epserve demo[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.add_typer(cluster_cli.app, name="cluster")


OWN_HANDLERS = ("serve", "front-end", "demo")
ONLY_LOOK = ("doctor", "compat", "plan", "config")
"""Commands that a signal ends at once. A KeyboardInterrupt raised inside their long imports may be lost."""


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at debug level.")] = False,
) -> None:
    if version:
        print(f"epserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand not in (*OWN_HANDLERS, *ONLY_LOOK):
        early_signals.as_usual()
    level = logging.DEBUG if verbose else logging.INFO
    logs.configure(level=level)


@app.command()
def serve(
    target: Annotated[
        str, typer.Argument(help="YAML file (docs/configuration.md), model folder, or ORG/NAME of a downloaded model.")
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key, e.g. --set server.port=0 --set engine.ranks=4.")
    ] = None,
    save_config: Annotated[
        Path | None, typer.Option(help="Write the configuration, defaults included, to this file.", dir_okay=False)
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="File to write host, port and pid to, once ready.", writable=True, dir_okay=False),
    ] = None,
    front_ends: Annotated[
        int | None, typer.Option(help="Processes that serve clients, on ports from server.port on: server.front_ends.")
    ] = None,
) -> None:
    """Start the ranks and the gRPC front end, and run until SIGTERM or Ctrl-C."""
    from .config_reference import dump
    from .config_target import load_target, parse_overrides

    overrides = parse_overrides(set_)
    if front_ends is not None:
        overrides["server.front_ends"] = front_ends
    loaded, from_defaults = load_target(target, overrides)
    _log_as(loaded.server.log_format)
    if save_config is not None:
        config_cli.save(save_config, dump(loaded))
    if from_defaults and loaded.server.log_format == "text":
        print(f"# {target} with these settings; --save-config FILE keeps them\n{dump(loaded)}", file=sys.stderr)
    from epserve.service.run import serve as run

    raise typer.Exit(asyncio.run(run(loaded, ready_file=ready_file, own_process=True)))


@app.command()
def front_end(
    join: Annotated[str, typer.Option(help="HOST:PORT of the service's server.join_port.")],
    secret_file: Annotated[
        Path, typer.Option(help="The service's server.join_secret_file.", exists=True, dir_okay=False, readable=True)
    ],
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file, perhaps the service's. Only its sections server and scheduler are used."),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override a key, e.g. --set server.port=0.")] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="File to write host, port and pid to, once ready.", writable=True, dir_okay=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to look for the service at the start.", min=0.001)] = 60.0,
) -> None:
    """Serve the clients of a service that has its ranks and its queue elsewhere, until SIGTERM or Ctrl-C."""
    from epserve.config import load_front_end, read_secret
    from epserve.service.front_end import Joining
    from epserve.service.front_end import serve as run

    from .config_target import parse_overrides

    server, scheduler = load_front_end(config, parse_overrides(set_))
    _log_as(server.log_format)
    joining = Joining(
        address=join,
        secret=read_secret(secret_file),
        timeout_s=timeout,
        default_deadline_s=scheduler.default_deadline_s,
        drain_timeout_s=scheduler.drain_timeout_s,
    )
    raise typer.Exit(asyncio.run(run(server, joining, ready_file=ready_file, own_process=True)))


def _log_as(form: Literal["text", "json"]) -> None:
    """Sets the logs of a serving process up. With json its streams carry nothing else."""
    logs.configure(form)
    if form == "json":
        logs.take_streams(stdout=True)
    faulthandler.enable()  # in place of Ray's handler of native crashes, which would take SIGTERM too


@app.command()
def call(
    address: Annotated[str, typer.Argument(help="host:port of a service.")] = "127.0.0.1:50051",
    layer: Annotated[int | None, typer.Option(help="MoE layer; default: the first that is served.")] = None,
    tokens: Annotated[int, typer.Option(help="Random tokens to send.", min=0)] = 16,
    repeat: Annotated[int, typer.Option(help="Calls to make.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for each call.", min=0.001)] = 60.0,
    token_file: TokenFile = None,
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_name: Name = "",
    seed: Annotated[int, typer.Option(help="Seed of the random tokens.")] = 0,
) -> None:
    """Send a batch of random tokens through one layer and print a summary of the result."""
    import time

    import torch

    from epserve.client import Client, ClientOptions, RetryPolicy
    from epserve.config import read_token

    console = Console()
    token = read_token(token_file) if token_file else None
    tls = tls_of(tls_ca, tls_cert, tls_key, tls_name)
    soon = ClientOptions(
        tls=tls, retry=RetryPolicy(attempts=10)
    )  # without a listener the call ends after 7 s, as a person waits for the answer
    with Client(address, soon, token=token) as client:
        if (state := client.status(timeout=timeout).state) != "serving":
            console.print(f"{address} is {state}: waiting for it, at most {timeout:g} s")
            client.wait_ready(timeout)
        model = client.model(timeout=timeout)
        layer = model.layers[0] if layer is None else layer
        x = torch.randn((tokens, model.hidden), generator=torch.Generator().manual_seed(seed))
        console.print(f"{model.name} ({model.family}): layers {list(model.layers)}, hidden {model.hidden}")
        for _ in range(repeat):
            start = time.perf_counter()
            y = client.forward(layer, x, timeout=timeout)
            elapsed = (time.perf_counter() - start) * 1e3
            console.print(
                f"layer {layer}: {tuple(x.shape)} -> {tuple(y.shape)}, norm {y.float().norm():.6g}, {elapsed:.2f} ms"
            )


@app.command()
def top(
    address: Annotated[str, typer.Argument(help="host:port of a service.")] = "127.0.0.1:50051",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between frames.", min=0.1)] = 1.0,
    token_file: TokenFile = None,
    tls_ca: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_name: Name = "",
) -> None:
    """Watch a service: state, ranks, rates, latencies, queue and the load of each expert."""
    from epserve.config import read_token

    from .top import run

    token = read_token(token_file) if token_file else None
    tls = tls_of(tls_ca, tls_cert, tls_key, tls_name)
    run(address, token=token, tls=tls, interval_s=interval, once=once, console=Console())


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Argument(help="Model folder or GGUF file, to show how its layers are stored and served.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address that the service would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that the service would listen on.", min=0, max=65535)] = 50051,
) -> None:
    """List the installed packages, the usable backends, the reasons against the others, and this machine's problems."""
    from .doctor import Verdict, examine

    colours = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "red"}
    table = Table("what", "", *(Column(name, overflow="fold") for name in ("detail", "remedy")), box=None)
    findings = examine(port, host, model)
    for finding in findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict.value}[/]"
        table.add_row(finding.what, verdict, finding.detail, finding.remedy)
    Console().print(table)
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    if problems:
        print(f"{problems} problem{'s' if problems > 1 else ''} found")
        raise typer.Exit(1)


@app.command()
def compat(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the docs' page instead of a table.")] = False,
) -> None:
    """Show which prepare/finalize goes with which experts, and the reason for each no."""
    from .compat import markdown as page
    from .compat import pairs

    if markdown:
        print(page())
        return
    table = Table("prepare/finalize", "experts", "", "why not", box=None)
    for pair in pairs():
        mark = "[green]usable[/]" if pair.usable else "[yellow]fits[/]" if pair.fits else "[red]no[/]"
        table.add_row(pair.all2all, pair.experts, mark, "; ".join(pair.reasons + pair.missing))
    Console().print(table)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Expert-parallel ranks, one process each.")] = 4,
    clients: Annotated[int, typer.Option(help="Clients that send at once.", min=1)] = 4,
    all2all: Annotated[str, typer.Option(help="All-to-all backend; see `epserve compat`.")] = "auto",
    experts: Annotated[str, typer.Option(help="Experts backend; see `epserve compat`.")] = "auto",
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Only write a small checkpoint there, with a tokenizer.")
    ] = None,
    family: Annotated[str, typer.Option(help="With --write: the checkpoint's model family.")] = "mixtral",
) -> None:
    """Write two small checkpoints, serve them on this machine's CPU, and compare the answers with transformers."""
    import time

    if write is not None:
        from .demo import write_only

        write_only(family, write)
        return

    since = time.monotonic()
    print("   0.0 s  importing torch, Ray and transformers", flush=True)
    from .demo import run

    if not run(ranks=ranks, clients=clients, all2all=all2all, experts=experts, since=since):
        raise typer.Exit(1)


app.command()(generate_cli.generate)
app.command()(cluster_cli.plan)
app.command()(config_cli.config)
app.command()(tune_cli.tune)
app.command()(admin_cli.rebalance)
app.command()(admin_cli.scale)
app.command()(profile_cli.profile)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(profile_cli.bench)


def main() -> None:
    """Entry point: the user's own mistakes end in one message, without a traceback."""
    # Ray forks while our gRPC threads run. Its children exec at once, so gRPC's fork handlers only warn. gRPC reads the
    # variable at import.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        app()
    except EpserveError as error:
        if logs.is_json():
            logging.getLogger("epserve").error("%s", error)
            sys.exit(2)
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not logs.is_json():
            raise
        logging.getLogger("epserve").critical("uncaught: %s", error, exc_info=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
