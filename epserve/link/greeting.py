"""The greeting of two processes: each proves that it knows one secret. The secret is not sent, and nothing is read before.

    both        hello: version, 32 fresh random bytes
    connecting  proof: HMAC-SHA256 by the secret over the protocol, the side and both sides' bytes
    listening   proof, after it has checked the other one: strangers learn nothing that depends on the secret

The messages are headers of frames (wire.py).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Any

NONCE_BYTES = 32
MAX_GREETING = 4096
"""Most bytes of a header from a side without a proof."""
HANDSHAKE_S = 10.0
"""Seconds for the whole greeting."""
MOST_GREETED = 64
"""Most connections without a proof. One more ends the oldest, since a side that knows the secret takes milliseconds."""


class Stranger(ConnectionError):
    """The other side does not know the secret, or speaks another protocol."""


class Greeting:
    """One side of one greeting."""

    def __init__(self, secret: bytes, *, protocol: str, version: int, connecting: bool):
        self._secret, self._protocol, self._version, self._connecting = secret, protocol, version, connecting
        self._mine, self._theirs = os.urandom(NONCE_BYTES), b""

    def hello(self) -> dict[str, Any]:
        return {"kind": "hello", "version": self._version, "nonce": self._mine.hex()}

    def hear(self, hello: Mapping[str, Any]) -> None:
        """Takes the other side's hello. Raises Stranger."""
        if hello.get("kind") != "hello" or hello.get("version") != self._version:
            raise Stranger(
                f"the other side speaks version {hello.get('version')} of this protocol, not {self._version}"
            )
        try:
            self._theirs = bytes.fromhex(str(hello.get("nonce", "")))
        except ValueError:
            self._theirs = b""
        if len(self._theirs) != NONCE_BYTES:
            raise Stranger(f"the other side sent {len(self._theirs)} random bytes, not {NONCE_BYTES}")

    def proof(self) -> dict[str, Any]:
        return {"kind": "proof", "proof": self._proof(self._connecting)}

    def check(self, proof: Mapping[str, Any]) -> None:
        """Checks the other side's proof. Raises Stranger."""
        if not hmac.compare_digest(str(proof.get("proof", "")).encode(), self._proof(not self._connecting).encode()):
            raise Stranger("the other side does not know the secret")

    def _proof(self, connecting: bool) -> str:
        """Returns a side's proof. The side is part of it, so that no side can be sent its own proof back."""
        mine = (self._mine, self._theirs) if connecting == self._connecting else (self._theirs, self._mine)
        side = "connecting" if connecting else "listening"
        message = f"{self._protocol} {self._version} {side} ".encode() + b"".join(mine)
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()
