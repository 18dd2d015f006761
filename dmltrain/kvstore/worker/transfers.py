"""Pushes and pulls of keys: frames, servers, memory for the values, and the training thread's waits.

Pushes and pulls of a key are numbered by its clock. routes.py has the links, server_link.py moves the slices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle, Key, Keys, as_array, keys_and_values, summed
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Flag
from dmltrain.kvstore.waiting import Trip, Waits, split
from dmltrain.kvstore.worker.calls import Call, Calls, GroupedKeys
from dmltrain.kvstore.worker.entry import KeyEntry, cut, memory_of
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.link_groups import GroupDestination, WorkerGroup
from dmltrain.kvstore.worker.links.outgoing import Outgoing
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import Destination
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.reading import GroupReading, Reading

_NOTHING = np.empty(0)  # in place of a value that has not come


class Transfers:
    """`synchronous`: pulls of weights wait for the round of their push; if so, keys may travel in `groups`. `arena`:
    memory shared with this host."""

    def __init__(
        self,
        member: Membership,
        entries: KeyEntries,
        arena: Arena | None,
        synchronous: bool,
        wait_seconds: float,
        groups: bool = True,
    ) -> None:
        """`groups`: push and pull several keys with one frame where possible."""
        self.waits = Waits()
        self._member, self._routes, self._entries = member, member.routes, entries
        self._calls = Calls(entries, synchronous and groups)
        self._arena, self._synchronous, self._wait_seconds = arena, synchronous, wait_seconds

    def push(self, key: Keys, value: Any, priority: int, rate: float) -> None:
        keys, values = keys_and_values(key, value)
        self._push(self._calls.find(keys), values, priority, rate)

    def pull(self, key: Keys, out: Any, priority: int) -> Handle:
        keys, targets = _targets(key, out)
        call, outgoing = self._calls.find(keys), Outgoing()
        handle = self._handle(call, out)
        alone = list(call.alone)
        for grouped in call.grouped:
            group = None if any([entry.unpushed for entry in grouped.entries]) else grouped.group()
            if group is None:
                alone += grouped.positions
                continue
            clock = grouped.entries[0].clock
            self._expect_group(call, grouped, group, targets, handle, clock)
            lowest = min([priority, *[entry.priority for entry in grouped.entries]])
            outgoing.add(grouped.link, grouped.link.groups.pull(group, clock, lowest))
        for position in sorted(alone):
            name, entry = call.names[position], call.entries[position]
            ways = self._routes.direct(entry.slices) if entry.unpushed else entry.ways
            self._expect(name, entry, ways, targets[position], handle, entry.clock, position)
            for link, slice_ in ways:
                outgoing.add(link, link.pull(slice_, entry.clock, min(priority, entry.priority)))
        outgoing.send(self._routes.links)
        return self._member.watched(handle)

    def pushpull(self, key: Keys, value: Any, out: Any, priority: int, rate: float) -> Handle:
        keys, values = keys_and_values(key, value)
        _, targets = _targets(key, value if out is None else out)
        call = self._calls.find(keys)
        handle = self._handle(call, out)
        self._push(call, values, priority, rate, targets, handle)
        return self._member.watched(handle)

    def all_reduce(self, name: str, values: Array) -> None:
        """Replace `values` (float64) by the sum of all workers' values."""
        key = f"sum of {name} ({values.size})"
        self.declare_sum(key, values)
        self.push(key, values.reshape(-1), 0, -1.0)
        self.pull(key, values, 0).wait()

    def declare_sum(self, key: Key, values: Array) -> None:
        """Declare a key that is no weight, unless it is declared already. Waits for the servers' answers."""
        if key not in self._entries:
            self._entries.declare([key], [values.reshape(-1)], is_weight=False)
            self._member.flush()

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

    def change(self, synchronous: bool) -> None:
        """The kvstore has changed between two steps. From now on each key travels alone."""
        self._synchronous, self._calls.groups = synchronous, False
        self._calls.forget()

    def begin(self, op: int) -> None:
        """The next pushes are those of this op of an elastic job."""
        for link in self._routes.links:
            link.op = op

    def enter(self, view: int, base: int) -> None:
        """Enter this view, which begins after op `base`. Earlier requests and pulls are forgotten. Changes of residuals
        by later ops are taken back. The clocks of weights begin again. All other keys must be declared again. Call this
        on the thread that pushes; not with groups."""
        for link in self._routes.links:
            link.enter(view)
        for undo in self._entries.undos:
            undo.back_to(base)
        outgoing = Outgoing()
        for entry in self._entries.restart():
            _let_go(entry, outgoing)
        outgoing.send(self._routes.links)
        self._calls.forget()

    def _buffer(self, entry: KeyEntry) -> Array:
        if entry.buffer is None:
            entry.offset, entry.buffer = self._memory(entry)
        return entry.buffer

    def _memory(self, entry: KeyEntry) -> tuple[int | None, Array]:
        """Memory to push the key from, and its offset if it is shared with a server."""
        size = entry.size * entry.dtype.itemsize
        shared = self._arena is not None and any(link.link.own_arena for link, _ in entry.ways)
        taken = self._arena.take(size) if self._arena and shared else None
        offset, memory = taken if taken else (None, np.empty(size, np.uint8))
        return offset, memory.view(entry.dtype)

    def _handle(self, call: Call, out: Any) -> Handle:
        # Longer than the servers' limit: they report first, with a message that names the late workers.
        seconds = self._wait_seconds + 10.0
        handle = Handle(call.slices, f"pull of {_names(call.names)}", seconds, self._count_wait)
        if out is READ:
            handle.values = [_NOTHING] * len(call.names)
        return handle

    def _count_wait(self, trip: Trip | None, since: float, until: float) -> None:
        self.waits += split(trip, since, until)

    def _began(self, entry: KeyEntry) -> float:
        """When the trip of a key's next values began: with its push, or, if its pull waits for no round, with the
        pull."""
        return entry.pushed if self._synchronous or not entry.is_weight else time.perf_counter()

    def _push(
        self,
        call: Call,
        values: Sequence[Any],
        priority: int,
        rate: float,
        targets: Sequence[Any] = (),
        handle: Handle | None = None,
    ) -> None:
        """Push all keys of a call; with `handle` also receive their values into `targets`."""
        outgoing, alone = Outgoing(), list(call.alone)
        arrays = [_flat(name, entry, item) for name, entry, item in zip(call.names, call.entries, values, strict=True)]
        flags = Flag.PULL if handle else 0
        for grouped in call.grouped:
            group = grouped.group()
            if group is None:
                alone += grouped.positions
                continue
            now = self._advance(grouped.entries, priority, outgoing)
            clock = grouped.entries[0].clock
            if handle:
                self._expect_group(call, grouped, group, targets, handle, clock)
            group_arrays = [arrays[position] for position in grouped.positions]
            places, groups = self._places(grouped, group_arrays), grouped.link.groups
            outgoing.add(grouped.link, groups.push(group, group_arrays, clock, rate, priority, flags, now, places))
        for position in sorted(alone):
            entry, array = call.entries[position], arrays[position]
            self._advance([entry], priority, outgoing)
            if handle:
                self._expect(call.names[position], entry, entry.ways, targets[position], handle, entry.clock, position)
            known = entry.offset if array is entry.buffer else None
            for link, slice_ in entry.ways:
                place = None if known is None else known + slice_.range.start * entry.dtype.itemsize
                part = cut(array, slice_)
                outgoing.add(link, link.push(slice_, part, entry.clock, rate, priority, flags, entry.pushed, place))
        outgoing.send(self._routes.links)

    def _advance(self, entries: Sequence[KeyEntry], priority: int, outgoing: Outgoing) -> float:
        """Begin the next clock of these keys; returns the time, time.perf_counter."""
        now = time.perf_counter()
        for entry in entries:
            entry.clock, entry.priority, entry.unpushed, entry.pushed = entry.clock + 1, priority, False, now
            if entry.kept:
                _let_go(entry, outgoing)
        return now

    def _places(self, grouped: GroupedKeys, arrays: Sequence[Array]) -> bytes:
        """The payload of the arrays' offsets in this worker's arena; empty if some are elsewhere."""
        arena = grouped.link.link.own_arena
        if arena is None:
            return b""
        if all([array is entry.buffer for array, entry in zip(arrays, grouped.entries, strict=True)]):
            if not grouped.places and all([entry.offset is not None for entry in grouped.entries]):
                grouped.places = wire.offsets([entry.offset or 0 for entry in grouped.entries])
            return grouped.places
        places = [arena.offset_of(array) if array.size else 0 for array in arrays]
        known = [place for place in places if place is not None]
        return wire.offsets(known) if len(known) == len(places) else b""

    def _expect_group(
        self,
        call: Call,
        grouped: GroupedKeys,
        group: WorkerGroup,
        targets: Sequence[Any],
        handle: Handle,
        clock: int,
    ) -> None:
        """Receive the group's values at `clock` into the targets of its keys."""
        entries, positions = grouped.entries, grouped.positions
        asked = self._began(entries[0])
        if targets[positions[0]] is READ:
            destination: GroupDestination = GroupReading(
                group, clock, handle, asked, [], link=grouped.link, entries=entries, positions=positions
            )
        else:
            arrays = [
                _destination(call.names[position], entry, targets[position], handle)
                for position, entry in zip(positions, entries, strict=True)
            ]
            destination = GroupDestination(group, clock, handle, asked, arrays)
        grouped.link.groups.expect(destination)

    def _expect(
        self, name: Key, entry: KeyEntry, ways: list[Way], target: Any, handle: Handle, clock: int, position: int
    ) -> None:
        """Receive the key's values at `clock` into `target`; `position` is that of the key in the call."""
        if target is READ:
            return self._expect_reading(entry, ways, handle, clock, position)
        destination, asked = _destination(name, entry, target, handle), self._began(entry)
        for link, slice_ in ways:
            link.expect(Destination(slice_, cut(destination, slice_), handle, asked=asked), clock)

    def _expect_reading(self, entry: KeyEntry, ways: list[Way], handle: Handle, clock: int, position: int) -> None:
        """Read the key's values in place where possible: see reading.joined."""
        reading = Reading(entry, ways, handle, position, [None] * len(ways))
        memory, asked = memory_of(entry), self._began(entry)
        for way in ways:
            way.link.expect(Destination(way.slice, cut(memory, way.slice), handle, reading.keep, asked), clock)
        handle.then(reading.finish)


