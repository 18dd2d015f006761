"""The agent's end of its channel: commands come in by standard input, frames go out by standard output.

Nothing here blocks: call `read` when standard input is readable, and `watch_output` before each wait for events.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator

from launch.agent.commands import Command, File
from launch.agent.events import Event, Refused
from launch.agent.protocol import (
    EVENT,
    HEADER,
    HELLO,
    MESSAGE_BYTES,
    NO_TASK,
    OUTPUT,
    OUTPUT_BYTES,
    ProtocolError,
    decode_command,
    encode_event,
)

READ_BYTES = OUTPUT_BYTES
BACKLOG_BYTES = 1 << 20  # unsent output above which the processes are no longer read
SILENCE_SECONDS = 10.0  # until a job says otherwise


class Incoming:
    """Splits the agent's standard input into commands and the raw bytes that follow a `File`."""

    def __init__(self) -> None:
        self.data, self.raw = bytearray(), 0
        self.skipping = False  # until the end of a line that is too long

    def feed(self, data: bytes) -> None:
        self.data += data

    def take(self) -> Command | bytes | None:
        """The next command, or bytes of a file; None if incomplete. A line that raises ProtocolError is skipped."""
        if self.raw:
            content = bytes(self.data[: self.raw])
            self.raw -= len(content)
            del self.data[: len(content)]
            return content or None
        end = self.data.find(b"\n")
        if end < 0:
            self._check_beginning()
            return None
        line = self.data[:end]
        del self.data[: end + 1]
        if self.skipping:
            self.skipping = False
            return self.take()
        command = decode_command(line)
        self.raw = command.bytes if isinstance(command, File) else 0
        return command

    def _check_beginning(self) -> None:
        """Of a line without its end yet: ProtocolError, once, if it is too long."""
        if not self.skipping and len(self.data) <= MESSAGE_BYTES:
            return
        size, before = len(self.data), self.skipping
        self.data.clear()
        self.skipping = True
        if not before:
            raise ProtocolError(f"a line of more than {size} bytes; expected at most {MESSAGE_BYTES}")

    def __iter__(self) -> Iterator[Command | bytes]:
        """All complete commands, and all bytes of files."""
        while (received := self.take()) is not None:
            yield received


class Channel:
    """`host` is this host's name in the job, for events. `lost`: why the launcher counts as lost, or ""."""

    def __init__(self, selector: selectors.BaseSelector, stdin: int, stdout: int):
        self.selector, self.stdin, self.stdout = selector, stdin, stdout
        self.host, self.silence = "this host", SILENCE_SECONDS
        self.incoming, self.backlog = Incoming(), bytearray(HELLO)
        self.received_at = time.monotonic()
        self.lost = ""
        for descriptor in (stdin, stdout):
            os.set_blocking(descriptor, False)

    @property
    def deadline(self) -> float:
        """When a silent launcher counts as lost, by time.monotonic()."""
        return self.received_at + self.silence

    @property
    def full(self) -> bool:
        """Whether so much is unsent that the agent should stop reading from the processes."""
        return len(self.backlog) > BACKLOG_BYTES

    @property
    def has_room(self) -> bool:
        """Whether the agent may read from them again."""
        return len(self.backlog) < BACKLOG_BYTES // 2

    def read(self) -> None:
        """Read what has arrived into `incoming`."""
        try:
            data = os.read(self.stdin, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            return self.lose("the launcher's end of the channel closed")
        self.received_at = time.monotonic()
        self.incoming.feed(data)

    def check_silence(self, now: float) -> None:
        if now >= self.deadline:
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

    def send(self, event: Event) -> None:
        try:
            payload = encode_event(event)
        except ProtocolError as error:  # a host with very many processes, for example
            payload = encode_event(Refused(self.host, f"the agent on {self.host} cannot answer: {error}", 125))
        self._send(EVENT, NO_TASK, payload)

    def send_output(self, task: int, data: bytes) -> None:
        self._send(OUTPUT, task, data)

    def _send(self, kind: int, task: int, payload: bytes) -> None:
        if not self.lost:
            self.backlog += HEADER.pack(kind, task, len(payload))
            self.backlog += payload

    def watch_output(self) -> None:
        """Register `write` with the selector while something is unsent."""
        watched = self.stdout in self.selector.get_map()
        if self.backlog and not watched:
            self.selector.register(self.stdout, selectors.EVENT_WRITE, self.write)
        elif watched and not self.backlog:
            self.selector.unregister(self.stdout)

    def write(self) -> None:
        try:
            with memoryview(self.backlog) as view:
                written = os.write(self.stdout, view[:BACKLOG_BYTES])
            del self.backlog[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            self.lose(f"the launcher closed the channel ({error.strerror})")
