"""This module is the gRPC server around an engine: options, security, health, reflection, start and stop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from epserve.config import ServerConfig
from epserve.engine.face import EngineFace
from epserve.errors import ConfigError
from epserve.joining.peers import Peers
from epserve.process import allocator, tracing
from epserve.protocol import admin_pb2 as admin_pb
from epserve.protocol import admin_pb2_grpc as admin_pb_grpc
from epserve.protocol import epserve_pb2 as pb
from epserve.protocol import frames, wire
from epserve.protocol import inference_pb2 as kserve_pb
from epserve.protocol import inference_pb2_grpc as kserve_pb_grpc
from epserve.protocol.dropping import GRPC_LOG, quiet

from . import auth, reflection
from .accounts import Accounts
from .admin import AdminServicer
from .calls import Calls
from .doorbell import Doorbell
from .incoming.intake import Intake
from .incoming.receiving import Receiving
from .kserve.servicer import InferenceServicer
from .lanes.door import LaneDoor
from .regions import Regions
from .servicer import ExpertsServicer
from .watch.observer import Observer
from .watch.status_page import StatusPage

log = logging.getLogger("epserve.server")

SERVICE = pb.DESCRIPTOR.services_by_name["Experts"].full_name
ADMIN_SERVICE = admin_pb.DESCRIPTOR.services_by_name["Admin"].full_name
INFERENCE_SERVICE = kserve_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_NAMES = ("", SERVICE, INFERENCE_SERVICE)
HOUSEKEEPING_S = 1.0
"""The server checks the tokens file and drops dead clients' regions at this interval."""
TRIM_EVERY = 15
"""Free memory goes back to the system after this many rounds of housekeeping."""
SHORTEST_PING_MS = 4_000
"""The server closes a connection whose client pings three times more often than this. The shortest interval of grpc-go
and grpc-java is 10 s, and pings may come early. Clients of this package ping every 30 s."""
FLUSH_S = 0.5
"""Replies on their way and health watchers get this time, once all accepted calls are done."""


