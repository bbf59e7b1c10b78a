"""One service process: the engine on its ranks and the gRPC front end, from start to drain."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from epserve.config import Config
from epserve.errors import ConfigError
from epserve.runtime.engine import Engine
from epserve.serving.server import Server

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(config: Config):
    """Start everything, yield (engine, server), stop everything, after a drain.

    The front end listens before the ranks are up, so that the health service answers NOT_SERVING while they load.
    """
    engine = Engine(config)
    server = Server(engine, config.server, default_deadline_s=config.scheduler.default_deadline_s)
    await server.start()
    try:
        await engine.start()
        yield engine, server
    finally:
        await server.stop(grace=config.scheduler.drain_timeout_s)
        await engine.close(drain_s=config.scheduler.drain_timeout_s)


async def serve(config: Config, *, ready_file: Path | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then finish what was accepted and return. A second signal acts as by default.
    SIGHUP reads the tokens file again.

    ready_file: written (atomically) when every rank has loaded and run a step: JSON with host, port and pid.
    """
    if ready_file is not None:
        _claim(ready_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: draining; send it again to stop at once", number.name)
        stop.set()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)

    def listen() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    listen()
    await _until(stop, _serve(config, ready_file, listen))


def _claim(ready_file: Path) -> None:
    """Removes what a killed service left; raises ConfigError now rather than when every rank has loaded."""
    try:
        ready_file.unlink(missing_ok=True)
        scratch = ready_file.with_suffix(".tmp")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise ConfigError(f"ready file {ready_file} cannot be written: {error.strerror}") from None


async def _serve(config: Config, ready_file: Path | None, listen: Callable[[], None]) -> None:
    """Until cancelled."""
    async with running(config) as (engine, server):
        listen()  # again: Ray's start puts a handler of its own in between, which prints a stack for each SIGTERM
        log.info(
            "ready: %s on %d ranks, grpc on %s:%d",
            engine.info.name,
            config.engine.ranks,
            config.server.host,
            server.port,
        )
        metrics = {"metrics_port": server.metrics_port} if server.metrics_port else {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        if ready_file is not None:
            scratch = ready_file.with_suffix(".tmp")
            scratch.write_text(
                json.dumps({"host": config.server.host, "port": server.port, "pid": os.getpid(), **metrics})
            )
            scratch.replace(ready_file)
        try:
            # NOTE: not on the stop event: it would wake this task first, and the cancel would then hit the drain.
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            log.info("stopping")  # _until cancels at the first signal; leaving this block drains
        finally:
            if ready_file is not None:
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
