"""What requests of the user wait for, and what became of it. Pure.

A request waits for several things, each named by a key, such as a worker that joins. It is answered when all of them
have been settled.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from dmltrain_launch.run.supervisor.action import Reply


@dataclass
class Waiter:
    """One request. `code`: of the first thing that failed, else 0."""

    number: int
    keys: set[Hashable] = field(default_factory=set)
    notes: list[tuple[str, int | None]] = field(default_factory=list)
    code: int = 0

    def note(self, text: str, code: int = 0, process: int | None = None) -> None:
        """Something was done, or failed if `code` is not 0. `process`: show its last lines."""
        self.notes.append((text, process))
        self.code = self.code or code


class Waiters:
    """All requests that have not been answered."""

    def __init__(self) -> None:
        self._all: list[Waiter] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def keys(self) -> set[Hashable]:
        """All that anybody waits for."""
        return {key for each in self._all for key in each.keys}

    def add(self, waiter: Waiter) -> None:
        self._all.append(waiter)

    def settle(self, key: Hashable, text: str, code: int = 0, process: int | None = None) -> None:
        """Nobody waits for this any more. `text` "": there is nothing to say."""
        for each in self._all:
            if key in each.keys:
                each.keys.discard(key)
                if text:
                    each.note(text, code, process)

    def swap(self, key: Hashable, keys: Collection[Hashable]) -> None:
        """Who waits for `key` waits for `keys` instead."""
        for each in self._all:
            if key in each.keys:
                each.keys.discard(key)
                each.keys.update(keys)

    def settle_all(self, text: str, code: int) -> None:
        """Nothing will happen any more."""
        for each in self._all:
            if each.keys:
                each.keys.clear()
                each.note(text, code)

    def replies(self) -> list[Reply]:
        """The answers to those that wait for nothing any more, once each."""
        done = [each for each in self._all if not each.keys]
        self._all = [each for each in self._all if each.keys]
        return [Reply(each.number, each.code, tuple(each.notes)) for each in done]
