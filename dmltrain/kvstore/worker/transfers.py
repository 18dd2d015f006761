"""Pushes and pulls of keys: frames, servers, memory for the values, and the training thread's waits.

Pushes and pulls of a key are numbered by its clock. routes.py has the links, server_link.py moves the slices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import UserError
from dmltrain.kvstore.base import READ, Handle, Key, Keys, as_array, keys_and_values, summed
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Flag
from dmltrain.kvstore.waiting import Trip, Waits, split
from dmltrain.kvstore.worker.entry import Entry, Reading, cut
from dmltrain.kvstore.worker.keys import Entries
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.outgoing import Outgoing
from dmltrain.kvstore.worker.routes import Way
from dmltrain.kvstore.worker.server_link import Landing


class Transfers:
    """`synchronous`: pulls of weights wait for the round of their push. `arena`: memory shared with this host."""

    def __init__(
        self, member: Membership, entries: Entries, arena: Arena | None, synchronous: bool, wait_seconds: float
    ) -> None:
        self.waits = Waits()
        self._member, self._routes, self._entries = member, member.routes, entries
        self._arena, self._synchronous, self._wait_seconds = arena, synchronous, wait_seconds

    def push(self, key: Keys, value: Any, priority: int, rate: float) -> None:
        keys, values = keys_and_values(key, value)
        outgoing = Outgoing()
        for name, item in zip(keys, values, strict=True):
            self._push(name, self._entries.find(name), item, priority, rate, outgoing)
        outgoing.send(self._routes.links)

    def pull(self, key: Keys, out: Any, priority: int) -> Handle:
        keys, targets = _targets(key, out)
        handle, outgoing = self._handle(keys), Outgoing()
        for name, target in zip(keys, targets, strict=True):
            entry = self._entries.find(name)
            ways = self._routes.direct(entry.slices) if entry.unpushed else entry.ways
            self._expect(name, entry, ways, target, handle, entry.clock)
            for link, slice_ in ways:
                outgoing.add(link, link.pull(slice_, entry.clock, min(priority, entry.priority)))
        outgoing.send(self._routes.links)
        return self._member.watched(handle)

    def pushpull(self, key: Keys, value: Any, out: Any, priority: int, rate: float) -> Handle:
        keys, values = keys_and_values(key, value)
        _, targets = _targets(key, value if out is None else out)
        handle, outgoing = self._handle(keys), Outgoing()
        for name, item, target in zip(keys, values, targets, strict=True):
            self._push(name, self._entries.find(name), item, priority, rate, outgoing, target, handle)
        outgoing.send(self._routes.links)
        return self._member.watched(handle)

    def all_reduce(self, name: str, values: Array) -> None:
        """Replace `values` (float64) by the sum of all workers' values."""
        key = f"sum of {name} ({values.size})"
        if key not in self._entries:
            self._entries.declare([key], [values.reshape(-1)], is_weight=False)
            self._member.flush()
        self.push(key, values.reshape(-1), 0, -1.0)
        self.pull(key, values, 0).wait()

    def buffers(self, keys: Sequence[Key]) -> list[Array]:
        return [self._buffer(self._entries.find(name)) for name in keys]

    def memory(self, key: Key) -> Array:
        """Flat memory (elements,) from which the key can be pushed without a copy; each call gives another."""
        return self._memory(self._entries.find(key))[1]

    def pull_next(self, keys: list[Key], targets: list[Array], priority: int) -> Handle:
        """Receive keys that other workers push, after the next push of each."""
        for entry in map(self._entries.find, keys):
            entry.clock, entry.priority, entry.pushed = entry.clock + 1, priority, time.perf_counter()
        return self.pull(keys, targets, priority)

    def barrier(self) -> None:
        since = time.perf_counter()
        self._member.barrier()
        self.waits += Waits(straggler=time.perf_counter() - since)

    def _buffer(self, entry: Entry) -> Array:
        if entry.buffer is None:
            entry.offset, entry.buffer = self._memory(entry)
        return entry.buffer

    def _memory(self, entry: Entry) -> tuple[int | None, Array]:
        """Memory to push the key from, and its offset if it is shared with a server."""
        size = entry.size * entry.dtype.itemsize
        shared = self._arena is not None and any(link.link.own_arena for link, _ in entry.ways)
        taken = self._arena.take(size) if self._arena and shared else None
        offset, memory = taken if taken else (None, np.empty(size, np.uint8))
        return offset, memory.view(entry.dtype)

    def _handle(self, keys: list[Key]) -> Handle:
        slices = sum(len(self._entries.find(name).slices) for name in keys)
        return Handle(slices, f"pull of {_names(keys)}", self._wait_seconds + 10.0, self._count_wait)

    def _count_wait(self, trip: Trip | None, since: float, until: float) -> None:
        self.waits += split(trip, since, until)

    def _began(self, entry: Entry) -> float:
        """When the trip of a key's next values began: with its push, or with its pull if that waits for no round."""
        return entry.pushed if self._synchronous or not entry.is_weight else time.perf_counter()

    def _push(
        self,
        name: Key,
        entry: Entry,
        item: Any,
        priority: int,
        rate: float,
        outgoing: Outgoing,
        target: Any = None,
        handle: Handle | None = None,
    ) -> None:
        """Add the pushes of all slices to `outgoing`; with `handle` also receive their values into `target`."""
        own = item is entry.buffer  # then size and offset are known
        array: Array = item if own else summed(item)
        if not own:
            _check_size(name, entry, array)
        entry.pushed = time.perf_counter()
        if handle:
            self._expect(name, entry, entry.ways, target, handle, entry.clock + 1)
        entry.clock, entry.priority, entry.unpushed = entry.clock + 1, priority, False
        kept, entry.kept = entry.kept, []
        for (link, slice_), offset in kept:
            outgoing.add_read(link, (slice_, offset))
        for link, slice_ in entry.ways:
            flags = Flag.PULL if handle else 0
            known = (
                entry.offset + slice_.range.start * entry.dtype.itemsize if own and entry.offset is not None else None
            )
            outgoing.add(
                link, link.push(slice_, cut(array, slice_), entry.clock, rate, priority, flags, entry.pushed, known)
            )

    def _expect(self, name: Key, entry: Entry, ways: list[Way], target: Any, handle: Handle, clock: int) -> None:
        """Receive the key's values at `clock` into `target`."""
        if target is READ:
            return self._expect_reading(entry, ways, handle, clock)
        targets = list(target) if isinstance(target, (list, tuple)) else [target]
        arrays = [as_array(item) for item in targets]
        if any(getattr(getattr(item, "device", None), "type", "cpu") != "cpu" for item in targets):
            raise UserError(f"kvstore: pull of key {name!r} needs CPU memory; copy to the device afterwards")
        for array in arrays:
            _check_size(name, entry, array)
        first = arrays[0]
        direct = first.flags.c_contiguous and first.flags.writeable
        landing, asked = first.reshape(-1) if direct else np.empty(entry.size, entry.dtype), self._began(entry)
        for array in arrays[1:] if direct else arrays:
            handle.then(partial(_copy, array, landing))
        for link, slice_ in ways:
            link.expect(Landing(slice_, cut(landing, slice_), handle, asked=asked), clock)

    def _expect_reading(self, entry: Entry, ways: list[Way], handle: Handle, clock: int) -> None:
        """Read the key's values in place where possible: see entry.joined."""
        if entry.landing is None:
            entry.landing = np.empty(entry.size, entry.dtype)
        reading = Reading(entry, ways, handle, len(handle.values), [None] * len(ways))
        asked = self._began(entry)
        for way in ways:
            way.link.expect(Landing(way.slice, cut(entry.landing, way.slice), handle, reading.keep, asked), clock)
        handle.values.append(entry.landing)
        handle.then(reading.finish)


def _targets(key: Keys, out: Any) -> tuple[list[Key], list[Any]]:
    if out is not READ:
        return keys_and_values(key, out)
    keys: list[Key] = [key] if isinstance(key, (int, str)) else list(key)
    return keys, [READ] * len(keys)


def _copy(array: Array, landing: Array) -> None:
    np.copyto(array, landing.reshape(array.shape))


def _check_size(name: Key, entry: Entry, array: Array) -> None:
    if array.size != entry.size or array.dtype != entry.dtype:
        raise UserError(
            f"kvstore: key {name!r} was declared with {entry.size} elements of {entry.dtype.name}; "
            f"this array has {array.size} of {array.dtype.name}"
        )


def _names(keys: list[Key]) -> str:
    return f"{len(keys)} keys from {keys[0]!r} on" if len(keys) > 1 else f"key {keys[0]!r}" if keys else "no keys"
