"""The connections of a job with --detach, in their reading threads.

A frame of an agent is confirmed to the agent when its content is kept (stream.py). When the connection to an agent is
lost, the launcher reaches the agent again. detached.py handles in the main thread what this module puts into the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.commands import Attach, Command, Kept
from dmltrain_launch.agent.detached import TAKEN_CODE
from dmltrain_launch.agent.events import Alive, Refused, Resumed
from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.agent.protocol import encode_command
from dmltrain_launch.channels import Channel
from dmltrain_launch.job.host import Host
from dmltrain_launch.run import journal
from dmltrain_launch.run.connection import Connection
from dmltrain_launch.run.session import Session
from dmltrain_launch.run.stream import Stream
from dmltrain_launch.run.supervisor.event import Event, Lost, OutputFailed

AGAIN_SECONDS = 60.0  # to reach an agent again whose connection was lost
PAUSE_SECONDS = 1.0
# of output: then it is confirmed at once and not with the next heartbeat, because the agent stops reading from its
# processes while too much is unconfirmed (`UNCONFIRMED_BYTES` in dmltrain_launch.agent.channel)
CONFIRMED_BYTES = 2 << 20
CUT_OFF = "no host of the job can be reached any more"


@dataclass(frozen=True)
class NumberedEvent:
    """An event that an agent's frame has brought."""

    event: Event
    host: str
    number: int
    stream: Stream


@dataclass(frozen=True)
class CaughtUp:
    """All frames that the agent had sent before this launcher attached are in the queue before this item."""

    host: str


@dataclass(frozen=True)
class Answered:
    """The agent has answered this launcher's Attach."""

    event: Resumed


