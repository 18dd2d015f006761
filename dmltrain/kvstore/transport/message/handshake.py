"""Messages with which every link begins: see transport/handshake.py."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.kvstore.transport.message.base import Count, Message, Role, Short
from dmltrain.kvstore.transport.wire import FrameKind


@dataclass(frozen=True)
class Hello(Message):
    """The caller's claimed identity, and what it wants: `listener` is a role and index, for `purpose` and `wire` see
    handshake.py."""

    kind = FrameKind.HELLO
    job: Short
    role: Role
    index: Count
    listener: Short
    purpose: Short
    wire: Short
    nonce: Short


@dataclass(frozen=True)
class Challenge(Message):
    """The listener's nonce, and its proof over both nonces."""

    kind = FrameKind.CHALLENGE
    nonce: Short
    proof: Short


@dataclass(frozen=True)
class Proof(Message):
    """The caller's proof over both nonces."""

    kind = FrameKind.PROOF
    proof: Short


@dataclass(frozen=True)
class Accept(Message):
    """The caller is accepted."""

    kind = FrameKind.ACCEPT


@dataclass(frozen=True)
class Refuse(Message):
    """The peer cannot take part in the job; its connection ends."""

    kind = FrameKind.REFUSE
    reason: str
