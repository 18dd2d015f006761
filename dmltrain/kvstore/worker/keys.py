"""All keys of a worker: their numbers, slices and servers. All workers of a job compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.transport.message import encode
from dmltrain.kvstore.transport.message.data import Declare
from dmltrain.kvstore.worker.entry import KeyEntry, declared
from dmltrain.kvstore.worker.links import sharding
from dmltrain.kvstore.worker.links.routes import Routes, Way
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.undo import Undo
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice

NONE: dict[str, Any] = {"type": "none"}
FLOAT = np.dtype(np.float32)
FIRST_SUM = 1 << 31  # first number of keys that are not weights, so that the numbers of weights never depend on them


@dataclass(eq=False)
class KeyEntries:
    """`kind`: the kvstore's, as declared to the servers; `seconds`: time limit for an answer; `apart`: no server is on
    a host with workers."""

    routes: Routes
    num_workers: int
    kind: KVStoreKind
    seconds: float
    apart: bool = False
    can_undo: bool = False  # whether the changes of residuals by an aborted round can be taken back
    shares: list[float] | None = None  # of the weights, by server; None: equal
    _compression: dict[str, Any] = field(default_factory=lambda: NONE)
    _by_name: dict[Key, KeyEntry] = field(default_factory=dict)
    _loads: list[int] = field(init=False)  # bytes on each server
    _first: dict[Key, list[sharding.Slice]] = field(default_factory=dict)  # of weights: the slices at their declaration
    _servers: list[int] | None = None  # the servers that are left, in ascending order; None: all

    def __post_init__(self) -> None:
        self._loads = [0] * self.routes.num_servers

    def __iter__(self) -> Iterator[KeyEntry]:
        return iter(self._by_name.values())

    def items(self) -> Iterator[tuple[Key, KeyEntry]]:
        return iter(self._by_name.items())

    def __contains__(self, name: Key) -> bool:
        return name in self._by_name

    def find(self, name: Key) -> KeyEntry:
        """Raises UserError if the key was not declared with `init`."""
        entry = self._by_name.get(name)
        if entry is None:
            raise UserError(f"kvstore: key {name!r} was not declared: call init first")
        return entry

    def compress(self, parameters: dict[str, Any]) -> None:
        """Set the compression of weights that are declared from now on. Raises UserError."""
        try:
            codecs.make(parameters)
        except ValueError as error:
            raise UserError(f"gradient compression: {error}") from error
        if any(entry.is_weight for entry in self):
            raise UserError("set_gradient_compression must come before init: init declares each key's compression")
        self._compression = dict(parameters)

    @property
    def has_residuals(self) -> bool:
        """Whether the compression keeps residuals."""
        codec = codecs.make(self._compression)
        return codec is not None and codec.needs_residual

    @property
    def compresses(self) -> bool:
        """Whether weights are compressed."""
        return codecs.make(self._compression) is not None

    def ratio(self, elements: int) -> float:
        """See KVStore.wire_ratio."""
        codec = codecs.make(self._compression)
        if codec is None:
            return 1.0
        sizes = codec.nbytes(elements), codec.of_sum(self.num_workers).nbytes(elements)
        return sum(sizes) / (len(sizes) * elements * FLOAT.itemsize)

    def declare(
        self,
        names: list[Key],
        arrays: list[Array],
        is_weight: bool,
        slice_bytes: int | None = None,
        mean: bool = False,
        compression: dict[str, Any] | None = None,
        tell: bool = True,
    ) -> None:
        """Declare those of these keys that are new, in slices, here and, with `tell`, to the servers. Without `tell`
        `declare_again` must follow. `slice_bytes`: see sharding.cut. `compression`: None: that of all weights. Does not
        wait for the answers."""
        fresh = [(name, array) for name, array in zip(names, arrays, strict=True) if name not in self]
        same = sum(entry.is_weight == is_weight for entry in self)
        first, loads = (same, self._loads) if is_weight else (FIRST_SUM + same, self._loads[:])
        sizes, itemsizes = [array.size for _, array in fresh], [array.itemsize for _, array in fresh]
        plan = sharding.cut(sizes, itemsizes, loads, first, slice_bytes, self.shares, self.apart, self._servers)
        for index, ((name, array), ranges) in enumerate(zip(fresh, plan, strict=True)):
            self._by_name[name] = self._entry(first + index, array, ranges, is_weight, mean, compression)
            if is_weight:
                self._first[name] = ranges
        new = [name for name, _ in fresh]
        if not tell:
            return
        for server in self.routes.servers:
            self._declare_to(server, new, lambda entry: self.routes.direct(entry.slices))
        if is_weight and self.routes.host:
            self._declare_to(self.routes.host, new, lambda entry: entry.ways, is_relay=True)

    def declare_parts(self, names: list[Key], sizes: Sequence[int], servers: Sequence[int]) -> None:
        """Declare float32 keys that one worker each pushes: the first key worker 0, and so on. `sizes`: in elements.
        `servers`: the server of each. Does not wait for the answers."""
        first = FIRST_SUM + sum(not entry.is_weight for entry in self)
        for pusher, (name, size, server) in enumerate(zip(names, sizes, servers, strict=True)):
            ranges = sharding.cut_on(server, first + pusher, size, FLOAT.itemsize)
            slices = [WorkerSlice(range_, FLOAT, None, None) for range_ in ranges]
            self._by_name[name] = KeyEntry(
                first + pusher, size, FLOAT, slices, self.routes.direct(slices), NONE, False, pusher=pusher
            )
        for link in self.routes.servers:
            self._declare_to(link, names, lambda entry: entry.ways)

    def declare_again(self) -> None:
        """Declare all keys to the servers. Does not wait for the answers."""
        for server in self.routes.servers:
            self._declare_to(server, [*self._by_name], lambda entry: self.routes.direct(entry.slices))

    def place(self, servers: Sequence[int]) -> None:
        """Divide the slices of weights among these servers, which are left. The result depends on the slices and these
        servers alone, and not on earlier divisions: so all workers get the same, also those that join later. Call this
        between `restart` and `declare_again`."""
        everywhere = len(servers) == self.routes.num_servers
        self._servers = None if everywhere else sorted(servers)
        self._loads = [0] * self.routes.num_servers
        entries = [(self._by_name[name], ranges) for name, ranges in self._first.items()]
        sizes = [range_.length * entry.dtype.itemsize for entry, ranges in entries for range_ in ranges]
        homes = [range_.server for _, ranges in entries for range_ in ranges]
        places = iter(homes if everywhere else sharding.place(sizes, self._loads, None, self._servers))
        if everywhere:
            for server, size in zip(homes, sizes, strict=True):
                self._loads[server] += size
        for entry, ranges in entries:
            for slice_, range_ in zip(entry.slices, ranges, strict=True):
                slice_.range = replace(range_, server=next(places))
            entry.ways = self.routes.direct(entry.slices)

    def restart(self, num_workers: int) -> list[KeyEntry]:
        """The members have changed: they are so many. Weights keep their slices and memory; their clocks begin again.
        All other keys are forgotten, as the servers do, and returned."""
        self.num_workers = num_workers
        forgotten = [entry for entry in self if not entry.is_weight]
        self._by_name = {name: entry for name, entry in self._by_name.items() if entry.is_weight}
        for entry in self:
            entry.clock, entry.unpushed = 0, True
            for slice_ in entry.slices:
                slice_.result_codec = slice_.codec and slice_.codec.of_sum(num_workers)
        return forgotten

    @property
    def undos(self) -> Iterator[Undo]:
        """The Undo of each residual that has one."""
        return (slice_.undo for entry in self for slice_ in entry.slices if slice_.undo is not None)

    def _declare_to(
        self, link: ServerLink, names: list[Key], ways: Callable[[KeyEntry], list[Way]], is_relay: bool = False
    ) -> None:
        """Declare on `link` the slices of these keys whose way uses it."""
        here = [
            declared(name, entry, [way.slice for way in ways(entry) if way.link is link], is_relay)
            for name in names
            for entry in [self._by_name[name]]
        ]
        slices = tuple(declaration for declaration in here if declaration.slices)
        message = Declare(self.kind.type.name, self.kind.staleness, slices)
        link.request(encode(message, link.view), self.seconds)

    def _entry(
        self,
        number: int,
        array: Array,
        ranges: list[sharding.Slice],
        is_weight: bool,
        mean: bool,
        compression: dict[str, Any] | None,
    ) -> KeyEntry:
        compresses = is_weight and array.dtype == np.float32
        compression = (compression or self._compression) if compresses else NONE
        codec = codecs.make(compression)
        result = codec and codec.of_sum(self.num_workers)
        slices = [
            WorkerSlice(range_, array.dtype, codec and codec.of_sum(self.routes.summed(range_.server)), result)
            for range_ in ranges
        ]
        for slice_ in slices if self.can_undo else ():
            slice_.undo = None if slice_.residual is None else Undo(slice_.residual)
        ways = self.routes.of_weight(slices) if is_weight else self.routes.direct(slices)
        return KeyEntry(number, array.size, array.dtype, slices, ways, compression, is_weight, mean and codec is None)
