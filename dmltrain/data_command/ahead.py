"""Work on many images by threads, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dmltrain.errors import UserError

AHEAD = 4  # results of each thread that may wait
Result = TypeVar("Result")


def check_threads(count: int) -> None:
    if count < 1:
        raise UserError(f"--num-thread {count}: expected 1 or more")


def ahead(make: Callable[[int], Result], indices: Iterable[int], threads: int) -> Iterator[Result]:
    """make(index) for each index, in order, computed in advance by `threads` threads."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="dmltrain-data")
    waiting: deque[Future[Result]] = deque()
    try:
        for index in indices:
            waiting.append(pool.submit(make, index))
            if len(waiting) > threads * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