class KeepingSession(Session):
    """`left`: this launcher has left the job, which goes on; `why` says the reason. Call `keep` before `run`."""

    def keep(self, kept: journal.Kept, size: Callable[[int], int]) -> None:
        """`size(task)`: the length of the log of a process, in bytes."""
        self.kept, self._size = kept, size
        self._streams: dict[str, Stream] = {}
        self._away: set[str] = set()  # hosts whose agent is being reached again: commands for it wait until then
        self._silent: set[str] = set()  # those of `_away` whose agent has not answered the Attach
        self._gone: set[str] = (
            set()
        )  # hosts whose agent has ended, and whose spool another agent gives to this launcher
        self._fates: dict[str, Lost] = {}  # by host: how the connection ended that is being made again
        self._places: dict[str, tuple[str, str]] = {}  # by host: door and spool of its agent
        self._unconfirmed: dict[str, int] = {}  # by host: bytes of output since the last confirmation
        self.why = ""

    def _next_lease(self) -> int:
        """The number with which this launcher attaches to an agent."""
        raise NotImplementedError

    def _reach(self, host: Host, seconds: float) -> None:
        self._away.add(host.name)
        self._silent.add(host.name)
        self._connecting.append(self._in_thread(self._attach, host, time.monotonic() + seconds))

    def _attach(self, host: Host, until: float) -> None:
        """Reach the agent of a host again."""
        while not self.closing:
            try:
                with self._connect_slots:
                    channel = self.cluster.connect(host, self.supervisor.job.mark, None)
                door, spool = self._places.get(host.name, ("", ""))
                mark, lease = self.supervisor.job.mark, self._next_lease()
                channel.write(encode_command(Attach(mark, host.name, lease, door, spool)))
            except (LaunchError, OSError) as error:
                if time.monotonic() + PAUSE_SECONDS >= until:
                    return self._unreachable(host.name, f"cannot be reached again: {error}")
                time.sleep(PAUSE_SECONDS)
                continue
            if self.closing:
                channel.close()
                return
            connection = self._connection(host.name, channel)
            self.connections[host.name] = connection
            connection.start()
            return self.readers.append(connection.reader)

    def _unreachable(self, host: str, reason: str) -> None:
        if self._away >= {name for name in self.supervisor.hosts if self.supervisor.ending.has_agent(name)}:
            return self._leave(f"{CUT_OFF}: {host} {reason}")
        self._give_up(Lost(host, reason))

    def _leave(self, why: str) -> None:
        """Let the job go on without this launcher."""
        self.why, self.left = self.why or why, True
        self._put_any(CaughtUp(""))  # wakes the main thread

    def _give_up(self, lost: Lost) -> None:
        """The agent of a host is lost for good."""
        self._away.discard(lost.host)
        self._silent.discard(lost.host)
        self.events.put(self._fates.pop(lost.host, lost))
        self._put_any(CaughtUp(lost.host))

    # -- what agents send, in the threads of their connections ---------------------------------------------------

    def _connection(self, host: str, channel: Channel) -> Connection:
        if host not in self._away:
            self._gone.discard(host)
            self._streams[host] = Stream()
        stream, confirmed = self._streams.setdefault(host, Stream()), 0

        def kept() -> Command | None:
            nonlocal confirmed
            newest = 0 if host in self._away else stream.kept
            if newest <= confirmed:
                return None
            confirmed = newest
            return Kept(newest)

        silence = self.supervisor.limits.silence
        return Connection(host, channel, silence, self._take_frame, self._report, kept)

    def _report(self, event: Event) -> None:
        """Take an event about the connection itself: Quiet or Lost."""
        if not isinstance(event, Lost) or self.closing:
            return self.events.put(event)
        host, ending = event.host, self.supervisor.ending
        lives_on = self.supervisor.tasks.started and not ending.begun and ending.is_usable(host)
        if host in self._silent or host in self._gone or not lives_on:
            return self._give_up(event)
        self._fates[host] = event
        self._reach(self.supervisor.hosts[host], 0.0 if event.ended else AGAIN_SECONDS)

    def _take_output(self, host: str, task: int, payload: bytes) -> None:
        stream = self._streams[host]
        number = stream.begin()
        if number > self.kept.frame(task):
            try:
                # the output before its mark: if this launcher is killed in between, the agent sends the frame again,
                # and the next launcher finds that the log has it already (`Output.expect_again`)
                self.output.write(task, payload)
                self.kept.put(task, number, self._size(task))
            except LaunchError as error:
                stream.stop()
                self.events.put(OutputFailed(str(error)))
            self._unconfirmed[host] = self._unconfirmed.get(host, 0) + len(payload)
        self._end_frame(host, stream)
        if self._unconfirmed.get(host, 0) >= CONFIRMED_BYTES and host not in self._away:
            self._unconfirmed[host] = 0
            self._confirm(host)

    def _confirm(self, host: str) -> None:
        if host in self.connections and host in self._streams:
            self.connections[host].send(Kept(self._streams[host].kept))

    def _take_event(self, host: str, event: AgentEvent) -> None:
        if isinstance(event, Alive):
            return
        if isinstance(event, Resumed):
            return self._take_resumed(event)
        if host in self._silent and isinstance(event, Refused):
            if event.code == TAKEN_CODE:
                self._leave(event.message)
            self._fates.setdefault(host, Lost(host, f"is gone: {event.message}", ended=True))
            return
        stream = self._streams[host]
        if stream.begin() > stream.seen:
            super()._take_event(host, event)
        self._end_frame(host, stream)

    def _take_resumed(self, event: Resumed) -> None:
        host = event.host
        self._silent.discard(host)
        if event.alive:
            self._fates.pop(host, None)
        else:
            self._gone.add(host)
        self._streams[host].resume(event.first, event.last)
        self._put_any(Answered(event))
        if event.last < event.first:
            self._put_any(CaughtUp(host))

    def _put(self, event: AgentEvent) -> None:
        stream = self._streams[event.host]
        if stream.is_new(stream.number):
            stream.end()  # before the main thread can confirm it: no heartbeat follows the last event
            self._put_any(NumberedEvent(event, event.host, stream.number, stream))

    def _end_frame(self, host: str, stream: Stream) -> None:
        if stream.end():
            self._put_any(CaughtUp(host))

    def _put_any(self, item: Any) -> None:
        self.events.put(item)
