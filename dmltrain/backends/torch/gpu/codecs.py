"""The codecs of kvstore/codec in torch's operators, for a GPU: the same bytes, residuals and values, bit for bit,
except the bits of NaN. Several slices are encoded or decoded together, with as many kernels as one.

Each operator is a kernel of its own, so no compiler joins a product and a sum to one rounding, and sums are written as
single additions, whose order is the host's. A division by a number would be a product with its inverse on a GPU, so
divisors are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.gpu import copies
from dmltrain.base.arrays import Array
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.codec import four_levels, int8, topk, two_bits
from dmltrain.kvstore.codec.half import BFloat16, Float16, all_halves
from dmltrain.kvstore.encoded import Encoding

GROUP = 512  # elements, of int8 and 2bit
Bits = list[list[torch.Tensor]]  # of each slice, in one or more parts: contiguous, and of any type
Data = Sequence[torch.Tensor]  # the bytes of each slice, uint8


class SliceEncoder:
    """A slice of a flat gradient on the `device`, and its residual, if there is one: see kvstore.encoded.Residual. All
    uses of that are on the stream of copies to the host."""

    def __init__(self, encoding: Encoding, device: torch.device) -> None:
        self.codec, self.length, self._device = encoding.codec, encoding.length, device
        self._begin, self.take_back = encoding.begin, encoding.take_back
        self._elements = slice(encoding.start, encoding.start + encoding.length)
        self.residual = torch.zeros(self.length if self.codec.needs_residual else 0, device=device)
        self._kept: torch.Tensor | None = None
        self.is_valid = False  # whether the last bytes are those of the residual
        if self.codec.needs_residual:
            encoding.keep_residual(self)

    def of(self, gradients: torch.Tensor) -> torch.Tensor:
        return gradients[self._elements]

    def begin(self) -> torch.Tensor:
        """Returns the residual that the next encoding adds. It sets `residual`, which may be other memory."""
        latest = self.residual
        self._begin()
        self.is_valid = True
        return latest

    def read(self) -> Array:
        with copies.leaving(self._device):
            values: Array = self.residual.cpu().numpy()
        return values

    def write(self, values: Array) -> None:
        with copies.leaving(self._device):
            self.residual.copy_(torch.from_numpy(np.ascontiguousarray(values, np.float32)))
        self.is_valid = False

    def keep(self) -> None:
        spare = torch.empty_like(self.residual) if self._kept is None else self._kept
        self._kept, self.residual = self.residual, spare

    def restore(self) -> None:
        assert self._kept is not None
        self._kept, self.residual = self.residual, self._kept
        self.is_valid = False


def encodes(codec: codecs.Codec) -> bool:
    """Whether this module has the codec."""
    return type(codec) in TABLE


def encode(encoders: Sequence[SliceEncoder], slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of these slices of gradients, all of one codec and on one device: uint8, there. Sets the residuals.
    Call this on the stream of copies to the host."""
    codec = encoders[0].codec
    joined = Joined([encoder.length for encoder in encoders], slices[0].device)
    totals = joined.cut(joined.values)
    residuals = [encoder.begin() for encoder in encoders]
    if codec.needs_residual:
        torch._foreach_copy_(totals, residuals)
        torch._foreach_add_(totals, list(slices))
    else:
        torch._foreach_copy_(totals, list(slices))
    bits, sent = TABLE[type(codec)][0](codec, joined)
    if codec.needs_residual:
        rest = joined.values if sent is None else joined.values.sub_(sent)
        rest.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_copy_([encoder.residual for encoder in encoders], totals)
    flat = [[part.reshape(-1).view(torch.uint8) for part in parts] for parts in bits]
    whole = torch.cat([part for parts in flat for part in parts])
    return list(torch.split(whole, [sum(map(len, parts)) for parts in flat]))


def decode(codec: codecs.Codec, data: Data, targets: Sequence[torch.Tensor], factor: float = 1.0) -> None:
    """Set the targets (length,) to the values of `data`, on the same device, times `factor`."""
    joined = Joined([len(target) for target in targets], data[0].device)
    TABLE[type(codec)][1](codec, joined, data)
    if factor != 1.0:
        joined.values.mul_(factor)
    torch._foreach_copy_(list(targets), joined.cut(joined.values))


