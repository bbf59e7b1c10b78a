"""`epserve demo`: small checkpoints in the real format, served by CPU ranks, compared with transformers' own blocks."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as hf_logging

from epserve.client import AsyncClient
from epserve.config import Config, parse_config
from epserve.errors import ConfigError
from epserve.models import ModelInfo
from epserve.models.demo import check_family, reference_block, write_demo_checkpoint, write_demo_tokenizer
from epserve.modular_kernel import UNQUANTIZED, Activation
from epserve.process import ranges
from epserve.process.lifetime import Listen, until_signalled
from epserve.rank.gate import GateSpec
from epserve.rank.setup.memory import check_machine
from epserve.rank.setup.plan import plan_ranks
from epserve.service.run import running

FAMILIES = {"deepseek_v3": "DeepSeek-V3-like", "mixtral": "Mixtral-like"}
SIZES: dict[str, Any] = {"hidden": 256, "intermediate": 128, "num_experts": 16, "top_k": 4, "num_layers": 3, "seed": 7}
BATCHES = (1, 7, 64, 250)  # tokens. Real batches have odd sizes, too
TOLERANCE = 1e-5  # relative L2 error in float32
STILL_S = 10.0  # the time between two lines of a long stage

T = TypeVar("T")


class Stages:
    """Prints one line for each stage with the seconds since the start, and further lines while a stage lasts."""

    def __init__(self, console: Console, since: float):
        """`since` is a time of `time.monotonic`."""
        self._console, self._since = console, since

    def __call__(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._since:6.1f} s  {text}", highlight=False, soft_wrap=True)

    @contextlib.asynccontextmanager
    async def lasting(self, text: str) -> AsyncIterator[None]:
        self(text)
        going_on = asyncio.ensure_future(self._go_on(text))
        try:
            yield
        finally:
            going_on.cancel()

    async def _go_on(self, text: str) -> None:
        while True:
            await asyncio.sleep(STILL_S)
            self(text.replace(": ", ": still ", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    layer: int
    num_tokens: int
    error: float
    ms: float


def write_only(family: str, folder: Path) -> None:
    """Writes a small checkpoint of random weights with a tokenizer. Raises ConfigError when the folder has one already."""
    check_family(family)
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} has a model already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hf_logging.disable_progress_bar()
        write_demo_checkpoint(family, folder, max_position_embeddings=4096)
        write_demo_tokenizer(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    print(f"{folder}: a small {family} of random weights. Now: epserve serve {folder}")


def run(
    *,
    ranks: int,
    clients: int,
    all2all: str = "auto",
    experts: str = "auto",
    console: Console | None = None,
    since: float | None = None,
) -> bool:
    """Serves and compares one checkpoint after the other. Returns True when every answer agrees with transformers.

    `since` is the origin of the seconds shown, by `time.monotonic`. The default is now. SIGINT and SIGTERM raise SystemExit
    with code 128 + the signal's number, once the ranks and the checkpoints are gone.
    Raises ConfigError or Incompatible for ranks and backends that cannot serve them, before anything is written or started.
    """
    _check(ranks, all2all, experts)
    console = console or Console()
    stage = Stages(console, time.monotonic() if since is None else since)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("epserve.process.lifetime").setLevel(logging.INFO)  # it reports the effect of a signal
    warnings.filterwarnings("ignore")
    hf_logging.disable_progress_bar()  # ours is the only bar
    good = True
    faulthandler.enable()  # in place of Ray's handler of native crashes, which would take SIGTERM too
    with (
        _signals_exit(),
        tempfile.TemporaryDirectory(prefix="epserve-demo-") as folder,
        _progress(console) as progress,
    ):
        farewell = partial(_farewell, console, folder)
        for family, title in FAMILIES.items():
            stage(f"{title}: writing the checkpoint")
            bar = progress.add_task(f"{title}: writing the checkpoint", total=clients * len(BATCHES) + 3)
            path = Path(folder) / family
            write_demo_checkpoint(family, path, dtype=torch.float32, **SIZES)
            progress.update(bar, advance=1, description=f"{title}: starting {ranks} ranks")
            config = _config(path, ranks, all2all, experts)
            work = partial(_serve_and_ask, config, path, clients, progress, bar, title, stage)
            answers, status = _until_done(work, farewell)
            stage(f"{title}: stopped")
            worst = max(answer.error for answer in answers)
            good &= worst <= TOLERANCE
            progress.update(bar, advance=1, description=f"{title}: done")
            _report(console, title, answers, status, worst)
    verdict = (
        "[green]every answer agrees with transformers[/]"
        if good
        else f"[red]an answer is off by more than {TOLERANCE}[/]"
    )
    console.print(verdict)
    return good


def _config(path: Path, ranks: int, all2all: str, experts: str) -> Config:
    return parse_config(
        {
            "model": {"path": str(path)},
            "engine": {"ranks": ranks, "device": "cpu", "all2all": all2all, "experts": experts},
            "server": {"port": 0},
        },
        "options",
    )


def _check(ranks: int, all2all: str, experts: str) -> None:
    """Runs the checks of serving for a model of these sizes before the model exists."""
    config = _config(Path(), ranks, all2all, experts)
    info = ModelInfo(
        family="mixtral", name="demo", hidden=SIZES["hidden"], intermediate=SIZES["intermediate"],
        num_experts=SIZES["num_experts"], top_k=SIZES["top_k"], dtype=torch.float32, layers=(0,), activation=Activation(),
        bias=False, gate=GateSpec(top_k=SIZES["top_k"]), shared_intermediate=0, fingerprint="", quant=UNQUANTIZED,
    )  # fmt: skip
    check_machine(config, info, plan_ranks(config, info, device="cpu"))


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Raises SystemExit between two services, so that the folder is removed. Services have their own handlers."""

    def leave(number: int, frame: object) -> None:
        os.write(
            2, f"epserve: {signal.Signals(number).name}: stopped\n".encode()
        )  # the signal may have interrupted a print
        raise SystemExit(128 + number)

    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, leave) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _farewell(console: Console, folder: str) -> None:
    """Cleans up when a signal ends the process and no other clean-up runs."""
    shutil.rmtree(folder, ignore_errors=True)
    console.show_cursor(True)  # the bar hides it


