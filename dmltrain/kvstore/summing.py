"""The arithmetic of a server: adding the workers' gradients. Pure; numpy only.

Sums go through memory once: block by block, each block over all workers while it is in the cache, always in the order
of the workers. An element's sum depends neither on the block size nor on who carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dmltrain.kvstore.codec import Codec

BLOCK = 1 << 16  # elements; of float32 256 KiB, so that sum and one addend stay in a core's own cache


def total(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """out[:] = parts[0] + parts[1] + ..., flat arrays of one type and length, in this order; `out` may be one of the
    first two."""
    if len(parts) == 1:
        if out is not parts[0]:
            np.copyto(out, parts[0])
        return
    block = BLOCK if len(parts) > 2 else max(1, len(out))
    for start in range(0, len(out), block):
        stop = start + block
        np.add(parts[0][start:stop], parts[1][start:stop], out=out[start:stop])
        for part in parts[2:]:
            np.add(out[start:stop], part[start:stop], out=out[start:stop])


def total_of_coded(parts: Sequence[np.ndarray], codec: Codec, out: np.ndarray) -> None:
    """The same from encoded parts, uint8."""
    codec.decode(parts[0], out)
    for part in parts[1:]:
        codec.add(part, out)
