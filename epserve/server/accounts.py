"""Identifies callers by bearer tokens from a file, each with a name and limits. The file is read again while the service runs.

    # TOKEN [name=NAME] [tokens_per_s=NUMBER] [bytes_in_flight=SIZE] [priority=low|normal|high] [admin]
    3f9c...e1 name=search tokens_per_s=50000 bytes_in_flight=256MiB
    77ab...02 name=operator admin

Tokens of one name are one client (so that a token can be replaced without a gap) and share its limits. The limits hold over
all front ends of a service (`engine/budgets.py`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from epserve.engine.budgets import Budget, Budgets, Claim
from epserve.engine.planning import Priority
from epserve.errors import ConfigError, Unauthenticated

log = logging.getLogger("epserve.server")

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPolicy:
    """Holds one client's limits.

    Args:
        tokens_per_s: model tokens, with a burst of one second's worth.
        priority: the highest priority that the client may ask for. None: `server.max_priority`.
    """

    name: str = ""
    priority: Priority | None = None
    tokens_per_s: float = math.inf
    bytes_in_flight: float = math.inf
    admin: bool = False


class Account:
    """Keeps one client's use. `policy` may be replaced at any time. None: its tokens were removed from the file."""

    def __init__(self, policy: ClientPolicy, budgets: Budgets | None = None):
        """budgets: the place where its use is counted. Several accounts may share it."""
        self.policy: ClientPolicy | None = policy
        self.name = policy.name
        self._budgets = budgets or Budgets()

    def current(self) -> ClientPolicy:
        """Returns the policy. Raises Unauthenticated once the tokens file no longer lists this client, also on open streams."""
        if self.policy is None:
            raise Unauthenticated(
                "authorization: this bearer token was withdrawn (server.tokens_file)", field="authorization"
            )
        return self.policy

    def spend(self, tokens: int) -> None:
        """Spends model tokens. Raises Overloaded with the time after which the client may try again."""
        if (rate := self.current().tokens_per_s) < math.inf:
            self._budget.spend(tokens, rate)

    def give_back(self, tokens: int) -> None:
        """Gives the tokens of a refused request back."""
        if self.policy is not None and self.policy.tokens_per_s < math.inf:
            self._budget.give_back(tokens, self.policy.tokens_per_s)

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Returns a context that holds the bytes of one request. Entering it raises Overloaded, unless it is the only request."""
        limit = self.current().bytes_in_flight
        return _holding(self._budget, nbytes, limit) if limit < math.inf else nullcontext()

    def claim(self, nbytes: int) -> Claim | None:
        """Returns the claim that a request of `nbytes` carries to the process that orders steps. None: there are no limits."""
        policy = self.policy
        if policy is None or policy.tokens_per_s == policy.bytes_in_flight == math.inf:
            return None
        return Claim(tokens_per_s=policy.tokens_per_s, bytes_in_flight=policy.bytes_in_flight, nbytes=nbytes)

    @property
    def bytes_in_flight(self) -> int:
        """Returns the bytes of this client's requests in this process. They are counted for a client with a limit."""
        return self._budget.held()

    @property
    def _budget(self) -> Budget:
        return self._budgets.of(self.name)


@contextmanager
def _holding(budget: Budget, nbytes: int, limit: float) -> Iterator[None]:
    budget.hold(nbytes, limit)
    try:
        yield
    finally:
        budget.release(nbytes)


