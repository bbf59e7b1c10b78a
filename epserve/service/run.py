"""The service process: the engine on its ranks, the gRPC front end, and other front ends, from start to drain."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epserve.config import Config, read_secret
from epserve.engine.engine import Engine
from epserve.joining.peers import Peers
from epserve.joining.port import JoinPort
from epserve.pool.host import check_host
from epserve.process import allocator
from epserve.process.lifetime import Listen, claim, until_signalled, write_ready
from epserve.rank.setup.memory import check_machine
from epserve.server.server import Server

from .front_ends import FrontEnds

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(config: Config, others: Others | None = None):
    """Starts everything, yields (engine, server), then drains and stops everything.

    The front end listens before the ranks are up, so that the health service answers NOT_SERVING while they load.
    `others` is filled with the other front ends.
    """
    others = others or Others()
    engine = Engine(config)
    check_host(config, engine.plan.spec.device)
    if config.cluster.address == "local":
        check_machine(config, engine.info, engine.plan)
    server = Server(engine, config.server, default_deadline_s=config.scheduler.default_deadline_s, peers=others.peers)
    await server.start()
    try:
        async with _joining(engine, config, others):
            try:
                await _all(engine.start(), *(each.start() for each in others.further))
                yield engine, server
            finally:
                # All front ends drain while the ranks still answer.
                stopping = (each.stop() for each in others.further)
                await asyncio.gather(server.stop(grace=config.scheduler.drain_timeout_s), *stopping)
                await engine.close(drain_s=config.scheduler.drain_timeout_s)
    finally:
        await server.stop()
        await engine.close()


async def _all(*work: Coroutine) -> None:
    """Runs all coroutines. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@dataclass(slots=True)
class Others:
    """The other front ends. They join at `ports`. `further` are those of this host, `peers` the state that all share."""

    peers: Peers = field(default_factory=Peers)
    ports: list[JoinPort] = field(default_factory=list)
    further: list[FrontEnds] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Returns the facts for the ready file."""
        listed = [facts for each in self.further for facts in each.facts.values()]
        joining = [each.address for each in self.ports if not each.address.startswith("unix:")]
        return {**({"front_ends": listed} if listed else {}), **({"join": joining[0]} if joining else {})}


@asynccontextmanager
async def _joining(engine: Engine, config: Config, others: Others) -> AsyncIterator[None]:
    """Listens for other front ends, on this host and on others, if they are configured."""
    server = config.server
    limit = server.max_buffered_bytes
    try:
        if server.front_ends > 1:
            secret = secrets.token_bytes(32)
            address = f"unix:@epserve-{secrets.token_hex(8)}"
            others.ports.append(JoinPort(engine, address, secret, max_bytes=limit, peers=others.peers))
            others.further.append(FrontEnds(config, others.ports[-1].address, secret))
        if server.join_port is not None and server.join_secret_file is not None:
            secret = read_secret(server.join_secret_file)
            host = f"[{server.host}]" if ":" in server.host else server.host
            address = f"{host}:{server.join_port}"
            others.ports.append(JoinPort(engine, address, secret, max_bytes=limit, peers=others.peers))
        for port in others.ports:
            port.start()
            log.info("front ends can join at %s", port.address)
        engine.count_front_ends = lambda: sum(port.front_ends for port in others.ports)
        yield
    finally:
        for port in others.ports:
            await port.close()


async def serve(config: Config, *, ready_file: Path | None = None, own_process: bool = False) -> int:
    """Serves until SIGTERM or SIGINT, then finishes accepted requests. SIGHUP reads the tokens file again.

    A second signal ends this process and its descendants at once.

    Args:
        config: the service's configuration.
        ready_file: written (atomically) when every rank has loaded and run a step: JSON with host, port and pid.
        own_process: as in `until_signalled`.

    Returns:
        The process's exit code: 0, or 128 + the signal's number when the signal came before everything ran.
    """
    allocator.settle()
    if ready_file is not None:
        claim(ready_file)
    return await until_signalled(lambda listen: _serve(config, ready_file, listen), own_process=own_process)


async def _serve(config: Config, ready_file: Path | None, listen: Listen) -> None:
    """Serves until it is cancelled."""
    others = Others()
    async with running(config, others) as (engine, server):
        listen(
            server.reload
        )  # again: Ray's start puts a handler of its own in between, which prints a stack for each SIGTERM
        log.info(
            "ready: %s on %d ranks, grpc on %s:%d",
            engine.info.name,
            config.engine.ranks,
            config.server.host,
            server.port,
        )
        facts: dict[str, Any] = {"host": config.server.host, "port": server.port, "pid": os.getpid()}
        if server.metrics_port:
            facts["metrics_port"] = server.metrics_port
        with write_ready(ready_file, facts | others.facts()):
            try:
                # NOTE: do not wait on the stop event. It would wake this task first, and the cancel would then hit the drain.
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                log.info("stopping")  # _until cancels at the first signal, and leaving this block drains
