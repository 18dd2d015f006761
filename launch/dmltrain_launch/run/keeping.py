"""The frames of agents of a job with --detach, in the threads of the connections.

A frame of an agent is confirmed to the agent when its content is kept (stream.py). When the connection to an agent is
lost, the launcher reaches the agent again. kept_job.py handles in the main thread what this module puts into the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.alone.detached import TAKEN_CODE
from dmltrain_launch.agent.commands import Attach, Command, Kept
from dmltrain_launch.agent.events import Alive, Refused, Resumed
from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.agent.protocol import encode_command
from dmltrain_launch.job.host import Host
from dmltrain_launch.run import journal
from dmltrain_launch.run.agents import Agents
from dmltrain_launch.run.stream import Stream
from dmltrain_launch.run.supervisor.event import Event, Lost, OutputFailed
from dmltrain_launch.terminal.output import Output

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


class Keeping:
    """`Frames` that the next launcher need not get again. `lease()`: the number with which this one attaches.

    `left`: why this launcher has left the job, which goes on; or "". `away`: hosts whose agent is being reached again:
    commands for it wait until then. `places`: door and spool of each agent.
    """

    def __init__(self, agents: Agents, output: Output, kept: journal.Kept, lease: Callable[[], int]):
        self._agents, self._output, self._kept, self._lease = agents, output, kept, lease
        self.streams: dict[str, Stream] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self.away: set[str] = set()
        self._silent: set[str] = set()  # those of `away` whose agent has not answered the Attach
        self._gone: set[str] = set()  # whose agent has ended, and whose spool another agent gives to this launcher
        self._fates: dict[str, Lost] = {}  # by host: how the connection ended that is being made again
        self._unconfirmed: dict[str, int] = {}  # by host: bytes of output since the last confirmation
        self.left = ""

    # -- to reach an agent again ---------------------------------------------------------------------------------

    def reach(self, host: Host, seconds: float) -> None:
        self.away.add(host.name)
        self._silent.add(host.name)
        self._agents.connect(self._attach, host, time.monotonic() + seconds)

    def _attach(self, host: Host, until: float) -> None:
        agents, mark = self._agents, self._agents.attempt.job.mark
        while not agents.intake.closing:
            try:
                with agents.connect_slots:
                    channel = agents.cluster.connect(host, mark, None)
                door, spool = self.places.get(host.name, ("", ""))
                channel.write(encode_command(Attach(mark, host.name, self._lease(), door, spool)))
            except (LaunchError, OSError) as error:
                if time.monotonic() + PAUSE_SECONDS >= until:
                    return self._unreachable(host.name, f"cannot be reached again: {error}")
                time.sleep(PAUSE_SECONDS)
                continue
            return agents.add(host, channel, self)

    def _unreachable(self, host: str, reason: str) -> None:
        attempt = self._agents.attempt
        if self.away >= {name for name in attempt.hosts if attempt.ending.has_agent(name)}:
            return self.leave(f"{CUT_OFF}: {host} {reason}")
        self._give_up(Lost(host, reason))

    def leave(self, why: str) -> None:
        """Let the job go on without this launcher."""
        self.left = self.left or why
        self._agents.events.put(CaughtUp(""))  # wakes the main thread

    def _give_up(self, lost: Lost) -> None:
        """The agent of a host is lost for good."""
        self.away.discard(lost.host)
        self._silent.discard(lost.host)
        self._agents.events.put(self._fates.pop(lost.host, lost))
        self._agents.events.put(CaughtUp(lost.host))

    # -- Frames --------------------------------------------------------------------------------------------------

    def begin(self, host: str) -> Callable[[], Command | None]:
        if host not in self.away:
            self._gone.discard(host)
            self.streams[host] = Stream()
        stream, confirmed = self.streams.setdefault(host, Stream()), 0

        def kept() -> Command | None:
            nonlocal confirmed
            newest = 0 if host in self.away else stream.kept
            if newest <= confirmed:
                return None
            confirmed = newest
            return Kept(newest)

        return kept

    def report(self, event: Event) -> None:
        if not isinstance(event, Lost) or self._agents.intake.closing:
            return self._agents.events.put(event)
        host, attempt = event.host, self._agents.attempt
        lives_on = attempt.tasks.started and not attempt.ending.begun and attempt.ending.is_usable(host)
        if host in self._silent or host in self._gone or not lives_on:
            return self._give_up(event)
        self._fates[host] = event
        self.reach(attempt.hosts[host], 0.0 if event.ended else AGAIN_SECONDS)

    def take_output(self, host: str, task: int, payload: bytes) -> None:
        stream = self.streams[host]
        number = stream.begin()
        if number > self._kept.frame(task):
            try:
                # the output before its mark: if this launcher is killed in between, the agent sends the frame again,
                # and the next launcher finds that the log has it already (`Output.expect_again`)
                self._output.write(task, payload)
                self._kept.put(task, number, self._output.size(task))
            except LaunchError as error:
                stream.stop()
                self._agents.events.put(OutputFailed(str(error)))
            self._unconfirmed[host] = self._unconfirmed.get(host, 0) + len(payload)
        self._end_frame(host, stream)
        if self._unconfirmed.get(host, 0) >= CONFIRMED_BYTES and host not in self.away:
            self._unconfirmed[host] = 0
            self.confirm(host)

    def confirm(self, host: str) -> None:
        if host in self.streams:
            self._agents.send(host, Kept(self.streams[host].kept))

    def take_event(self, event: AgentEvent) -> None:
        host = event.host
        if isinstance(event, Alive):
            return
        if isinstance(event, Resumed):
            return self._take_resumed(event)
        if host in self._silent and isinstance(event, Refused):
            if event.code == TAKEN_CODE:
                self.leave(event.message)
            self._fates.setdefault(host, Lost(host, f"is gone: {event.message}", ended=True))
            return
        stream = self.streams[host]
        if stream.begin() > stream.seen and (mine := self._agents.intake.for_supervisor(event)):
            self._pass_on(mine, stream)
        self._end_frame(host, stream)

    def _take_resumed(self, event: Resumed) -> None:
        host = event.host
        self._silent.discard(host)
        if event.alive:
            self._fates.pop(host, None)
        else:
            self._gone.add(host)
        self.streams[host].resume(event.first, event.last)
        self._agents.events.put(Answered(event))
        if event.last < event.first:
            self._agents.events.put(CaughtUp(host))

    def _pass_on(self, event: AgentEvent, stream: Stream) -> None:
        if stream.is_new(stream.number):
            stream.end()  # before the main thread can confirm it: no heartbeat follows the last event
            self._agents.events.put(NumberedEvent(event, event.host, stream.number, stream))

    def _end_frame(self, host: str, stream: Stream) -> None:
        if stream.end():
            self._agents.events.put(CaughtUp(host))
