"""How a process of an elastic job goes on when it loses its scheduler: with the next incarnation.

Until the next scheduler decides, the process does what the lost one has permitted: training goes on until an operation
needs the scheduler. Messages on which the lost scheduler may not have acted are sent again to the next one.

If a scheduler is lost, the launcher starts the next incarnation of it, and writes its number and address into a file
on each host: {"incarnation": 2, "host": "10.0.0.3", "port": 40000}. Numbers grow, and no process goes back to an older
one.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dmltrain.base.env import Environment
from dmltrain.kvstore.scheduler.lost_links import process
from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.address import shown
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.job import LinkLost, Register, Start
from dmltrain.kvstore.transport.message.views import Enter, Finished, Ready, Rejoin
from dmltrain.kvstore.transport.wire import FrameError
from dmltrain.kvstore.view import View

LOOK_SECONDS = 0.05  # between two looks for the next incarnation
# Between two calls of the same incarnation. If that scheduler lives, it has removed this process, and its answer says
# so.
SAME_SECONDS = 1.0
# Time limit of a call. A call of the same incarnation has only SAME_SECONDS: its host may be off, and the next
# incarnation may be there soon.
CALL_SECONDS = 5.0


@dataclass(frozen=True)
class Incarnation:
    """The scheduler `number` listens at this address."""

    number: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"the scheduler at {shown(self.host, self.port)}"


def newest(environment: Environment) -> Incarnation:
    """The incarnation in the file; that of the environment if there is no such file, if the file cannot be read, or if
    it has an earlier one."""
    own = Incarnation(environment.incarnation, environment.root_host, environment.root_port)
    if not environment.scheduler_file:
        return own
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(Path(environment.scheduler_file).read_text())
        if int(content["incarnation"]) > own.number:
            return Incarnation(int(content["incarnation"]), str(content["host"]), int(content["port"]))
    return own


@dataclass(frozen=True)
class Standing:
    """How far a process is, for another scheduler. `entered`: the newest view that it was told. `finished`, of a
    server: the workers that have left it -> the last op that each held."""

    entered: Enter | None
    finished: Mapping[int, int] = field(default_factory=dict)


class Following:
    """The connection of a process to one scheduler after the other. `current`: the incarnation to which this process
    is, or was, connected."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.current = newest(environment)
        self._remembered: list[Message] = []

    @property
    def superseded(self) -> bool:
        """Whether there is a later incarnation than `current`."""
        return newest(self._environment).number > self.current.number

    def connect(self, seconds: float = CALL_SECONDS) -> Link:
        """A link to the newest incarnation. Raises OSError, Closed or FrameError."""
        environment, target = self._environment, self._newest
        caller = Caller.new(
            environment.job,
            environment.key,
            environment.role,
            environment.index,
            "scheduler 0",
            CONTROL,
            environment.wire,
        )
        connection = link.connect(
            (target.host, target.port), caller, timeout=seconds, certificate=environment.certificate_file
        )
        self.current = target
        return connection

    def find(self, ended: threading.Event) -> Link | None:
        """Wait for a link to a later incarnation, or to `current` if that one lives. None after `wait_seconds`, or when
        `ended` is set."""
        began = time.monotonic()
        same_at = began + SAME_SECONDS
        while not ended.wait(LOOK_SECONDS) and time.monotonic() - began < self._environment.wait_seconds:
            is_same = not self.superseded
            if is_same and time.monotonic() < same_at:
                continue
            same_at = time.monotonic() + SAME_SECONDS
            try:
                return self.connect(SAME_SECONDS if is_same else CALL_SECONDS)
            except (OSError, Closed, FrameError):  # not there yet, or another program has its port
                continue
        return None

    def remember(self, message: Message) -> None:
        """Keep a message that every later incarnation must get as well."""
        self._remembered.append(message)

    def enter(self, view: View) -> None:
        """A new view. Forget the lost links to processes that are not in it, or that are new in it: those messages were
        about earlier processes with the same role and index."""
        if self._environment.role == "worker":
            stay = set(view.servers).difference(view.joined_servers)
        else:
            stay = set(view.members).difference(view.joined)
        role = "server" if self._environment.role == "worker" else "worker"
        self._remembered = [
            message
            for message in self._remembered
            if not isinstance(message, LinkLost) or _concerns(message, role, stay)
        ]

    def introduction(self, registration: Register, start: Start | None, standing: Standing | None) -> list[Message]:
        """The first messages to another incarnation; none if this process cannot go on with another one. `standing`:
        None if the process does not survive the loss of a scheduler."""
        ready = tuple(message for message in self._remembered if isinstance(message, Ready))
        if standing is None or not (self._environment.elastic and self._environment.scheduler_file):
            return []
        if standing.entered is None and self._environment.joins:
            return [registration, *self._remembered]  # it is no member yet
        if start is None or not (standing.entered or ready or self._environment.role == "server"):
            return []
        entered = (standing.entered,) if standing.entered else ()
        finished = tuple(Finished(*item) for item in sorted(standing.finished.items()))
        others = [message for message in self._remembered if not isinstance(message, Ready)]
        return [Rejoin(registration, start, entered, ready[:1], finished), *others]

    @property
    def _newest(self) -> Incarnation:
        latest = newest(self._environment)
        return max(latest, self.current, key=lambda incarnation: incarnation.number)


def _concerns(lost: LinkLost, peers: str, stay: set[int]) -> bool:
    """Whether each end of this link that has the role `peers` is among those that `stay`."""
    ends = (process(lost.own), process(lost.peer))
    return all(index in stay for role, index in ends if role == peers)
