"""Shared memory of processes on one host: its owner writes, the others read. Linux.

An arena is a memfd: a file without a name. So it never outlives its processes, and no other user can open it. Its
descriptor is sent to other processes through a unix socket (rendezvous.py). After the owner has mapped it, it is sealed
against all later writers: nobody else can write or map it for writing. (Linux before 5.1 has no such seal. Readers map
it read-only there as well, but nothing enforces that; the owner logs it.) An arena reserves as many addresses as the
machine has memory, but uses memory only where it is written. It is allocated upwards from its start and never freed,
because a job declares its keys once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.log import log

ALIGNMENT = 64  # bytes; a cache line, and the best alignment for vector instructions
_SEALS = (1033, 1034)  # F_ADD_SEALS, F_GET_SEALS (linux/fcntl.h)
_SEAL_SIZE = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, _SHRINK, _GROW: a reader can rely on the size
_SEAL_FUTURE_WRITE = 0x10  # only mappings that exist already can be written; Linux 5.1, not in Python's fcntl


class ArenaError(Exception):
    """Memory cannot be shared; the message has the reason."""


class Arena:
    """Memory of this process that others may read."""

    def __init__(self, capacity: int | None = None, add_seals: Callable[[int, int, int], object] = fcntl.fcntl) -> None:
        """`capacity`: bytes of addresses (default: the machine's memory). Raises ArenaError."""
        self.capacity = capacity or os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        self._used = 0
        self._lock = threading.Lock()
        try:
            self.descriptor = os.memfd_create("dmltrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, self.capacity)
            self._memory = np.frombuffer(mmap.mmap(self.descriptor, self.capacity), np.uint8)
            _seal(self.descriptor, add_seals)
        except (OSError, AttributeError, ValueError) as error:
            raise ArenaError(f"no memory to share: {error}") from error
        self._start = self._memory.ctypes.data

    def take(self, size: int) -> tuple[int, Array] | None:
        """Allocate `size` bytes: their offset and memory (size,) uint8; None if no addresses are left."""
        with self._lock:
            offset = self._used
            after = offset + -(-size // ALIGNMENT) * ALIGNMENT
            if after > self.capacity:
                return None
            self._used = after
        return offset, self._memory[offset : offset + size]

    def view(self, offset: int, size: int) -> Array:
        """`size` bytes at `offset`, uint8."""
        return self._memory[offset : offset + size]

    def offset_of(self, array: Array) -> int | None:
        """The offset of a contiguous array in this arena; None if it is outside."""
        offset = array.ctypes.data - self._start
        return offset if offset >= 0 and offset + array.nbytes <= self._used else None


def _seal(descriptor: int, add_seals: Callable[[int, int, int], object]) -> None:
    """Fix the size, and let nobody map it for writing from now on. Raises OSError."""
    try:
        add_seals(descriptor, _SEALS[0], _SEAL_SIZE | _SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log("shared memory is not sealed against writing (Linux before 5.1): processes of this user could change it")
        add_seals(descriptor, _SEALS[0], _SEAL_SIZE)


class Mapping:
    """Another process's arena, for reading. It may lack the seal against writing, which protects its owner only."""

    def __init__(self, descriptor: int) -> None:
        """Closes the descriptor. Raises ArenaError if it is not an arena's."""
        try:
            if fcntl.fcntl(descriptor, _SEALS[1]) & _SEAL_SIZE != _SEAL_SIZE:
                raise ArenaError("the memory that the peer shares could shrink")
            size = os.fstat(descriptor).st_size
            self._memory = np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
        except (OSError, ValueError) as error:
            raise ArenaError(f"the memory that the peer shares cannot be read: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def view(self, offset: int, size: int) -> Array:
        """`size` bytes at `offset`, uint8, read-only. Raises ValueError if they are outside."""
        if offset < 0 or size < 0 or offset + size > self._memory.size:
            raise ValueError(f"{size} bytes at offset {offset} lie outside the shared memory")
        return self._memory[offset : offset + size]
