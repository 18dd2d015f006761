"""Requests of the user that wait until something has happened. Pure.

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
        """Add a line to the answer: something was done, or, if `code` is not 0, it failed.

        `process`: the number of a process whose last lines explain it.
        """
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
        """The keys of everything that a request waits for."""
        return {key for waiter in self._all for key in waiter.keys}

    def add(self, waiter: Waiter) -> None:
        self._all.append(waiter)

    def settle(self, key: Hashable, text: str, code: int = 0, process: int | None = None) -> None:
        """`key` has happened, or will never happen: no request waits for it any more. `text` "": nothing to say."""
        for waiter in self._all:
            if key in waiter.keys:
                waiter.keys.discard(key)
                if text:
                    waiter.note(text, code, process)

    def swap(self, key: Hashable, keys: Collection[Hashable]) -> None:
        """Requests that wait for `key` wait for all of `keys` instead."""
        for waiter in self._all:
            if key in waiter.keys:
                waiter.keys.discard(key)
                waiter.keys.update(keys)

    def settle_all(self, text: str, code: int) -> None:
        """Answer all requests, because nothing will happen any more."""
        for waiter in self._all:
            if waiter.keys:
                waiter.keys.clear()
                waiter.note(text, code)

    def replies(self) -> list[Reply]:
        """The answers to requests that do not wait for anything any more. Each is returned once."""
        done = [waiter for waiter in self._all if not waiter.keys]
        self._all = [waiter for waiter in self._all if waiter.keys]
        return [Reply(waiter.number, waiter.code, tuple(waiter.notes)) for waiter in done]