class Accounts:
    """Holds all clients. It keeps digests of tokens, never the tokens. Without a file all callers are one anonymous client."""

    def __init__(self, path: Path | None, budgets: Budgets | None = None):
        """budgets: the budgets of this process. Raises ConfigError when the file is unusable."""
        self._path = path
        self._budgets = budgets or Budgets()
        self._stamp: tuple[int, ...] = ()
        self._by_name: dict[str, Account] = {}
        self._by_digest: dict[bytes, Account] = {}
        self._anonymous = Account(ClientPolicy(admin=True))
        if path is not None:
            self._load(path)

    @property
    def guarded(self) -> bool:
        return self._path is not None

    def identify(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Account:
        """Returns the account by the call's `authorization`. Raises Unauthenticated."""
        if self._path is None:
            return self._anonymous
        sent = next((value for key, value in metadata or () if key == "authorization"), "")
        scheme, _, token = (sent.decode(errors="replace") if isinstance(sent, bytes) else sent).partition(" ")
        # The time of a digest's look-up tells nothing about a token: a digest's prefix does not reveal a token.
        account = self._by_digest.get(_digest(token.strip())) if scheme.lower() == "bearer" else None
        if account is None:
            text = "authorization: missing or unknown bearer token (server.tokens_file)"
            raise Unauthenticated(text, field="authorization")
        return account

    def changed(self) -> bool:
        return self._path is not None and _stamp(self._path) != self._stamp

    def reload(self) -> None:
        """Reads the file again. Limits change at once, also for calls on open streams. An unusable file is logged and ignored."""
        if self._path is None:
            return
        try:
            self._load(self._path)
        except ConfigError as error:
            self._stamp = _stamp(self._path)
            log.error("tokens file not reloaded, the last good one stays in force: %s", error)
        else:
            log.info("tokens file reloaded: %d clients", len(self._by_name))

    def _load(self, path: Path) -> None:
        stamp = _stamp(path)
        policies = read_policies(path)
        by_name = {policy.name: policy for policy in policies.values()}
        for name, account in self._by_name.items():
            account.policy = by_name.get(name)
        kept = {name: account for name, account in self._by_name.items() if name in by_name}
        self._by_name = {name: kept.get(name) or Account(policy, self._budgets) for name, policy in by_name.items()}
        self._by_digest = {digest: self._by_name[policy.name] for digest, policy in policies.items()}
        self._stamp = stamp


def read_policies(path: Path) -> dict[bytes, ClientPolicy]:
    """Returns digest of each token -> policy. Blank lines and lines that start with # do not count. Raises ConfigError.

    When no line says `admin`, every token may do everything.
    """
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"server.tokens_file: cannot read {path}: {error.strerror}") from None
    policies: dict[bytes, ClientPolicy] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            digest, policy = _parse(line, f"server.tokens_file: {path}, line {number}")
            if digest in policies:
                raise ConfigError(f"server.tokens_file: {path}, line {number}: this token is listed already")
            policies[digest] = policy
    if not policies:
        raise ConfigError(f"server.tokens_file: {path} holds no token; put one on each line")
    by_name: dict[str, ClientPolicy] = {}
    for policy in policies.values():
        if by_name.setdefault(policy.name, policy) != policy:
            raise ConfigError(f"server.tokens_file: {path}: client {policy.name!r} has lines with different limits")
    if not any(policy.admin for policy in by_name.values()):
        return {digest: replace(policy, admin=True) for digest, policy in policies.items()}
    return policies


def _parse(line: str, where: str) -> tuple[bytes, ClientPolicy]:
    token, *words = line.split()
    if not token.isascii():
        raise ConfigError(f"{where}: holds a token with spaces or non-ASCII characters")
    digest = _digest(token)
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word != "admin" and not equals:
            raise ConfigError(
                f"{where}: holds a token with spaces or non-ASCII characters, or a word that is not KEY=VALUE"
            )
        if key not in ("name", "tokens_per_s", "bytes_in_flight", "priority", "admin") or key in values:
            known = "name, tokens_per_s, bytes_in_flight, priority, admin"
            raise ConfigError(f"{where}: unknown or repeated key {key!r} (known: {known})")
        values[key] = value
    return digest, ClientPolicy(
        name=values.get("name") or f"client-{digest.hex()[:8]}",
        tokens_per_s=_positive(values.get("tokens_per_s", "inf"), f"{where}: tokens_per_s"),
        bytes_in_flight=_size(values.get("bytes_in_flight", "inf"), f"{where}: bytes_in_flight"),
        priority=_priority(values["priority"], where) if "priority" in values else None,
        admin="admin" in values,
    )


def _priority(text: str, where: str) -> Priority:
    if text.upper() not in Priority.__members__:
        known = ", ".join(name.lower() for name in Priority.__members__)
        raise ConfigError(f"{where}: priority: must be one of {known}, got {text!r}")
    return Priority[text.upper()]


def _positive(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ConfigError(f"{where}: must be a number above 0, got {text!r}")
    return value


def _size(text: str, where: str) -> float:
    matched = re.fullmatch(r"([0-9.]+|inf)([A-Za-z]*)", text)
    if matched is None or matched[2].upper() not in _UNITS:
        raise ConfigError(f"{where}: must be a number of bytes, or one with KiB, MiB or GiB, got {text!r}")
    return _positive(matched[1], where) * _UNITS[matched[2].upper()]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return (0,)
    return found.st_mtime_ns, found.st_size, found.st_ino
