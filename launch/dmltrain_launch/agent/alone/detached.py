"""An agent whose job lives on without its launcher (docs/decisions/0016).

From the start of its first process on, the next launcher can attach to it. While there is no launcher, events and
output wait in the spool, no process is started, and the scheduler is not replaced, because only a launcher may number
its incarnations. When no process of the job has run on the host for IDLE_SECONDS, the agent ends, and its spool stays.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.alone.attach import Door, Lease, new_name
from dmltrain_launch.agent.alone.spool import Spool
from dmltrain_launch.agent.channel import Channel
from dmltrain_launch.agent.commands import UNCOUNTED, Attach, Command, JobCommand
from dmltrain_launch.agent.events import Refused, Resumed
from dmltrain_launch.agent.protocol import EVENT, HEADER, NO_TASK, encode_event
from dmltrain_launch.agent.run_folder import prefix

if TYPE_CHECKING:
    from dmltrain_launch.agent.children import Children

IDLE_SECONDS = 10.0
KEPT_SECONDS = 10.0  # at the end: for the launcher to confirm everything; a silent launcher is lost after the same time
TAKEN_CODE = 75  # for a launcher whose job another launcher has taken


class Detached:
    """The part of an agent that outlives its launcher. From its creation on, everything that is sent goes to a spool.

    Refusal if the spool's folder cannot be created. `possible`: whether the agent goes on when its launcher is lost.
    """

    def __init__(self, selector: selectors.BaseSelector, channel: Channel, children: Children, job: JobCommand):
        self._selector, self._channel, self._children = selector, channel, children
        self._lease = Lease()
        self._door: Door | None = None
        self.door = new_name()
        self._commands = 1  # that were received: the JobCommand that has made this
        self._idle_since = math.inf
        self._over_since = math.inf
        self._read: Callable[[], None] = lambda: None
        self._take_all: Callable[[], None] = lambda: None
        try:
            channel.spool = Spool(tempfile.mkdtemp(prefix=f"{prefix(job.mark)}spool-"))
        except OSError as error:
            what = f"--detach: cannot make a folder in TMPDIR or /tmp on {job.host}"
            raise Refusal(f"{what}: {error.strerror}", 125) from None
        self.spool = channel.spool.folder

    @property
    def possible(self) -> bool:
        return self._door is not None

    def count(self, command: Command) -> None:
        if not isinstance(command, UNCOUNTED):
            self._commands += 1

    # -- with a launcher -----------------------------------------------------------------------------------------

    def open(self, read: Callable[[], None], take_all: Callable[[], None]) -> None:
        """Listen for the next launcher. `read` reads from a launcher; `take_all` executes the commands that have
        come."""
        self._read, self._take_all = read, take_all
        if self._channel.spool and not self._door:
            try:
                self._door = Door(self._selector, self.door, self._admit)
            except OSError as error:
                what = f"--detach: {self._channel.host} has another agent of this job, or cannot listen"
                raise Refusal(f"{what}: {error.strerror}", 125) from None

    def over(self, now: float) -> bool:
        """Whether the agent can exit, after the end of the job on this host."""
        channel = self._channel
        if not channel.spool:
            return not channel.backlog
        self._over_since = min(self._over_since, now)
        return not channel.attached or channel.spool.done or now >= self._over_since + KEPT_SECONDS

    def close(self) -> None:
        if self._door:
            self._door.close()
        if self._channel.spool:
            self._channel.spool.close()

    # -- without one ---------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When to call `idle` or `over`."""
        return min(self._idle_since + IDLE_SECONDS, self._over_since + KEPT_SECONDS)

    def begin(self) -> None:
        """The launcher is lost."""
        self._channel.detach()
        self._idle_since = math.inf

    def idle(self, now: float) -> bool:
        """Whether there has been neither a launcher nor a process for IDLE_SECONDS."""
        runs = any(child.popen.returncode is None for child in self._children.by_pid.values())
        self._idle_since = math.inf if self._channel.attached or runs else min(self._idle_since, now)
        return now >= self._idle_since + IDLE_SECONDS

    # -- the next one --------------------------------------------------------------------------------------------

    def _admit(self, command: Attach, connection: socket.socket, rest: bytes) -> None:
        channel, spool = self._channel, self._channel.spool
        assert spool is not None
        if not self._lease.take(command.lease):
            with connection:
                text = f"another launcher has attached to the job on {channel.host}"
                _send(connection, Refused(channel.host, text, TAKEN_CODE))
            return
        if channel.attached:
            channel.lose("another launcher has attached")
            channel.detach()
        self._idle_since = math.inf
        spool.rewind()
        channel.attach(connection.detach(), rest, Resumed(channel.host, spool.first, spool.last, self._commands))
        self._selector.register(channel.stdin, selectors.EVENT_READ, self._read)
        self._take_all()


def _send(connection: socket.socket, event: Refused) -> None:
    payload = encode_event(event)
    with contextlib.suppress(OSError):
        connection.send(HEADER.pack(EVENT, NO_TASK, len(payload)) + payload)
