"""Receives a server's state: memory grows with the bytes that arrive, not with what the header says."""

from __future__ import annotations

from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.wire import MAX_STATE, FrameError, Header

PIECE = 1 << 20  # bytes


def receive(link: Link, header: Header, limit: int = MAX_STATE) -> bytearray:
    """The state after `header`. Raises FrameError if it has more than `limit` bytes, and Closed."""
    if header.length > limit:
        raise FrameError(f"a state of {header.length} bytes, the limit is {limit}")
    state = bytearray()
    while len(state) < header.length:
        piece = bytearray(min(PIECE, header.length - len(state)))
        link.read_into(memoryview(piece))
        state += piece
    return state
