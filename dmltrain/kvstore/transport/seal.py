"""Seals: what shows that a frame is the next one from the peer of the handshake, unchanged. Pure.

A seal is HMAC-SHA256, truncated to 16 bytes (RFC 2104, section 5), of a sequence number, the frame's header and its
payload, with a key for each direction of each connection. So frames can be neither changed, injected, repeated, left
out nor reordered. Control frames always carry one; data frames do with the level `auth`. A connection that loses a
frame's seal ends.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dmltrain.kvstore.transport.wire import FrameError, FrameKind

SIZE = 16  # bytes
_KIND = 5  # offset of the frame's kind in its header
_NUMBER = struct.Struct("!Q")


class Keys(NamedTuple):
    """The keys of one connection, 32 bytes each."""

    caller: bytes  # for the frames that the caller sends
    listener: bytes
    tls: bytes  # shows that both ends of the TLS connection are those of the handshake


class Seals:
    """Both directions of one connection. Each must be used by one thread at a time."""

    def __init__(self, sending: bytes, receiving: bytes, every: bool) -> None:
        """The directions' keys; `every`: whether data frames carry seals too."""
        self._sending, self._receiving = Direction(sending), Direction(receiving)
        self._every = every

    def cover(self, header: bytes | bytearray | memoryview) -> bool:
        """Whether the frame with this packed header carries a seal."""
        return self._every or header[_KIND] < FrameKind.INIT

    def seal(self, parts: Sequence[bytes | memoryview]) -> bytes:
        """The seal of the next frame to send."""
        return self._sending.next(parts)

    def check(self, parts: Iterable[bytes | memoryview], received: bytes | bytearray) -> None:
        """Raises FrameError unless `received` is the seal of the next frame to receive."""
        if not hmac.compare_digest(self._receiving.next(parts), received):
            raise FrameError("a frame was changed, injected, repeated or lost on its way: its seal is wrong")


class Direction:
    """The seals of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def next(self, parts: Iterable[bytes | memoryview]) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(_NUMBER.pack(self._number))
        self._number += 1
        for part in parts:
            keyed.update(part)
        return keyed.digest()[:SIZE]
