"""The list of what was copied to a folder, a file in that folder. It says what the next copy may remove.

The list has a line of JSON for each entry: [path, state, ...]. The first line is FORMAT, the last one the number of
entries. A list that is damaged or belongs to another user counts as none: then nothing is removed. From the time that a
file is requested until the next copy, an entry has the old state and the new one, because the file may not arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import IO

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.copy.destination import LIST, Destination, checked
from dmltrain_launch.agent.copy.ownership import is_foreign
from dmltrain_launch.agent.copy.safe_folder import shown_paths

FORMAT = ["dmltrain: files copied here", 1]
LIST_BYTES = 256 << 20  # a million entries have about 120 MB; a longer list is ignored
LINE_BYTES = 1 << 16
READ_BYTES = 1 << 20
LINES = 500  # are read or written in a step
FOLDER, LINK = "folder", "link "  # states; that of a file is its SHA-256 in hexadecimal
NO_STATE = ""  # of what is no file, link or folder


class Copied:
    """`entries`: path -> the states in which the copy may have left it."""

    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[str, ...]] = {}
        self._stored: dict[bytes, tuple[str, ...]] = {}

    def load(self, destination: Destination) -> Iterator[None]:
        """Read the list. Yields after LINES lines."""
        self._stored = yield from _read(destination)
        self.entries = dict(self._stored)

    def store(self, destination: Destination) -> Iterator[None]:
        """Write the list if it has changed, with what agents of other hosts that share the folder have added."""
        if self.entries == self._stored:
            return
        on_disk = yield from _read(destination)
        for path, states in on_disk.items():
            if path in self.entries or path not in self._stored:
                self.add(path, *states)
        self._stored = dict(self.entries)
        temporary = destination.temporary(LIST)
        try:
            yield from _write(temporary.descriptor, self.entries)
        except BaseException:  # also the end of this generator
            temporary.discard()
            raise
        temporary.install(destination.root, LIST, 0o600, time.time_ns())

    def add(self, path: bytes, *states: str) -> None:
        """Note that `path` is in one of `states`, or in a state that was noted before."""
        before = self.entries.get(path, ())
        self.entries[path] = (*before, *(state for state in dict.fromkeys(states) if state not in before))


def _read(destination: Destination) -> Generator[None, None, dict[bytes, tuple[str, ...]]]:
    try:
        descriptor = destination.read(LIST)
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or is_foreign(status) or status.st_size > LIST_BYTES:
            return {}
        try:
            return (yield from _parsed(file))
        except (OSError, ValueError, TypeError, RecursionError, Refusal):
            return {}


def _parsed(file: IO[bytes]) -> Generator[None, None, dict[bytes, tuple[str, ...]]]:
    """ValueError, TypeError or Refusal if it is no whole list."""
    entries: dict[bytes, tuple[str, ...]] = {}
    if json.loads(file.readline(LINE_BYTES)) != FORMAT:
        raise ValueError
    while isinstance(row := json.loads(file.readline(LINE_BYTES)), list):
        path, *states = row
        if not all(isinstance(field, str) for field in row):
            raise TypeError
        entries[checked(path)] = tuple(states)
        if len(entries) % LINES == 0:
            yield
    if row != len(entries) or file.read(1):
        raise ValueError
    return entries


def _write(descriptor: int, entries: Mapping[bytes, tuple[str, ...]]) -> Iterator[None]:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(FORMAT).encode() + b"\n")
        for number, (path, states) in enumerate(sorted(entries.items())):
            row = [path.decode("utf-8", "surrogateescape"), *states]
            file.write(json.dumps(row).encode() + b"\n")
            if number % LINES == 0:
                yield
        file.write(b"%d\n" % len(entries))


def state(destination: Destination, path: bytes, status: os.stat_result) -> Generator[None, None, str]:
    """The state of what is at `path`; OSError if it cannot be read. Yields after READ_BYTES of hashing."""
    if stat.S_ISDIR(status.st_mode):
        return FOLDER
    if stat.S_ISLNK(status.st_mode):
        return LINK + destination.read_link(path).decode("utf-8", "surrogateescape")
    if not stat.S_ISREG(status.st_mode):
        return NO_STATE
    descriptor = destination.read(path)
    try:
        return (yield from digest(descriptor))
    finally:
        os.close(descriptor)


def digest(descriptor: int) -> Generator[None, None, str]:
    """The SHA-256 of the file, in hexadecimal."""
    sha256, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    while True:
        count = os.readv(descriptor, [buffer])
        if not count:
            return sha256.hexdigest()
        sha256.update(memoryview(buffer)[:count])
        yield


def unannounced(copied: Copied, announced: Mapping[bytes, str]) -> tuple[list[bytes], list[bytes]]:
    """Two lists of paths that were copied earlier.

    First those that are not `announced` (path -> kind): they may be excluded now, or gone from the source. Then those
    that are announced as another kind, such as a folder in place of a file: what was copied is gone from the source.
    """
    missing = [path for path in copied.entries if path not in announced]
    folders = {path for path, states in copied.entries.items() if states[-1:] == (FOLDER,)}
    other = [path for path in copied.entries if path in announced and (path in folders) != (announced[path] == FOLDER)]
    return missing, other


def remove_gone(
    destination: Destination, copied: Copied, gone: Collection[bytes]
) -> Generator[None, None, tuple[list[bytes], list[bytes]]]:
    """Remove the paths `gone` here and from the list, unless they have changed since the copy.

    Returns the files and links that were removed, and the paths that have changed and stay. A folder is removed if it
    is empty. Yields after at most one file system call or READ_BYTES of hashing.
    """
    removed, changed = [], []
    for path in sorted(gone, reverse=True):  # a folder after its contents
        yield
        states = copied.entries.pop(path, ())
        status = _stat(destination, path)
        if status is None:
            continue
        try:
            if (yield from state(destination, path, status)) not in states:
                changed.append(path)
            elif stat.S_ISDIR(status.st_mode):
                with contextlib.suppress(OSError):  # it is not empty
                    destination.remove_folder(path)
            else:
                destination.remove(path)
                removed.append(path)
        except FileNotFoundError:  # another agent that shares the folder was faster
            continue
    return removed[::-1], changed[::-1]


def notes_of_removal(removed: Sequence[bytes], changed: Sequence[bytes]) -> list[str]:
    """What the user is told about the two lists that `remove_gone` returns."""
    notes = []
    if removed:
        notes.append(f"removed {shown_paths(removed)}: copied there earlier, and gone from this folder")
    if changed:
        notes.append(f"kept {shown_paths(changed)}: gone from this folder, but changed there since the last copy")
    return notes


def _stat(destination: Destination, path: bytes) -> os.stat_result | None:
    try:
        return destination.stat(path)
    except OSError:  # a link or a file has taken the place of a folder above it
        return None
