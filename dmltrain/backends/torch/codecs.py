"""The codecs of kvstore/codec in torch's operators, for gradients on a GPU: the same bytes and residuals, bit for bit.

Each operator is a kernel of its own, so no compiler joins a product and a sum to one rounding, and sums are written as
single additions, whose order is the host's. A division by a number would be a product with its inverse on a GPU, so
divisors are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dmltrain.backends.torch import copies
from dmltrain.base.arrays import Array
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.codec import four_levels, int8, topk, two_bits
from dmltrain.kvstore.codec.half import BFloat16, Float16
from dmltrain.kvstore.encoded import Encoding

GROUP = 512  # elements, of int8 and 2bit
Bits = list[torch.Tensor]  # parts of an encoded slice, one after the other, contiguous and of any type


class SliceEncoder:
    """Encodes a slice of a flat gradient on the `device`, where the residual is, if there is one. Make it, and call
    `encode`, on the stream of copies to the host."""

    def __init__(self, encoding: Encoding, device: torch.device) -> None:
        self._codec = encoding.codec
        self._length = encoding.length
        self._elements = slice(encoding.start, encoding.start + encoding.length)
        self._write = TABLE[type(encoding.codec)]
        self.residual: torch.Tensor | None = None
        if encoding.codec.needs_residual:
            self.residual = torch.zeros(encoding.length, device=device)
            encoding.keep_residual(self)

    def read(self) -> Array:
        """See kvstore.encoded.Residual."""
        assert self.residual is not None
        with copies.streams(self.residual.device).out:
            return self.residual.cpu().numpy()

    def write(self, values: Array) -> None:
        """See kvstore.encoded.Residual."""
        assert self.residual is not None
        with copies.streams(self.residual.device).out:
            self.residual.copy_(torch.from_numpy(np.ascontiguousarray(values, np.float32)))

    def encode(self, gradients: torch.Tensor) -> torch.Tensor:
        """The bytes of the slice, uint8, on the device. Changes the residual."""
        if not self._length:
            return gradients.new_empty(0, dtype=torch.uint8)
        total = gradients[self._elements]
        if self.residual is not None:
            total = self.residual.add_(total)
        bits, sent = self._write(self._codec, total)
        if self.residual is not None:
            if sent is not None:
                total.sub_(sent)
            total.nan_to_num_(0.0, 0.0, 0.0)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in bits])


def encodes(codec: codecs.Codec) -> bool:
    """Whether this module has the codec."""
    return type(codec) in TABLE


# Each function encodes `total` (length,) float32. It returns the bits, and the values that they decode to: None if no
# residual needs them.


def _bf16(_: BFloat16, total: torch.Tensor) -> tuple[Bits, None]:
    rounded = total.to(torch.bfloat16).view(torch.int16)
    return [torch.where(total.isnan(), 0x7FC0, rounded)], None


def _fp16(_: Float16, total: torch.Tensor) -> tuple[Bits, None]:
    sign = (total.view(torch.int32) >> 16).to(torch.int16) & -0x8000
    return [torch.where(total.isnan(), sign | 0x7E00, total.to(torch.float16).view(torch.int16))], None


def _int8(_: int8.Int8, total: torch.Tensor) -> tuple[Bits, torch.Tensor]:
    groups = _groups(total)
    scales = groups.abs().amax(1) / _number(127.0, total.device)
    scales = torch.where(scales < float(int8.MIN_SCALE), 0.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan).clamp_(max=float(int8.MAX_SCALE))
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    multiples = (groups * inverse[:, None]).round_().nan_to_num_(0.0).to(torch.int8)
    sent = multiples * scales[:, None]
    return [scales, multiples.view(-1)[: len(total)]], sent.view(-1)[: len(total)]


def _four_levels(_: four_levels.FourLevels, total: torch.Tensor) -> tuple[Bits, torch.Tensor]:
    groups, counts = _groups(total), _counts(len(total), total.device)
    magnitude = groups.abs()
    sums = _pairwise(magnitude)
    reached = magnitude >= (sums / counts * float(four_levels.HIGH_FROM))[:, None]
    ones = reached.float()
    number, above = ones.sum(1), _pairwise(magnitude.mul_(ones))
    high, low = above / number.clamp(min=1.0), (sums - above).clamp_(min=0.0) / (counts - number).clamp_(min=1.0)
    finite = sums.isfinite()
    high, low = torch.where(finite, high, torch.nan), torch.where(finite, low, torch.nan)
    sent = ones.mul_((high - low)[:, None]).add_(low[:, None]).view(-1)[: len(total)].copysign(total)
    codes = (total.view(torch.int32) < 0).to(torch.uint8) * 2 + reached.view(-1)[: len(total)]
    return [low, high, _packed(codes)], sent


def _two_bits(codec: two_bits.TwoBits, total: torch.Tensor) -> tuple[Bits, torch.Tensor]:
    threshold = float(np.float32(codec.threshold))
    codes = (total <= -threshold).to(torch.uint8) * 2 + (total >= threshold)
    codes = torch.where(total.isfinite(), codes, 3)
    steps = torch.where(codes == 2, -threshold, 0.0) + torch.where(codes == 1, threshold, 0.0)
    return [_packed(codes)], torch.where(codes == 3, torch.nan, steps)


def _topk(codec: topk.TopK, total: torch.Tensor) -> tuple[Bits, None]:
    count = codec.count(len(total))
    magnitudes = total.view(torch.int32) & 0x7FFFFFFF
    edge = magnitudes.topk(count, sorted=True).values[-1:]
    greater, equal = magnitudes > edge, magnitudes == edge
    wanted = count - greater.sum()  # of the equal ones the first
    chosen = greater | (equal & (equal.cumsum(0) <= wanted))
    place = torch.where(chosen, chosen.cumsum(0) - 1, count)  # all others share one place after the end
    positions = torch.zeros(count + 1, dtype=torch.int64, device=total.device)
    positions = positions.scatter_(0, place, torch.arange(len(total), device=total.device))[:count]
    values = total[positions]
    total.masked_fill_(chosen, 0.0)
    return [positions.to(torch.int32), values], None


TABLE: dict[type[codecs.Codec], Callable[[Any, torch.Tensor], tuple[Bits, torch.Tensor | None]]] = {
    BFloat16: _bf16,
    Float16: _fp16,
    int8.Int8: _int8,
    four_levels.FourLevels: _four_levels,
    two_bits.TwoBits: _two_bits,
    topk.TopK: _topk,
}


def _groups(values: torch.Tensor) -> torch.Tensor:
    """(groups, GROUP), with zeros after the end."""
    return _padded(values, GROUP).view(-1, GROUP)


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    rest = -len(values) % multiple
    return functional.pad(values, (0, rest)) if rest else values


def _pairwise(groups: torch.Tensor) -> torch.Tensor:
    """numpy's sum of each group (groups,): eight sums of each 128 elements, which are then added in pairs."""
    parts = groups.view(-1, GROUP // 128, 16, 8)
    sums = parts[:, :, 0]
    for index in range(1, 16):
        sums = sums + parts[:, :, index]
    sums = sums.view(len(groups), -1)
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes of two bits, uint8, four to a byte, the first in the lowest bits."""
    fours = _padded(codes, 4).view(-1, 4)
    return (fours[:, 3] << 6) | (fours[:, 2] << 4) | (fours[:, 1] << 2) | fours[:, 0]


@cache
def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


@cache
def _counts(length: int, device: torch.device) -> torch.Tensor:
    """The elements of each group, float32 (groups,)."""
    counts = np.full(-(-length // GROUP), GROUP, np.float32)
    counts[-1:] -= -length % GROUP
    return torch.from_numpy(counts).to(device)
