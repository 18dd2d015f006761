"""Work that threads do in advance, with its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def ahead(
    start: Callable[[Executor, int], Callable[[], Result]], indices: Iterable[int], threads: int, limit: int
) -> Iterator[Result]:
    """The results of these indices, in order, computed by `threads` threads, at most `limit` in advance.
    `start(pool, index)` gives the work on a result to the pool, and returns the function that waits for it."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="dmltrain-batches")
    waiting: deque[Callable[[], Result]] = deque()
    try:
        for index in indices:
            waiting.append(start(pool, index))
            if len(waiting) > limit:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
