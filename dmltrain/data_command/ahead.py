"""Work on many images by several threads, with results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dmltrain.base.errors import UserError
from dmltrain.data.ahead import ahead

AHEAD = 4  # results of each thread that may wait
Result = TypeVar("Result")


def check_threads(count: int) -> None:
    if count < 1:
        raise UserError(f"--num-thread {count}: expected 1 or more")


def in_order(make: Callable[[int], Result], indices: Iterable[int], threads: int) -> Iterator[Result]:
    """make(index) for each index, in order, computed in advance by `threads` threads."""
    return ahead(lambda pool, index: pool.submit(make, index).result, indices, threads, threads * AHEAD)
