"""Compare the announced entries with the destination, check that they fit on the disk, make folders and links.

All are generators that yield after at most one file system call or a piece of hashing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator, Iterator
from typing import NamedTuple

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.copy import copied
from dmltrain_launch.agent.copy.copied import NO_STATE, Copied, state
from dmltrain_launch.agent.copy.destination import MIB, Destination
from dmltrain_launch.agent.copy.ownership import is_foreign, others_can_write
from dmltrain_launch.agent.copy.safe_folder import shown, shown_paths

FILE, FOLDER, LINK = "file", "folder", "link"
ENTRY_BYTES = 120  # of the list of what was copied, about
# What a program saves of its training state, in the formats of PyTorch, MXNet and others. A file of such a name that
# the job wrote here is newer than the one that was copied here, whatever the source has of that name.
CHECKPOINT = re.compile(
    rb".*(\.pth?|\.ckpt|\.params|\.states|\.np[yz]|\.safetensors|\.distcp|\.server-\d+|-symbol\.json)",
    re.IGNORECASE | re.DOTALL,
)


class CopyRow(NamedTuple):
    """An announced entry; `content` is a file's SHA-256 in hexadecimal or a link's target."""

    kind: str
    path: bytes
    mode: int
    mtime: int
    size: int
    content: str

    @property
    def target(self) -> bytes:
        return self.content.encode("utf-8", "surrogateescape")

    @property
    def state(self) -> str:
        """As in `dmltrain_launch.agent.copy.copied`."""
        return (
            copied.FOLDER if self.kind == FOLDER else copied.LINK + self.content if self.kind == LINK else self.content
        )


class Compared(NamedTuple):
    """`rows` are missing here or differ, so they are copied.

    `kept` and `overwritten` are paths of files that changed here after an earlier copy, or that were not copied here.
    `kept` are checkpoints, which stay as they are and are not in `rows`; `overwritten` are all others.
    """

    rows: dict[int, CopyRow]
    kept: list[bytes]
    overwritten: list[bytes]

    def notes(self) -> list[str]:
        """What the user is told about files that were not simply copied."""
        notes = []
        if self.kept:
            notes.append(
                f"kept {shown_paths(self.kept)}: checkpoints that changed there since they were copied, or were "
                "written there; remove them there to get those of this folder"
            )
        if self.overwritten:
            notes.append(
                f"replaced {shown_paths(self.overwritten)}: changed there since the last copy, or never copied there"
            )
        return notes


def differing(destination: Destination, copied: Copied, rows: dict[int, CopyRow]) -> Generator[None, None, Compared]:
    """Compare the rows with what is here."""
    compared = Compared({}, [], [])
    for index, row in rows.items():
        yield
        try:
            status = destination.stat(row.path)
            if status is None:
                compared.rows[index] = row
            else:
                yield from _compare(destination, copied, index, row, status, compared)
        except OSError as error:
            raise destination.refusal(error, row.path) from None
    return compared


def _compare(
    destination: Destination, copied: Copied, index: int, row: CopyRow, status: os.stat_result, compared: Compared
) -> Iterator[None]:
    """Note what to do with a row whose path exists here. Corrects a mode or time that differs."""
    _check_kind(destination, row, status)
    if row.kind == FOLDER:
        destination.folder(row.path)  # Refusal if it belongs to another user
    elif is_foreign(status):
        compared.rows[index] = row
        return compared.overwritten.append(row.path)
    present = yield from _state(destination, copied, row, status)
    if present == row.state and _adjusted(destination, row, status):
        if row.path in copied.entries:
            copied.entries[row.path] = (present,)
    elif present == row.state or present in copied.entries.get(row.path, ()):
        compared.rows[index] = row
    elif stat.S_ISREG(status.st_mode) and CHECKPOINT.fullmatch(row.path):
        compared.kept.append(row.path)
    else:
        compared.rows[index] = row
        compared.overwritten.append(row.path)


def _check_kind(destination: Destination, row: CopyRow, status: os.stat_result) -> None:
    folder = stat.S_ISDIR(status.st_mode)
    if folder != (row.kind == FOLDER):
        kind = "a folder" if folder else "a link" if stat.S_ISLNK(status.st_mode) else "not a folder"
        fix = "remove it there, or exclude it with --sync-exclude"
        where = shown(os.path.join(destination.path, row.path))
        raise Refusal(f"{where} is {kind} on {destination.host}, but a {row.kind} in the copied folder: {fix}", 2)


def _state(
    destination: Destination, copied: Copied, row: CopyRow, status: os.stat_result
) -> Generator[None, None, str]:
    """The state of what is here; NO_STATE if it cannot be read, or if its size shows that it differs."""
    known = row.path in copied.entries
    if stat.S_ISREG(status.st_mode) and status.st_size != row.size and not known:
        return NO_STATE
    try:
        return (yield from state(destination, row.path, status))
    except OSError:
        return NO_STATE


def check_space(destination: Destination, copied: Copied, rows: list[CopyRow]) -> Iterator[None]:
    """Refuse a copy that does not fit, before anything is written. Old files stay until the new ones are complete."""
    file_system = os.fstatvfs(destination.root)
    block = file_system.f_frsize or 4096
    change = peak = -(-ENTRY_BYTES * len(copied.entries) // block) * block if rows else 0  # for the list of the copy
    names = int(bool(rows))
    for row in rows:
        yield
        peak = max(peak, change + -(-row.size // block) * block)
        status = destination.stat(row.path)
        names += status is None
        replaced = status.st_blocks * 512 if status is not None and status.st_nlink == 1 else 0
        change += -(-row.size // block) * block - replaced
    free = file_system.f_bavail * file_system.f_frsize
    fix = "free some there, choose another --sync-dst-dir, or exclude files with --sync-exclude"
    where = f"not enough space in {shown(destination.path)} on {destination.host}"
    if file_system.f_blocks and peak > free:  # some file systems report 0 blocks
        raise Refusal(f"{where}: {peak / MIB:.1f} MiB needed, {free / MIB:.1f} MiB free; {fix}", 2)
    if file_system.f_files and names > file_system.f_favail:
        raise Refusal(f"{where}: {names} new files (inodes) needed, {file_system.f_favail} free; {fix}", 2)


def make(destination: Destination, rows: list[CopyRow]) -> Iterator[None]:
    """Make the folders and links of `rows`."""
    for row in rows:
        yield
        try:
            if row.kind == FOLDER:
                destination.make_folder(row.path)
            else:
                destination.link(row.path, row.target, row.mtime)
        except OSError as error:
            raise destination.refusal(error, row.path) from None


def _adjusted(destination: Destination, row: CopyRow, status: os.stat_result) -> bool:
    """Correct mode and time of what has the right content. Returns False if the file must be copied anew.

    That is so if another user could open the file before: the user may still have it open for writing.
    """
    if row.kind == LINK and status.st_mtime_ns != row.mtime:
        destination.set_link_time(row.path, row.mtime)
    if row.kind != FILE:
        return True
    mode, descriptor = row.mode | stat.S_IRUSR, destination.read(row.path)
    try:
        if destination.was_open and others_can_write(status, descriptor):
            return False
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)
        if status.st_mtime_ns != row.mtime:
            os.utime(descriptor, ns=(row.mtime, row.mtime))
    except OSError:  # root's file or a read-only disk: only a missing permission to execute matters
        return not mode & 0o111 & ~status.st_mode
    finally:
        os.close(descriptor)
    return True
