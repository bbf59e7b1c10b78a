"""This module refuses bad arguments before the client sends anything, since the errors of gRPC, protobuf and torch name
no field and no remedy. It does no I/O."""

from __future__ import annotations

import ipaddress
import operator
import re
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

from epserve.errors import ConfigError, InvalidRequest

LONGEST_S = 1e6  # eleven days: above some 1e9 s gRPC's clock overflows and the call ends at once
LARGEST_INT64 = 2**63 - 1
TARGETS = '"host:port", "[::1]:port", "unix:/path/of/socket" or "ipv4:10.0.0.1:50051,10.0.0.2:50051"'
_RESOLVERS = ("unix:", "unix-abstract:", "dns:", "vsock:", "xds:")
"""gRPC resolves these names by itself, beside the targets that this module checks."""


def bounded(timeout_s: Any, field: str = "timeout") -> float:
    """Returns the timeout. `inf` becomes the longest wait that gRPC can express. Raises InvalidRequest unless it is a
    positive number."""
    if not is_number(timeout_s):
        raise InvalidRequest(f"{field}: {_shown(timeout_s)} is not a number; give seconds, such as 2.0", field=field)
    if not timeout_s > 0:
        raise InvalidRequest(f"{field}: {timeout_s} is not a positive number of seconds", field=field)
    return float(min(timeout_s, LONGEST_S))


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(value: Any) -> int | None:
    """Returns the number, or None for other values, True and False included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def shape_of(shape: Any) -> tuple[int, ...]:
    """Returns the sizes. Raises InvalidRequest unless the shape is a sequence of whole numbers that are not negative."""
    sizes = [whole_number(size) for size in shape] if isinstance(shape, Iterable) else [None]
    if any(size is None or not 0 <= size <= LARGEST_INT64 for size in sizes):
        text = f"shape: {_shown(shape)} is not a sequence of whole numbers from 0 up; give (tokens, hidden size)"
        raise InvalidRequest(text, field="shape")
    return tuple(size for size in sizes if size is not None)


def check_request_id(request_id: Any) -> None:
    """Raises InvalidRequest unless the id is an ASCII string. The service judges length and characters."""
    if not isinstance(request_id, str) or not request_id.isascii():
        text = f"request_id: {_shown(request_id)} is not a string of ASCII characters"
        raise InvalidRequest(text, field="request_id")


def check_token(token: Any) -> None:
    """Raises ConfigError for an unusable token. The message never shows the token."""
    if not isinstance(token, str):
        raise ConfigError(f"token: must be a string, got {type(token).__name__}; empty for none")
    for place, character in enumerate(token):
        if not "!" <= character <= "~":
            raise ConfigError(
                f"token: character {place + 1} of {len(token)} is U+{ord(character):04X}; a token has printable ASCII"
                " characters without spaces (strip the end of the line that it was read from)"
            )


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless the value is one of those allowed."""
    names = tuple(allowed)
    if value not in names:
        known = ", ".join(map(repr, names))
        raise ConfigError(f"{name}: {_shown(value)} is none of {known}")


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises ConfigError for another type, without the value, which may be a token in the wrong place."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name}: must be {kind.__name__}(...), got {type(value).__name__}")


def check_target(target: Any) -> None:
    """Raises ConfigError for a target that gRPC does not resolve, or resolves to port 443."""
    if not isinstance(target, str):
        _refuse_target(target, "is not a string")
    if not target:
        _refuse_target(target, "is empty")
    if not all("!" <= character <= "~" for character in target):
        _refuse_target(target, "has spaces, control characters or letters beyond ASCII")
    if re.match(r"(https?|grpcs?):/", target):
        _refuse_target(
            target, "is a web address; leave out what comes before the host, TLS is ClientOptions(tls=Tls())"
        )
    if target in _RESOLVERS:
        _refuse_target(target, "names nothing")
    if target.startswith(_RESOLVERS):
        return
    family, _, addresses = target.partition(":")
    if family in ("ipv4", "ipv6"):
        for address in addresses.split(","):
            _check_address(target, address, family)
        return
    host, colon, port = target.rpartition(":")
    if not colon or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        _refuse_target(target, "has no port, or an IPv6 address without brackets")
    if not host:
        _refuse_target(target, "has no host")
    _check_port(target, port)


def _check_address(target: str, address: str, family: str) -> None:
    host, colon, port = address.rpartition(":")
    host = host.replace("%5B", "[").replace("%5D", "]").strip("[]")
    try:
        fits = f"ipv{ipaddress.ip_address(host).version}" == family
    except ValueError:
        fits = False
    if not colon or not fits:
        _refuse_target(target, f"holds {address!r}, which is no {family} address and port")
    _check_port(target, port)


def _check_port(target: str, port: str) -> None:
    if not (port.isdigit() and 1 <= int(port) <= 65535):
        _refuse_target(target, f"has the port {port!r}, must be 1 to 65535")


def _refuse_target(target: Any, why: str) -> NoReturn:
    raise ConfigError(f"target: {_shown(target)} {why}; give {TARGETS}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_both(topk_ids: Any, topk_weights: Any) -> None:
    """Raises InvalidRequest for ids without weights, or weights without ids."""
    if (topk_ids is None) != (topk_weights is None):
        missing = "topk_ids" if topk_ids is None else "topk_weights"
        raise InvalidRequest(f"{missing}: missing; topk_ids and topk_weights come together, or neither", field=missing)


def requires_gradient(*values: Any) -> bool:
    """Tells whether torch would record a gradient for one of the values."""
    return any(getattr(value, "requires_grad", False) for value in values) and _records_gradients()


def check_no_gradient(value: Any, field: str) -> None:
    """Raises InvalidRequest for a tensor of torch that requires a gradient while torch records gradients."""
    if requires_gradient(value):
        text = (
            f"{field}: requires a gradient, which this call does not record; use the blocking Client.forward, which does, or call"
            " under torch.no_grad() and then backward"
        )
        raise InvalidRequest(text, field=field)


def _records_gradients() -> bool:
    import torch  # a tensor of torch came, so torch is imported

    return torch.is_grad_enabled()
