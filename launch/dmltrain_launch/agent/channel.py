"""The agent's end of its channel: commands come in by standard input, frames go out by standard output.

Nothing here blocks: call `read` when standard input is readable, and `watch_output` before each wait for events.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from typing import TYPE_CHECKING

from dmltrain_launch.agent.events import Alive, Event, Refused
from dmltrain_launch.agent.incoming import Incoming
from dmltrain_launch.agent.protocol import (
    EVENT,
    HEADER,
    HELLO,
    NO_TASK,
    OUTPUT,
    OUTPUT_BYTES,
    ProtocolError,
    encode_event,
)

if TYPE_CHECKING:
    from dmltrain_launch.agent.alone.spool import Spool  # few jobs need one

READ_BYTES = OUTPUT_BYTES
BACKLOG_BYTES = 1 << 20  # of unsent output: above it the agent stops reading from the processes
UNCONFIRMED_BYTES = 16 << 20  # of output that the attached launcher has not confirmed: above it the agent stops, too
SILENCE_SECONDS = 10.0  # until the job gives its own limit


class Channel:
    """`host` is this host's name in the job, for events. `lost`: why the launcher counts as lost, or "".

    With a `spool` everything but heartbeats goes through it, so that the next launcher can get what this one has not
    confirmed. `attached` is false between two launchers.
    """

    def __init__(self, selector: selectors.BaseSelector, stdin: int, stdout: int):
        self.selector, self.stdin, self.stdout = selector, stdin, stdout
        self.host, self.silence = "this host", SILENCE_SECONDS
        self.incoming, self.backlog = Incoming(), bytearray(HELLO)
        self.received_at = time.monotonic()
        self.lost = ""
        self.attached = True
        self.spool: Spool | None = None
        for descriptor in (stdin, stdout):
            os.set_blocking(descriptor, False)

    @property
    def deadline(self) -> float:
        """When a silent launcher counts as lost, by time.monotonic()."""
        return self.received_at + self.silence if self.attached else math.inf

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent to the launcher."""
        return len(self.backlog) + (self.spool.unread if self.spool and self.attached else 0)

    @property
    def unconfirmed(self) -> int:
        """Bytes that the attached launcher has not confirmed."""
        return self.spool.bytes if self.spool and self.attached else 0

    @property
    def full(self) -> bool:
        """Whether so much is unsent or unconfirmed that the agent should stop reading from the processes."""
        return self.unsent > BACKLOG_BYTES or self.unconfirmed > UNCONFIRMED_BYTES

    @property
    def has_room(self) -> bool:
        """Whether the agent may read from the processes again."""
        return self.unsent < BACKLOG_BYTES // 2 and self.unconfirmed < UNCONFIRMED_BYTES // 2

    def read(self) -> None:
        """Read what has arrived into `incoming`."""
        try:
            data = os.read(self.stdin, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a bridge was killed
            data = b""
        if not data:
            return self.lose("the launcher's end of the channel closed")
        self.received_at = time.monotonic()
        self.incoming.feed(data)

    def check_silence(self, now: float) -> None:
        if self.attached and now >= self.deadline:
            self.lose(f"missed heartbeats from the launcher for {self.silence:g} s")

    def lose(self, why: str) -> None:
        """The launcher is lost: stop reading and sending."""
        if self.lost:
            return
        self.lost = why
        self.backlog.clear()
        for descriptor in (self.stdin, self.stdout):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)

    def detach(self) -> None:
        """The launcher is lost, and another one may come: keep in the spool what is sent from now on."""
        self.lost, self.attached = "", False
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (self.stdin, self.stdout, 2):
            if descriptor > 2:
                os.close(descriptor)
            # the number stays in use, so that no other file gets it; and sshd, if the agent was started by it, ends the
            # session when these descriptors are closed
            else:
                os.dup2(nothing, descriptor)
        os.close(nothing)

    def attach(self, descriptor: int, rest: bytes, resumed: Event) -> None:
        """Go on with the next launcher, at the other end of the socket `descriptor`.

        `rest`: bytes that it has already sent. The event `resumed` is sent to it before everything else.
        """
        self.stdin, self.stdout = descriptor, os.dup(descriptor)
        os.set_blocking(descriptor, False)
        self.incoming, self.backlog = Incoming(), bytearray()
        self.incoming.feed(rest)
        self.received_at = time.monotonic()
        self.attached = True
        self._send(EVENT, NO_TASK, encode_event(resumed))

    def send(self, event: Event) -> None:
        try:
            payload = encode_event(event)
        except ProtocolError as error:  # a host with very many processes, for example
            payload = encode_event(Refused(self.host, f"the agent on {self.host} cannot answer: {error}", 125))
        if self.spool and not isinstance(event, Alive):
            return self.spool.append(EVENT, NO_TASK, payload)
        self._send(EVENT, NO_TASK, payload)

    def send_output(self, task: int, data: bytes) -> None:
        if self.spool:
            return self.spool.append(OUTPUT, task, data)
        self._send(OUTPUT, task, data)

    def _send(self, kind: int, task: int, payload: bytes) -> None:
        if not self.lost and self.attached:
            self.backlog += HEADER.pack(kind, task, len(payload))
            self.backlog += payload

    def watch_output(self) -> None:
        """Register `write` with the selector while something is unsent."""
        if not self.attached:
            return
        if self.spool and not self.lost:
            self._read_spool(self.spool)
        watched = self.stdout in self.selector.get_map()
        if self.backlog and not watched:
            self.selector.register(self.stdout, selectors.EVENT_WRITE, self.write)
        elif watched and not self.backlog:
            self.selector.unregister(self.stdout)

    def _read_spool(self, spool: Spool) -> None:
        try:
            while len(self.backlog) < BACKLOG_BYTES // 2 and (data := spool.read(READ_BYTES)):
                self.backlog += data
        except OSError as error:
            self.lose(f"what was kept in {spool.folder} cannot be read ({error.strerror})")

    def write(self) -> None:
        try:
            with memoryview(self.backlog) as view:
                written = os.write(self.stdout, view[:BACKLOG_BYTES])
            del self.backlog[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(f"the launcher closed the channel ({error.strerror})")
