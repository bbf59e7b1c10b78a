"""HTTP proxies that the environment names: gRPC follows them, for every target that no_proxy does not list."""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import urlsplit

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""gRPC takes the first that is set, also for connections without TLS."""


def channel_options(target: str) -> list[tuple[str, int]]:
    """Options of a channel to `target`: none of its own, or for this host itself that no proxy is asked for it."""
    return [("grpc.enable_http_proxy", 0)] if is_local(target) else []


def is_local(target: str) -> bool:
    """Whether every address of the target is a Unix socket, a loopback address or localhost."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    addresses = re.sub(r"^(ipv4:|ipv6:|dns:(///)?)", "", target).split(",")
    return all(
        _is_loopback(address.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]")) for address in addresses
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def named(details: str) -> str:
    """What to say of a connection that failed at the proxy's address, as gRPC's `details` have it; "" where it did not.

    The proxy's user and password are not shown.
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), "")
    try:
        proxy = urlsplit(os.environ.get(name, ""))
        host, port = proxy.hostname, proxy.port or 80
    except ValueError:
        return ""
    if host is None or not re.search(rf":{port}(:|$)", details):
        return ""
    return f"the connection went to the proxy {host}:{port} of the environment's {name}; list the service's host in no_proxy"
