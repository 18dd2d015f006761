"""Requests of `dmltrain job` to a running job: from its control socket to the supervisor, and back."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence

from dmltrain_launch.control.listener import Listener
from dmltrain_launch.control.listener import Reply as Answered
from dmltrain_launch.control.message import Answer, Request
from dmltrain_launch.run.supervisor.action import Reply
from dmltrain_launch.run.supervisor.event import Asked, Event

Explain = Callable[[Sequence[tuple[str, int | None]]], list[str]]


class Requests:
    """Listens until `close`; with `listens` False, never. `name`: of the socket, or "".

    Requests wait in `events` for a supervisor; `first` is the number of the first one. `explain` turns the notes of a
    reply into lines.
    """

    def __init__(self, mark: str, dmltrain: str, explain: Explain, listens: bool, first: int = 0):
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._explain = explain
        self._numbers = itertools.count(first)
        self._waiting: dict[int, Answered] = {}
        self._listener = Listener(mark, self._ask, dmltrain) if listens else None
        self.name = self._listener.name if self._listener else ""

    def _ask(self, request: Request, reply: Answered) -> None:
        number = next(self._numbers)
        self._waiting[number] = reply
        self.events.put(Asked(number, request.do, request.what))

    def answer(self, reply: Reply) -> None:
        answered = self._waiting.pop(reply.number, None)
        if answered is None:
            return  # it came through an earlier launcher, and its control socket went with that launcher
        answered(Answer(reply.code, tuple(self._explain(reply.notes))))

    def close(self) -> None:
        if self._listener:
            self._listener.close()
