"""A `Session` of a job with --detach, which lives on when its launcher dies (docs/decisions/0016).

Each event is written into the journal before the supervisor handles it (journal.py). A frame of an agent is confirmed
to the agent when its content is kept (stream.py).

A launcher that attaches repeats the journal. Then it reaches the agents again. No deadline counts until it has received
all frames that the agents kept meanwhile: else the supervisor could act on a deadline before it knows of an earlier
event.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Ended, Ready, Resumed
from dmltrain_launch.control.message import ATTACH
from dmltrain_launch.run import journal
from dmltrain_launch.run.journal import Beginning, Entry, Journal
from dmltrain_launch.run.keeping import Answered, CaughtUp, KeepingSession, NumberedEvent
from dmltrain_launch.run.repeated import Repeated
from dmltrain_launch.run.session import secret
from dmltrain_launch.run.stream import Stream
from dmltrain_launch.run.supervisor.action import Action, Connect, Reply
from dmltrain_launch.run.supervisor.event import Asked, Connected, Event, Lost, Tick, Unreached
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, RECONNECT_LOST_SECONDS, USAGE_CODE

ATTACH_SECONDS = 20.0  # to reach the agents, for a launcher that attaches
ALONE = "has ended: no process of the job was left there, and no launcher came"


class DetachedSession(KeepingSession):
    """`foreground`: a user waits for this launcher, so no other launcher may take the job. `left`: this launcher has
    left the job, which goes on; `why` says the reason. Before `run`, call `keep`, and `write_to` or `go_on`.
    """

    def keep(self, kept: journal.Kept, size: Callable[[int], int]) -> None:
        """`size(task)`: the length of the log of a process, in bytes."""
        super().keep(kept, size)
        self._beginning: Beginning | None = None
        self._sent: dict[str, list[Command]] = {}  # by host, to its present agent
        self._catching: set[str] = set()  # hosts whose agent still sends frames of the time without a launcher
        self._held: list[Any] = []  # ends of agents that ended without a launcher: handled after all other events
        self._waiting: set[str] = set()  # the hosts of these
        self._alone: set[str] = set()  # hosts whose agent's end without a launcher was handled, as a Lost
        self._current: NumberedEvent | None = None
        # of the supervisor's time, in s: time.monotonic() begins anew when this machine is started again
        self._offset = 0.0
        self._lease = 0
        self._lock = threading.Lock()
        self.foreground = False

    def write_to(self, new_journal: Journal, beginning: Beginning) -> None:
        """Prepare for a new job, which begins with `run`."""
        self._journal, self._beginning = new_journal, beginning

    def go_on(self, open_journal: Journal, repeated: Repeated, lease: int) -> None:
        """Prepare to go on with a job that another launcher has started. `lease`: the number of its last launcher."""
        self._journal, self._lease = open_journal, lease
        self._places = repeated.places
        self._sent, self._offset = repeated.sent, max(0.0, repeated.now - time.monotonic())
        self._streams = {host: Stream(number) for host, number in repeated.seen.items()}

    # -- the clock -----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() + self._offset

    @property
    def _deadline(self) -> float:
        return math.inf if self._catching else self.supervisor.deadline

    # -- the start -----------------------------------------------------------------------------------------------

    def _begin(self, log_folder: str | None) -> None:
        if self._beginning is None:
            return self._begin_again()
        key, pem = secret(self.supervisor.job)
        beginning = replace(self._beginning, key=key, certificate=pem, log_folder=log_folder, now=self._now())
        self._journal.begin(beginning)
        self._perform(self.supervisor.begin(key, log_folder, beginning.now, pem))

    def _begin_again(self) -> None:
        ending = self.supervisor.ending
        for name, host in self.supervisor.hosts.items():
            if ending.has_ended(name):
                continue
            if ending.is_being_replaced(name):
                self._perform([Connect(name, RECONNECT_LOST_SECONDS)])
            elif name not in self._sent:
                why = "the launcher before this one was lost before it had reached this host: start the job again"
                self.events.put(Unreached(name, f"{name}: {why}", FAULT_CODE))
            else:
                self._catching.add(name)
                self._reach(host, ATTACH_SECONDS)
        self._put_any(CaughtUp(""))

    def _next_lease(self) -> int:
        with self._lock:
            self._lease += 1
            self._journal.attach(self._lease)
            return self._lease

    # -- in the main thread --------------------------------------------------------------------------------------

    def _next(self) -> Event:
        self._current = None
        while not self.left:
            item: Any = super()._next()
            if isinstance(item, CaughtUp):
                self._caught_up(item.host)
            elif isinstance(item, Answered):
                self._resumed(item.event)
            elif isinstance(item, Asked) and item.do == ATTACH:
                self._release(item)
            elif (event := self._unwrapped(item)) is not None:
                return event
        return Tick()

    def _caught_up(self, host: str) -> None:
        self._catching.discard(host)
        if not self._catching:
            held, self._held = self._held, []
            self._waiting.clear()
            for item in held:
                self._put_any(item)

    def _resumed(self, event: Resumed) -> None:
        host = event.host
        self._away.discard(host)
        if event.alive and host in self.connections:
            for command in self._sent.get(host, [])[event.commands :]:
                self.connections[host].send(command)

    def _release(self, asked: Asked) -> None:
        """Another launcher wants the job."""
        assert self.requests
        if self.foreground:
            text = f"the launcher with pid {os.getpid()} is attached to the job: end it first, or close its terminal"
            return self.requests.answer(Reply(asked.number, USAGE_CODE, ((text, None),)))
        self.requests.answer(Reply(asked.number, 0, ()))
        self._leave("another launcher takes the job")

    def _unwrapped(self, item: Any) -> Event | None:
        """The event for the supervisor; None if there is none now."""
        event: Event = item.event if isinstance(item, NumberedEvent) else item
        host = event.host if isinstance(event, (Ended, Lost)) else ""
        ending = self.supervisor.ending
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

    def _handle(self, event: Event) -> list[Action]:
        if self.left:
            return []
        current, now = self._current, self._now()
        if isinstance(event, Connected):
            self._sent[event.host] = []
        if isinstance(event, Ready):
            self._places[event.host] = event.door, event.spool
        if current:
            self._journal.add(Entry(now, event, current.host, current.number))
            current.stream.wrote(current.number)
        else:
            self._journal.add(Entry(now, event))
        if isinstance(event, Ended):
            self._confirm(event.host)
        return super()._handle(event)

    def _send(self, host: str, command: Command) -> None:
        self._sent.setdefault(host, []).append(command)
        if host not in self._away:
            super()._send(host, command)

    def _close(self) -> None:
        if self.supervisor.over:
            for host in list(self.connections):
                self._confirm(host)
        super()._close()
