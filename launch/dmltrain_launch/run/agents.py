"""The connections to the agents of a job, and what becomes of the frames that come on them.

The connections' reading threads pass output directly to `Output` and events to the queue. So a terminal that blocks
slows the processes, but never the supervisor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Alive, Probed, Refused, Reported, Used
from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.agent.protocol import OUTPUT, ProtocolError, decode_event, tasks_of
from dmltrain_launch.channels import Channel
from dmltrain_launch.clusters import Cluster
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.preflight import clock_skew
from dmltrain_launch.run.connection import Connection
from dmltrain_launch.run.supervisor.action import Connect
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.event import Connected, Copied, Event, OutputFailed, Unreached
from dmltrain_launch.terminal.output import Sink

if TYPE_CHECKING:
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

READER_SECONDS = 2.0  # for the last output to reach the logs
CONNECTING_SECONDS = 0.5  # for an agent without a job to exit
RETRY_SECONDS = 0.5  # before another attempt to put an agent in the place of a lost one
LEAST_SECONDS = 0.1  # for an attempt
CONNECTING = 32  # hosts that the launcher connects to at the same time
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


class Agents:
    """`events` is the queue for the supervisor. `closing`: the session ends."""

    def __init__(
        self,
        attempt: Attempt,
        cluster: Cluster,
        events: queue.SimpleQueue[Any],
        copier: Sync | None = None,
        keep_usage: Callable[[Used], None] = lambda used: None,
    ):
        self.attempt, self.cluster, self.events = attempt, cluster, events
        self.copier, self.keep_usage = copier, keep_usage
        self.connections: dict[str, Connection] = {}
        self.connect_slots = threading.Semaphore(CONNECTING)
        self.closing = False
        self.asked_at: dict[str, float] = {}  # by host: when the last message was sent, in s since 1970
        self._readers: list[threading.Thread] = []
        self._connecting: list[threading.Thread] = []
        self._event_slots: dict[str, threading.Semaphore] = {}

    def close(self) -> None:
        self.closing = True
        if self.copier:
            self.copier.cancel()
        for connection in list(self.connections.values()):
            connection.finish()
        _join(self._readers, READER_SECONDS)
        _join(self._connecting, CONNECTING_SECONDS)

    def in_thread(self, function: Callable[..., None], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                function(*arguments)
            except Exception as error:  # a bug of the launcher ends the job, which would else wait forever
                self.events.put(OutputFailed(f"launcher failure: {error!r}"))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    # -- connections ---------------------------------------------------------------------------------------------

    def connect(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function that connects to an agent, in a thread of its own."""
        self._connecting.append(self.in_thread(function, *arguments))

    def begin(self, host: Host, action: Connect, frames: Frames) -> None:
        """Start an agent, and connect to it."""
        with self.connect_slots:
            if self.closing:
                return
            try:
                channel = self._channel(host, action)
            except LaunchError as error:
                return self.events.put(Unreached(host.name, str(error), error.code))
        self.add(host, channel, frames, Connected(host.name))

    def _channel(self, host: Host, action: Connect) -> Channel:
        """A channel to a new agent; the LaunchError of the last attempt if all fail."""
        left, end = action.seconds, time.monotonic() + (action.seconds or 0.0)
        for _ in range(action.attempts - 1):
            try:
                return self.cluster.connect(host, self.attempt.job.mark, left)
            except LaunchError:
                if self.closing or time.monotonic() + RETRY_SECONDS >= end:
                    raise
            time.sleep(RETRY_SECONDS)
            left = max(end - time.monotonic(), LEAST_SECONDS)
        return self.cluster.connect(host, self.attempt.job.mark, left)

    def add(self, host: Host, channel: Channel, frames: Frames, first: Event | None = None) -> None:
        """Use a channel to an agent. `first`: an event that comes before those of the agent."""
        if self.closing:
            channel.close()
            return
        silence, take = self.attempt.limits.silence, partial(self.take_frame, frames)
        connection = Connection(host.name, channel, silence, take, frames.report, frames.begin(host.name))
        self.connections[host.name] = connection
        if first:
            self.events.put(first)
        connection.start()
        self._readers.append(connection.reader)

    def send(self, host: str, command: Command) -> None:
        if host in self.connections:
            self.connections[host].send(command)

    # -- what agents send, in the threads of their connections ---------------------------------------------------

    def take_frame(self, frames: Frames, host: str, kind: int, task: int, payload: bytes) -> None:
        if kind == OUTPUT:
            self._check_task(host, task)
            return frames.take_output(host, task, payload)
        event = decode_event(payload, host)
        for number in tasks_of(event):
            self._check_task(host, number)
        if isinstance(event, Reported) and self.attempt.processes[event.task].task.role != SCHEDULER:
            raise ProtocolError(f"a report of task {event.task}, which is no scheduler")
        frames.take_event(event)

    def _check_task(self, host: str, task: int) -> None:
        """ProtocolError unless the task is on this host: an agent may only report about its own tasks."""
        processes = self.attempt.processes
        if task >= len(processes) or processes[task].task.host.name != host:
            raise ProtocolError(f"a report about task {task}, which is not on {host}")

    def for_supervisor(self, event: AgentEvent) -> AgentEvent | None:
        """The event for the supervisor; None if somebody else has taken it.

        Waits, and so stops reading from the host, while EVENTS_AT_ONCE of its events wait for the supervisor.
        """
        if isinstance(event, Used):
            return self.keep_usage(event)
        if isinstance(event, Alive) or (self.copier and self.copier.take(event)):
            return None
        if isinstance(event, Probed):
            event = replace(event, skew=clock_skew(event.facts, self.asked_at[event.host], time.time()))
        slots = self._event_slots.setdefault(event.host, threading.Semaphore(EVENTS_AT_ONCE))
        while not slots.acquire(timeout=LOOK_SECONDS) and not self.closing:
            pass
        return event

    def handled(self, event: Event) -> None:
        """The supervisor has got an event: its host may send another one."""
        if isinstance(event, AgentEvent) and event.host in self._event_slots:
            self._event_slots[event.host].release()

    # -- the copy ------------------------------------------------------------------------------------------------

    def copy(self, copier: Sync, host: str, folder: str) -> None:
        """Copy the working directory to a host."""
        if host not in copier.hosts:
            copier.add(host)
        self.in_thread(self._copy, copier, host, folder)

    def _copy(self, copier: Sync, host: str, folder: str) -> None:
        try:
            summary = copier.copy(host, folder, self.connections[host].channel.write)
        except LaunchError as error:
            return self.events.put(Refused(host, str(error), error.code))
        except OSError:  # its reader reports the agent's end
            return
        if summary is not None:
            self.events.put(Copied(host, summary, copier.hosts[host].notes))


class PassedOn:
    """`Frames` of a job that ends with its launcher: they are passed on, and nothing is kept."""

    def __init__(self, agents: Agents, output: Sink):
        self._agents, self._output = agents, output

    def begin(self, host: str) -> Callable[[], Command | None]:
        return lambda: None

    def take_output(self, host: str, task: int, payload: bytes) -> None:
        try:
            self._output.write(task, payload)
        except LaunchError as error:
            self._agents.events.put(OutputFailed(str(error)))

    def take_event(self, event: AgentEvent) -> None:
        if mine := self._agents.for_supervisor(event):
            self._agents.events.put(mine)

    def report(self, event: Event) -> None:
        self._agents.events.put(event)


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Join all threads, for at most `seconds` in total."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
