"""All keys of a worker: their numbers, slices and servers. All workers of a job compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import UserError
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.transport.message import Declare, encode
from dmltrain.kvstore.worker import sharding
from dmltrain.kvstore.worker.entry import Entry, declared
from dmltrain.kvstore.worker.routes import Routes, Way
from dmltrain.kvstore.worker.server_link import ServerLink
from dmltrain.kvstore.worker.worker_slice import WorkerSlice

NONE: dict[str, Any] = {"type": "none"}
FLOAT = np.dtype(np.float32)
FIRST_SUM = 1 << 31  # first number of keys that are not weights, so that the numbers of weights never depend on them


@dataclass(eq=False)
class Entries:
    """`kind` and `staleness`: the kvstore's, as declared to the servers; `seconds`: time limit for an answer."""

    routes: Routes
    num_workers: int
    kind: str
    staleness: float
    seconds: float
    shares: list[float] | None = None  # of the weights, by server; None: equal
    _compression: dict[str, Any] = field(default_factory=lambda: NONE)
    _by_name: dict[Key, Entry] = field(default_factory=dict)
    _loads: list[int] = field(init=False)  # bytes on each server

    def __post_init__(self) -> None:
        self._loads = [0] * len(self.routes.servers)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_name.values())

    def __contains__(self, name: Key) -> bool:
        return name in self._by_name

    def find(self, name: Key) -> Entry:
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

    def ratio(self, elements: int) -> float:
        """See KVStore.wire_ratio."""
        codec = codecs.make(self._compression)
        if codec is None:
            return 1.0
        sizes = codec.nbytes(elements), codec.of_sum(self.num_workers).nbytes(elements)
        return sum(sizes) / (len(sizes) * elements * FLOAT.itemsize)

    def declare(
        self, names: list[Key], arrays: list[Array], is_weight: bool, whole: bool = False, mean: bool = False
    ) -> None:
        """Declare those of these keys that are new to the servers, whole or in slices. Waits for no answer."""
        fresh = [(name, array) for name, array in zip(names, arrays, strict=True) if name not in self]
        same = sum(entry.is_weight == is_weight for entry in self)
        first, loads = (same, self._loads) if is_weight else (FIRST_SUM + same, self._loads[:])
        sizes, itemsizes = [array.size for _, array in fresh], [array.itemsize for _, array in fresh]
        slice_bytes = max((array.nbytes for _, array in fresh), default=0) if whole else None
        plan = sharding.cut(sizes, itemsizes, loads, first, slice_bytes, self.shares)
        for index, ((name, array), ranges) in enumerate(zip(fresh, plan, strict=True)):
            self._by_name[name] = self._entry(first + index, array, ranges, is_weight, mean)
        new = [name for name, _ in fresh]
        for server in self.routes.servers:
            self._declare_to(server, new, lambda entry: self.routes.direct(entry.slices))
        if is_weight and self.routes.host:
            self._declare_to(self.routes.host, new, lambda entry: entry.ways, is_relay=True)

    def declare_parts(self, names: list[Key], sizes: Sequence[int], servers: Sequence[int]) -> None:
        """Declare float32 keys that are pushed by one worker each, the first by worker 0: their sizes in elements, and
        the server of each. Waits for no answer."""
        first = FIRST_SUM + sum(not entry.is_weight for entry in self)
        for pusher, (name, size, server) in enumerate(zip(names, sizes, servers, strict=True)):
            ranges = sharding.cut_on(server, first + pusher, size, FLOAT.itemsize)
            slices = [WorkerSlice(each, FLOAT, None, None) for each in ranges]
            self._by_name[name] = Entry(
                first + pusher, size, FLOAT, slices, self.routes.direct(slices), NONE, False, pusher=pusher
            )
        for link in self.routes.servers:
            self._declare_to(link, names, lambda entry: entry.ways)

    def _declare_to(
        self, link: ServerLink, names: list[Key], ways: Callable[[Entry], list[Way]], is_relay: bool = False
    ) -> None:
        """Declare on `link` the slices of these keys whose way uses it."""
        here = [
            declared(name, entry, [way.slice for way in ways(entry) if way.link is link], is_relay)
            for name in names
            for entry in [self._by_name[name]]
        ]
        message = Declare(self.kind, self.staleness, tuple(each for each in here if each.slices))
        link.request(encode(message), self.seconds)

    def _entry(self, number: int, array: Array, ranges: list[sharding.Slice], is_weight: bool, mean: bool) -> Entry:
        compresses = is_weight and array.dtype == np.float32
        compression = self._compression if compresses else NONE
        codec = codecs.make(compression)
        result = codec and codec.of_sum(self.num_workers)
        slices = [
            WorkerSlice(each, array.dtype, codec and codec.of_sum(self.routes.summed(each.server)), result)
            for each in ranges
        ]
        ways = self.routes.of_weight(slices) if is_weight else self.routes.direct(slices)
        return Entry(number, array.size, array.dtype, slices, ways, compression, is_weight, mean and codec is None)
