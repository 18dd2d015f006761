"""Pinned memory of the host: what a GPU pushes lies there, and what it pulls arrives there. Codecs encode and decode on
the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.gpu import copies, registered
from dmltrain.backends.torch.gpu.codecs import SliceEncoder, decode, encode, encodes
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import READ, Key, KVStore
from dmltrain.kvstore.codec import Codec
from dmltrain.kvstore.encoded import AsSent, Encoded, Encoding

Pair = tuple[torch.Tensor, torch.Tensor]


class ArrivingMemory:
    """Where the values of a key arrive for a GPU: in `memory` (elements,), which is pinned, or with `encodings` each
    slice as its server has sent it. `out`: for KVStore.pull."""

    def __init__(self, memory: torch.Tensor | None, encodings: Sequence[Encoding] = ()) -> None:
        self.is_encoded = memory is None
        self._slices = [slice(each.start, each.start + each.length) for each in encodings] or [slice(None)]
        sizes = [max(each.nbytes, 4 * each.length) for each in encodings]
        pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        self._parts = [AsSent(each.view(torch.uint8).numpy()) for each in (pinned if memory is None else [memory])]
        self.out: Any = Encoded(self._parts) if memory is None else memory.numpy()

    def parts(self, target: torch.Tensor) -> Iterator[tuple[Codec | None, torch.Tensor, torch.Tensor]]:
        """Of the values that have come: the codec of each part, its bytes, and its place in the target (elements,)."""
        for elements, part in zip(self._slices, self._parts, strict=True):
            place = target[elements]
            size = part.codec.nbytes(len(place)) if part.codec else place.nbytes
            yield part.codec, torch.from_numpy(part.memory[:size]), place


class PushedMemory:
    """The memory from which a bucket is pushed: on a CPU `memory`, of its gradients, for a GPU pinned, and where its
    values arrive. With `encodings` the GPU encodes its gradients; then there is memory for each of their slices. With
    `keep` values arrive elsewhere than where they are pushed from."""

    def __init__(
        self, memory: Array, device: torch.device, keep: bool = False, encodings: Sequence[Encoding] = ()
    ) -> None:
        own = [memory] if not encodings else [_memory_of(each) for each in encodings]
        self.memory = list(map(torch.from_numpy if device.type == "cpu" else pinned, own))
        self.encodings, self.encoders = encodings, [SliceEncoder(each, device) for each in encodings]
        self.arriving: ArrivingMemory | None = None
        if encodings:
            self.arriving = ArrivingMemory(None, encodings)
        elif device.type != "cpu":
            self.arriving = ArrivingMemory(
                torch.empty_like(self.memory[0], pin_memory=True) if keep else self.memory[0]
            )
        arrays = [each.numpy() for each in self.memory]
        self._pushed: Array | Encoded = Encoded(arrays) if encodings else arrays[0]
        self._copied: torch.Event | None = None  # None: no copy has begun

    @property
    def out(self) -> Any:
        """For KVStore.pull."""
        return self.arriving.out if self.arriving else READ

    @property
    def has_begun(self) -> bool:
        """Whether a copy has, whose bytes nothing has taken back."""
        return self._copied is not None and all(encoder.is_valid for encoder in self.encoders)

    @property
    def is_complete(self) -> bool:
        """Whether `complete` returns at once."""
        return self._copied is None or self._copied.query()

    def begun(self, copied: torch.Event) -> None:
        """A copy to the memory has begun, which is complete after the event."""
        self._copied = copied

    def complete(self) -> Array | Encoded:
        """Wait for the copy that has begun, if one has."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._pushed

    def forget(self, device: torch.device) -> None:
        """What is computed from now on may change the gradients of the copy, for which nobody waits any more."""
        if self._copied is not None:
            copies.computing(device).wait_event(self._copied)
            self._copied = None


def _memory_of(encoding: Encoding) -> Array:
    return np.empty(encoding.nbytes, np.uint8) if encoding.memory is None else encoding.memory


def encodings(store: KVStore, key: Key) -> Sequence[Encoding]:
    """How a GPU encodes what it pushes of a key; empty if the host does, or if the key is not encoded."""
    found = store.encodings(key)
    return found if all(encodes(encoding.codec) for encoding in found) else ()


def register(store: KVStore, memories: Sequence[Array], encodings: Sequence[Encoding] = ()) -> None:
    """Register these memories, and those of the encodings, with the driver where servers of this host read them."""
    memories = [*memories, *(each.memory for each in encodings if each.memory is not None)]
    registered.register([memory for memory in memories if store.shares(memory)])


def begin_copies(
    device: torch.device, sources: Sequence[tuple[PushedMemory, torch.Tensor]], factors: Sequence[float] = ()
) -> None:
    """Begin to copy gradients (elements,) on one GPU, times these factors, to the host. Those that are encoded are
    encoded together."""
    copied = copies.to_host(device, lambda: _pairs(sources, factors))
    for memory, _ in sources:
        memory.begun(copied)


def _pairs(sources: Sequence[tuple[PushedMemory, torch.Tensor]], factors: Sequence[float]) -> Iterator[Pair]:
    coded: dict[Codec, list[tuple[SliceEncoder, torch.Tensor, torch.Tensor]]] = {}
    for host, gradients in sources:
        for factor in factors:
            gradients = gradients * factor
        if not host.encoders:
            yield gradients, host.memory[0]
        for encoder, place in zip(host.encoders, host.memory, strict=False):
            coded.setdefault(encoder.codec, []).append((encoder, encoder.of(gradients), place))
    for each in coded.values():
        encoders, slices, places = zip(*each, strict=True)
        yield from zip(encode(encoders, slices), places, strict=True)


def pinned(memory: Array) -> torch.Tensor:
    """The same memory if it is pinned, else other memory that is."""
    here = torch.from_numpy(memory)
    return here if here.is_pinned() else torch.empty_like(here, pin_memory=True)


@dataclass(frozen=True, eq=False)
class Arrival:
    """Values that have come, and their target (elements,) on a GPU, which gets them times `factor`. `free`: see
    copies.to_device."""

    memory: ArrivingMemory
    target: torch.Tensor
    factor: float = 1.0
    free: torch.Event | None = None


def arrive(arrivals: Sequence[Arrival]) -> None:
    """Set the targets, all on one GPU. Those of values that are encoded are decoded together."""
    device = arrivals[0].target.device
    copies.to_device(device, lambda: _take(arrivals, device), [each.free for each in arrivals])


def _take(arrivals: Sequence[Arrival], device: torch.device) -> None:
    coded: dict[tuple[Codec, float], list[Pair]] = {}
    for each in arrivals:
        for codec, part, place in each.memory.parts(each.target):
            if codec:
                coded.setdefault((codec, each.factor), []).append((part.to(device, non_blocking=True), place))
                continue
            place.copy_(part.view(place.dtype), non_blocking=True)
            if each.factor != 1.0:
                place.mul_(each.factor)
    for (codec, factor), pairs in coded.items():
        data, places = zip(*pairs, strict=True)
        decode(codec, data, places, factor)
