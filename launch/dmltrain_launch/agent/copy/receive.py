"""The agent's side of copying the working directory: compare the folder with what is announced, write what differs.

Commands, in this order (`dmltrain_launch.agent.commands`): Sync, answered by Opened; then Same, which ends the copy, or
Entries. If an earlier copy left something that is not announced now, the answer is Missing, and Remove follows. The
next answer is Wanted; then File commands come with the bytes of the wanted files. After the last file Synced is sent.
The launcher may then announce again the files that changed after their announcement. A Refused ends the copy: later
messages are ignored.

Nothing here takes longer than STEP_SECONDS or one file system call, so that the agent can answer heartbeats.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.commands import Command, Entries, File, Remove, Sync
from dmltrain_launch.agent.copy import compare, safe_folder
from dmltrain_launch.agent.copy.compare import FILE, CopyRow
from dmltrain_launch.agent.copy.copied import Copied, notes_of_removal, remove_gone, unannounced
from dmltrain_launch.agent.copy.destination import LIST, Destination, Temporary, checked
from dmltrain_launch.agent.copy.safe_folder import shown
from dmltrain_launch.agent.events import Event, Missing, Opened, Refused, Synced, Wanted
from dmltrain_launch.agent.protocol import batches

Result = TypeVar("Result")
STEP_SECONDS = 0.05
# A network file system writes all unflushed data of a file in one call when it is closed, which may take long.
FLUSH_BYTES = 32 << 20
ENTRIES = 4_000_000  # of a copy; an entry takes about 500 bytes of the agent's memory


class IncomingFile:
    """A file that is being received."""

    def __init__(self, index: int, row: CopyRow, temporary: Temporary):
        self.index, self.row, self.temporary = index, row, temporary
        self.digest, self.received = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        with memoryview(data) as view:
            written = 0
            while written < len(data):
                written += os.write(self.temporary.descriptor, view[written:])
        if self.received // FLUSH_BYTES != (self.received + len(data)) // FLUSH_BYTES:
            os.fdatasync(self.temporary.descriptor)
        self.received += len(data)


class Receiver:
    """The receiving side of a copy. `emit` sends an event; `host` is this host's name in messages.

    After each `begin`, call `step` until it returns False.
    """

    def __init__(self, host: str, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic):
        self.host, self.emit, self.clock, self.most = host, emit, clock, ENTRIES
        self.destination: Destination | None = None
        self.read_only: OSError | None = None
        self.probe: Temporary | None = None
        self.rows: dict[int, CopyRow] = {}
        self.copied = Copied()
        self.listed = self.compared = False  # whether `copied` is loaded, and the first comparison has begun
        self.missing: list[bytes] = []  # copied earlier and not announced: the launcher says which of them are gone
        self.gone: list[bytes] = []  # to be removed
        self.notes: list[str] = []
        self.wanted: dict[int, CopyRow] = {}
        self.work: Iterator[None] = iter(())
        self.file: IncomingFile | None = None
        self.refused = False
        self.changed: list[int] = []
        self.files = self.bytes = 0

    # -- called by the agent -------------------------------------------------------------------------------------

    def begin(self, command: Command) -> None:
        """Process a Sync, Same, Entries or Remove."""
        self._guard(self._begin, command)

    def step(self) -> bool:
        """Work for STEP_SECONDS. Returns whether there is more to do."""
        return bool(self._guard(self._step))

    def expect(self, command: File) -> None:
        """Process a File. Its bytes follow: pass them to `take`, in chunks of any size."""
        self._guard(self._expect, command)

    def take(self, data: bytes) -> None:
        self._guard(self._take, data)

    def finish(self) -> None:
        """End the copy, complete or not, and remove temporary files."""
        if self.file is not None:
            self.file.temporary.discard()
        if self.probe is not None:
            self.probe.discard()
        if self.destination is not None:
            self.destination.close()
        self.file = self.probe = self.destination = None
        self.work, self.wanted, self.rows = iter(()), {}, {}
        self.copied, self.missing, self.gone, self.notes = Copied(), [], [], []
        self.listed = self.compared = False

    def _guard(self, do: Callable[..., Result], *arguments: object) -> Result | None:
        if self.refused:
            return None
        try:
            return do(*arguments)
        except Refusal as refusal:
            message, code = str(refusal), refusal.code
        except ValueError as error:  # a path with a zero byte
            message, code = f"the launcher sent {self.host} an invalid path: {error}", 125
        except OSError as error:
            message, code = f"copying to {self.host} failed: {error.strerror}", 2
        self.refused = True
        self.finish()
        self.emit(Refused(self.host, message, code))
        return None

    # -- compare -------------------------------------------------------------------------------------------------

    def _begin(self, command: Command) -> None:
        if isinstance(command, Sync):
            return self._open(command.to)
        if self.probe is not None:
            self.probe.discard()
            self.probe = None
        if isinstance(command, Remove):
            return self._take_gone(command)
        if not isinstance(command, Entries):
            return self.finish()
        if len(self.rows) + len(command.entries) > self.most:
            fix = "exclude folders that the job does not need with --sync-exclude"
            raise Refusal(f"more than {self.most} files, folders and links to copy to {self.host}: {fix}", 2)
        for index, kind, path, mode, mtime, size, content in command.entries:
            self.rows[index] = CopyRow(kind, checked(path), mode, mtime, size, content)
        if command.last:
            self.changed, self.files, self.bytes = [], 0, 0
            self.work = self._compare() if self.listed else self._look_for_missing()

    def _take_gone(self, command: Remove) -> None:
        """The launcher's answer to Missing."""
        if not self.listed or self.compared:
            raise Refusal(f"the launcher sent {self.host} paths to remove that it was not asked about", 125)
        asked = set(self.missing)
        gone = [checked(path) for path in command.paths]
        self.gone += [path for path in gone if path in asked]
        if command.last:
            self.work = self._compare()

    def _open(self, to: str) -> None:
        self.finish()
        expanded = os.path.expanduser(to.encode("utf-8", "surrogateescape"))
        if not os.path.isabs(expanded):
            fix = "expected an absolute path, or a path that begins with ~/"
            raise Refusal(f"--sync-dst-dir {shown(expanded)} on {self.host}: {fix}", 2)
        try:
            self.destination = Destination(expanded, self.host)
        except OSError as error:
            what = f"cannot create the folder {shown(expanded)} on {self.host} to copy to"
            raise Refusal(f"{what}: {error.strerror}; choose another --sync-dst-dir", 2) from None
        self._make_probe(self.destination)
        if self.probe is not None and not self.destination.is_own:
            status, what = os.fstat(self.destination.root), "belongs to root, not to you"
            raise safe_folder.refusal(expanded, status, self.host, what)
        name = self.probe.name.decode() if self.probe else ""
        self.emit(Opened(self.host, expanded.decode("utf-8", "surrogateescape"), name))

    def _make_probe(self, destination: Destination) -> None:
        """Test whether the folder is writable. A read-only folder may already have everything."""
        try:
            destination.remove_left()
            self.probe = destination.temporary(b"probe")
            self.read_only = None
        except OSError as error:
            self.read_only = error

    def _step(self) -> bool:
        until = self.clock() + STEP_SECONDS
        return any(self.clock() >= until for _ in self.work)

    def _look_for_missing(self) -> Iterator[None]:
        """Ask about what was once copied here and is not announced; if there is nothing, go on."""
        destination = self._opened()
        if destination.make_private():
            self.notes.append(f"{shown(destination.path)} had mode {destination.mode:04o} and is private now")
        yield from self.copied.load(destination)
        self.listed = True
        if not self.read_only:
            kinds = {row.path: row.kind for row in self.rows.values()}
            self.missing, self.gone = unannounced(self.copied, kinds)
        if not self.missing:
            return (yield from self._compare())
        for paths, last in batches([path.decode("utf-8", "surrogateescape") for path in self.missing]):
            self.emit(Missing(self.host, paths, last))
            yield

    def _compare(self) -> Iterator[None]:
        """Remove what is gone, find what differs, check the space, make folders and links, and request files."""
        destination, rows = self._opened(), self.rows
        self.rows, self.compared = {}, True
        yield from self._remove(destination)
        compared = yield from compare.differing(destination, self.copied, rows)
        if compared.rows and self.read_only:
            raise destination.refusal(self.read_only, b"")
        for row in compared.rows.values():
            self.copied.add(row.path, row.state)
        yield from compare.check_space(destination, self.copied, list(compared.rows.values()))
        self.notes += compared.notes()
        yield from self._store(destination)
        yield from compare.make(destination, [row for row in compared.rows.values() if row.kind != FILE])
        self.wanted = {index: row for index, row in compared.rows.items() if row.kind == FILE}
        for entries, last in batches(list(self.wanted)):
            self.emit(Wanted(self.host, entries, sum(self.wanted[index].size for index in entries), last))
            yield
        self._end_when_complete()

    def _store(self, destination: Destination) -> Iterator[None]:
        """Write down what is going to be copied, so that it can be removed even if the copy is cut off."""
        try:
            if not self.read_only:
                yield from self.copied.store(destination)
        except OSError as error:
            raise destination.refusal(error, LIST) from None

    def _remove(self, destination: Destination) -> Iterator[None]:
        try:
            removed, changed = yield from remove_gone(destination, self.copied, self.gone)
        except OSError as error:
            raise destination.refusal(error, b"") from None
        self.gone = []
        self.notes += notes_of_removal(removed, changed)

    def _opened(self) -> Destination:
        if self.destination is None:
            raise Refusal(f"the launcher sent {self.host} entries to copy before the folder to copy to", 125)
        return self.destination

    # -- files ---------------------------------------------------------------------------------------------------

    def _expect(self, command: File) -> None:
        index, destination = command.entry, self._opened()
        if self.file is not None and self.file.index != index:
            self._drop(self.file.index)
        if index not in self.wanted:
            raise Refusal(f"the launcher sent {self.host} a file (number {index}) that was not requested", 125)
        row = self.wanted[index]
        if command.gone:
            return self._drop(index)
        if self.file is None:
            try:
                self.file = IncomingFile(index, row, destination.temporary(row.path))
            except OSError as error:
                raise destination.refusal(error, row.path) from None
        if self.file.received + command.bytes > row.size:
            raise Refusal(f"the launcher sent {self.host} more bytes of {shown(row.path)} than announced", 125)
        self._take(b"")

    def _take(self, data: bytes) -> None:
        file, destination = self.file, self._opened()
        if file is None:
            return
        try:
            file.write(data)
            if file.received == file.row.size:
                self._complete(destination, file)
        except OSError as error:
            raise destination.refusal(error, file.row.path) from None

    def _complete(self, destination: Destination, file: IncomingFile) -> None:
        if file.digest.hexdigest() != file.row.content:
            return self._drop(file.index)
        folder, name = destination.parent(file.row.path)
        file.temporary.install(folder, name, file.row.mode | stat.S_IRUSR, file.row.mtime)
        self.file = None
        self.files, self.bytes = self.files + 1, self.bytes + file.row.size
        del self.wanted[file.index]
        self._end_when_complete()

    def _drop(self, index: int) -> None:
        """Give up the file for now. An older file at its path stays."""
        if self.file is not None:
            self.file.temporary.discard()
            self.file = None
        self.changed.append(index)
        del self.wanted[index]
        self._end_when_complete()

    def _end_when_complete(self) -> None:
        if not self.wanted:
            self.emit(Synced(self.host, self.files, self.bytes, tuple(self.changed), tuple(self.notes)))
            self.notes = []
