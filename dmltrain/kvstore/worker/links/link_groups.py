"""The groups of a link to a server: small slices that are pushed and pulled together, with one frame for all of them.

Theory of operation. A group is declared to the server once; from then on a number stands for it. A frame of a group
stands for the frames of its slices, one after another. The server may answer a pull of a group with one VALUE_GROUP or
with a VALUE for each slice. In shared memory the payload is the offsets of the slices. It seldom changes, so the arrays
of a payload are made once and remembered.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.outbox import Frame, Outbox, Payload
from dmltrain.kvstore.transport.shared_memory import Mapping
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header
from dmltrain.kvstore.waiting import Trip
from dmltrain.kvstore.worker.links.worker_slice import FIRST, Destination, Traffic, WorkerSlice, as_bytes, bounded

MAX_GROUPS, MAX_IN_GROUPS = 4096, 1 << 16  # of a link: groups, and slices in them
MAX_KNOWN = 16  # payloads of a group's values that are kept

Id = tuple[int, int, int]


@dataclass(eq=False)
class Sending:
    """Shared memory into which pushes of some slices are copied. All groups of these slices share it; they differ only
    in the differences of the slices' clocks. Clocks are those of the first slice.

    Memory of an arena is never freed. If each group had its own, the groups of one call, whose clocks' differences may
    change several times (calls.MAX_CHANGES), would take several times the memory of the model."""

    arrays: list[Array] = field(default_factory=list)  # none until the first push
    places: bytes = b""  # of `arrays`, as they are sent
    loaned: int = 0  # the last clock whose push lies in `arrays`, where the server reads it
    differences: tuple[int, ...] = ()  # of the slices' clocks, then
    returned: int = 0  # the last clock whose value has arrived in one frame


@dataclass(eq=False)
class WorkerGroup:
    """Some slices on one server. The clock of the group is that of its first slice. `differences`: the clock of each
    slice minus the clock of the group."""

    number: int
    slices: list[WorkerSlice]
    differences: tuple[int, ...]
    sending: Sending = field(default_factory=Sending)
    nbytes: int = field(init=False)
    _known: dict[bytes, list[Array]] = field(default_factory=dict)  # values by payload

    def __post_init__(self) -> None:
        self.nbytes = sum(slice_.nbytes for slice_ in self.slices)

    @property
    def free(self) -> bool:
        """Whether the server reads nothing in `sending`."""
        sending = self.sending
        return sending.loaned <= sending.returned or all(
            slice_.returned >= sending.loaned + further
            for slice_, further in zip(self.slices, sending.differences, strict=True)
        )

    def place_of(self, key: int, index: int) -> int | None:
        """The position of a slice in the group."""
        ids = ((slice_.range.key, slice_.range.index) for slice_ in self.slices)
        return next((place for place, id in enumerate(ids) if id == (key, index)), None)

    def found(self, payload: bytes, memory: Mapping) -> list[Array]:
        """The slices' values at these offsets of the server's memory. Raises FrameError or ValueError."""
        if payload not in self._known:
            places = wire.parse_offsets(payload, len(self.slices))
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[payload] = [
                memory.view(place, slice_.nbytes).view(slice_.dtype)
                for place, slice_ in zip(places, self.slices, strict=True)
            ]
        return self._known[payload]


@dataclass(eq=False)
class GroupDestination:
    """The destination of a pulled group at a clock: flat arrays, one for each slice."""

    group: WorkerGroup
    clock: int
    handle: Handle
    asked: float  # see Destination
    arrays: list[Array]
    handled: float = 0.0

    def targets(self) -> list[Array]:
        """Memory to receive the values into."""
        return self.arrays

    def read(self, values: list[Array], number: int) -> bool:
        """Read `values` where they are, and release them later by `number`; False: the caller must copy them."""
        return False

    def received(self) -> None:
        """The values are in `targets`."""

    def done(self, trip: Trip) -> None:
        """The values have arrived."""
        self.handle.some_done(len(self.group.slices), trip)

    def alone(self, place: int) -> Destination:
        """The destination of one slice whose value comes alone."""
        return Destination(
            self.group.slices[place], self.arrays[place], self.handle, asked=self.asked, handled=self.handled
        )


@dataclass(eq=False)
class Scattered(GroupDestination):
    """The destinations of a group's slices if they belong to several pulls; see LinkGroups._destination."""

    destinations: list[Destination] = field(kw_only=True)

    def done(self, trip: Trip) -> None:
        for destination in self.destinations:
            destination.handle.one_done(trip)


