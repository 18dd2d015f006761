"""A worker's view of a key, and of the key's slices as one array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.transport.message.data import DeclaredKey
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice


class KeptSlice(NamedTuple):
    """A slice's value that is read in the server's memory, and its offset there."""

    way: Way
    offset: int


@dataclass(eq=False)
class KeyEntry:
    """One key: its number on the wire, its slices, and its clock (how often this worker has pushed it)."""

    number: int
    size: int
    dtype: np.dtype[Any]
    slices: list[WorkerSlice]  # as declared to their servers
    ways: list[Way]  # how each slice's pushes and results travel
    compression: dict[str, Any]
    is_weight: bool
    mean: bool = False  # the servers divide each round's sum by the number of workers
    pusher: int = -1  # the only worker that pushes it; -1: all do
    clock: int = 0
    unpushed: bool = True  # whether there was no push since init, or since a state was loaded
    priority: int = 0  # of the last push: its pull must not overtake it
    pushed: float = 0.0  # time of the last push, time.perf_counter
    buffer: Array | None = None  # returned by `buffers`
    offset: int | None = None  # of the buffer in this worker's arena
    block: Array | None = None  # the buffers of several keys, as they lie in a flat key; this key's begins at `place`
    place: int = 0
    destination: Array | None = None  # receives values that cannot be read in place
    kept: list[KeptSlice] = field(default_factory=list)  # values that are read in place; the next push releases them


def memory_of(entry: KeyEntry) -> Array:
    """This worker's memory for a key's values that cannot be read in place."""
    if entry.destination is None:
        entry.destination = np.empty(entry.size, entry.dtype)
    return entry.destination


def cut(array: Array, slice_: WorkerSlice) -> Array:
    """The slice's elements of a key's flat array."""
    return array[slice_.range.start : slice_.range.start + slice_.range.length]


def declared(name: Key, entry: KeyEntry, here: list[WorkerSlice], is_relay: bool) -> DeclaredKey:
    """The declaration of a key for the server, or relay, of these slices. A relay sums; the server then divides."""
    compression = entry.compression if any(slice_.codec for slice_ in here) else {"type": "none"}
    slices = tuple((slice_.range.index, slice_.range.length) for slice_ in here)
    mean = entry.mean and not is_relay
    return DeclaredKey(
        entry.number, str(name), entry.dtype.name, entry.is_weight, compression, slices, mean, entry.pusher
    )
