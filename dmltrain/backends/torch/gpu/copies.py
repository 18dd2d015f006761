"""Copies between a GPU and the host, on streams of their own: they go on while the GPU computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class CopyStreams:
    """Of one GPU: gradients to the host, results to the GPU, and samples to the GPU."""

    out: torch.Stream
    into: torch.Stream
    samples: torch.Stream


@functools.cache
def streams(device: torch.device) -> CopyStreams:
    return CopyStreams(*(torch.Stream(device=device) for _ in range(3)))


def computing(device: torch.device) -> torch.Stream:
    """The stream on which this thread computes."""
    return torch.accelerator.current_stream(device)


def to_host(device: torch.device, pairs: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Event:
    """Copy tensors of the device to pinned memory: `pairs` of a source and its target. They are made on the stream of
    the copies, from what is computed by now, which must stay until the event. Then the targets have the values."""
    with leaving(device) as out:
        for source, target in pairs():
            target.copy_(source, non_blocking=True)
    return out.record_event()


def leaving(device: torch.device) -> torch.Stream:
    """The stream of the copies to the host, which goes on from what is computed by now."""
    out = streams(device).out
    out.wait_stream(computing(device))
    return out


def to_device(device: torch.device, copy: Callable[[], None], free: Iterable[torch.Event | None]) -> None:
    """`copy` from pinned memory, on the stream of the copies to the device; what is computed from now on sees the
    values. `free`: the targets have no use after these events; None: after what has been asked for so far."""
    into, now = streams(device).into, computing(device)
    for event in set(free):
        if event is None:
            into.wait_stream(now)
        else:
            into.wait_event(event)
    with into:
        copy()
    now.wait_stream(into)


@dataclass
class _Slot:
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))  # pinned, (bytes,)
    copied: torch.Event | None = None  # after it the memory is free


class SampleBuffers:
    """Pinned memory for the samples of a GPU, which stays: while one batch is copied from a slot of it, the host writes
    the next one to another."""

    SLOTS = 4  # images and labels of two batches

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = itertools.cycle([_Slot() for _ in range(self.SLOTS)])

    def place(self, array: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, with the same order in memory. It is made while the GPU computes what was asked for
        before."""
        slot, stream, now = next(self._slots), streams(self._device).samples, computing(self._device)
        if slot.copied:
            slot.copied.synchronize()
        if slot.memory.numel() < array.nbytes:
            slot.memory = torch.empty(array.nbytes, dtype=torch.uint8, pin_memory=True)
        strides = torch.empty_like(array, device="meta").stride()
        pinned = slot.memory[: array.nbytes].view(array.dtype).as_strided(array.size(), strides).copy_(array)
        with stream:
            placed = pinned.to(self._device, non_blocking=True)
        slot.copied = stream.record_event()
        now.wait_event(slot.copied)
        placed.record_stream(now)
        return placed
