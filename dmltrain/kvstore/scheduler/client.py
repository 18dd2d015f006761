"""The part of a server or worker in its job: registration, barriers, what it reports, and the end of the job.

connection.py has the connection to the scheduler, heartbeats.py the heartbeats, job_end.py how the job ends. When the
job is lost, the first reason counts, and a thread of this package calls `on_end(reason)`; at the job's regular end it
calls `on_end('')`. A process of a lost job that does not end by itself is ended, so that none hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from dmltrain.base.env import Environment
from dmltrain.kvstore import spawned
from dmltrain.kvstore.scheduler.connection import Connection
from dmltrain.kvstore.scheduler.following import Standing
from dmltrain.kvstore.scheduler.heartbeats import Heartbeats
from dmltrain.kvstore.scheduler.job_end import JobEnd
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.handshake import Refuse
from dmltrain.kvstore.transport.message.job import (
    Abort,
    Barrier,
    Bye,
    LinkLost,
    Overdue,
    Register,
    Release,
    Shutdown,
    Start,
)
from dmltrain.kvstore.transport.message.views import Failed, Left

EXIT_SECONDS = 3.0
VERDICT_SECONDS = 5.0  # for the scheduler to say why a link was lost; it waits 2 s for a better cause

Handlers = Mapping[type[Message], Callable[[Any], None]]


@dataclass(frozen=True)
class Told:
    """What an object does with a message of the scheduler, in words for docs/protocol.md."""

    does: str
    call: Callable[[Any, Any], None]  # (object, message)


def bound(table: Mapping[type[Message], Told], to: object) -> Handlers:
    """The table's handlers, of this object."""
    return {kind: partial(told.call, to) for kind, told in table.items()}


