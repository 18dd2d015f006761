"""A flat key: small keys of one type that travel, and are summed, as one. Pure; workers and servers compute the same.

Each key begins at a multiple of ALIGNMENT bytes, as memory of an arena does, so keys that were allocated one after
another are a flat key as they lie. What is between them are zeros, or anything if nobody adds it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.shared_memory import ALIGNMENT

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
    digest = hashlib.blake2b(wire.flat(keys), digest_size=4).digest()
    return FIRST | int.from_bytes(digest, "big") & ((1 << _BITS) - 1)
