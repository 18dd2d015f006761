"""Who may connect: a mutual HMAC-SHA256 challenge over the job's key (RFC 2104; after ISO/IEC 9798-4). Pure.

Caller sends `hello`; listener answers with `challenge` (its nonce and its proof over both nonces); the caller checks
that and sends its own `proof`; the listener checks it. Nonces are fresh, so a recorded connection proves nothing later,
and the two proofs name their side, so neither can be reflected. With an empty key both sides agree on "no
authentication"; the job's name is still checked.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from dmltrain.kvstore.transport.wire import FrameError

ROLES = ("scheduler", "server", "worker", "relay")  # a relay's index is its worker's


@dataclass(frozen=True)
class Caller:
    """The connecting side: its job, role and index are part of what it proves."""

    job: str
    key: bytes
    role: str
    index: int
    nonce: str

    @staticmethod
    def new(job: str, key: bytes, role: str, index: int) -> Caller:
        return Caller(job, key, role, index, secrets.token_hex(16))

    def hello(self) -> dict[str, Any]:
        return {"job": self.job, "role": self.role, "index": self.index, "nonce": self.nonce}

    def proof(self, challenge: dict[str, Any]) -> dict[str, str]:
        """Answer the listener's challenge. Raises FrameError when the listener does not know the job's key."""
        nonce, proof = _text(challenge, "nonce"), _text(challenge, "proof")
        if not hmac.compare_digest(_bytes(proof), _sign(self.key, "listener", self.hello(), nonce).encode()):
            raise FrameError("the other side does not know this job's key: is another job listening there?")
        return {"proof": _sign(self.key, "caller", self.hello(), nonce)}


@dataclass(frozen=True)
class Listener:
    """The accepting side."""

    job: str
    key: bytes
    nonce: str

    @staticmethod
    def new(job: str, key: bytes) -> Listener:
        return Listener(job, key, secrets.token_hex(16))

    def challenge(self, hello: dict[str, Any]) -> dict[str, str]:
        """Raises FrameError when the caller belongs to another job or its hello is malformed."""
        _text(hello, "nonce")
        if _text(hello, "job") != self.job:
            raise FrameError("the caller belongs to another job")
        index = hello.get("index")
        if _text(hello, "role") not in ROLES or type(index) is not int or index < 0:
            raise FrameError("the caller's hello names no role and index")
        return {"nonce": self.nonce, "proof": _sign(self.key, "listener", hello, self.nonce)}

    def check(self, hello: dict[str, Any], answer: dict[str, Any]) -> None:
        """Raises FrameError when the caller's proof is wrong."""
        expected = _sign(self.key, "caller", hello, self.nonce)
        if not hmac.compare_digest(_bytes(_text(answer, "proof")), expected.encode()):
            raise FrameError("the caller does not know this job's key")


def _sign(key: bytes, side: str, hello: dict[str, Any], nonce: str) -> str:
    fields = [side, hello["job"], hello["role"], str(hello["index"]), hello["nonce"], nonce]
    text = b"".join(b"%d:%s," % (len(_bytes(field)), _bytes(field)) for field in fields)  # netstrings: no ambiguity
    return hmac.new(key, text, "sha256").hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold lone surrogates


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > 512:
        raise FrameError(f"handshake without a {name}")
    return value