def _until_done(work: Callable[[Listen], Coroutine[Any, Any, T]], farewell: Callable[[], None]) -> T:
    """Returns the result of `work`. Raises SystemExit when a signal comes before."""
    results: list[T] = []

    async def kept(listen: Listen) -> None:
        results.append(await work(listen))

    code = asyncio.run(until_signalled(kept, own_process=True, farewell=farewell))
    if not results:
        raise SystemExit(code or 128 + signal.SIGINT)
    return results[0]


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


async def _serve_and_ask(
    config: Config, path: Path, clients: int, progress: Progress, bar: TaskID, title: str, stage: Stages, listen: Listen
) -> tuple[list[Answer], Any]:
    """Returns the answers, and the engine's status after them."""
    async with contextlib.AsyncExitStack() as stack:
        async with stage.lasting(f"{title}: starting Ray and {config.engine.ranks} ranks"):
            engine, server = await stack.enter_async_context(running(config))
        listen(partial(signal.raise_signal, signal.SIGTERM))  # a terminal that is closed ends the demo
        progress.update(bar, advance=1, description=f"{title}: asking")
        stage(f"{title}: transformers computes what is right")
        address = f"{config.server.host}:{server.port}"
        batches = {layer: [_batch(layer, size, engine.info.hidden) for size in BATCHES] for layer in engine.info.layers}
        wanted = {layer: [reference_block(path, layer)(x) for x in xs] for layer, xs in batches.items()}
        async with stage.lasting(f"{title}: {clients} clients ask for {clients * len(BATCHES)} batches"):
            every = await asyncio.gather(
                *(_client(address, number, batches, wanted, lambda: progress.advance(bar)) for number in range(clients))
            )
        stage(f"{title}: answered; stopping the ranks")
        return [answer for answers in every for answer in answers], engine.status()


def _batch(layer: int, num_tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn((num_tokens, hidden), generator=torch.Generator().manual_seed(100 * layer + num_tokens))


async def _client(address: str, number: int, batches, wanted, advance) -> list[Answer]:
    """Runs one client: it sends every batch size through a layer. All requests of all clients are in flight at once."""
    layers = list(batches)
    answers = []
    async with AsyncClient(address) as client:
        for index, num_tokens in enumerate(BATCHES):
            layer = layers[(number + index) % len(layers)]
            start = time.perf_counter()
            y = await client.forward(layer, batches[layer][index], timeout=120)
            ms = (time.perf_counter() - start) * 1e3
            want = wanted[layer][index]
            error = float((y.double() - want.double()).norm() / want.double().norm())
            answers.append(Answer(layer=layer, num_tokens=num_tokens, error=error, ms=ms))
            advance()
    return answers


def _report(console: Console, title: str, answers: list[Answer], status, worst: float) -> None:
    table = Table(
        "rank", "process", "device", "experts", "tokens", title=f"{title}: where the experts were", title_justify="left"
    )
    for rank in status.ranks:
        table.add_row(str(rank.rank), str(rank.pid), rank.device, ranges.shown(rank.experts), str(rank.tokens_done))
    console.print(table)
    times = [answer.ms for answer in answers]
    tokens = sum(answer.num_tokens for answer in answers)
    console.print(
        f"{len(answers)} requests with {tokens} tokens in {status.steps} steps;"
        f" latency p50 {statistics.median(times):.1f} ms, max {max(times):.1f} ms"
    )
    console.print(f"{title}: max relative error {worst:.2e} (allowed {TOLERANCE:.0e})")
