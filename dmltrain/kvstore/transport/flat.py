"""A flat key: small keys of one type that travel, and are summed, as one. Pure; workers and servers compute the same.

Each key begins at a multiple of ALIGNMENT bytes, as memory of an arena does, so keys that were allocated one after
another are a flat key as they lie. What is between them are zeros, or anything if nobody adds it.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence

from dmltrain.kvstore.transport.shared_memory import ALIGNMENT
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header

MAX_MEMBERS = 1024  # keys of a flat key
MAX_BYTES = 4 * MAX_MEMBERS  # of its declaration
FIRST = 3 << 30  # first number of flat keys, above those of all other keys
_BITS = 30  # of a number above FIRST


def layout(lengths: Sequence[int], itemsize: int) -> list[slice]:
    """Where each of the keys lies; lengths and places in elements of `itemsize` bytes."""
    step = ALIGNMENT // itemsize
    starts = itertools.accumulate((-(-length // step) * step for length in lengths), initial=0)
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def number(keys: Sequence[int]) -> int:
    """The number of the flat key of these keys. It follows from them alone, so workers need not agree on an order. Two
    lists of keys have the same number with a probability of 2^-30; a server refuses the second."""
    digest = hashlib.blake2b(_pack(keys), digest_size=4).digest()
    return FIRST | int.from_bytes(digest, "big") & ((1 << _BITS) - 1)


def declaration(keys: Sequence[int]) -> bytes:
    """The frame that declares the flat key of these keys."""
    payload = _pack(keys)
    return Header(FrameKind.FLAT, len(payload), key=number(keys)).pack() + payload


def parse(payload: bytes | bytearray) -> tuple[int, ...]:
    """The keys of a declaration's payload. Raises FrameError if the length is wrong."""
    if not payload or len(payload) % 4 or len(payload) > MAX_BYTES:
        raise FrameError(f"a flat key of {len(payload)} bytes, expected 1 to {MAX_MEMBERS} times 4")
    return struct.unpack(f"!{len(payload) // 4}I", payload)


def _pack(keys: Sequence[int]) -> bytes:
    return struct.pack(f"!{len(keys)}I", *keys)
