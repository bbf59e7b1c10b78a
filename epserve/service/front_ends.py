"""The further front ends of a host: processes that `epserve serve` starts, watches, starts again, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from typing import Any

from epserve.config import Config
from epserve.errors import ConfigError

log = logging.getLogger(__name__)

READY_S = 120.0
"""Longest start in seconds of a process that imports torch while ranks on the machine do the same."""
AGAIN_S = (0.5, 30.0)
"""Waits in seconds before a front end that ended is started again. They double from the first to the last."""
LONG_LIFE_S = 60.0
STOP_S = 5.0
"""Seconds that a stop may take beyond the drain."""


class FrontEnds:
    """Runs the front ends 1 to `server.front_ends` - 1. Number 0 is this process."""

    def __init__(self, config: Config, address: str, secret: bytes):
        """`address` and `secret` are those of this process's port for joining front ends."""
        self._config, self._address, self._secret = config, address, secret
        self.facts: dict[int, dict[str, Any]] = {}
        """Number of a serving front end -> host, port, pid, perhaps metrics_port."""
        self._ports: dict[int, tuple[int, int | None]] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts all front ends and returns when they listen. After a ConfigError the caller must still call `stop`."""
        ready = [asyncio.get_running_loop().create_future() for _ in range(1, self._config.server.front_ends)]
        self._keeping = [asyncio.ensure_future(self._keep(number, each)) for number, each in enumerate(ready, 1)]
        await asyncio.gather(*ready)

    async def stop(self) -> None:
        """Stops all front ends after they have finished their accepted requests."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        waiting = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if waiting:
            limit = self._config.scheduler.drain_timeout_s + STOP_S
            _, late = await asyncio.wait(waiting, timeout=limit)
            for process in self._processes.values() if late else ():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*waiting)
        self._processes.clear()
        self.facts.clear()

    async def _keep(self, number: int, ready: asyncio.Future[None]) -> None:
        wait = AGAIN_S[0]
        while True:
            started = time.monotonic()
            try:
                await self._run(number, ready)
            except ConfigError as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                log.error("%s", error)
            wait = AGAIN_S[0] if time.monotonic() - started > LONG_LIFE_S else min(2 * wait, AGAIN_S[1])
            log.warning("front end %d ended; it is started again in %.1f s", number, wait)
            await asyncio.sleep(wait)

    async def _run(self, number: int, ready: asyncio.Future[None]) -> None:
        """Runs one process from its start to its end. Raises ConfigError when it does not come up."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "epserve.front_end",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            process_group=0,  # Ctrl-C in a terminal is for this process, which then stops them
        )  # fmt: skip
        self._processes[number] = process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it has died: its end says more
            process.stdin.write(json.dumps(self._given(number)).encode())
            await process.stdin.drain()
            process.stdin.close()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        except TimeoutError:
            process.kill()
            line = b""
        if not line:
            code = await process.wait()
            raise ConfigError(f"front end {number} did not start (exit code {code}); its own message is in the log")
        facts = self.facts[number] = json.loads(line)
        self._ports[number] = facts["port"], facts.get("metrics_port")
        log.info("front end %d: grpc on %s:%d, process %d", number, facts["host"], facts["port"], facts["pid"])
        if not ready.done():
            ready.set_result(None)
        try:
            await process.wait()
        finally:
            self.facts.pop(number, None)

    def _given(self, number: int) -> dict[str, Any]:
        config = self._config
        server = config.server.model_dump(mode="json")
        # A restarted front end keeps its ports, since clients know its address.
        port, metrics = self._ports.get(number, (config.server.ports[number], None))
        if config.server.metrics_port is not None:
            server["metrics_port"] = metrics or config.server.all_metrics_ports[number]
        server |= {
            "port": port, "front_ends": 1, "unix_socket": None, "join_port": None, "join_secret_file": None,
        }  # fmt: skip
        joining = {
            "address": self._address,
            "secret": self._secret.hex(),
            "default_deadline_s": config.scheduler.default_deadline_s,
            "drain_timeout_s": config.scheduler.drain_timeout_s,
            "parent": os.getpid(),
        }
        level = logging.getLogger().level
        return {"server": server, "joining": joining, "number": number, "log_level": level}
