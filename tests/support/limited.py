"""Callers with tokens, for tests of limits."""

from epserve.client import AsyncClient, ClientOptions, RetryPolicy

ONCE = RetryPolicy(attempts=1)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def impatient(address: str, token: str) -> AsyncClient:
    return AsyncClient(address, ClientOptions(token=token, retry=ONCE))
