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
from dmltrain.kvstore.encoded import Encoded
from dmltrain.kvstore.transport import flat
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Flag
from dmltrain.kvstore.waiting import Trip, Waits, split
from dmltrain.kvstore.worker.calls import Call, Calls, Item
from dmltrain.kvstore.worker.entry import KeyEntry, cut, memory_of
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.outgoing import Outgoing
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import Destination, Parts
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.reading import Reading

_NOTHING = np.empty(0)  # in place of a value that has not come


class Transfers:
    """`arena`: memory shared with this host. `flat_keys`: push and pull several keys as one where possible, if pulls of
    weights wait for the round of their push."""

    def __init__(
        self, member: Membership, entries: KeyEntries, arena: Arena | None, wait_seconds: float, flat_keys: bool = True
    ) -> None:
        self.waits = Waits()
        self._member, self._routes, self._entries = member, member.routes, entries
        self._arena, self._wait_seconds = arena, wait_seconds
        self._synchronous = entries.kind.type.synchronous
        self._calls = Calls(entries, self._synchronous and flat_keys)

    def push(self, key: Keys, value: Any, priority: int, rate: float) -> None:
        keys, values = keys_and_values(key, value)
        call = self._calls.find(keys)
        self._push(call, call.items(), values, priority, rate)

    def pull(self, key: Keys, out: Any, priority: int) -> Handle:
        keys, targets = _targets(key, out)
        call, outgoing = self._calls.find(keys), Outgoing()
        items = [(item, self._ways(item)) for item in call.items(pulls=True)]
        handle = self._handle(call, out, sum([len(ways) for _, ways in items]))
        for item, ways in items:
            clock = item.keys[0].clock
            self._expect(call, item, ways, targets, handle, clock)
            lowest = min([priority, *[key.priority for key in item.keys]])
            for link, slice_ in ways:
                outgoing.add(link, link.pull(slice_, clock, lowest))
        outgoing.send(self._routes.links)
        return self._member.watched(handle)

    def _ways(self, item: Item) -> list[Way]:
        """How an item's values are pulled: a weight that was never pushed is at its servers only."""
        return self._routes.direct(item.entry.slices) if not item.is_flat and item.entry.unpushed else item.entry.ways

    def pushpull(self, key: Keys, value: Any, out: Any, priority: int, rate: float) -> Handle:
        keys, values = keys_and_values(key, value)
        _, targets = _targets(key, value if out is None else out)
        call = self._calls.find(keys)
        items = call.items()
        handle = self._handle(call, out, sum([len(item.entry.ways) for item in items]))
        self._push(call, items, values, priority, rate, targets, handle)
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
        entries = [self._entries.find(name) for name in keys]
        self._lay_out([entry for entry in dict.fromkeys(entries) if entry.buffer is None and len(entry.ways) == 1])
        return [self._buffer(entry) for entry in entries]

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

    def change(self) -> None:
        """The kvstore's kind has changed between two steps. From now on each key travels alone."""
        self._synchronous, self._calls.flat_keys = self._entries.kind.type.synchronous, False
        self._calls.forget()

    def begin(self, op: int) -> None:
        """The next pushes are those of this op of an elastic job."""
        for link in self._routes.links:
            link.op = op

    def enter(self, view: int, base: int, num_workers: int) -> None:
        """Enter this view of so many workers, which begins after op `base`. Earlier requests and pulls are forgotten.
        Changes of residuals by later ops are taken back. The clocks of weights begin again. All other keys must be
        declared again. Call this on the thread that pushes; not with flat keys."""
        for link in self._routes.links:
            link.enter(view)
        for undo in self._entries.undos:
            undo.back_to(base)
        outgoing = Outgoing()
        for entry in self._entries.restart(num_workers):
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
        shared = any(link.link.own_arena for link, _ in entry.ways)
        offset, memory = self._take(size, shared)
        return offset, memory.view(entry.dtype)

    def _take(self, size: int, shared: bool) -> tuple[int | None, Array]:
        taken = self._arena.take(size) if self._arena and shared else None
        return taken if taken else (None, np.zeros(size, np.uint8))

    def _lay_out(self, entries: Sequence[KeyEntry]) -> None:
        """Memory for keys with one slice each, which all lie in it as in a flat key if they are on one server."""
        together: dict[tuple[Any, Any], list[KeyEntry]] = {}
        for entry in entries:
            together.setdefault((entry.ways[0].link, entry.dtype), []).append(entry)
        for (link, dtype), keys in together.items():
            places = flat.layout([key.size for key in keys], dtype.itemsize)
            offset, memory = self._take(places[-1].stop * dtype.itemsize, link.link.own_arena is not None)
            block = memory.view(dtype)
            for key, place in zip(keys, places, strict=True):
                key.block, key.place, key.buffer = block, place.start, block[place]
                key.offset = None if offset is None else offset + place.start * dtype.itemsize

    def _handle(self, call: Call, out: Any, slices: int) -> Handle:
        # Longer than the servers' limit: they report first, with a message that names the late workers.
        seconds = self._wait_seconds + 10.0
        handle = Handle(slices, f"pull of {_names(call.names)}", seconds, self._count_wait)
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
        items: Sequence[Item],
        values: Sequence[Any],
        priority: int,
        rate: float,
        targets: Sequence[Any] = (),
        handle: Handle | None = None,
    ) -> None:
        """Push all keys of a call, as `items`; with `handle` also receive their values into `targets`."""
        outgoing, flags = Outgoing(), Flag.PULL if handle else 0
        arrays = [_flat(name, entry, item) for name, entry, item in zip(call.names, call.entries, values, strict=True)]
        for item in items:
            entry, (data, offset) = item.entry, item.data(arrays)
            self._advance(item, priority, outgoing)
            if handle:
                self._expect(call, item, entry.ways, targets, handle, entry.clock)
            for link, slice_ in entry.ways:
                place = None if offset is None else offset + slice_.range.start * entry.dtype.itemsize
                if isinstance(data, Encoded):
                    part: Array | Parts = data.parts[slice_.range.index]
                else:
                    part = cut(data, slice_) if isinstance(data, np.ndarray) else data
                outgoing.add(link, link.push(slice_, part, entry.clock, rate, priority, flags, entry.pushed, place))
        outgoing.send(self._routes.links)

    def _advance(self, item: Item, priority: int, outgoing: Outgoing) -> None:
        """Begin the next clock of the keys."""
        now, clock = time.perf_counter(), item.keys[0].clock + 1
        for entry in [item.entry, *item.keys] if item.is_flat else item.keys:
            entry.clock, entry.priority, entry.unpushed, entry.pushed = clock, priority, False, now
            if entry.kept:
                _let_go(entry, outgoing)

    def _expect(
        self, call: Call, item: Item, ways: list[Way], targets: Sequence[Any], handle: Handle, clock: int
    ) -> None:
        """Receive the values at `clock` into the targets of the item's keys."""
        first, asked = targets[item.positions[0]], self._began(item.keys[0])
        if first is READ:
            return self._expect_reading(item, ways, handle, clock)
        if isinstance(first, Encoded):  # such keys are in no flat key
            for link, slice_ in ways:
                link.expect(Destination(slice_, first.parts[slice_.range.index], handle, asked=asked), clock)
            return
        arrays: Parts = [
            _destination(call.names[position], entry, targets[position], handle)
            for position, entry in zip(item.positions, item.keys, strict=True)
        ]
        for link, slice_ in ways:
            target = arrays if item.is_flat else cut(arrays[0], slice_)
            link.expect(Destination(slice_, target, handle, asked=asked), clock)

    def _expect_reading(self, item: Item, ways: list[Way], handle: Handle, clock: int) -> None:
        """Read the values in place where possible: see reading.joined."""
        entry, asked = item.entry, self._began(item.keys[0])
        reading = Reading(entry, ways, handle, item.places, [None] * len(ways))
        memory = memory_of(entry)
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
    for way, offset in kept:
        outgoing.add_read(way.link, (way.slice, offset))


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


def _flat(name: Key, entry: KeyEntry, item: Any) -> Array | Encoded:
    """The array to push, flat and contiguous, if it is not encoded. Raises UserError."""
    own = entry.buffer
    if isinstance(item, Encoded) or (own is not None and item is own):
        return item
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
