"""Shows the service over HTTP to people and to Prometheus: `/` status page, `/status.json`, `/metrics`, `/healthz`, `/livez`.

It is read-only, on the host of the gRPC port and with its security: the same TLS files, and the same bearer tokens (a browser
asks for one as the password of any user). A few threads serve it, so that a slow reader costs the event loop nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import gzip
import hashlib
import json
import logging
import re
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from epserve.config import ServerConfig
from epserve.errors import ConfigError, EpserveError
from epserve.server.accounts import Accounts

from .observer import Observer

log = logging.getLogger("epserve.server")

PAGE = Path(__file__).parent / "static" / "status.html"
THREADS = 8
READ_TIMEOUT_S = 10.0
"""The limit for a client that sends no request, or reads no reply."""
POLL_S = 0.1
GZIP_FROM = 1024
LOCAL_NAMES = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)
OPEN_PATHS = ("/healthz", "/livez")
"""Kubelets and load balancers ask for these paths without credentials."""
SECURITY = [
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]

Reply = tuple[HTTPStatus, str, bytes, list[tuple[str, str]]]


class StatusPage:
    """Serves the page. `start()` binds, and `stop()` waits for replies on their way."""

    def __init__(self, observer: Observer, config: ServerConfig, accounts: Accounts, state: Callable[[], str]):
        """state: returns the service's state, at any time and from any thread."""
        self._observer, self._config, self._accounts, self._state = observer, config, accounts, state
        self._metrics = make_wsgi_app(observer.metrics.registry)
        self._server: _HttpServer | None = None
        page = PAGE.read_text(encoding="utf-8")
        self._page, self._policy = page.encode(), content_policy(page)

    @property
    def port(self) -> int:
        """Returns the bound port, or 0 before start."""
        return self._server.server_address[1] if self._server is not None else 0

    async def start(self) -> None:
        """Binds and serves. Raises ConfigError when the address cannot be bound."""
        host, port = self._config.host, self._config.metrics_port
        assert port is not None
        try:
            server = self._server = _HttpServer(host, port, self._answer)
        except OSError as error:
            text = f"server.metrics_port: cannot listen on {host} port {port}: {error.strerror or error}"
            raise ConfigError(f"{text}; choose another port, or 0 for a free one") from None
        if self._config.tls_cert is not None:
            server.socket = _tls(self._config).wrap_socket(
                server.socket,
                server_side=True,
                do_handshake_on_connect=False,  # it would block the thread that accepts
            )
        self._serving = asyncio.get_running_loop().run_in_executor(None, server.serve_forever, POLL_S)
        scheme = "https" if self._config.tls_cert is not None else "http"
        log.info("status page and metrics on %s://%s:%d", scheme, host, self.port)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            await self._serving
            await asyncio.to_thread(server.server_close)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answers a request as the WSGI application."""
        path = environ.get("PATH_INFO", "/")
        refusal = self._refusal(environ, path)
        if refusal is None and path == "/metrics":
            return self._metrics(environ, start_response)
        status, kind, body, headers = refusal or self._reply(path)
        headers = [("Content-Type", kind), *SECURITY, *headers]
        if len(body) >= GZIP_FROM and "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
            body = gzip.compress(body, compresslevel=1)
            headers.append(("Content-Encoding", "gzip"))
        headers.append(("Content-Length", str(len(body))))
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _refusal(self, environ: dict[str, Any], path: str) -> Reply | None:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "read-only: GET and HEAD", ("Allow", "GET, HEAD"))
        if path in OPEN_PATHS:
            return None
        if not self._accounts.guarded:
            # A page elsewhere whose host name points at loopback must not read this page through a browser.
            local = self._config.host == "::1" or LOCAL_NAMES.fullmatch(self._config.host)
            if local and not LOCAL_NAMES.fullmatch(environ.get("HTTP_HOST", "")):
                return _text(HTTPStatus.FORBIDDEN, "this page answers to local host names only")
            return None
        try:
            sent = bearer(environ.get("HTTP_AUTHORIZATION", ""))
            admin = self._accounts.identify([("authorization", sent)]).current().admin
        except EpserveError as error:
            return _text(
                HTTPStatus.UNAUTHORIZED, str(error), ("WWW-Authenticate", 'Basic realm="epserve: a bearer token"')
            )
        return None if admin else _text(HTTPStatus.FORBIDDEN, "this needs a token of an admin (server.tokens_file)")

    def _reply(self, path: str) -> Reply:
        if path in ("/", "/index.html"):
            return HTTPStatus.OK, "text/html; charset=utf-8", self._page, [("Content-Security-Policy", self._policy)]
        if path == "/status.json":
            body = json.dumps(self._observer.snapshot(), separators=(",", ":")).encode()
            return HTTPStatus.OK, "application/json", body, []
        if path == "/healthz":
            state = self._state()
            return _text(HTTPStatus.OK if state == "serving" else HTTPStatus.SERVICE_UNAVAILABLE, state)
        if path == "/livez":
            return _text(HTTPStatus.OK, "alive")
        return _text(HTTPStatus.NOT_FOUND, "there are /, /status.json, /metrics, /healthz and /livez")


def bearer(authorization: str) -> str:
    """Turns a browser's `Basic` credentials into a bearer token, which is their password. Other values stay as they are."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {password}"


def content_policy(page: str) -> str:
    """Returns a policy that allows only the page's own script, style and data. Injected text can neither run nor be sent away."""
    hashes = {
        tag: " ".join(f"'sha256-{_digest(body)}'" for body in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _text(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Reply:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode(), list(headers)


def _tls(config: ServerConfig) -> ssl.SSLContext:
    """Returns the TLS context of the gRPC port, with mutual TLS. The gRPC port has checked the files."""
    assert config.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_cert, config.tls_key)
    if config.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.tls_client_ca)
    return context


class _Handler(WSGIRequestHandler):
    timeout = READ_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http %s: %s", self.client_address[0], format % args)


class _HttpServer(WSGIServer):
    """Serves with a fixed number of threads. Further connections wait in the system's queue."""

    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, host: str, port: int, application: Any):
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="epserve-http")
        self._free = threading.Semaphore(THREADS)
        self._open: set[socket.socket] = set()
        self._stopping = False
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        """Binds without HTTPServer's look-up of the host's full name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Waits for a thread and accepts nothing meanwhile, since each connection costs the service a file descriptor."""
        while not self._free.acquire(timeout=POLL_S):
            if self._stopping:
                self.shutdown_request(request)
                return
        self._open.add(request)
        self._threads.submit(self._serve, request, client_address)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:  # the client went away, or did not speak TLS
            log.debug("http %s: %s", client_address[0], error)
        except Exception:
            log.exception("http %s", client_address[0])
        finally:
            self._open.discard(request)
            self.shutdown_request(request)
            self._free.release()

    def shutdown(self) -> None:
        self._stopping = True
        super().shutdown()

    def server_close(self) -> None:
        """Closes the server. Replies on their way still go out. Connections without a request are closed."""
        super().server_close()
        for each in list(self._open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(
                    each, socket.SHUT_RD
                )  # NOTE: the object's own method would end TLS in both directions
        self._threads.shutdown(wait=True)
