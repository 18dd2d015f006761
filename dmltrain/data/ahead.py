"""Results that threads compute in advance, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def ahead(
    start: Callable[[Executor, int], Callable[[], Result]], indices: Iterable[int], threads: int, limit: int
) -> Iterator[Result]:
    """The results for these indices, in order. `threads` threads compute them, at most `limit` in advance.

    start(pool, index): submits the work on one result to the pool, and returns a function that waits for the result.
    """
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
