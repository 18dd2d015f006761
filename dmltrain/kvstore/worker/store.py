"""A worker's side of the distributed kvstores: keys, their slices, and what is done with them.

Pushes and pulls of a key are numbered by its clock. routes.py has the links, server_link.py moves the slices.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore.base import READ, Handle, Key, Keys, KVStore, as_array, keys_and_values, summed
from dmltrain.kvstore.scheduler.client import EXIT_SECONDS, Control
from dmltrain.kvstore.transport.message import Optimizer, encode
from dmltrain.kvstore.transport.wire import Flag, Header, Kind
from dmltrain.kvstore.waiting import Trip, Waits, split
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.bound import Bound, Carried
from dmltrain.kvstore.worker.entry import Entry, Reading, cut
from dmltrain.kvstore.worker.keys import Entries
from dmltrain.kvstore.worker.outgoing import Outgoing
from dmltrain.kvstore.worker.relay import LINGER_SECONDS
from dmltrain.kvstore.worker.routes import Place, Routes, Way
from dmltrain.kvstore.worker.server_link import Landing, Part, ServerLink


class DistKVStore(KVStore):
    """All distributed types. `staleness`: their bound, in clocks; see dmltrain.kvstore.create."""

    present = False  # one for each process: it is the process's place in the job

    def __init__(self, kind: str, staleness: float, environment: Environment,
                 exit_seconds: float = EXIT_SECONDS) -> None:
        DistKVStore.present = True
        self.type = kind
        self.rank, self.num_workers = environment.index, environment.num_workers
        self.num_servers = environment.num_servers
        self._environment = environment
        self._staleness_taken = (0.0, 0)  # what take_staleness has told: sum and count
        self._barriers = 0
        self.waits: Waits = Waits()
        self._stepping = False
        self._bound: Bound | None = None
        self._closed = False
        self._process = os.getpid()
        place = Place(environment, sums=self.kvstore_type.sums_in_host and environment.num_workers > 1)
        self._arena = place.arena
        self._links: list[ServerLink] = []
        self._control = Control(environment, on_end=self._end, exit_seconds=exit_seconds, socket_name=place.socket_name)
        self.start = self._control.wait_for_start()  # what the scheduler told everybody
        self._routes = self._connect(place)
        self._servers, self._links = self._routes.servers, self._routes.all_links
        self._entries = Entries(self._routes, self.num_workers, self.kvstore_type.name, staleness, self._seconds)
        atexit.register(self._at_exit)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return sum(link.link.bytes_sent + link.traffic.shared_sent for link in self._links)

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return sum(link.link.bytes_received + link.traffic.shared_received for link in self._links)

    # -- MXNet's interface ----------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any) -> None:
        keys, values = keys_and_values(key, value)
        arrays = [summed(item) for item in values]
        self._entries.declare(keys, arrays, is_weight=True)
        if self.rank == 0:
            for name, array in zip(keys, arrays, strict=True):
                for link, part in self._routes.direct(self._entries.find(name).parts):
                    link.initialise(part, cut(array, part), self._seconds)
        self._flush()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        keys, values = keys_and_values(key, value)
        self._check_stepping()
        outgoing = Outgoing()
        for name, item in zip(keys, values, strict=True):
            self._push(name, self._entries.find(name), item, priority, rate, outgoing)
        outgoing.send(self._routes.links)

    def _check_stepping(self) -> None:
        if self.kvstore_type.needs_server_optimizer and not self._stepping:
            raise UserError(f"kvstore {self.type} makes the optimizer's step on the servers: call set_optimizer first")

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        keys, targets = self._targets(key, out)
        handle, outgoing = self._handle(keys), Outgoing()
        for name, target in zip(keys, targets, strict=True):
            entry = self._entries.find(name)
            ways = self._routes.direct(entry.parts) if entry.given else entry.ways
            self._expect(name, entry, ways, target, handle, entry.clock)
            for link, part in ways:
                outgoing.add(link, link.pull(part, entry.clock, min(priority, entry.priority)))
        outgoing.send(self._routes.links)
        return self._waited(handle, wait)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0, wait: bool = True,
                 rate: float = -1.0) -> Handle:
        keys, values = keys_and_values(key, value)
        _, targets = self._targets(key, value if out is None else out)
        self._check_stepping()
        handle, outgoing = self._handle(keys), Outgoing()
        for name, item, target in zip(keys, values, targets, strict=True):
            self._push(name, self._entries.find(name), item, priority, rate, outgoing, target, handle)
        outgoing.send(self._routes.links)
        return self._waited(handle, wait)

    def _targets(self, key: Keys, out: Any) -> tuple[list[Key], list[Any]]:
        if out is not READ:
            return keys_and_values(key, out)
        keys = [key] if isinstance(key, (int, str)) else list(key)
        return keys, [READ] * len(keys)

    def _handle(self, keys: list[Key]) -> Handle:
        parts = sum(len(self._entries.find(name).parts) for name in keys)
        return Handle(parts, f"pull of {_names(keys)}", self._environment.wait_seconds + 10.0, self._count_wait)

    def _count_wait(self, trip: Trip | None, since: float, until: float) -> None:
        self.waits += split(trip, since, until)

    def _began(self, entry: Entry) -> float:
        """When the trip of a key's next values began: with its push, or with the pull where that waits for no round."""
        return entry.pushed if self.kvstore_type.synchronous or not entry.is_weight else time.perf_counter()

    def _waited(self, handle: Handle, wait: bool) -> Handle:
        if self._control.failure:
            handle.fail(self._control.failure)
        if wait:
            handle.wait()
        return handle

    def buffers(self, keys: Sequence[Key]) -> list[np.ndarray]:
        return [self._buffer(self._entries.find(name)) for name in keys]

    def _buffer(self, entry: Entry) -> np.ndarray:
        if entry.buffer is None:
            size = entry.size * entry.dtype.itemsize
            shared = self._arena is not None and any(link.link.own_arena for link, _ in entry.ways)
            taken = self._arena.take(size) if self._arena and shared else None
            entry.place, memory = taken if taken else (None, np.empty(size, np.uint8))
            entry.buffer = memory.view(entry.dtype)
        return entry.buffer

    def set_gradient_compression(self, parameters: dict[str, Any]) -> None:
        self._entries.compress(parameters)

    def barrier(self) -> None:
        self._barriers += 1
        since = time.perf_counter()
        self._control.barrier(f"{self._barriers}")
        self.waits += Waits(straggler=time.perf_counter() - since)

    def all_reduce(self, name: str, array: np.ndarray) -> np.ndarray:
        values = np.array(array, np.float64)
        self._sum_up(name, values)
        return values

    def _sum_up(self, name: str, values: np.ndarray) -> None:
        """Replace `values` by the sum of all workers' values."""
        key = f"sum of {name} ({values.size})"
        if key not in self._entries:
            self._entries.declare([key], [values.reshape(-1)], is_weight=False)
            self._flush()
        outgoing = Outgoing()
        self._push(key, self._entries.find(key), values.reshape(-1), 0, -1.0, outgoing)
        outgoing.send(self._routes.links)
        self.pull(key, values)

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        if self.rank == 0:
            frame = encode(Optimizer(spec))
            for handle in [self._asked(server.request(frame, self._seconds)) for server in self._servers]:
                handle.wait()
        self._stepping = True
        self.barrier()

    def key_number(self, key: Key) -> int:
        return self._entries.find(key).number

    def optimizer_states(self) -> list[bytearray]:
        answers: list[list[bytearray]] = [[] for _ in self._servers]
        for server, answer in zip(self._servers, answers, strict=True):
            self._asked(server.request(Header(Kind.READ_STATE).pack(), self._seconds, answer)).wait()
        return [answer[0] for answer in answers]

    def load_optimizer_state_bytes(self, states: list[bytes]) -> None:
        if len(states) != len(self._servers):
            raise UserError(f"the optimizer's state is of a job with {len(states)} servers, this one has "
                            f"{len(self._servers)}: continue with -s {len(states)}")
        if self.rank == 0:
            for server, state in zip(self._servers, states, strict=True):
                frame = Header(Kind.STATE, len(state)).pack() + state
                self._asked(server.request(frame, self._seconds)).wait()
        self.barrier()
        for entry in self._entries:
            entry.given = True

    def held_back(self) -> dict[str, np.ndarray]:
        parts = residual.parts_of(self._entries)
        if not parts:
            return {}
        own = residual.gathered(parts)
        held = {}
        for worker in range(self.num_workers):  # one after the other: on the way there is memory for one
            values = own.copy() if worker == self.rank else np.zeros_like(own)
            self._sum_up("held back", values)
            if self.rank == 0:
                held[f"worker {worker}"] = values
        if self.rank == 0 and not self._stepping:
            states = self.optimizer_states()
            held |= {f"server {number}": np.frombuffer(state, np.uint8) for number, state in enumerate(states)}
        return held

    def put_back(self, held_back: dict[str, np.ndarray]) -> None:
        parts = residual.parts_of(self._entries)
        workers = [array for name, array in held_back.items() if name.startswith("worker ")]
        servers = [array for name, array in held_back.items() if name.startswith("server ")]
        if not parts:
            return
        residual.spread(parts, workers, lambda part: self._keeps(part, len(workers)))
        if len(servers) == self.num_servers and not self._stepping:
            self.load_optimizer_state_bytes([array.tobytes() for array in servers])

    def _keeps(self, part: Part, workers: int) -> Iterable[int]:
        """Whose residuals of a part, of that many workers, are this one's from now on."""
        if workers == self.num_workers:
            return self._routes.keeps(part.piece.server)
        return range(workers) if self.rank == 0 else ()

    def take_staleness(self) -> float:
        now = (sum(link.traffic.staleness for link in self._routes.links),
               sum(link.traffic.values for link in self._routes.links))
        before, self._staleness_taken = self._staleness_taken, now
        return (now[0] - before[0]) / max(1, now[1] - before[1])

    def measure_limits(self) -> str:
        if not self._environment.probe:
            return ""
        routes = self._routes
        hosts = [worker.host_id or f"of worker {rank}" for rank, worker in enumerate(self.start.workers)]
        hosts += [server.host_id for server in self.start.servers]
        upstream = routes.relay.links if routes.relay else {}
        self._bound = Bound(self, routes.servers, routes.host, upstream, hosts)
        return str(self._bound)

    def carried(self) -> Carried | None:
        return self._bound and self._bound.carried()

    def bound(self, carried: Carried, took: float) -> float:
        return self._bound.seconds(carried, took) if self._bound else 0.0

    def abort(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._control.abort(reason)
            self._control.close()

    def lose(self, reason: str) -> None:
        """End the job for everybody; this process too, whatever its main thread waits for. Called on another thread."""
        self._control.abort(reason)
        self._control.fail(reason)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child ends
        failed = getattr(sys, "last_type", None)  # set when an exception ends the program
        if failed is None:
            self.close()
        else:
            self.abort(f"ended by {failed.__name__}: {sys.last_value}")

    def close(self) -> None:
        if self._closed:
            return
        sent = [link.outbox.finish(self._environment.wait_seconds) for link in self._routes.links]
        if not all(sent) and not self._control.failure:
            self.abort("its last pushes could not be sent")
            raise JobLost("the servers did not take this worker's last pushes")
        self._closed = True
        self._control.bye()
        for link in self._routes.links:
            link.link.cut()
        if self._routes.relay:  # it is here for the others of this host as well
            self._routes.relay.leave(self._control.over)

    # -- links ----------------------------------------------------------------------------------------------------

    @property
    def _seconds(self) -> float:
        return self._environment.wait_seconds

    def _connect(self, place: Place) -> Routes:
        try:
            return Routes(self._environment, self.start, place, self._link_lost, self.lose)
        except (JobLost, UserError) as error:
            self._control.abort(str(error))
            raise

    def _asked(self, handle: Handle) -> Handle:
        if self._control.failure:
            handle.fail(self._control.failure)
        return handle

    def _flush(self) -> None:
        """Wait until the servers have answered all requests."""
        for handle in [link.last_request() for link in self._routes.links]:
            if handle is not None:
                self._asked(handle).wait()

    def _link_lost(self, reason: str) -> None:
        if self._closed or self._control.shutdown.wait(LINGER_SECONDS) or self._control.failure:
            return
        self._control.fail(reason)

    def _end(self, reason: str) -> None:
        if reason:
            for link in self._links:
                link.fail(reason)

    # -- keys and slices ------------------------------------------------------------------------------------------

    def _push(self, name: Key, entry: Entry, item: Any, priority: int, rate: float, outgoing: Outgoing,
              target: Any = None, handle: Handle | None = None) -> None:
        """Add the pushes of all slices to `outgoing`; with `handle` their values go into `target` as well."""
        own = item is entry.buffer  # nothing to look at, and its place is known
        array: np.ndarray = item if own else summed(item)
        if not own:
            self._check_size(name, entry, array)
        entry.pushed = time.perf_counter()
        if handle:
            self._expect(name, entry, entry.ways, target, handle, entry.clock + 1)
        entry.clock, entry.priority, entry.given = entry.clock + 1, priority, False
        kept, entry.kept = entry.kept, []
        for (link, part), place in kept:
            outgoing.add_read(link, (part, place))
        for link, part in entry.ways:
            flags = Flag.PULL if handle else 0
            known = entry.place + part.piece.start * entry.dtype.itemsize if own and entry.place is not None else None
            outgoing.add(link, link.push(part, cut(array, part), entry.clock, rate, priority, flags, entry.pushed,
                                         known))

    def _expect(self, name: Key, entry: Entry, ways: list[Way], target: Any, handle: Handle, clock: int) -> None:
        """The key's values at `clock` go to `target`."""
        if target is READ:
            return self._expect_reading(entry, ways, handle, clock)
        targets = list(target) if isinstance(target, (list, tuple)) else [target]
        arrays = [as_array(item) for item in targets]
        if any(getattr(getattr(item, "device", None), "type", "cpu") != "cpu" for item in targets):
            raise UserError(f"kvstore: pull of key {name!r} needs memory of the CPU; copy to the device afterwards")
        for array in arrays:
            self._check_size(name, entry, array)
        first = arrays[0]
        direct = first.flags.c_contiguous and first.flags.writeable
        landing, asked = first.reshape(-1) if direct else np.empty(entry.size, entry.dtype), self._began(entry)
        for array in arrays[1:] if direct else arrays:
            handle.then(lambda array=array, landing=landing: np.copyto(array, landing.reshape(array.shape)))
        for link, part in ways:
            link.expect(Landing(part, cut(landing, part), handle, asked=asked), clock)

    def _expect_reading(self, entry: Entry, ways: list[Way], handle: Handle, clock: int) -> None:
        """Values are read where the server wrote them, as far as they lie in one piece."""
        if entry.landing is None:
            entry.landing = np.empty(entry.size, entry.dtype)
        reading = Reading(entry, ways, handle, len(handle.values), [None] * len(ways))
        asked = self._began(entry)
        for way in ways:
            way.link.expect(Landing(way.part, cut(entry.landing, way.part), handle, reading.keep, asked), clock)
        handle.values.append(entry.landing)
        handle.then(reading.finish)

    # -- checks ---------------------------------------------------------------------------------------------------

    def _check_size(self, name: Key, entry: Entry, array: np.ndarray) -> None:
        if array.size != entry.size or array.dtype != entry.dtype:
            raise UserError(f"kvstore: key {name!r} was declared with {entry.size} elements of {entry.dtype.name}; "
                            f"this array has {array.size} of {array.dtype.name}")


def _names(keys: list[Key]) -> str:
    return f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys from {keys[0]!r} on"