@dataclass
class Joined:
    """Slices of these lengths one after the other, each with zeros up to the end of its last group."""

    lengths: list[int]
    device: torch.device

    def __post_init__(self) -> None:
        self.sizes = [-(-length // GROUP) for length in self.lengths]  # in groups
        self.values = torch.zeros(sum(self.sizes) * GROUP, device=self.device)

    @property
    def groups(self) -> torch.Tensor:
        """(groups, GROUP)"""
        return self.values.view(-1, GROUP)

    def cut(self, values: torch.Tensor, per_byte: int = 1) -> list[torch.Tensor]:
        """The parts of the slices in `values`, of which each is that of `per_byte` elements."""
        parts = torch.split(values.view(-1), [size * GROUP // per_byte for size in self.sizes])
        return [part[: -(-length // per_byte)] for part, length in zip(parts, self.lengths, strict=True)]

    def cut_groups(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the slices in `values` (groups,)."""
        return torch.split(values, self.sizes)

    def levels(self, data: Data, place: int) -> torch.Tensor:
        """The float32 of each group, (groups, 1), of which `data` has those of its slice at this place."""
        ends = [4 * size * (place + 1) for size in self.sizes]
        parts = zip(data, self.sizes, ends, strict=True)
        return torch.cat([part[end - 4 * size : end].view(torch.float32) for part, size, end in parts])[:, None]

    def packed(self, data: Data) -> torch.Tensor:
        """The bytes of the slices, each of four elements, as int32 (bytes,)."""
        packed = torch.zeros(self.values.numel() // 4, dtype=torch.int32, device=self.device)
        torch._foreach_copy_(self.cut(packed, per_byte=4), list(data))
        return packed

    @cached_property
    def counts(self) -> torch.Tensor:
        """The elements of each group, float32 (groups,)."""
        return _counts(tuple(self.lengths), self.device)


# Each function encodes what is joined. It returns the bits, and the values that they decode to: None if no residual
# needs them.


def _bf16(_: BFloat16, joined: Joined) -> tuple[Bits, None]:
    rounded = joined.values.to(torch.bfloat16).view(torch.int16)
    return [[part] for part in joined.cut(torch.where(joined.values.isnan(), 0x7FC0, rounded))], None


def _fp16(_: Float16, joined: Joined) -> tuple[Bits, None]:
    values = joined.values
    signed_nan = (values.view(torch.int32) >> 16).to(torch.int16) & -0x8000 | 0x7E00
    rounded = torch.where(values.isnan(), signed_nan, values.to(torch.float16).view(torch.int16))
    return [[part] for part in joined.cut(rounded)], None


def _int8(_: int8.Int8, joined: Joined) -> tuple[Bits, torch.Tensor]:
    groups = joined.groups
    scales = groups.abs().amax(1) / _number(127.0, joined.device)
    scales = torch.where(scales < float(int8.MIN_SCALE), 0.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan).clamp_(max=float(int8.MAX_SCALE))
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    multiples = (groups * inverse[:, None]).round_().nan_to_num_(0.0).to(torch.int8)
    bits = zip(joined.cut_groups(scales), joined.cut(multiples), strict=True)
    return [list(parts) for parts in bits], (multiples * scales[:, None]).view(-1)


def _four_levels(_: four_levels.FourLevels, joined: Joined) -> tuple[Bits, torch.Tensor]:
    magnitude, values = joined.groups.abs(), joined.values
    sums = _pairwise(magnitude)
    reached = magnitude >= (sums / joined.counts * float(four_levels.HIGH_FROM))[:, None]
    ones = reached.float()
    number, rest = ones.sum(1), _pairwise(magnitude.sub_(magnitude * ones))
    high = (sums - rest).clamp_(min=0.0) / number.clamp(min=1.0)
    low = rest / (joined.counts - number).clamp_(min=1.0)
    finite = sums.isfinite()
    high, low = torch.where(finite, high, torch.nan), torch.where(finite, low, torch.nan)
    sent = ones.mul_((high - low)[:, None]).add_(low[:, None]).view(-1).copysign_(values)
    codes = (values.view(torch.int32) < 0).to(torch.uint8) * 2 + reached.view(-1)
    bits = zip(joined.cut_groups(low), joined.cut_groups(high), _packed(codes, joined), strict=True)
    return [list(parts) for parts in bits], sent


def _two_bits(codec: two_bits.TwoBits, joined: Joined) -> tuple[Bits, torch.Tensor]:
    threshold, values = float(np.float32(codec.threshold)), joined.values
    codes = (values <= -threshold).to(torch.uint8) * 2 + (values >= threshold)
    codes = torch.where(values.isfinite(), codes, 3)
    steps = torch.where(codes == 2, -threshold, 0.0) + torch.where(codes == 1, threshold, 0.0)
    return [[part] for part in _packed(codes, joined)], torch.where(codes == 3, torch.nan, steps)


def _topk(codec: topk.TopK, joined: Joined) -> tuple[Bits, None]:
    """Takes what is sent out of the values. Each slice has kernels of its own."""
    return [_largest(total, codec.count(len(total))) for total in joined.cut(joined.values)], None


def _largest(total: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The positions of the `count` largest, and their values, which this sets to 0."""
    magnitudes = total.view(torch.int32) & 0x7FFFFFFF
    edge = magnitudes.topk(count).values[-1:]
    greater, equal = magnitudes > edge, magnitudes == edge
    wanted = count - greater.sum()  # of the equal ones the first
    chosen = greater | (equal & (equal.cumsum(0) <= wanted))
    place = torch.where(chosen, chosen.cumsum(0) - 1, count)  # all others share one place after the end
    positions = torch.zeros(count + 1, dtype=torch.int64, device=total.device)
    positions = positions.scatter_(0, place, torch.arange(len(total), device=total.device))[:count]
    values = total[positions]
    total.masked_fill_(chosen, 0.0)
    return [positions.to(torch.int32), values]


# Each of the next functions sets the values of `joined` to those of `data`, the bytes of each slice.


def _from_bf16(_: BFloat16, joined: Joined, data: Data) -> None:
    torch._foreach_copy_(joined.cut(joined.values), [part.view(torch.bfloat16) for part in data])


def _from_fp16(_: Float16, joined: Joined, data: Data) -> None:
    numbers = joined.values.view(torch.int32)
    torch._foreach_copy_(joined.cut(numbers), [part.view(torch.int16) for part in data])
    joined.values = _table(all_halves, joined.device).index_select(0, numbers.bitwise_and_(0xFFFF))


def _from_int8(_: int8.Int8, joined: Joined, data: Data) -> None:
    multiples = [part[4 * size :].view(torch.int8) for part, size in zip(data, joined.sizes, strict=True)]
    torch._foreach_copy_(joined.cut(joined.values), multiples)
    joined.groups.mul_(joined.levels(data, 0))


def _from_four_levels(_: four_levels.FourLevels, joined: Joined, data: Data) -> None:
    low, high = joined.levels(data, 0), joined.levels(data, 1)
    packed = joined.packed([part[8 * size :] for part, size in zip(data, joined.sizes, strict=True)])
    tables = (_table(_of_bytes, joined.device, name) for name in ("low", "step"))
    signs, steps = (table.index_select(0, packed).view(-1, GROUP) for table in tables)
    joined.values = signs.mul_(low).add_(steps.mul_(high - low)).view(-1)


def _of_bytes(name: str) -> Array:
    return four_levels.tables()[name].view(np.float32).reshape(-1, 4)


def _from_two_bits(codec: two_bits.TwoBits, joined: Joined, data: Data) -> None:
    table = _table(two_bits.fours, joined.device, codec.threshold).view(-1, 4)
    joined.values = table.index_select(0, joined.packed(data)).view(-1)


def _from_topk(_: topk.TopK, joined: Joined, data: Data) -> None:
    """Each slice has kernels of its own."""
    for values, part in zip(joined.cut(joined.values), data, strict=True):
        half = len(part) // 2
        values.scatter_(0, part[:half].view(torch.int32).long(), part[half:].view(torch.float32))


Encode = Callable[[Any, Joined], tuple[Bits, torch.Tensor | None]]
Decode = Callable[[Any, Joined, Data], None]
TABLE: dict[type[codecs.Codec], tuple[Encode, Decode]] = {
    BFloat16: (_bf16, _from_bf16),
    Float16: (_fp16, _from_fp16),
    int8.Int8: (_int8, _from_int8),
    four_levels.FourLevels: (_four_levels, _from_four_levels),
    two_bits.TwoBits: (_two_bits, _from_two_bits),
    topk.TopK: (_topk, _from_topk),
}


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


def _packed(codes: torch.Tensor, joined: Joined) -> list[torch.Tensor]:
    """Codes of two bits, uint8, four to a byte, the first in the lowest bits. Those after the end of a slice are 0."""
    fours = codes.view(-1, 4)
    packed = (fours[:, 3] << 6) | (fours[:, 2] << 4) | (fours[:, 1] << 2) | fours[:, 0]
    parts = joined.cut(packed, per_byte=4)
    for part, length in zip(parts, joined.lengths, strict=True):
        if length % 4:
            part[-1:] &= (1 << 2 * (length % 4)) - 1
    return parts


@cache
def _number(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


@lru_cache(64)
def _table(values: Callable[..., Array], device: torch.device, *arguments: Any) -> torch.Tensor:
    """What this returns, on the device."""
    return torch.from_numpy(np.array(values(*arguments))).to(device)


@lru_cache(64)
def _counts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """See Joined."""
    counts = [np.full(-(-length // GROUP), GROUP, np.float32) for length in lengths]
    for each, length in zip(counts, lengths, strict=True):
        each[-1:] -= -length % GROUP
    return torch.from_numpy(np.concatenate(counts)).to(device)