class Control:
    """One process's control link. All methods may be called from any thread."""

    def __init__(
        self,
        environment: Environment,
        port: int = 0,
        on_end: Callable[[str], None] | None = None,
        exit_seconds: float = EXIT_SECONDS,
        socket_name: str = "",
        on_message: Handlers | None = None,
        standing: Callable[[], Standing | None] = lambda: None,
    ) -> None:
        """Connect and register. `port` is the port on which a server listens, `socket_name` the unix socket for
        processes on its host (rendezvous.py). `on_end`, `exit_seconds`: see JobEnd. `on_message`: called on the reading
        thread with messages that this class does not know. `standing`: how far this process is; None if it does not go
        on without its scheduler. Raises JobLost when the scheduler cannot be reached.
        """
        self._environment = environment
        self.job_end = JobEnd(f"{environment.role} {environment.index}", on_end, exit_seconds)
        self._released: set[tuple[str, int]] = set()  # barrier, view
        self._handlers: Handlers = {**bound(self.TOLD, self), **(on_message or {})}
        registration = Register(environment.node_host, port, environment.host_name, socket_name, host.identity())
        self._connection = Connection(environment, registration, standing)
        self.heartbeats = Heartbeats(environment, self._connection, self.job_end)
        self.watch, self.over = self.heartbeats.watch, self.job_end.over
        threading.Thread(target=self._read, name="control-reader", daemon=True).start()
        self.heartbeats.start()

    @property
    def failure(self) -> str:
        """Why the job was lost; empty until then."""
        return self.job_end.failure

    def wait_for_start(self) -> Start:
        """Wait for the message that the scheduler sends when all processes have registered. Raises JobLost."""
        connection, seconds = self._connection, self._environment.start_seconds + 5.0
        self.job_end.wait(lambda: connection.start is not None, seconds, "the start of the job")
        assert connection.start is not None
        return connection.start

    def barrier(self, name: str, view: int = 0, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every worker has called `barrier` with this name, in this view. False if `interrupted()` is true
        first; it is asked again after each message. Raises JobLost."""
        this = name, view
        self.send(Barrier(name, view))
        self.wait_until(lambda: this in self._released or interrupted(), f"barrier {name!r}")
        released = this in self._released
        self._released.discard(this)
        return released

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until `reached()` is true; it is asked again after each message. Raises JobLost."""
        # Longer than the scheduler's limit: it ends the job first, with a message that names the missing workers.
        self.job_end.wait(reached, self._environment.wait_seconds + 5.0, what)

    def confirm(self) -> None:
        """If this process was suspended, wait until it has read messages of the scheduler that came after that. Raises
        JobLost if they say that the job goes on without this process."""
        self.heartbeats.note_waking(time.monotonic())
        if not self.heartbeats.is_current:
            self.wait_until(lambda: self.heartbeats.is_current, "the scheduler's next word")

    def send(self, message: Message) -> None:
        """Report what the next incarnation of the scheduler does not need."""
        self._connection.send(message)

    def report(self, message: Message) -> None:
        """Report what each later incarnation of the scheduler must know as well, and go on."""
        self._connection.send_and_remember(message)

    def left(self, message: Left) -> None:
        """Report which worker has left this server; see message.Left."""
        self._connection.send_unmoved(message)

    def abort(self, reason: str) -> None:
        """End the job for all processes."""
        self.report(Abort(reason))

    def overdue(self, reason: str) -> None:
        """End the job for all processes because some have waited for too long, unless there is a better cause."""
        self.report(Overdue(reason))

    def link_lost(
        self, lost: LinkLost, seconds: float = VERDICT_SECONDS, settled: Callable[[], bool] = lambda: False
    ) -> None:
        """Report a lost data link, and wait up to `seconds` for the scheduler to name the cause. If it names none, this
        process fails with the lost link as the cause, unless `settled()` is true; it is asked after each message."""
        self.report(lost)
        self.job_end.lost_within(seconds, settled)
        if not settled():
            self.job_end.fail(str(lost))

    def bye(self, stays: bool = False, done: int = -1) -> None:
        """Report that this process has finished: from now on the end of its link is not a failure. With `stays` it
        serves its host's other workers until it calls this again. `done`: see message.Bye."""
        if not stays:
            self.job_end.leave()
        self.send(Bye(stays, done))

    def failed(self, error: str, done: int) -> None:
        """Report that this worker ends by an error of its own; see message.Failed."""
        self.job_end.closing = True
        self.send(Failed(error, done))

    def lost_within(self, seconds: float) -> str:
        """Why the job was lost, if that is known within `seconds`; else empty."""
        return self.job_end.lost_within(seconds)

    def fail(self, reason: str) -> None:
        """Record that the job is lost, with the first reason, and end this process."""
        self.job_end.fail(reason)

    def close(self) -> None:
        self.job_end.leave()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                try:
                    self._take(self._connection.read())
                except Exception as error:
                    if not self._goes_on(error):
                        raise
        except Exception as error:  # after any error no thread may wait for the scheduler
            self.job_end.fail(f"lost {self._connection.scheduler}: {error}")
        finally:
            self.job_end.over.set()

    def _goes_on(self, error: Exception) -> bool:
        """The link has ended. Whether this process goes on with another scheduler, which has come."""
        end, connection = self.job_end, self._connection
        return not (end.over.is_set() or end.closing) and connection.can_move and connection.move(error, end.leaves)

    def _take(self, message: Message) -> None:
        """Handle a message, and wake the threads that wait for a message."""
        if handle := self._handlers.get(type(message)):
            handle(message)
        self.job_end.news()

    def _refused(self, message: Refuse) -> None:
        again = f"; {spawned.hint()}" if "is already registered" in message.reason else ""
        self.job_end.fail(f"{self._connection.scheduler} refused this process: {message.reason}{again}")

    def _aborted(self, message: Abort) -> None:
        self.job_end.over.set()
        self.job_end.fail(message.reason)

    def _release(self, message: Release) -> None:
        self._released.add((message.id, message.view))

    TOLD: ClassVar[Mapping[type[Message], Told]] = {
        Refuse: Told("ends with the reason", _refused),
        Abort: Told("ends with the reason, which is why the job is lost", _aborted),
        Release: Told("goes on after the barrier", _release),
        Shutdown: Told("ends: the job has ended well", lambda control, message: control.job_end.ended()),
    }
