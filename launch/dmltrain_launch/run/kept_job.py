"""How a session keeps its job for the next launcher, if its own one dies: with --detach (docs/decisions/0016).

Each event is written into the journal before the supervisor handles it (journal.py). A frame of an agent is confirmed
to the agent when its content is kept (stream.py).

A launcher that attaches repeats the journal. Then it reaches the agents again. No deadline counts until it has received
all frames that the agents kept meanwhile: else the supervisor could act on a deadline before it knows of an earlier
event.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Ended, Ready, Resumed
from dmltrain_launch.run.agents import Agents
from dmltrain_launch.run.journal import Beginning, Entry, Journal, Kept
from dmltrain_launch.run.keeping import Answered, CaughtUp, Keeping, NumberedEvent
from dmltrain_launch.run.repeated import Repeated
from dmltrain_launch.run.stream import Stream
from dmltrain_launch.run.supervisor.action import Action, Connect, Reply
from dmltrain_launch.run.supervisor.event import Asked, Connected, Event, Lost, Unreached
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, RECONNECT_LOST_SECONDS, USAGE_CODE
from dmltrain_launch.terminal.output import Output

ATTACH_SECONDS = 20.0  # to reach the agents, for a launcher that attaches
ALONE = "has ended: no process of the job was left there, and no launcher came"


@dataclass(frozen=True)
class KeptJob:
    """What a session with a journal is given. `story`: how the job begins; or, if another launcher has started it, what
    that one's journal says. `lease`: the number of the last launcher that has attached to the job."""

    journal: Journal
    kept: Kept
    output: Output
    story: Beginning | Repeated
    may_leave: Callable[[], bool]
    lease: int = 0


class Records:
    """Called by the main thread of a session."""

    def __init__(self, agents: Agents, job: KeptJob):
        self._agents, self._journal, self._story, self._may_leave = agents, job.journal, job.story, job.may_leave
        self.frames = Keeping(agents, job.output, job.kept, self._next_lease)
        self._sent: dict[str, list[Command]] = {}  # by host, to its present agent
        self._catching: set[str] = set()  # hosts whose agent still sends frames of the time without a launcher
        self._held: list[Any] = []  # ends of agents that ended without a launcher: handled after all other events
        self._waiting: set[str] = set()  # the hosts of these
        self._alone: set[str] = set()  # hosts whose agent's end without a launcher was handled, as a Lost
        self._current: NumberedEvent | None = None
        # of the supervisor's time, in s: time.monotonic() begins anew when this machine is started again
        self.offset = 0.0
        self._lease = job.lease
        self._lock = threading.Lock()
        if isinstance(self._story, Repeated):
            self._take_over(self._story)

    def _take_over(self, repeated: Repeated) -> None:
        self._sent, self.offset = repeated.sent, max(0.0, repeated.now - time.monotonic())
        self.frames.places = repeated.places
        self.frames.streams = {host: Stream(number) for host, number in repeated.seen.items()}

    def _next_lease(self) -> int:
        with self._lock:
            self._lease += 1
            self._journal.attach(self._lease)
            return self._lease

    @property
    def catching_up(self) -> bool:
        return bool(self._catching)

    # -- the start -----------------------------------------------------------------------------------------------

    @property
    def is_of_another(self) -> bool:
        """Whether another launcher has started the job."""
        return isinstance(self._story, Repeated)

    def begin(self, key: str, certificate: str, log_folder: str | None, now: float) -> None:
        """A new job begins."""
        assert isinstance(self._story, Beginning)
        beginning = replace(self._story, key=key, certificate=certificate, log_folder=log_folder, now=now)
        self._journal.begin(beginning)

    def begin_again(self) -> list[Action]:
        """Reach the agents of a job that another launcher has started."""
        attempt, actions = self._agents.attempt, list[Action]()
        for name, host in attempt.hosts.items():
            if attempt.ending.has_ended(name):
                continue
            if attempt.ending.is_being_replaced(name):
                actions.append(Connect(name, RECONNECT_LOST_SECONDS))
            elif name not in self._sent:
                why = "the launcher before this one was lost before it had reached this host: start the job again"
                self._agents.events.put(Unreached(name, f"{name}: {why}", FAULT_CODE))
            else:
                self._catching.add(name)
                self.frames.reach(host, ATTACH_SECONDS)
        self._agents.events.put(CaughtUp(""))
        return actions

    # -- events --------------------------------------------------------------------------------------------------

    def event(self, item: Any) -> Event | None:
        """The event for the supervisor that an item of the queue stands for; None if there is none now."""
        self._current = None
        if isinstance(item, CaughtUp):
            self._caught_up(item.host)
        elif isinstance(item, Answered):
            self._resumed(item.event)
        else:
            return self._unwrapped(item)
        return None

    def _caught_up(self, host: str) -> None:
        self._catching.discard(host)
        if not self._catching:
            held, self._held = self._held, []
            self._waiting.clear()
            for item in held:
                self._agents.events.put(item)

    def _resumed(self, event: Resumed) -> None:
        host = event.host
        self.frames.away.discard(host)
        if event.alive:
            for command in self._sent.get(host, [])[event.commands :]:
                self._agents.send(host, command)

    def released(self, asked: Asked) -> Reply:
        """Another launcher wants the job. Returns the answer to it."""
        if not self._may_leave():
            text = f"the launcher with pid {os.getpid()} is attached to the job: end it first, or close its terminal"
            return Reply(asked.number, USAGE_CODE, ((text, None),))
        return Reply(asked.number, 0, ())

    def _unwrapped(self, item: Any) -> Event | None:
        event: Event = item.event if isinstance(item, NumberedEvent) else item
        host = event.host if isinstance(event, (Ended, Lost)) else ""
        ending = self._agents.attempt.ending
        alone = isinstance(event, Ended) and not ending.begun and host not in ending.leaving
        if host and self._catching and (alone or host in self._waiting):
            self._waiting.add(host)
            self._held.append(item)
            return None
        if isinstance(event, Lost) and host in self._alone:
            self._alone.discard(host)
            return None
        self._current = item if isinstance(item, NumberedEvent) else None
        if not alone:
            return event
        self._alone.add(host)
        return Lost(host, ALONE, ended=True)

    def write(self, event: Event, now: float) -> None:
        """Keep an event that the supervisor is about to handle."""
        if isinstance(event, Connected):
            self._sent[event.host] = []
        if isinstance(event, Ready):
            self.frames.places[event.host] = event.door, event.spool
        if current := self._current:
            self._journal.add(Entry(now, event, current.host, current.number))
            current.stream.wrote(current.number)
        else:
            self._journal.add(Entry(now, event))
        if isinstance(event, Ended):
            self.frames.confirm(event.host)

    def may_send(self, host: str, command: Command) -> bool:
        """Note a command for an agent. Returns whether it can be sent now, and not only when the agent is reached."""
        self._sent.setdefault(host, []).append(command)
        return host not in self.frames.away
