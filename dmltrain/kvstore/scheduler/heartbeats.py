"""The heartbeats of a server or worker: they show the scheduler that this process lives, and notice when the scheduler
or this process itself was silent, and when the network has cut a data link."""

from __future__ import annotations

import threading
import time

from dmltrain.base.env import Environment
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.connection import Connection
from dmltrain.kvstore.scheduler.job_end import JobEnd
from dmltrain.kvstore.transport.data_links import Watch
from dmltrain.kvstore.transport.message.job import Heartbeat

LOOK_SECONDS = 0.5  # between two looks at data links
AFTER_WAKING = 1.0  # s, for a process that was suspended to read the messages that came meanwhile


class Heartbeats:
    """`watch` checks the data links that are added to it. `woke`: when this process was last found to have been
    suspended, s of time.monotonic; 0: never."""

    def __init__(self, environment: Environment, connection: Connection, job_end: JobEnd) -> None:
        self._environment, self._connection, self._job_end = environment, connection, job_end
        self.watch = Watch.earlier_than(environment.lost_seconds)
        self.woke = 0.0
        self._awake = connection.heard  # when the heartbeats' thread last ran

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def note_waking(self, now: float) -> None:
        """If this process was suspended, the scheduler's silence may have been its own."""
        if now - self._awake > self._environment.lost_seconds / 2:
            self._connection.heard = self.woke = now

    @property
    def is_current(self) -> bool:
        """Whether this process was never suspended, or has read messages that came after that."""
        return not self.woke or self._connection.heard > self.woke + AFTER_WAKING

    def _beat(self) -> None:
        environment, end, due = self._environment, self._job_end, 0.0
        while not (end.closing or end.failure):
            now = time.monotonic()
            self.note_waking(now)
            self._awake = now
            if not self._connection.orphaned:
                self._check_scheduler(now - self._connection.heard)
            self.watch.check()
            if now >= due:
                due = now + environment.heartbeat_seconds
                self._connection.send(Heartbeat())
            end.shutdown.wait(max(0.0, min(LOOK_SECONDS, due - now)))

    def _check_scheduler(self, silent: float) -> None:
        """Leave a scheduler that has been silent for `silent` s, too long, or that a later incarnation has replaced."""
        environment, connection = self._environment, self._connection
        if environment.scheduler_file and connection.superseded and connection.can_move:
            connection.supersede()
        elif silent > environment.lost_seconds:
            reason = (
                f"{connection.scheduler} missed heartbeats for {silent:.0f} s (frozen, stopped, or cut off "
                f"from {environment.role} {environment.index} on {environment.host_name})"
            )
            if connection.can_move:
                log(reason)
                connection.cut()
            else:
                self._job_end.fail(reason)
