"""Memory that all workers of a host share, and counters in it that tell each how far the others are. Linux on x86-64.

Each worker writes its own counters and slots only. A counter is a futex (man 2 futex), so a worker that waits for
another one sleeps in the kernel. x86-64 keeps the order of writes, which the counters rely on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch._C._distributed_c10d import PrefixStore, Store

from dmltrain.base.arrays import Array
from dmltrain.base.errors import JobLost
from dmltrain.kvstore.transport import rendezvous

SLOT_BYTES, SLOTS = 1 << 19, 4  # of each worker
POSTED, REDUCED, TAKEN = STAGES = range(3)  # of a piece: see host_collectives.py
LINE = 64  # bytes of a cache line
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.2  # between two looks for a lost job
SYSCALL_FUTEX, FUTEX_WAIT, FUTEX_WAKE, ALL = 202, 0, 1, (1 << 31) - 1  # of x86-64
WRAP = 1 << 32  # of a counter

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LOOK = ctypes.byref(_Timespec(0, int(LOOK_SECONDS * 1e9)))


class HostMemory:
    """Of `count` workers, seen by worker `rank`. `lost()`: why the job is lost, or ""; `limit`: s that a wait takes."""

    def __init__(self, descriptor: int, rank: int, count: int, lost: Callable[[], str], limit: float) -> None:
        """Raises OSError."""
        memory = mmap.mmap(descriptor, _size(count))
        self.rank, self.count, self._lost, self._limit = rank, count, lost, limit
        self._words = memoryview(memory).cast("I")
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        notes = np.frombuffer(memory, np.int64, count * SLOTS, _notes_begin(count))
        self.notes = notes.reshape(count, SLOTS)  # of what lies in a slot
        slots = np.frombuffer(memory, np.uint8, offset=_slots_begin(count))
        self._slots = slots.reshape(count, SLOTS, SLOT_BYTES)

    def slot(self, worker: int, piece: int, dtype: np.dtype[Any]) -> Array:
        """Of the piece of this number."""
        found: Array = self._slots[worker, piece % SLOTS].view(dtype)
        return found

    def advance(self, stage: int, pieces: int) -> None:
        """This worker is past `stage` with so many pieces."""
        word = _word(self.rank, stage)
        self._words[word] = pieces % WRAP
        self._futex(word, FUTEX_WAKE, ALL, None)

    def wait(self, stage: int, pieces: int, workers: Sequence[int] | None = None) -> None:
        """For these workers (None: all) to be past `stage` with so many pieces. Raises JobLost."""
        for worker in range(self.count) if workers is None else workers:
            word, since = _word(worker, stage), 0.0
            while ((found := self._words[word]) - pieces) % WRAP >= WRAP // 2:
                if self._futex(word, FUTEX_WAIT, found, _LOOK) and ctypes.get_errno() == errno.ETIMEDOUT:
                    since = since or time.monotonic()
                    self._look(worker, since)

    def wait_for_cause(self, seconds: float) -> None:
        """For the loss of the job, at most so long. Raises JobLost."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._raise_if_lost()
            time.sleep(LOOK_SECONDS)

    def _look(self, worker: int, since: float) -> None:
        self._raise_if_lost()
        if time.monotonic() - since > self._limit:
            raise JobLost(f"worker {worker} has not made this call for {self._limit:g} s (DMLTRAIN_WAIT_TIMEOUT)")

    def _raise_if_lost(self) -> None:
        if reason := self._lost():
            raise JobLost(reason)

    def _futex(self, word: int, operation: int, value: int, seconds: Any) -> int:
        address = ctypes.c_void_p(self._begin + 4 * word)
        result = _libc.syscall(SYSCALL_FUTEX, address, operation, ctypes.c_uint(value), seconds, None, 0)
        return int(result)


def shared(
    store: Store, rank: int, count: int, wanted: bool, lost: Callable[[], str], limit: float
) -> HostMemory | None:
    """The memory of all workers of `store`'s job, which are on one host; None, on all of them, if one does not want it
    or cannot have it."""
    store = PrefixStore("dmltrain memory", store)
    descriptor = _first(store, count) if rank == 0 else _next(store)
    memory = None
    if descriptor is not None:
        with contextlib.suppress(OSError, ValueError):
            memory = HostMemory(descriptor, rank, count, lost, limit) if wanted else None
        os.close(descriptor)
    store.set(f"worker {rank}", "" if memory is None else "mapped")
    return memory if all(store.get(f"worker {each}") for each in range(count)) else None


def _first(store: Store, count: int) -> int | None:
    """Worker 0 makes the memory, and gives the others its descriptor."""
    listening = rendezvous.listen() if platform.machine() == "x86_64" else None
    store.set("name", listening[1] if listening else "")
    if listening is None:
        return None
    descriptor = os.memfd_create("dmltrain sums", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _size(count))
    with listening[0] as socket_, contextlib.suppress(OSError):
        given, until = 0, time.monotonic() + CONNECT_SECONDS
        while given < count - 1:
            socket_.settimeout(max(0.0, until - time.monotonic()))
            connection, _ = socket_.accept()
            with connection:
                if rendezvous.same_user(connection):
                    socket.send_fds(connection, [b"M"], [descriptor])
                    given += 1
    return descriptor


def _next(store: Store) -> int | None:
    name = store.get("name").decode()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)
        if name:
            connection.connect(f"\0{name}")
        if name and rendezvous.same_user(connection):
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            return descriptors[0] if descriptors else None
    return None


def _word(worker: int, stage: int) -> int:
    return (worker * len(STAGES) + stage) * LINE // 4


def _notes_begin(count: int) -> int:
    return count * len(STAGES) * LINE


def _slots_begin(count: int) -> int:
    return -(-(_notes_begin(count) + count * SLOTS * 8) // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(count: int) -> int:
    return _slots_begin(count) + count * SLOTS * SLOT_BYTES