class Server:
    """The server runs around an `engine` that may still be starting. Health then says NOT_SERVING, and calls get the
    engine's error."""

    def __init__(
        self,
        engine: EngineFace,
        config: ServerConfig,
        *,
        default_deadline_s: float = 60.0,
        tracer_provider: Any = None,
        peers: Peers | None = None,
    ):
        """Makes a server that is not bound yet.

        Args:
            tracer_provider: OpenTelemetry's, in place of the one that `server.otlp_endpoint` makes. `stop` closes it.
            peers: the state that front ends share. The object that connects this process to the others has the same
                one.
        """
        self._engine, self._config = engine, config
        self._tracer_provider = tracer_provider
        self._peers = peers or Peers()
        self._observer: Observer | None = None
        self._page: StatusPage | None = None
        self._default_deadline_s = default_deadline_s
        self._port = 0
        self._doorbell: Doorbell | None = None
        self._lanes: LaneDoor | None = None
        self._server: grpc.aio.Server | None = None
        self._calls: Calls | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._publishing: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """Returns the bound port, or 0 before start."""
        return self._port

    @property
    def metrics_port(self) -> int:
        """Returns the port of the status page and the metrics, or 0 when there are none."""
        return self._page.port if self._page is not None else 0

    @property
    def lanes(self) -> pb.Lanes:
        """Returns what lanes have done since the start."""
        return self._lanes.shown() if self._lanes is not None else pb.Lanes()

    @property
    def lanes_cpu_s(self) -> float:
        """Returns the processor time of the thread that serves lanes, at most a second old."""
        return self._lanes.poller.cpu_s if self._lanes is not None else 0.0

    @property
    def address(self) -> str:
        return _address(self._config.host, self._port)

    async def start(self) -> None:
        """Binds and starts. Raises ConfigError when it cannot read certificates or tokens, or cannot bind the address."""
        config = self._config
        allocator.keep_freed_memory()
        credentials = auth.server_credentials(config)
        accounts = Accounts(config.tokens_file, self._peers.budgets)
        guards = [auth.TokenInterceptor(accounts)] if accounts.guarded else []
        _check_free(config.host, config.port)
        provider = self._tracer_provider
        if provider is None and config.otlp_endpoint:
            provider = tracing.exporting(config.otlp_endpoint, config.trace_ratio)
        observer = self._observer = Observer(
            self._engine, max_expert_series=config.metrics_expert_series, provider=provider
        )
        GRPC_LOG.addFilter(quiet)  # a second start does no harm
        intake = Intake(config.max_buffered_bytes)
        receiving = Receiving(intake, self._default_deadline_s)
        server = grpc.aio.server(interceptors=[observer.interceptor(), *guards, receiving], options=_options(config))
        calls = self._calls = Calls(
            self._engine,
            config,
            self._default_deadline_s,
            accounts=accounts,
            regions=Regions(config, board=self._peers.board),
            observer=observer,
            intake=intake,
        )
        names = [SERVICE, health.SERVICE_NAME, *reflection.SERVICES]
        self._doorbell = Doorbell(calls)
        if config.regions:
            await self._doorbell.start()
        self._lanes = LaneDoor(calls)
        observer.metrics.lanes = self._lanes.shown
        if config.lanes:
            self._lanes.start()
        experts = ExpertsServicer(calls, self._doorbell, self._lanes)
        frames.add_experts_servicer(experts, server)
        admin_pb_grpc.add_AdminServicer_to_server(AdminServicer(self._engine, guarded=accounts.guarded), server)
        names.append(ADMIN_SERVICE)
        if config.inference_protocol:
            kserve_pb_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(calls), server)
            names.append(INFERENCE_SERVICE)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            reflection.add(names, server)
        wanted = _address(config.host, config.port)
        try:
            if credentials is None:
                self._port = server.add_insecure_port(wanted)
            else:
                self._port = server.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise ConfigError(f"server.host, server.port: cannot listen on {wanted}: {error}") from None
        intake.port = self._port
        if config.unix_socket is not None:
            _listen_on_socket(server, config.unix_socket)
        if config.metrics_port is not None:
            self._page = StatusPage(observer, config, accounts, self._shown_state)
            await self._page.start()
        observer.start(calls)
        await self._publish_health()
        self._loop = asyncio.get_running_loop()
        self._engine.on_state_change(self._state_changed)
        await server.start()
        self._server = server
        self._tasks = [asyncio.create_task(work) for work in (_keep_house(calls), intake.watch())]
        log.info("listening on %s (TLS %s, tokens %s)", self.address, credentials is not None, accounts.guarded)

    async def stop(self, grace: float = 0.0) -> None:
        """Says NOT_SERVING, waits up to `grace` seconds for accepted calls, then ends the connections. It is
        idempotent."""
        server, calls = self._server, self._calls
        if server is None or calls is None:
            return
        self._server = None
        for task in self._tasks:
            task.cancel()
        await self._health.enter_graceful_shutdown()
        if not await calls.drain(grace):
            log.warning("%d calls were still running after %.1f s; they are cancelled", calls.in_flight, grace)
        if self._lanes is not None:
            await self._lanes.drain(grace)
        await server.stop(FLUSH_S)
        if self._lanes is not None:
            await self._lanes.stop()
        if self._doorbell is not None:
            self._doorbell.stop()
        if self._page is not None:
            await self._page.stop()
        if self._observer is not None:
            await self._observer.stop()
        calls.regions.unregister_all()
        if self._config.unix_socket is not None:
            self._config.unix_socket.unlink(missing_ok=True)
        log.info("stopped listening on %s", self.address)

    def reload(self) -> None:
        """Reads the tokens file again now, as a change of it does. It logs an unusable file, which changes nothing."""
        if self._calls is not None:
            self._calls.accounts.reload()

    async def wait(self) -> None:
        """Waits until the server is stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()

    def _shown_state(self) -> str:
        """Returns the state for /healthz: the gRPC health service's, a drain included."""
        return "draining" if self._calls is not None and self._calls.draining.is_set() else self._engine.state()

    def _state_changed(self, state: str) -> None:
        """Passes the engine's state on. Any thread may call it. A loop that has ended needs no news."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._health_changed)

    def _health_changed(self) -> None:
        task = asyncio.ensure_future(self._publish_health())
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)

    async def _publish_health(self) -> None:
        serving = self._engine.state() == "serving"
        kinds = health_pb2.HealthCheckResponse
        for name in HEALTH_NAMES:
            await self._health.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    """Returns gRPC's options. Sizes are explicit: gRPC's default of 4 MiB is 292 tokens of hidden size 7168."""
    message = max(config.max_message_bytes, wire.FRAME_BYTES) + wire.OVERHEAD_BYTES
    return [
        ("grpc.max_receive_message_length", message),
        ("grpc.max_send_message_length", message),
        ("grpc.max_concurrent_streams", config.max_concurrent_streams),
        # Identity only. gzip takes 21 % off bfloat16 noise at 9 MB/s of one core, and a small compressed message could make
        # the server unpack a large one.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.http2.max_frame_size", wire.HTTP2_FRAME_BYTES),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls in silence
        ("grpc.keepalive_time_ms", 60_000),  # finds peers that vanished without closing
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # gRPC otherwise waits longer, whatever the keepalive's timeout
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # else a connection idle for two pings is never asked again
        ("grpc.http2.min_ping_interval_without_data_ms", SHORTEST_PING_MS),
    ]


async def _keep_house(calls: Calls) -> None:
    for second in itertools.count(1):
        await asyncio.sleep(HOUSEKEEPING_S)
        if second % TRIM_EVERY == 0:
            await asyncio.to_thread(allocator.trim)
        calls.regions.reclaim()
        if calls.accounts.changed():
            calls.accounts.reload()


def _listen_on_socket(server: grpc.aio.Server, path: Path) -> None:
    """Listens on a socket that only the server's own user can open. It replaces a stale one. Raises ConfigError for one
    in use."""
    what = f"server.unix_socket: cannot listen on {path}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from None
    else:
        raise ConfigError(f"{what}: another server is listening there")
    mask = os.umask(0o177)  # before the socket exists, so that others can connect at no moment
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise ConfigError(f"{what}: {error}") from None
    finally:
        os.umask(mask)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_free(host: str, port: int) -> None:
    """Binds once without gRPC: the system's reason is clearer than gRPC's, which goes to stderr."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # gRPC does this too: TIME_WAIT is no obstacle
            probe.bind(address)
    except OSError as error:
        text = f"server.host, server.port: cannot listen on {_address(host, port)}: {error.strerror or error}"
        raise ConfigError(f"{text}; choose another port, or 0 for a free one") from None
