"""Mutual authentication, and the keys that protect a connection's frames. Pure.

A challenge with HMAC-SHA256 (RFC 2104; after ISO/IEC 9798-4) and the job's key. The caller sends Hello. The listener
answers with Challenge (its nonce, and its proof). The caller checks the proof and sends its own Proof, which the
listener checks. Each proof covers all that the two must agree on: the protocol's version, the job, role and index of
both ends, the purpose of the connection, the level of protection, and both nonces. So a forwarder cannot connect a
caller with another listener than it meant, nor for another purpose. Nonces are new for each connection, so a recorded
connection cannot be replayed. Each proof includes its side, so that it cannot be reflected.

The keys for the frames that follow (seal.py) are derived from the job's key and the same fields, with HKDF (RFC 5869).
An empty key means no authentication; the job's name is still checked.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, replace

from dmltrain.kvstore.transport import message, wire
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.handshake import Accept, Challenge, Hello, Proof
from dmltrain.kvstore.transport.seal import Keys
from dmltrain.kvstore.transport.wire import FrameError, Header

CONTROL, DATA, MEMORY = "control", "data", "shared memory"  # purposes of a connection


@dataclass(frozen=True)
class Caller:
    """The connecting side: `role` and `index` call `listener`, for example "server 0", for `purpose`."""

    job: str
    key: bytes
    role: str
    index: int
    listener: str
    purpose: str
    wire: str  # level of protection: env.WIRES
    nonce: str

    @staticmethod
    def new(
        job: str, key: bytes, role: str, index: int, listener: str, purpose: str = DATA, wire: str = "plain"
    ) -> Caller:
        return Caller(job, key, role, index, listener, purpose, wire, _nonce())

    def again(self) -> Caller:
        """The same for another connection."""
        return replace(self, nonce=_nonce())

    def hello(self) -> Hello:
        return Hello(self.job, self.role, self.index, self.listener, self.purpose, self.wire, self.nonce)

    def proof(self, challenge: Challenge) -> Proof:
        """Answer the listener's challenge. Raises FrameError when the listener does not know the job's key."""
        expected = _sign(self.key, "listener", self.hello(), challenge.nonce)
        if not hmac.compare_digest(_bytes(challenge.proof), expected.encode()):
            raise FrameError("the peer does not know this job's key: is another job listening there?")
        return Proof(_sign(self.key, "caller", self.hello(), challenge.nonce))

    def keys(self, challenge: Challenge) -> Keys:
        """The keys of this connection, after ACCEPT."""
        return _keys(self.key, self.hello(), challenge.nonce)


@dataclass(frozen=True)
class Listener:
    """The accepting side: `name` is its role and index, for example "server 0"."""

    job: str
    key: bytes
    name: str
    purpose: str
    wire: str
    nonce: str

    @staticmethod
    def new(job: str, key: bytes, name: str, purpose: str = DATA, wire: str = "plain") -> Listener:
        return Listener(job, key, name, purpose, wire, _nonce())

    def challenge(self, hello: Hello) -> Challenge:
        """Raises FrameError when the caller belongs to another job, meant another listener or wants another level of
        protection."""
        if hello.job != self.job:
            raise FrameError("the caller belongs to another job")
        if (hello.listener, hello.purpose) != (self.name, self.purpose):
            raise FrameError(
                f"the caller wants {hello.listener[:50]!r} for {hello.purpose[:50]!r}, "
                f"but this is {self.name!r} for {self.purpose!r}"
            )
        if hello.wire != self.wire:
            raise FrameError(
                f"the caller has DMLTRAIN_WIRE={hello.wire[:50]}, this process has {self.wire}: "
                "set the same value for all processes of the job (dmltrain-launch --wire does)"
            )
        return Challenge(self.nonce, _sign(self.key, "listener", hello, self.nonce))

    def check(self, hello: Hello, answer: Proof) -> None:
        """Raises FrameError when the caller's proof is wrong."""
        expected = _sign(self.key, "caller", hello, self.nonce)
        if not hmac.compare_digest(_bytes(answer.proof), expected.encode()):
            raise FrameError("the caller does not know this job's key")

    def keys(self, hello: Hello) -> Keys:
        """The keys of this connection, after ACCEPT."""
        return _keys(self.key, hello, self.nonce)


class ListenerHandshake:
    """The listener's side of one handshake: bytes go in, bytes come out. `accepted` is the caller's Hello once it has
    proved that it knows the job's key."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.accepted: Hello | None = None
        self._hello: Hello | None = None
        self._received = bytearray()

    def receive(self, data: bytes) -> bytes:
        """Take received bytes; returns the bytes to send next. Raises FrameError, with the reason, at the first
        mistake."""
        self._received += data
        if len(self._received) < wire.HEADER_SIZE:
            return b""
        header = Header.unpack(self._received[: wire.HEADER_SIZE])
        wanted = Proof if self._hello else Hello
        if header.kind != wanted.kind:
            raise FrameError(f"frame kind {header.kind} during the handshake, expected {wanted.kind.name}")
        if header.length > wire.MAX_HELLO:
            raise FrameError(f"control frame of {header.length} bytes, the limit is {wire.MAX_HELLO}")
        end = wire.HEADER_SIZE + header.length
        if len(self._received) < end:
            return b""
        content = message.decode(header.kind, self._received[wire.HEADER_SIZE : end])
        if len(self._received) > end:
            raise FrameError("data before this handshake has ended")
        self._received.clear()
        return self._answer(content)

    def _answer(self, content: Message) -> bytes:
        if isinstance(content, Hello):
            self._hello = content
            return message.encode(self.listener.challenge(content))
        assert self._hello is not None  # see receive
        self.listener.check(self._hello, message.expect(content, Proof))
        self.accepted = self._hello
        return message.encode(Accept())


def _nonce() -> str:
    return secrets.token_hex(16)


def _sign(key: bytes, side: str, hello: Hello, nonce: str) -> str:
    return hmac.new(key, _agreed(side, hello, nonce), "sha256").hexdigest()


def _keys(key: bytes, hello: Hello, nonce: str) -> Keys:
    return Keys(*(_derive(key, _agreed(use, hello, nonce)) for use in ("caller frames", "listener frames", "TLS")))


def _derive(key: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 with the default salt: 32 bytes."""
    extracted = hmac.digest(bytes(32), key, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


def _agreed(use: str, hello: Hello, nonce: str) -> bytes:
    fields = [
        use,
        str(wire.VERSION),
        hello.job,
        hello.role,
        str(hello.index),
        hello.listener,
        hello.purpose,
        hello.wire,
        hello.nonce,
        nonce,
    ]
    return b"".join(b"%d:%s," % (len(_bytes(field)), _bytes(field)) for field in fields)  # netstrings: unambiguous


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # JSON can hold lone surrogates
