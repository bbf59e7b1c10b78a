"""How a process of the service lives: signals that end it after a drain, and the file that says that it is ready."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epserve.cluster import node
from epserve.errors import ConfigError

log = logging.getLogger(__name__)

Listen = Callable[[Callable[[], None]], None]
"""Once everything runs: takes what SIGHUP is to do."""


async def until_signalled(work: Callable[[Listen], Coroutine]) -> None:
    """Run `work` until it ends, or until SIGTERM or SIGINT cancel it; a second one ends the process and all it started."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: draining; send it again to stop at once", number.name)
        stop.set()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, _at_once)  # not through the loop, which may be what is stuck

    def listen(reload: Callable[[], None] | None = None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if reload is not None:
            loop.add_signal_handler(signal.SIGHUP, reload)

    listen()
    # The handler of a second signal stays: after this, Python still waits for threads that cannot be cancelled.
    await _until(stop, work(listen))


def _at_once(number: int, frame: Any) -> None:
    """Ray's processes and the ranks are ours where we started them; left alone, some would live for another minute.

    NOTE: no clean-up by Python's or Ray's own hooks, which wait ten seconds for a start that is under way.
    """
    log.warning("%s again: stopping at once", signal.Signals(number).name)
    node.end(node.descendants({os.getpid()}), 0.0)
    os._exit(128 + number)


def claim(ready_file: Path) -> None:
    """Removes what a killed service left; raises ConfigError now rather than when every rank has loaded."""
    try:
        ready_file.unlink(missing_ok=True)
        scratch = ready_file.with_suffix(".tmp")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise ConfigError(f"ready file {ready_file} cannot be written: {error.strerror}") from None


@contextmanager
def write_ready(ready_file: Path | None, facts: Mapping[str, Any]) -> Iterator[None]:
    """There, whole, while the block runs."""
    if ready_file is None:
        yield
        return
    scratch = ready_file.with_suffix(".tmp")
    scratch.write_text(json.dumps(facts))
    scratch.replace(ready_file)
    try:
        yield
    finally:
        ready_file.unlink(missing_ok=True)


async def _until(stop: asyncio.Event, work: Coroutine) -> None:
    """Run `work`; when `stop` comes first (the ranks may still be loading), cancel it and let it clean up."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        await task
    except asyncio.CancelledError:
        log.info("stopped before every rank was ready")
    finally:
        stopping.cancel()