@dataclass(eq=False)
class LinkGroups:
    """The groups of one link. `lock` guards `traffic` and the pulls. `alone`: destinations of values of slices, by key,
    slice and clock."""

    link: Link
    outbox: Outbox
    traffic: Traffic
    lock: threading.Lock
    alone: dict[Id, list[Destination]] = field(default_factory=dict)
    _groups: list[WorkerGroup] = field(default_factory=list)
    _by_content: dict[tuple[Id, ...], WorkerGroup] = field(default_factory=dict)
    _sending: dict[tuple[tuple[int, int], ...], Sending] = field(default_factory=dict)  # by keys and slices
    _pulls: dict[tuple[int, int], list[GroupDestination]] = field(default_factory=dict)  # by group and clock

    def find(self, slices: Sequence[WorkerSlice], differences: Sequence[int]) -> WorkerGroup | None:
        """The group of these slices, declared to the server if it is new; None if there are too many groups."""
        content = tuple(
            (slice_.range.key, slice_.range.index, further) for slice_, further in zip(slices, differences, strict=True)
        )
        if content in self._by_content:
            return self._by_content[content]
        if len(self._groups) == MAX_GROUPS or len(content) + sum(map(len, self._by_content)) > MAX_IN_GROUPS:
            return None
        sending = self._sending.setdefault(tuple(id[:2] for id in content), Sending())
        group = self._by_content[content] = WorkerGroup(len(self._groups), list(slices), tuple(differences), sending)
        self._groups.append(group)
        payload = wire.group(content)
        header = Header(FrameKind.GROUP, len(payload), key=group.number)
        self.outbox.put_all([Frame(header.pack() + payload, None, FIRST)])
        return group

    # -- sending --------------------------------------------------------------------------------------------------

    def push(
        self,
        group: WorkerGroup,
        arrays: list[Array],
        clock: int,
        rate: float,
        priority: int,
        flags: int,
        ready: float,
        places: bytes,
    ) -> Frame:
        """The PUSH_GROUP frame of the slices' gradients `arrays`, flat. `places`: the payload of their offsets in the
        arena, or empty if they lie elsewhere. For the rest see ServerLink.push."""

        def header(flags: int, length: int) -> bytes:
            return Header(
                FrameKind.PUSH_GROUP,
                length,
                0,
                group.number,
                0,
                clock,
                rate,
                0,
                flags,
                0,
                time.perf_counter() - ready,
                priority=bounded(priority),
            ).pack()

        def prepared() -> tuple[bytes, Payload]:
            if self._copy(group, arrays, clock):
                return header(flags | Flag.OFFSETS, len(group.sending.places)), memoryview(group.sending.places)
            return header(flags, group.nbytes), [as_bytes(array) for array in arrays if array.size]

        if places:
            self._count_sent(group)
            return Frame(header(flags | Flag.OFFSETS, len(places)) + places, None, priority)
        return Frame(b"", priority=priority, prepare=prepared, prepared_bytes=wire.HEADER_SIZE + group.nbytes)

    def _copy(self, group: WorkerGroup, arrays: list[Array], clock: int) -> bool:
        """On the sending thread: copy a push into shared memory; False if there is none, or the server reads it."""
        arena = self.link.own_arena
        if arena is None or not group.free:
            return False
        since, sending = time.perf_counter(), group.sending
        if not sending.places:
            taken = [arena.take(slice_.nbytes) for slice_ in group.slices]
            allocated = [allocation for allocation in taken if allocation is not None]
            if len(allocated) < len(taken):
                return False
            sending.arrays = [
                memory.view(slice_.dtype) for (_, memory), slice_ in zip(allocated, group.slices, strict=True)
            ]
            sending.places = wire.offsets([place for place, _ in allocated])
        for memory, array in zip(sending.arrays, arrays, strict=True):
            np.copyto(memory, array)
        sending.loaned, sending.differences = clock, group.differences
        self._count_sent(group)
        self.traffic.prepared += time.perf_counter() - since
        return True

    def _count_sent(self, group: WorkerGroup) -> None:
        with self.lock:
            self.traffic.shared_sent += group.nbytes

    def expect(self, destination: GroupDestination) -> None:
        """Register the destination of a group's value. Call this before the pull."""
        destination.handled = self.traffic.handled
        with self.lock:
            self._pulls.setdefault((destination.group.number, destination.clock), []).append(destination)

    def pull(self, group: WorkerGroup, clock: int, priority: int) -> Frame:
        """The PULL_GROUP frame; call `expect` first."""
        header = Header(FrameKind.PULL_GROUP, key=group.number, clock=clock, priority=bounded(priority))
        return Frame(header.pack(), None, priority)

    def release(self, read: Sequence[tuple[WorkerGroup, int]]) -> Frame:
        """The RELEASE_GROUP frame for values that have been read: groups, and the values' numbers."""
        payload = wire.release((group.number, 0, number) for group, number in read)
        return Frame(Header(FrameKind.RELEASE_GROUP, len(payload)).pack() + payload, None, FIRST)

    # -- receiving ------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Fail all pending pulls. Call this with the lock held."""
        for destination in itertools.chain(*self._pulls.values()):
            destination.handle.fail(reason)

    def receive(self, header: Header) -> None:
        """Receive a VALUE_GROUP. Raises FrameError, Closed, and LookupError or ValueError if nothing asked for it."""
        with self.lock:
            destination = self._destination(self._groups[header.key], header.clock)
        group = destination.group
        if header.flags & Flag.OFFSETS:
            self._read_shared(header, destination)
        else:
            if header.length != group.nbytes:
                raise FrameError(f"{header.length} bytes for group {group.number}, expected {group.nbytes}")
            self.link.read_parts([as_bytes(target) for target in destination.targets() if target.size])
            destination.received()
        group.sending.returned = max(group.sending.returned, header.clock)
        count, shared = len(group.slices), bool(header.flags & Flag.OFFSETS)
        with self.lock:
            self.traffic.values += count
            self.traffic.staleness += count * header.number
            if shared:
                self.traffic.shared_received += group.nbytes
        handled = self.traffic.handled - destination.handled
        destination.done(Trip(destination.asked, header.waited, header.worked, handled, shared))

    def _read_shared(self, header: Header, destination: GroupDestination) -> None:
        memory = self.link.peer_arena
        if memory is None:
            raise FrameError("a value in shared memory, but this link shares none")
        values = destination.group.found(bytes(self.link.read_payload(header, wire.MAX_OFFSETS)), memory)
        if destination.read(values, header.offset):
            return
        since = time.perf_counter()
        for target, value in zip(destination.targets(), values, strict=True):
            np.copyto(target, value)
        destination.received()
        self.traffic.landed += time.perf_counter() - since
        self.outbox.put_all([self.release([(destination.group, header.offset)])])

    def take_alone(self, key: int, index: int, clock: int) -> Destination:
        """The destination of a slice's value at a clock, which no other value gets: of a pull of this slice, or of a
        group, which the server answers one by one. Raises KeyError if there is none. Call this with the lock held."""
        if (key, index, clock) not in self.alone:
            self._expand(key, index, clock)
        waiting = self.alone[key, index, clock]
        destination = waiting.pop(0)
        if not waiting:
            del self.alone[key, index, clock]
        return destination

    def _expand(self, key: int, index: int, clock: int) -> None:
        """If there is a pull of a group with this slice at this clock, expect its values one by one from now on."""
        for (number, first), destinations in self._pulls.items():
            group = destinations[0].group
            place = group.place_of(key, index)
            if place is not None and first + group.differences[place] == clock:
                destination = self._taken(number, first)
                break
        else:
            return
        for place, (slice_, further) in enumerate(zip(group.slices, group.differences, strict=True)):
            id = slice_.range.key, slice_.range.index, first + further
            self.alone.setdefault(id, []).append(destination.alone(place))

    def _destination(self, group: WorkerGroup, clock: int) -> GroupDestination:
        """The destination of a group's value. Two pulls may have slices in common. If the values of the other pull came
        first, and one by one, they have used the destinations of this pull: then use those that the other pull left.
        Raises KeyError."""
        if (group.number, clock) in self._pulls:
            return self._taken(group.number, clock)
        left = [
            self.take_alone(slice_.range.key, slice_.range.index, clock + further)
            for slice_, further in zip(group.slices, group.differences, strict=True)
        ]
        first, arrays = left[0], [destination.target for destination in left]
        return Scattered(group, clock, first.handle, first.asked, arrays, first.handled, destinations=left)

    def _taken(self, number: int, clock: int) -> GroupDestination:
        destinations = self._pulls[number, clock]
        destination = destinations.pop(0)
        if not destinations:
            del self._pulls[number, clock]
        return destination
