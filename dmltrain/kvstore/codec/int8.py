"""One byte an element: a multiple, -127 to 127, of its group's scale. A group of 512 elements has the scale max / 127.

On the wire: ceil(length / 512) scales (float32), then `length` multiples (int8). The error of an element is at most
1/254 of the maximum magnitude of its group, so that an outlier costs precision in its own group only (Dettmers et al.,
"8-bit optimizers via block-wise quantization", 2022, section 2.1). Groups whose maximum is below 1.5e-36 have the scale
0: their values stay in the residual. Groups with a NaN or inf have the scale NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.codec.block import BlockCodec, whole_groups
from dmltrain.kvstore.scratch import scratch

GROUP = 512  # elements
MIN_SCALE = np.finfo(np.float32).tiny  # the inverse of a smaller one is inf
MAX_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # 127 times this is finite


@dataclass(frozen=True)
class Int8(BlockCodec):
    """Multiples, -127 to 127, of a scale for each 512 elements: their maximum magnitude / 127."""

    name = "int8"
    number = 4
    size = "1.008n"
    needs_residual = True

    def nbytes(self, length: int) -> int:
        return 4 * _groups(length) + length

    def write(self, block: Array, start: int, target: Array, length: int) -> None:
        scales, multiples = _fields(target, start, block.size, length)
        groups = whole_groups(block, GROUP)
        quotients = scratch("quotients", groups.size).reshape(groups.shape)
        np.absolute(groups, out=quotients)
        np.maximum.reduce(quotients, axis=1, out=scales)
        np.divide(scales, np.float32(127.0), out=scales)
        np.multiply(groups, _inverse(scales), out=quotients)
        np.rint(quotients, out=quotients)
        np.copyto(multiples, quotients.reshape(-1)[: block.size], casting="unsafe")

    def read(self, data: Array, start: int, length: int, into: Array) -> None:
        scales, multiples = _fields(data, start, into.size, length)
        if into.size % GROUP == 0:
            np.copyto(into, multiples)
            groups = into.reshape(-1, GROUP)
            np.multiply(groups, scales[:, None], out=groups)
        else:
            values = scratch("quotients", _groups(into.size) * GROUP)
            values[into.size :] = 0.0
            np.copyto(values[: into.size], multiples)
            groups = values.reshape(-1, GROUP)
            np.multiply(groups, scales[:, None], out=groups)
            np.copyto(into, values[: into.size])


def _groups(length: int) -> int:
    return -(-length // GROUP)


def _fields(data: Array, start: int, size: int, length: int) -> tuple[Array, Array]:
    """The scales and the multiples of elements [start, start + size)."""
    ahead = 4 * _groups(length)
    scales = data[:ahead].view(np.float32)[start // GROUP : start // GROUP + _groups(size)]
    return scales, data[ahead + start : ahead + start + size].view(np.int8)


def _inverse(scales: Array) -> Array:
    """1 / scale as (groups, 1), or 0 for groups that send nothing. Makes scales valid: too small ones become 0, inf
    and NaN become NaN."""
    if np.minimum.reduce(scales) >= MIN_SCALE and np.maximum.reduce(scales) <= MAX_SCALE:
        return np.asarray(np.reciprocal(scales)[:, None])
    scales[scales < MIN_SCALE] = 0.0
    scales[~np.isfinite(scales)] = np.nan
    np.minimum(scales, MAX_SCALE, out=scales)  # NaN stays NaN
    inverse = np.zeros_like(scales)
    np.reciprocal(scales, out=inverse, where=scales > 0)
    return inverse[:, None]
