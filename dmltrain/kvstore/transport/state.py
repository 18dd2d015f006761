"""Receives a server's state: memory is taken as the bytes arrive, not as the header says."""

from __future__ import annotations

import numpy as np

from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.wire import MAX_STATE, FrameError, Header


def receive(link: Link, header: Header, limit: int = MAX_STATE) -> bytearray:
    """The state after `header`. Raises FrameError if it has more than `limit` bytes, and Closed."""
    if header.length > limit:
        raise FrameError(f"a state of {header.length} bytes, the limit is {limit}")
    try:
        state = np.empty(header.length, np.uint8)  # addresses: the kernel adds memory where bytes are written
    except MemoryError as error:
        raise FrameError(f"a state of {header.length} bytes, which this machine cannot hold") from error
    link.read_into(memoryview(state))  # type: ignore[arg-type]
    return bytearray(memoryview(state))  # type: ignore[arg-type]
