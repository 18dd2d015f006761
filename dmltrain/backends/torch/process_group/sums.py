"""Sums of tensors on the servers of a job, in pieces.

Every worker asks for the same sums in the same order, as torch.distributed demands it of all collectives. A tensor
travels in pieces of a few sizes, and each size has a ring of keys of the kvstore. So the nth piece of a size has the
same key on all workers without a word between them, the memory has a bound whatever sizes a program sums, and a key is
declared once. A tensor waits only while its place in the ring still holds an earlier piece.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dmltrain.backends.torch.process_group.host_collectives import HostCollectives, Sum
from dmltrain.backends.torch.process_group.work import OwnWork
from dmltrain.base.arrays import Array
from dmltrain.base.errors import JobLost
from dmltrain.kvstore.base import READ, Handle
from dmltrain.kvstore.encoded import Encoded
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.message.job import Start
from dmltrain.kvstore.worker.store import DistKVStore

LARGEST, SMALLEST = 1 << 22, 1 << 16  # bytes of a piece, about; each size is twice the next one
# The servers are faster than gloo from so many bytes on: where all workers are on one host, and else.
LEAST_WITHIN, LEAST_BETWEEN = 1 << 20, 1 << 16
RING_PLACES = 16  # of each size
DECLARED = 4  # places at a time
DTYPES = (torch.float32, torch.float64)
OF_16_BITS = (torch.bfloat16, torch.float16)  # summed as float32, in shared memory only: servers have no such keys
# An operation of torch equals these, but these do not equal it: `in` compares the other way round.
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


@dataclass
class Place:
    """One key of the kvstore, and the shared memory from which it is pushed."""

    key: str
    buffer: torch.Tensor  # (elements,)
    free: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.free.set()

    def fill(self, values: torch.Tensor) -> None:
        """What is not used has the number of values at its end, for `check`."""
        self.buffer[: len(values)].copy_(values)
        if len(values) < len(self.buffer):
            self.buffer[-1] = len(values)

    def check(self, values: torch.Tensor, total: Array, workers: int) -> None:
        """Raise JobLost if the `total` has parts of other lengths."""
        if len(values) < len(total) and total[-1] != workers * len(values):
            raise JobLost("the workers have called all_reduce with tensors of different sizes")


@dataclass
class Piece:
    """A part of a tensor on its way. `values` (elements,) is a view into the tensor. `place`: None: the caller
    takes the sum."""

    values: torch.Tensor
    place: Place | None
    handle: Handle
    factor: float
    work: OwnWork | None  # which ends with this piece

    def land(self, workers: int) -> None:
        """Wait for the sum, and put it where the values were. Raises JobLost."""
        self.handle.wait()
        if self.place:
            total = self.handle.values[0]
            self.place.check(self.values, total, workers)
            np.multiply(total[: len(self.values)], self.factor, out=self.values.numpy())


class SumsOnServers:
    """`start` is called by one thread at a time; another one, of this object, receives what it has started."""

    def __init__(self, store: DistKVStore, host: HostCollectives | None = None) -> None:
        """`host`: makes them in place of the servers, where all workers are on one host."""
        self.store, self.host = store, host
        self.least = 1 if host else least(store.start_message)
        self.bytes = 0  # of the tensors whose sums have begun
        self._rings: dict[tuple[torch.dtype, int], list[Place]] = {}
        self._used: Counter[tuple[torch.dtype, int]] = Counter()
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, name="dmltrain sums", daemon=True).start()

    def takes(self, tensor: torch.Tensor, operation: dist.ReduceOp) -> bool:
        """Whether the servers have this operation, and are faster than gloo for this tensor."""
        return (
            is_sum(operation, tensor.dtype, (*DTYPES, *OF_16_BITS) if self.host else DTYPES)
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= self.least
        )

    def start(self, tensor: torch.Tensor, factor: float = 1.0) -> OwnWork:
        """Replace `tensor` by the sum of all workers' tensors, times `factor`."""
        work = OwnWork([tensor])
        flat = tensor.detach().view(-1)
        if self.host:
            values = flat.float() if flat.dtype in OF_16_BITS else flat
            self.host.start(Sum(functools.partial(_land, work, flat, values), values.numpy(), factor))
            self.bytes += flat.nbytes
            return work
        with self._lock:
            self.bytes += flat.nbytes
            parts = list(_parts(flat.numel() * flat.element_size(), self.store.num_servers))
            begin = 0
            for number, size in enumerate(parts):
                values = flat[begin : begin + size // flat.element_size()]
                begin += len(values)
                place = self._next_place(flat.dtype, size)
                place.free.wait()
                place.free.clear()
                place.fill(values)
                handle = self.store.pushpull(place.key, place.buffer.numpy(), READ, wait=False)
                last = work if number + 1 == len(parts) else None
                self._pieces.put(Piece(values, place, handle, factor, last))
        return work

    def start_coded(self, key: str, values: torch.Tensor, pushed: Array | Encoded, out: Any) -> OwnWork:
        """The sum of float32 `values` (elements,), of which `pushed` is pushed as the codec of this key says, comes to
        `out`."""
        work = OwnWork([values])
        with self._lock:
            self.bytes += 4 * len(values)
            handle = self.store.pushpull(key, pushed, out, wait=False)
            self._pieces.put(Piece(values, None, handle, 1.0, work))
        return work

    def _next_place(self, dtype: torch.dtype, size: int) -> Place:
        """The same one on all workers, which have asked for the same sizes before."""
        ring = self._rings.setdefault((dtype, size), [])
        index = self._used[dtype, size] % RING_PLACES
        self._used[dtype, size] += 1
        if index == len(ring):
            keys = [f"sum {dtype} {size} {index + more}".replace("torch.", "") for more in range(DECLARED)]
            array = np.zeros(size // dtype.itemsize, str(dtype).removeprefix("torch."))
            self.store.init(keys, [array] * DECLARED, slice_bytes=size // self.store.num_servers)
            ring += map(Place, keys, map(torch.from_numpy, self.store.buffers(keys)))
        return ring[index]

    def _receive(self) -> None:
        error: Exception | None = None
        while True:
            piece = self._pieces.get()
            try:
                piece.land(self.store.num_workers)
            except Exception as caught:  # JobLost: all that is under way has failed
                error = error or caught
            if piece.place:
                piece.place.free.set()
            if piece.work:
                piece.work.end(error)


def _land(work: OwnWork, tensor: torch.Tensor, total: torch.Tensor, error: Exception | None) -> None:
    """Round the `total` to the tensor's type, and end the work."""
    if total is not tensor and not error:
        tensor.copy_(total)
    work.end(error)


def is_sum(operation: dist.ReduceOp, dtype: torch.dtype, dtypes: Sequence[torch.dtype] = DTYPES) -> bool:
    """Whether it is a sum or a mean of these types."""
    return dtype in dtypes and any(operation == each for each in OPERATIONS)  # type: ignore[comparison-overlap]


def least(start: Start) -> int:
    """The bytes from which on a tensor goes over the servers: the same on all workers, which have the same `start`."""
    return LEAST_WITHIN if len(host.at_start(start)) == 1 else LEAST_BETWEEN


def _parts(size: int, servers: int) -> Iterator[int]:
    """The bytes of the pieces of a tensor of `size` bytes; the last one may have more than is left. Each has an equal
    slice for each server, of a power of two: as few frames as can be, and no link has more than the others."""
    slice_ = _power_of_two(LARGEST / servers)
    while size > 0:
        while slice_ * servers > max(size, SMALLEST):
            slice_ //= 2
        yield slice_ * servers
        size -= slice_ * servers


def _power_of_two(at_least: float) -> int:
    return 1 << max(6, math.ceil(math.log2(at_least)))
