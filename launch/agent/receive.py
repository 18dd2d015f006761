"""The agent's side of copying the working directory: it compares what is here and writes what differs.

Commands, in this order (`launch.agent.commands`): Sync, answered by Opened; then Same, which ends it, or Entries,
the last of which is answered by Wanted; then a File with its bytes for each piece of what is wanted. After the last
file Synced is sent; the launcher may announce the files anew that did not come as they were announced. A Refused ends
it: later messages are ignored.

Nothing here takes longer than STEP_SECONDS or one call of the file system, so that the agent goes on answering.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from launch.agent import Refusal, compare
from launch.agent.commands import Command, Entries, File, Sync
from launch.agent.compare import FILE, Row
from launch.agent.destination import Destination, Temporary, checked, shown
from launch.agent.events import Event, Opened, Refused, Synced, Wanted

Result = TypeVar("Result")
STEP_SECONDS = 0.05
# Data is handed to the disk now and then: network file systems write all of a file when it is closed, in one call
FLUSH_BYTES = 32 << 20


class Part:
    """A file that is being received."""

    def __init__(self, index: int, row: Row, temporary: Temporary):
        self.index, self.row, self.temporary = index, row, temporary
        self.digest, self.got = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        with memoryview(data) as view:
            written = 0
            while written < len(data):
                written += os.write(self.temporary.descriptor, view[written:])
        if self.got // FLUSH_BYTES != (self.got + len(data)) // FLUSH_BYTES:
            os.fdatasync(self.temporary.descriptor)
        self.got += len(data)


class Receiver:
    """One agent's copying. `emit` sends an event; `host` is this host's name in messages.

    Call `step` until it returns False whenever it may have work: after each `begin`.
    """

    def __init__(self, host: str, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic):
        self.host, self.emit, self.clock = host, emit, clock
        self.destination: Destination | None = None
        self.read_only: OSError | None = None
        self.probe: Temporary | None = None
        self.rows: dict[int, Row] = {}
        self.wanted: dict[int, Row] = {}
        self.work: Iterator[None] = iter(())
        self.part: Part | None = None
        self.refused = False
        self.changed: list[int] = []
        self.files = self.bytes = 0

    # -- what the agent calls ------------------------------------------------------------------------------------

    def begin(self, command: Command) -> None:
        """Take a Sync, Same or Entries."""
        self._guard(self._begin, command)

    def step(self) -> bool:
        """Work for STEP_SECONDS; whether there is more to do."""
        return bool(self._guard(self._step))

    def expect(self, command: File) -> None:
        """Take a File, whose bytes follow, to be given to `take` in any pieces."""
        self._guard(self._expect, command)

    def take(self, data: bytes) -> None:
        self._guard(self._take, data)

    def finish(self) -> None:
        """End the copy, also before it is complete: no temporary file stays."""
        if self.part is not None:
            self.part.temporary.discard()
        if self.probe is not None:
            self.probe.discard()
        if self.destination is not None:
            self.destination.close()
        self.part = self.probe = self.destination = None
        self.work, self.wanted, self.rows = iter(()), {}, {}

    def _guard(self, do: Callable[..., Result], *arguments: object) -> Result | None:
        if self.refused:
            return None
        try:
            return do(*arguments)
        except Refusal as refusal:
            message, code = str(refusal), refusal.code
        except ValueError as error:  # text that is no path
            message, code = f"the launcher sends {self.host} what cannot be copied: {error}", 125
        except OSError as error:
            message, code = f"copying to {self.host} failed: {error.strerror}", 2
        self.refused = True
        self.finish()
        self.emit(Refused(self.host, message, code))
        return None

    # -- what is here --------------------------------------------------------------------------------------------

    def _begin(self, command: Command) -> None:
        if isinstance(command, Sync):
            return self._open(command.to)
        if self.probe is not None:
            self.probe.discard()
            self.probe = None
        if not isinstance(command, Entries):
            return self.finish()
        for index, kind, path, mode, mtime, size, content in command.entries:
            self.rows[index] = Row(kind, checked(path), mode, mtime, size, content)
        if command.last:
            self.changed, self.files, self.bytes = [], 0, 0
            self.work = self._compare()

    def _open(self, to: str) -> None:
        self.finish()
        expanded = os.path.expanduser(to.encode("utf-8", "surrogateescape"))
        if not os.path.isabs(expanded):
            fix = "expected an absolute path, or one that begins with ~/"
            raise Refusal(f"--sync-dst-dir {shown(expanded)} on {self.host}: {fix}", 2)
        try:
            self.destination = Destination(expanded)
        except OSError as error:
            what = f"the folder {shown(expanded)} to copy to cannot be made on {self.host}"
            raise Refusal(f"{what}: {error.strerror}; choose another --sync-dst-dir", 2) from None
        self._put_probe(self.destination)
        name = self.probe.name.decode() if self.probe else ""
        self.emit(Opened(self.host, expanded.decode("utf-8", "surrogateescape"), name))

    def _put_probe(self, destination: Destination) -> None:
        """Try whether the folder can be written; when not, it may still have everything already."""
        try:
            destination.remove_left()
            self.probe = destination.temporary(b"probe")
            self.read_only = None
        except OSError as error:
            self.read_only = error

    def _step(self) -> bool:
        until = self.clock() + STEP_SECONDS
        return any(self.clock() >= until for _ in self.work)

    def _compare(self) -> Iterator[None]:
        """Find what differs, make room sure, make folders and links, and say which files are wanted."""
        destination, rows = self._opened(), self.rows
        self.rows = {}
        differing = yield from compare.differing(destination, rows, self.host)
        if differing and self.read_only:
            raise destination.refusal(self.read_only, b"", self.host)
        yield from compare.check_room(destination, list(differing.values()), self.host)
        yield from compare.make(destination, [row for row in differing.values() if row.kind != FILE], self.host)
        self.wanted = {index: row for index, row in differing.items() if row.kind == FILE}
        self.emit(Wanted(self.host, tuple(self.wanted), sum(row.size for row in self.wanted.values())))
        self._end_when_complete()

    def _opened(self) -> Destination:
        if self.destination is None:
            raise Refusal(f"the launcher sends {self.host} what to copy, but not where to", 125)
        return self.destination

    # -- what comes ----------------------------------------------------------------------------------------------

    def _expect(self, command: File) -> None:
        index, destination = command.entry, self._opened()
        if self.part is not None and self.part.index != index:
            self._drop(self.part.index)
        if index not in self.wanted:
            raise Refusal(f"the launcher sends {self.host} a file (number {index}) that was not asked for", 125)
        row = self.wanted[index]
        if command.gone:
            return self._drop(index)
        if self.part is None:
            try:
                self.part = Part(index, row, destination.temporary(row.path))
            except OSError as error:
                raise destination.refusal(error, row.path, self.host) from None
        if self.part.got + command.bytes > row.size:
            raise Refusal(f"the launcher sends {self.host} more of {shown(row.path)} than it announced", 125)
        self._take(b"")

    def _take(self, data: bytes) -> None:
        part, destination = self.part, self._opened()
        if part is None:
            return
        try:
            part.write(data)
            if part.got == part.row.size:
                self._complete(destination, part)
        except OSError as error:
            raise destination.refusal(error, part.row.path, self.host) from None

    def _complete(self, destination: Destination, part: Part) -> None:
        if part.digest.hexdigest() != part.row.content:
            return self._drop(part.index)
        folder, name = destination.parent(part.row.path)
        part.temporary.install(folder, name, part.row.mode | stat.S_IRUSR, part.row.mtime)
        self.part = None
        self.files, self.bytes = self.files + 1, self.bytes + part.row.size
        del self.wanted[part.index]
        self._end_when_complete()

    def _drop(self, index: int) -> None:
        """Do without the file for now; what was here under its name stays."""
        if self.part is not None:
            self.part.temporary.discard()
            self.part = None
        self.changed.append(index)
        del self.wanted[index]
        self._end_when_complete()

    def _end_when_complete(self) -> None:
        if not self.wanted:
            self.emit(Synced(self.host, self.files, self.bytes, tuple(self.changed)))
