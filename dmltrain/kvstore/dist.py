"""A worker's side of the distributed kvstores: sends slices to their servers, receives values in place.

One sending and one receiving thread for each server. Pushes and pulls of a key are numbered by its clock; a value lands
in the memory that its pull named. Server answers to requests (not pulls) come in the order of the requests.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore import link, plan, wire
from dmltrain.kvstore.base import Handle, Key, Keys, KVStore, as_array, keys_and_values, summed
from dmltrain.kvstore.control import EXIT_SECONDS, Control
from dmltrain.kvstore.handshake import Caller
from dmltrain.kvstore.link import Closed, Link, Outbox
from dmltrain.kvstore.plan import Slice
from dmltrain.kvstore.wire import FrameError, Header, Kind

LAST = -(1 << 30)  # priority of requests: after the pushes before them
LINGER_SECONDS = 2.0  # after a server's link broke, for the scheduler to say who was lost


@dataclass
class _Entry:
    """One key: its number on the wire, its slices, its clock (how often this worker has pushed it)."""

    number: int
    size: int
    dtype: str
    slices: list[Slice]
    clock: int = 0
    priority: int = 0  # of the last push: its pull must not overtake it


@dataclass
class _Server:
    """The link to one server and what is expected from it."""

    name: str
    link: Link
    outbox: Outbox
    pulls: dict[tuple[int, int, int], deque[tuple[memoryview, Handle]]] = field(default_factory=dict)
    requests: deque[tuple[Handle, list[bytearray]]] = field(default_factory=deque)


class DistKVStore(KVStore):
    """dist_sync, dist_async and dist_ssp. `meaning` is one of these; see dmltrain.kvstore.create."""

    present = False  # one for each process: it is the process's place in the job

    def __init__(self, kind: str, meaning: str, staleness: float, environment: Environment,
                 exit_seconds: float = EXIT_SECONDS) -> None:
        DistKVStore.present = True
        self.type = kind
        self.rank, self.num_workers = environment.index, environment.num_workers
        self.num_servers = environment.num_servers
        self._meaning, self._staleness = meaning, staleness
        self._environment = environment
        self._entries: dict[Key, _Entry] = {}
        self._loads = [0] * environment.num_servers
        self._staleness_seen = np.zeros(2)  # sum and count
        self._barriers = 0
        self._stepping = False
        self._closed = False
        self._lock = threading.Lock()  # guards pulls, requests and staleness
        self._servers: list[_Server] = []
        self._process = os.getpid()
        self._control = Control(environment, on_end=self._end, exit_seconds=exit_seconds)
        self.facts = self._control.wait_for_start()  # what the scheduler told everybody
        addresses = self.facts["servers"]
        self._servers = [self._connect(number, host, port) for number, (host, port) in enumerate(addresses)]
        for server in self._servers:
            threading.Thread(target=self._receive, args=(server,), name=f"from {server.name}", daemon=True).start()
        atexit.register(self._at_exit)

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return sum(server.link.bytes_sent for server in self._servers)

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return sum(server.link.bytes_received for server in self._servers)

    # -- MXNet's interface ----------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Any) -> None:
        keys, values = keys_and_values(key, value)
        arrays = [summed(item) for item in values]
        self._declare(keys, arrays, is_weight=True)
        if self.rank == 0:
            for name, array in zip(keys, arrays, strict=True):
                self._initialise(self._entries[name], array)
        self._flush()
        self.barrier()

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        keys, values = keys_and_values(key, value)
        if self._meaning != "dist_sync" and not self._stepping:
            raise UserError(f"kvstore {self.type} makes the optimizer's step on the servers: call set_optimizer first")
        for name, item in zip(keys, values, strict=True):
            entry, array = self._find(name), summed(item)
            self._check_size(name, entry, array)
            entry.clock, entry.priority = entry.clock + 1, priority
            self._send(entry, Kind.PUSH, array, priority, rate)

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        keys, targets = keys_and_values(key, out)
        entries = [self._find(name) for name in keys]
        handle = Handle(sum(len(entry.slices) for entry in entries), f"pull of {_names(keys)}",
                        self._environment.wait_seconds + 10.0)
        for name, entry, target in zip(keys, entries, targets, strict=True):
            self._pull(name, entry, target, priority, handle)
        if self._control.failure:
            handle.fail(self._control.failure)
        if wait:
            handle.wait()
        return handle

    def barrier(self) -> None:
        self._barriers += 1
        self._control.barrier(f"{self._barriers}")

    def all_reduce(self, name: str, array: np.ndarray) -> np.ndarray:
        values = np.array(array, np.float64)
        key = f"sum of {name} ({values.size})"
        if key not in self._entries:
            self._declare([key], [values.reshape(-1)], is_weight=False)
            self._flush()
        entry = self._entries[key]
        entry.clock += 1
        self._send(entry, Kind.PUSH, values.reshape(-1), 0, -1.0)
        self.pull(key, values)
        return values

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        if self.rank == 0:
            frame = wire.control(Kind.OPTIMIZER, spec)
            for handle in [self._request(server, frame) for server in self._servers]:
                handle.wait()
        self._stepping = True
        self.barrier()

    def key_number(self, key: Key) -> int:
        return self._find(key).number

    def optimizer_states(self) -> list[bytearray]:
        answers: list[list[bytearray]] = [[] for _ in self._servers]
        for server, answer in zip(self._servers, answers, strict=True):
            self._request(server, Header(Kind.READ_STATE).pack(), answer).wait()
        return [answer[0] for answer in answers]

    def load_optimizer_state_bytes(self, states: list[bytes]) -> None:
        if len(states) != len(self._servers):
            raise UserError(f"the optimizer's state is of a job with {len(states)} servers, this one has "
                            f"{len(self._servers)}: continue with -s {len(states)}")
        if self.rank == 0:
            for server, state in zip(self._servers, states, strict=True):
                self._request(server, Header(Kind.STATE, len(state)).pack() + state).wait()
        self.barrier()

    def take_staleness(self) -> float:
        with self._lock:
            total, count = self._staleness_seen
            self._staleness_seen = np.zeros(2)
        return float(total / max(1.0, count))

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
        sent = [server.outbox.finish(self._environment.wait_seconds) for server in self._servers]
        if not all(sent) and not self._control.failure:
            self.abort("its last pushes could not be sent")
            raise JobLost("the servers did not take this worker's last pushes")
        self._closed = True
        self._control.bye()
        for server in self._servers:
            server.link.cut()

    # -- sending --------------------------------------------------------------------------------------------------

    def _connect(self, number: int, host: str, port: int) -> _Server:
        environment, name = self._environment, f"server {number} at {host}:{port}"
        caller = Caller.new(environment.job, environment.key, "worker", environment.index)
        try:
            connection = link.connect((host, port), caller, timeout=10.0)
        except (OSError, Closed, FrameError) as error:
            raise JobLost(f"{name} cannot be reached: {error}") from error
        return _Server(name, connection, Outbox(connection, f"to {name}"))

    def _declare(self, keys: list[Key], arrays: list[np.ndarray], is_weight: bool) -> None:
        fresh = [(key, array) for key, array in zip(keys, arrays, strict=True) if key not in self._entries]
        first = len(self._entries)
        sizes, itemsizes = [array.size for _, array in fresh], [array.itemsize for _, array in fresh]
        slices = plan.cut(sizes, itemsizes, self._loads, first)
        for offset, ((key, array), pieces) in enumerate(zip(fresh, slices, strict=True)):
            self._entries[key] = _Entry(first + offset, array.size, array.dtype.name, pieces)
        for number, server in enumerate(self._servers):
            here = [self._declaration(key, is_weight, number) for key, _ in fresh]
            message = {"type": self._meaning, "staleness": self._staleness,
                       "keys": [entry for entry in here if entry["slices"]]}
            self._request(server, wire.control(Kind.DECLARE, message))

    def _declaration(self, key: Key, is_weight: bool, server: int) -> dict[str, Any]:
        entry = self._entries[key]
        mine = [[piece.index, piece.length] for piece in entry.slices if piece.server == server]
        return {"key": entry.number, "name": str(key), "dtype": entry.dtype, "weight": is_weight, "slices": mine}

    def _initialise(self, entry: _Entry, array: np.ndarray) -> None:
        data, size = _bytes(array), array.itemsize
        for piece in entry.slices:
            part = data[piece.start * size:(piece.start + piece.length) * size]
            header = Header(Kind.INIT, part.nbytes, self.rank, piece.key, piece.index, 0, 0.0,
                            wire.DTYPES.index(entry.dtype))
            self._request(self._servers[piece.server], header.pack(), payload=part)

    def _send(self, entry: _Entry, kind: Kind, array: np.ndarray, priority: int, rate: float) -> None:
        data, size, dtype = _bytes(array), array.itemsize, wire.DTYPES.index(entry.dtype)
        for piece in entry.slices:
            part = data[piece.start * size:(piece.start + piece.length) * size]
            header = Header(kind, part.nbytes, self.rank, piece.key, piece.index, entry.clock, rate, dtype)
            self._servers[piece.server].outbox.put(header.pack(), part, priority)

    def _pull(self, name: Key, entry: _Entry, target: Any, priority: int, handle: Handle) -> None:
        targets = list(target) if isinstance(target, (list, tuple)) else [target]
        arrays = [as_array(item) for item in targets]
        if any(getattr(getattr(item, "device", None), "type", "cpu") != "cpu" for item in targets):
            raise UserError(f"kvstore: pull of key {name!r} needs memory of the CPU; copy to the device afterwards")
        for array in arrays:
            self._check_size(name, entry, array)
        first = arrays[0]
        direct = first.flags.c_contiguous and first.flags.writeable
        landing = first.reshape(-1) if direct else np.empty(entry.size, entry.dtype)
        for array in arrays[1:] if direct else arrays:
            handle.then(lambda array=array, landing=landing: np.copyto(array, landing.reshape(array.shape)))
        self._ask(entry, landing, priority, handle)

    def _ask(self, entry: _Entry, landing: np.ndarray, priority: int, handle: Handle) -> None:
        data, size = _bytes(landing), landing.itemsize
        for piece in entry.slices:
            server = self._servers[piece.server]
            part = data[piece.start * size:(piece.start + piece.length) * size]
            with self._lock:
                server.pulls.setdefault((piece.key, piece.index, entry.clock), deque()).append((part, handle))
            header = Header(Kind.PULL, 0, self.rank, piece.key, piece.index, entry.clock)
            server.outbox.put(header.pack(), None, min(priority, entry.priority))

    def _request(self, server: _Server, frame: bytes, answer: list[bytearray] | None = None,
                 payload: memoryview | None = None) -> Handle:
        handle = Handle(1, f"request to {server.name}", self._environment.wait_seconds)
        with self._lock:  # one order for both queues
            server.requests.append((handle, [] if answer is None else answer))
            server.outbox.put(frame, payload, LAST)
        if self._control.failure:
            handle.fail(self._control.failure)
        return handle

    def _flush(self) -> None:
        """Wait until the servers have answered all requests."""
        with self._lock:
            handles = [server.requests[-1][0] for server in self._servers if server.requests]
        for handle in handles:
            handle.wait()

    # -- receiving ------------------------------------------------------------------------------------------------

    def _receive(self, server: _Server) -> None:
        try:
            while True:
                self._take(server, server.link.read_header())
        except (Closed, OSError) as error:
            self._server_lost(f"{server.name} closed the connection: {error}")
        except Exception as error:  # whatever it is, nobody may wait for this server any more
            self._server_lost(f"{server.name} sent what was not asked for: {error!r}")

    def _take(self, server: _Server, header: Header) -> None:
        if header.kind == Kind.VALUE:
            place = (header.key, header.slice, header.round)
            with self._lock:
                waiting = server.pulls[place]
                self._staleness_seen += (header.number, 1.0)
                target, handle = waiting.popleft()
                if not waiting:
                    del server.pulls[place]
            if header.length != target.nbytes:
                raise FrameError(f"{header.length} bytes for key {header.key}, expected {target.nbytes}")
            if header.length:
                server.link.read_into(target)
            handle.part_done()
        elif header.kind == Kind.ERROR:
            self.lose(str(server.link.read_control(header).get("reason")))
        else:
            self._answer(server, header)

    def _answer(self, server: _Server, header: Header) -> None:
        with self._lock:
            handle, answer = server.requests.popleft()
        if header.kind == Kind.STATE:
            data = bytearray(header.length)
            server.link.read_into(memoryview(data))
            answer.append(data)
        elif header.kind != Kind.DONE:
            raise FrameError(f"frame kind {header.kind}")
        handle.part_done()

    def _server_lost(self, reason: str) -> None:
        if self._closed or self._control.shutdown.wait(LINGER_SECONDS) or self._control.failure:
            return
        self._control.fail(reason)

    def _end(self, reason: str) -> None:
        if not reason:
            return
        with self._lock:
            for server in self._servers:
                for waiting in server.pulls.values():
                    for _, handle in waiting:
                        handle.fail(reason)
                for handle, _ in server.requests:
                    handle.fail(reason)
        for server in self._servers:
            server.link.cut()

    # -- checks ---------------------------------------------------------------------------------------------------

    def _find(self, name: Key) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise UserError(f"kvstore: key {name!r} was never given to init")
        return entry

    def _check_size(self, name: Key, entry: _Entry, array: np.ndarray) -> None:
        if array.size != entry.size or array.dtype.name != entry.dtype:
            raise UserError(f"kvstore: key {name!r} was declared with {entry.size} elements of {entry.dtype}; "
                            f"this array has {array.size} of {array.dtype.name}")


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def _names(keys: list[Key]) -> str:
    return f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys from {keys[0]!r} on"