def _targets(key: Keys, out: Any) -> tuple[list[Key], list[Any]]:
    if out is not READ:
        return keys_and_values(key, out)
    keys: list[Key] = [key] if isinstance(key, (int, str)) else list(key)
    return keys, [READ] * len(keys)


def _let_go(entry: KeyEntry, outgoing: Outgoing) -> None:
    """Release the key's values that were read in place."""
    kept, entry.kept = entry.kept, []
    for value in kept:
        value.let_go(outgoing)


def _copy(array: Array, destination: Array) -> None:
    np.copyto(array, destination.reshape(array.shape))


def _destination(name: Key, entry: KeyEntry, target: Any, handle: Handle) -> Array:
    """Flat memory to receive the key's values into: the first array of `target` if possible. `handle` then copies the
    values to the other arrays."""
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    arrays = [as_array(item) for item in targets]
    if any(getattr(getattr(item, "device", None), "type", "cpu") != "cpu" for item in targets):
        raise UserError(f"kvstore: pull of key {name!r} needs CPU memory; copy to the device afterwards")
    for array in arrays:
        _check_size(name, entry, array)
    first = arrays[0]
    direct = first.flags.c_contiguous and first.flags.writeable
    destination = first.reshape(-1) if direct else np.empty(entry.size, entry.dtype)
    for array in arrays[1:] if direct else arrays:
        handle.then(partial(_copy, array, destination))
    return destination


def _flat(name: Key, entry: KeyEntry, item: Any) -> Array:
    """The array to push, flat and contiguous. Raises UserError."""
    own = entry.buffer
    if own is not None and item is own:
        return own
    array: Array = summed(item)
    _check_size(name, entry, array)
    return array


def _check_size(name: Key, entry: KeyEntry, array: Array) -> None:
    if array.size != entry.size or array.dtype != entry.dtype:
        raise UserError(
            f"kvstore: key {name!r} was declared with {entry.size} elements of {entry.dtype.name}; "
            f"this array has {array.size} of {array.dtype.name}"
        )


def _names(keys: Sequence[Key]) -> str:
    return f"{len(keys)} keys from {keys[0]!r} on" if len(keys) > 1 else f"key {keys[0]!r}" if keys else "no keys"
