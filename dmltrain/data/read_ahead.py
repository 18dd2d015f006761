"""Reads a chunk-shuffled epoch from the disk in the order of the files, ahead of the threads that decode.

Samples of a window of `--shuffle chunk` lie in a few places of the disk, but come in random order. So a thread reads
the next window's records from the first to the last and drops them. The operating system keeps what was read, and the
decoding threads find it in memory: without seeks, with one more copy of each record.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dmltrain.data.assignment.parts import Part
from dmltrain.data.dataset import Samples


class ReadAhead:
    """For a part of an epoch of `split`. Without `touch` of the split, and without windows, it does nothing."""

    def __init__(self, split: Samples, part: Part) -> None:
        self._touch = getattr(split, "touch", None) if part.window else None
        self._part, self._next = part, 0  # the first window that nobody has asked to read
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dmltrain-batches-disk")

    def reach(self, position: int) -> None:
        """The work on this position of the part begins: read its window and the next."""
        window = self._part.window
        if self._touch is None:
            return
        self._next = max(self._next, position // window)
        while self._next <= position // window + 1 and self._next * window < len(self._part.order):
            self._pool.submit(self._read, self._next * window)
            self._next += 1

    def _read(self, start: int) -> None:
        for sample in np.sort(self._part.order[start : start + self._part.window]).tolist():
            if self._stopped.is_set():
                return
            assert self._touch is not None
            self._touch(sample)

    def close(self) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
