"""What comes to an agent: commands, and the bytes of files between them."""

from __future__ import annotations

from collections.abc import Iterator

from dmltrain_launch.agent.commands import Command, File
from dmltrain_launch.agent.protocol import MESSAGE_BYTES, ProtocolError, decode_command


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
        """Check a line whose end has not arrived: ProtocolError, once for each line, if it is too long."""
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
