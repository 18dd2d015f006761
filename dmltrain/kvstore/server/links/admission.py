"""Who may connect to a server or relay, and from which moment on its link is in use."""

from __future__ import annotations

import threading
from collections.abc import Collection

from dmltrain.base.env import Environment
from dmltrain.kvstore.server.links.answers import Answers
from dmltrain.kvstore.server.links.shared_core import SharedCore
from dmltrain.kvstore.server.workers import relay_number
from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.outbox import Outbox

# How long to wait for a view without the worker whose place a caller takes. If none comes, the caller is that worker.
REPLACE_SECONDS = 10.0


class Admission:
    """Fills the queues of `answers`. `complete`: all that are expected have connected.

    The link of a replacement waits for a view that has this worker; then it becomes the link of this rank. The lost
    process may only be frozen, and go on later. It can do no harm: its link was cut, its frames are of older views, and
    the values that it read are released already.

    If a caller's time for the handshake ends just before ACCEPT arrives, it gives its link up before its first frame,
    and connects again. In a view this may also be a replacement: then the view without the lost worker comes soon.
    """

    def __init__(self, environment: Environment, shared: SharedCore, answers: Answers) -> None:
        self._environment, self._shared, self._answers = environment, shared, answers
        self.complete = threading.Event()
        self._expected: frozenset[int] = frozenset()
        self._silent: set[Outbox] = set()  # of links that have not had a frame yet

    def expect(self, workers: Collection[int], relays: Collection[int] = ()) -> None:
        """Stop listening when all these have connected, so that unauthenticated peers can no longer take this process's
        time. A server of an elastic job goes on, slowly, because replacements may come. Call this before `accept`."""
        total = self._environment.ranks
        self._expected = frozenset(workers) | {relay_number(total, rank) for rank in relays}

    def admit(self, connection: Link, role: str, index: int) -> tuple[int, Outbox] | None:
        """Admit a worker or relay: returns its number and the queue to it, or None if it may not connect."""
        shared, workers = self._shared, self._environment.ranks
        number = {"worker": index, "relay": relay_number(workers, index)}.get(role, -1) if index < workers else -1
        with shared.changed:
            if shared.view and 0 <= number < workers:  # the scheduler has let it join: its view may come a little later
                shared.changed.wait_for(lambda: shared.over or self._place(number) is not None, REPLACE_SECONDS)
            place = self._place(number)
            if place is None and self._given_up(number):
                place = self._answers.outboxes
            if place is None:
                return None
            if place is self._answers.outboxes:
                shared.core.workers.join(number)
            before, outbox = place.get(number), Outbox(connection, f"to {role} {index}")
            place[number] = outbox
            self._silent.add(outbox)
            complete = self._expected and self._expected <= self._answers.outboxes.keys()
            shared.changed.notify_all()
        if before:
            before.link.cut()
        if complete:
            self.complete.set()
        return number, outbox

    def _place(self, number: int) -> dict[int, Outbox] | None:
        """The dictionary for a new link of this worker or relay: that of the links in use, or that of the links that
        wait for a view with their worker. None if it may not connect. Call this with the lock held."""
        answers, known = self._answers, self._shared.core.workers.takes(number)
        before = answers.outboxes.get(number)
        if known and before is None:
            return answers.outboxes
        joins_later = self._environment.num_workers <= number < self._environment.ranks
        if self._given_up(number) or not (self._shared.view or joins_later):
            return None
        free = before is None or before.link.has_ended
        return answers.joining if free and 0 <= number < self._environment.ranks else None

    def _given_up(self, number: int) -> bool:
        """Whether the link of this worker or relay has ended before its first frame."""
        before = self._answers.outboxes.get(number)
        known = self._shared.core.workers.takes(number)
        return known and before is not None and before in self._silent and before.link.has_ended

    def heard(self, outbox: Outbox) -> None:
        """A frame has come by the link of this queue."""
        with self._shared.lock:
            self._silent.discard(outbox)

    def ended(self, worker: int, outbox: Outbox) -> bool:
        """A link has ended, and its replies are released. Returns whether that is no loss: its worker was removed, or
        the caller gave it up before its first frame. (It connects again, or reports why it cannot.)"""
        shared, answers = self._shared, self._answers
        with shared.changed:
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: shared.over or answers.joining.get(worker) is not outbox)
            current, silent = answers.outboxes.get(worker) is outbox, outbox in self._silent
            if current and silent and shared.view:
                return True  # `admit` asks who comes in its place
            self._silent.discard(outbox)
            if current and silent:
                del answers.outboxes[worker]
            elif current:
                answers.release_all(worker)
            return silent or not current
