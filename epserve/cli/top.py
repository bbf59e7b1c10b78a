"""`epserve top`: a live view of a service in the terminal, from its GetStatus."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from epserve.client import Client, ClientOptions, Tls
from epserve.errors import EpserveError
from epserve.protocol import epserve_pb2 as pb

STATES = {
    "serving": "bold green",
    "starting": "yellow",
    "recovering": "bold yellow",
    "resizing": "yellow",
    "draining": "yellow",
}
BLOCKS = " ▁▂▃▄▅▆▇█"
HEAT = ("blue", "cyan", "green", "yellow", "red")
"""Colours from cold to hot. The blocks' height shows the same without colour."""
HEAT_COLUMNS = 32
"""Widest heat strip. With more experts on a rank, neighbours share a column that shows the hottest of them."""
SPARK_SAMPLES = 60


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of ranks. It shows from a terminal width of `from_width` on."""

    name: str
    justify: Literal["left", "right"] = "left"
    from_width: int = 0


COLUMNS = (
    Column("rank", "right"),
    Column("state"),
    Column("node", from_width=120),
    Column("device", from_width=100),
    Column("tokens", "right", from_width=100),
    Column("tokens/s", "right"),
    Column("load", "right"),
    Column("each expert"),
    Column("where the time goes", from_width=110),
    Column("experts backend", from_width=160),
)


@dataclass(slots=True)
class View:
    """The state of the screen: the last answer, and samples over several answers."""

    address: str
    model: pb.GetModelReply | None = None
    status: pb.GetStatusReply | None = None
    trouble: str = ""
    """The reason why the last question had no answer."""
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=SPARK_SAMPLES))
    _before: tuple[float, dict[int, int]] | None = None
    _rates: dict[int, float] = field(default_factory=dict)

    def take(self, status: pb.GetStatusReply, now: float) -> None:
        """Adds an answer. `now`: seconds on any steady clock."""
        done = {rank.rank: rank.tokens_done for rank in status.ranks}
        if self._before is not None and now > self._before[0]:
            seconds, old = now - self._before[0], self._before[1]
            self._rates = {rank: max(count - old.get(rank, count), 0) / seconds for rank, count in done.items()}
        self._before = now, done
        self.status, self.trouble = status, ""
        self.tokens.append(status.rates.tokens)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.trouble:
            yield Text(f"no answer: {self.trouble}", style="bold red")
        if self.status is not None:
            yield self._head(self.status)
            yield self._ranks(self.status, options.max_width)

    def _head(self, status: pb.GetStatusReply) -> Panel:
        grid = Table.grid(padding=(0, 3))
        state = Text(status.state.upper(), style=STATES.get(status.state, "bold red"))
        model = self.model.name if self.model is not None else ""
        grid.add_row(state, f"up {duration(status.uptime_s)}", f"generation {status.generation}", f"{model}")
        rates, latency = status.rates, status.latency
        grid.add_row(
            f"{short(rates.tokens)} tokens/s",
            f"{short(rates.requests)} requests/s",
            f"{short(rates.steps)} steps/s",
            Text(f"{short(rates.errors)} errors/s", style="bold red" if rates.errors else ""),
        )
        grid.add_row(
            f"p50 {latency.p50_ms:.2f} ms" if latency.count else "p50 –",
            f"p90 {latency.p90_ms:.2f} ms" if latency.count else "p90 –",
            f"p99 {latency.p99_ms:.2f} ms" if latency.count else "p99 –",
            f"{short(latency.count)} in the last minute",
        )
        grid.add_row(
            f"queue {short(status.queue_tokens)} tokens",
            f"{status.calls_in_flight} in flight",
            f"{sized(status.buffered_bytes)} held",
            f"{status.recoveries} recoveries, {status.replayed_requests} replays",
        )
        if (lanes := status.lanes).open or lanes.calls:
            grid.add_row(
                f"{lanes.open} lanes, {100 * (lanes.polling_share + lanes.gpu_polling_share):.1f} % of a core",
                f"{short(lanes.calls)} lane calls",
                f"{short(lanes.joined)} joined, {short(lanes.waited)} waited",
                Text(f"{short(lanes.refused)} refused", style="bold red" if lanes.refused else ""),
            )
        spark = Text(sparkline(self.tokens), style="cyan")
        title = f"epserve {status.server_version} at {self.address}"
        return Panel(Group(grid, spark), title=title, title_align="left", border_style="dim")

    def _ranks(self, status: pb.GetStatusReply, width: int) -> Table:
        """Returns the table of ranks. A narrow terminal gets fewer columns rather than cut ones."""
        shown = [column for column in COLUMNS if width >= column.from_width]
        table = Table(box=None, pad_edge=False)
        for column in shown:
            table.add_column(column.name, justify=column.justify, no_wrap=True)
        loads = [sum(rank.expert_tokens) for rank in status.ranks]
        everything = sum(loads)
        hottest = max((max(rank.expert_tokens, default=0) for rank in status.ranks), default=0)
        for rank, load in zip(status.ranks, loads, strict=True):
            late = f" ({rank.late_compiles} late compiles)" if rank.late_compiles else ""
            cells: dict[str, Any] = {
                "rank": str(rank.rank),
                "state": Text(f"{rank.phase}{late}", style="green")
                if rank.alive
                else Text("no answer", style="bold red"),
                "node": rank.node,
                "device": f"{rank.device} {rank.gpu_uuid[:8]}".strip(),
                "tokens": short(rank.tokens_done),
                "tokens/s": short(self._rates[rank.rank]) if rank.rank in self._rates else "–",
                "load": f"{100 * load / everything:.0f} %" if everything else "–",
                "each expert": heat(rank.expert_tokens, hottest)
                if everything
                else Text(f"{len(rank.experts)} experts", style="dim"),
                "where the time goes": phases(rank.phase_seconds),
                "experts backend": backends(rank.experts_choices),
            }
            table.add_row(*(cells[column.name] for column in shown))
        return table


def run(address: str, *, token: str | None, tls: Tls | None, interval_s: float, once: bool, console: Console) -> None:
    """Shows the view until Ctrl-C, or one frame with `once`. Raises EpserveError when the first question has no answer."""
    view = View(address)
    with Client(address, ClientOptions(tls=tls), token=token) as client:
        view.model = client.model(timeout=5.0)
        view.take(client.status(timeout=5.0), time.monotonic())
        if once:
            console.print(view)
            return
        with _interrupted() as stop, Live(view, console=console, screen=True, auto_refresh=False) as live:
            while not stop.wait(interval_s):
                try:
                    view.take(client.status(timeout=max(interval_s, 2.0)), time.monotonic())
                except EpserveError as error:  # the service may be restarting
                    view.trouble = str(error)
                live.update(view, refresh=True)


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets. The end of the block raises KeyboardInterrupt again.

    Raised at once it can be lost, since Python only reports it inside a gRPC callback.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
    if stop.is_set():
        raise KeyboardInterrupt


def heat(loads: Sequence[int], hottest: int) -> Text:
    """Returns one column for each expert, or for a few neighbours. Its height and colour show the load."""
    width = max(1, -(-len(loads) // HEAT_COLUMNS))
    strip = Text()
    for start in range(0, len(loads), width):
        part = max(loads[start : start + width]) / hottest if hottest else 0.0
        strip.append(BLOCKS[round(part * (len(BLOCKS) - 1))], style=HEAT[min(int(part * len(HEAT)), len(HEAT) - 1)])
    return strip


def phases(seconds: Any) -> str:
    """Returns the three phases that take most of a rank's time."""
    total = sum(seconds.values())
    top = sorted(seconds.items(), key=lambda each: -each[1])[:3]
    return " ".join(f"{name} {100 * spent / total:.0f}%" for name, spent in top) if total else "–"


def backends(choices: Any) -> str:
    """Returns each backend with its least number of rows. Empty: one backend computes all batches."""
    parts: list[str] = []
    before = ""
    for each in choices:
        if each.backend != before:
            parts.append(f"{each.backend} from {each.rows}" if parts else each.backend)
        before = each.backend
    return ", ".join(parts)


def sparkline(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    return "".join(BLOCKS[max(1, round(value / top * (len(BLOCKS) - 1))) if top else 1] for value in values)


def short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}" if value < 1e4 else str(round(value))


def sized(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
