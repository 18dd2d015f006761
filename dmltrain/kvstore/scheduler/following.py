"""How a process of an elastic job goes on when it loses its scheduler: with the next incarnation.

Until that one decides, it does what the scheduler before has permitted: training goes on until something needs the
scheduler. What that scheduler may not have acted on is said again.

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
from dmltrain.kvstore.transport.message import Enter, Finished, LinkLost, Message, Ready, Register, Rejoin, Start
from dmltrain.kvstore.transport.wire import FrameError
from dmltrain.kvstore.view import View

LOOK_SECONDS = 0.05  # between two looks for the next incarnation
SAME_SECONDS = 1.0  # between two calls of the same one: if it lives, it has removed this process, and says so
CALL_SECONDS = 5.0  # for a call; SAME_SECONDS for one of the same: its host may be off, and the next one there soon


@dataclass(frozen=True)
class Incarnation:
    """The scheduler `number` listens at this address."""

    number: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"the scheduler at {shown(self.host, self.port)}"


def newest(environment: Environment) -> Incarnation:
    """The one in the file, unless there is no file, it cannot be read, or the environment has a later one."""
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
    """How far a process is. `entered`: the newest view that it was told. `finished`: of a server, who has left it."""

    entered: Enter | None
    finished: Mapping[int, int] = field(default_factory=dict)


class Following:
    """`current`: the incarnation that this process is, or was, connected to."""

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
        """A link to a later incarnation, as soon as there is one; None if not within `wait_seconds`, or when `ended`.
        If `current` lives, to that."""
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
        """Remember what every incarnation has to know."""
        self._remembered.append(message)

    def enter(self, view: View) -> None:
        """A new view: what a server has said about its links to workers that are not in it, or new, is void: it was
        about the processes before those. So is what a worker has said about its links to servers that are new."""
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
        """What to say first to another incarnation; nothing if this process cannot go on with one. `standing`: None if
        it does not survive the loss of a scheduler."""
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
    """Whether the end of this link with the role `peers`, if there is one, is among those that `stay`."""
    ends = (process(lost.own), process(lost.peer))
    return all(index in stay for role, index in ends if role == peers)
