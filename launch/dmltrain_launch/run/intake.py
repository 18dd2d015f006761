"""What agents send: checked, and sorted by who takes it. In the reading threads of their connections.

They pass output directly to `Output` and events to the queue. So a terminal that blocks slows the processes, but never
the supervisor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Alive, Probed, Reported, Used
from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.agent.protocol import OUTPUT, ProtocolError, decode_event, tasks_of
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.preflight import clock_skew
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.event import Event, OutputFailed
from dmltrain_launch.terminal.output import Sink

if TYPE_CHECKING:
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

EVENTS_AT_ONCE = 16  # of a host that wait for the supervisor, which limits their memory
LOOK_SECONDS = 1.0  # between two looks whether the session closes


class Frames(Protocol):
    """Takes what agents send, in the threads of their connections."""

    def begin(self, host: str) -> Callable[[], Command | None]:
        """A connection begins. Returns what gives a command to send with each heartbeat, or None."""

    def take_output(self, host: str, task: int, payload: bytes) -> None: ...

    def take_event(self, event: AgentEvent) -> None: ...

    def report(self, event: Event) -> None:
        """Take an event about a connection itself: Quiet or Lost."""


class Intake:
    """Checks frames. It is the `Frames` of a job that ends with its launcher: they are passed on, and nothing is kept.

    `events` is the queue for the supervisor. `closing`: the session ends.
    """

    def __init__(
        self,
        attempt: Attempt,
        output: Sink,
        events: queue.SimpleQueue[Any],
        copier: Sync | None = None,
        keep_usage: Callable[[Used], None] = lambda used: None,
    ):
        self._attempt, self._output, self.events = attempt, output, events
        self._copier, self._keep_usage = copier, keep_usage
        self.closing = False
        self._asked_at: dict[str, float] = {}  # by host: when the last message was sent, in s since 1970
        self._slots: dict[str, threading.Semaphore] = {}

    def take(self, frames: Frames, host: str, kind: int, task: int, payload: bytes) -> None:
        if kind == OUTPUT:
            self._check_task(host, task)
            return frames.take_output(host, task, payload)
        event = decode_event(payload, host)
        for number in tasks_of(event):
            self._check_task(host, number)
        if isinstance(event, Reported) and self._attempt.processes[event.task].task.role != SCHEDULER:
            raise ProtocolError(f"a report of task {event.task}, which is no scheduler")
        frames.take_event(event)

    def _check_task(self, host: str, task: int) -> None:
        """ProtocolError unless the task is on this host: an agent may only report about its own tasks."""
        processes = self._attempt.processes
        if task >= len(processes) or processes[task].task.host.name != host:
            raise ProtocolError(f"a report about task {task}, which is not on {host}")

    def for_supervisor(self, event: AgentEvent) -> AgentEvent | None:
        """The event for the supervisor; None if somebody else has taken it.

        Waits, and so stops reading from the host, while EVENTS_AT_ONCE of its events wait for the supervisor.
        """
        if isinstance(event, Used):
            return self._keep_usage(event)
        if isinstance(event, Alive) or (self._copier and self._copier.take(event)):
            return None
        if isinstance(event, Probed):
            event = replace(event, skew=clock_skew(event.facts, self._asked_at[event.host], time.time()))
        slots = self._slots.setdefault(event.host, threading.Semaphore(EVENTS_AT_ONCE))
        while not slots.acquire(timeout=LOOK_SECONDS) and not self.closing:
            pass
        return event

    def asked(self, host: str) -> None:
        """A command is sent to this host now."""
        self._asked_at[host] = time.time()

    def handled(self, event: Event) -> None:
        """The supervisor has got an event: its host may send another one."""
        if isinstance(event, AgentEvent) and event.host in self._slots:
            self._slots[event.host].release()

    # -- Frames --------------------------------------------------------------------------------------------------

    def begin(self, host: str) -> Callable[[], Command | None]:
        return lambda: None

    def take_output(self, host: str, task: int, payload: bytes) -> None:
        try:
            self._output.write(task, payload)
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    def take_event(self, event: AgentEvent) -> None:
        if mine := self.for_supervisor(event):
            self.events.put(mine)

    def report(self, event: Event) -> None:
        self.events.put(event)
