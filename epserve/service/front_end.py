"""A front end in a separate process: it serves clients, and another process has the ranks and orders the steps.

`epserve front-end --join HOST:PORT` runs one. With `server.front_ends`, `epserve serve` starts some on its own host. These
get their settings as JSON on stdin (`python -m epserve.service.front_end`), secrets included, so that no process list shows
them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epserve.config import ServerConfig
from epserve.errors import ConfigError, EpserveError
from epserve.joining.peers import Peers
from epserve.joining.remote import RemoteEngine
from epserve.process import allocator, logs
from epserve.process.lifetime import Listen, claim, until_signalled, write_ready
from epserve.server.server import Server

log = logging.getLogger(__name__)

WATCH_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The join of a front end. `address` is that of the process that orders the steps.

    `timeout_s` is the longest search for that process at the start.
    """

    address: str
    secret: bytes
    timeout_s: float = 60.0
    default_deadline_s: float = 60.0
    drain_timeout_s: float = 20.0
    parent: int = 0
    """Id of the process that started this one. This process ends with it. 0: none."""


async def serve(
    config: ServerConfig, joining: Joining, *, ready_file: Path | None = None, own_process: bool = False
) -> int:
    """Serves until SIGTERM or SIGINT, then finishes accepted requests and returns the exit code (as `service.serve`).

    Raises ConfigError when it cannot join, or when the other process now serves another model or configuration.
    """
    allocator.settle()
    if ready_file is not None:
        claim(ready_file)
    return await until_signalled(lambda listen: _serve(config, joining, ready_file, listen), own_process=own_process)


async def _serve(config: ServerConfig, joining: Joining, ready_file: Path | None, listen: Listen) -> None:
    peers = Peers()
    engine = await RemoteEngine.join(joining.address, joining.secret, timeout_s=joining.timeout_s, peers=peers)
    try:
        face: Any = engine  # has the Engine methods that the server needs, without Ray
        server = Server(face, config, default_deadline_s=joining.default_deadline_s, peers=peers)
        await server.start()
        try:
            listen(server.reload)
            facts: dict[str, Any] = {"host": config.host, "port": server.port, "pid": os.getpid()}
            if server.metrics_port:
                facts["metrics_port"] = server.metrics_port
            log.info("front end of %s, grpc on %s:%d", joining.address, config.host, server.port)
            with write_ready(ready_file, facts):
                if joining.parent:
                    print(json.dumps(facts), flush=True)
                await _until_over(engine, joining.parent)
        finally:
            await server.stop(grace=joining.drain_timeout_s)
    finally:
        await engine.close()


async def _until_over(engine: RemoteEngine, parent: int) -> None:
    """Returns for a drain. Raises ConfigError when the joined service now serves another model or configuration."""
    orphaned = asyncio.ensure_future(_orphaned(parent))
    try:
        await asyncio.wait([engine.ended, orphaned], return_when=asyncio.FIRST_COMPLETED)
        if engine.ended.done():
            engine.ended.result()
        log.warning("process %d, which started this front end, is gone", parent)
    except asyncio.CancelledError:
        log.info("stopping")  # the first signal cancels
    finally:
        orphaned.cancel()


async def _orphaned(parent: int) -> None:
    """Returns when the parent is gone. Without a parent it never returns."""
    while not parent or os.getppid() == parent:
        await asyncio.sleep(WATCH_S)


def main() -> int:
    """Runs a front end for `front_ends.FrontEnds`, with all settings on stdin. Exit code 2: trying again would not help."""
    given = json.load(sys.stdin)
    config = ServerConfig.model_validate(given["server"])
    number = given["number"]
    logs.configure(config.log_format, level=given["log_level"], members=lambda: {"front_end": number})
    if config.log_format == "json":
        logs.take_streams()
    joining = Joining(**{**given["joining"], "secret": bytes.fromhex(given["joining"]["secret"])})
    try:
        return asyncio.run(serve(config, joining, own_process=True))
    except EpserveError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    sys.exit(main())
