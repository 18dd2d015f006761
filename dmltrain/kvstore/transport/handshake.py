"""Mutual authentication: an HMAC-SHA256 challenge with the job's key (RFC 2104; after ISO/IEC 9798-4). Pure.

The caller sends Hello. The listener answers with Challenge (its nonce, and its proof over both nonces). The caller
checks the proof and sends its own Proof, which the listener checks. Nonces are new for each connection, so a recorded
connection cannot be replayed. Each proof includes its side, so that it cannot be reflected. An empty key means no
authentication; the job's name is still checked.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from dmltrain.kvstore.transport.message import Challenge, Hello, Proof
from dmltrain.kvstore.transport.wire import FrameError


@dataclass(frozen=True)
class Caller:
    """The connecting side; its proof includes job, role and index."""

    job: str
    key: bytes
    role: str
    index: int
    nonce: str

    @staticmethod
    def new(job: str, key: bytes, role: str, index: int) -> Caller:
        return Caller(job, key, role, index, secrets.token_hex(16))

    def hello(self) -> Hello:
        return Hello(self.job, self.role, self.index, self.nonce)

    def proof(self, challenge: Challenge) -> Proof:
        """Answer the listener's challenge. Raises FrameError when the listener does not know the job's key."""
        expected = _sign(self.key, "listener", self.hello(), challenge.nonce)
        if not hmac.compare_digest(_bytes(challenge.proof), expected.encode()):
            raise FrameError("the peer does not know this job's key: is another job listening there?")
        return Proof(_sign(self.key, "caller", self.hello(), challenge.nonce))


@dataclass(frozen=True)
class Listener:
    """The accepting side."""

    job: str
    key: bytes
    nonce: str

    @staticmethod
    def new(job: str, key: bytes) -> Listener:
        return Listener(job, key, secrets.token_hex(16))

    def challenge(self, hello: Hello) -> Challenge:
        """Raises FrameError when the caller belongs to another job."""
        if hello.job != self.job:
            raise FrameError("the caller belongs to another job")
        return Challenge(self.nonce, _sign(self.key, "listener", hello, self.nonce))

    def check(self, hello: Hello, answer: Proof) -> None:
        """Raises FrameError when the caller's proof is wrong."""
        expected = _sign(self.key, "caller", hello, self.nonce)
        if not hmac.compare_digest(_bytes(answer.proof), expected.encode()):
            raise FrameError("the caller does not know this job's key")


def _sign(key: bytes, side: str, hello: Hello, nonce: str) -> str:
    fields = [side, hello.job, hello.role, str(hello.index), hello.nonce, nonce]
    text = b"".join(b"%d:%s," % (len(_bytes(each)), _bytes(each)) for each in fields)  # netstrings: unambiguous
    return hmac.new(key, text, "sha256").hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold lone surrogates
