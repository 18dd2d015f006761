"""The connections to the agents of a job, each with its threads; intake.py has what comes on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Refused
from dmltrain_launch.channels import Channel
from dmltrain_launch.clusters import Cluster
from dmltrain_launch.job.host import Host
from dmltrain_launch.run.connection import Connection
from dmltrain_launch.run.intake import Frames, Intake
from dmltrain_launch.run.supervisor.action import Connect
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.event import Connected, Copied, Event, OutputFailed, Unreached

if TYPE_CHECKING:
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

READER_SECONDS = 2.0  # for the last output to reach the logs
CONNECTING_SECONDS = 0.5  # for an agent without a job to exit
RETRY_SECONDS = 0.5  # before another attempt to put an agent in the place of a lost one
LEAST_SECONDS = 0.1  # for an attempt
CONNECTING = 32  # hosts that the launcher connects to at the same time


class Agents:
    """Starts agents on the hosts of `attempt`. What they send goes to `intake`."""

    def __init__(self, attempt: Attempt, cluster: Cluster, intake: Intake):
        self.attempt, self.cluster, self.intake, self.events = attempt, cluster, intake, intake.events
        self.connections: dict[str, Connection] = {}
        self.connect_slots = threading.Semaphore(CONNECTING)
        self._readers: list[threading.Thread] = []
        self._connecting: list[threading.Thread] = []

    def close(self) -> None:
        self.intake.closing = True
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
            if self.intake.closing:
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
                if self.intake.closing or time.monotonic() + RETRY_SECONDS >= end:
                    raise
            time.sleep(RETRY_SECONDS)
            left = max(end - time.monotonic(), LEAST_SECONDS)
        return self.cluster.connect(host, self.attempt.job.mark, left)

    def add(self, host: Host, channel: Channel, frames: Frames, first: Event | None = None) -> None:
        """Use a channel to an agent. `first`: an event that comes before those of the agent."""
        if self.intake.closing:
            channel.close()
            return
        silence, take = self.attempt.limits.silence, partial(self.intake.take, frames)
        connection = Connection(host.name, channel, silence, take, frames.report, frames.begin(host.name))
        self.connections[host.name] = connection
        if first:
            self.events.put(first)
        connection.start()
        self._readers.append(connection.reader)

    def send(self, host: str, command: Command) -> None:
        if host in self.connections:
            self.connections[host].send(command)

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


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Join all threads, for at most `seconds` in total."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
