"""Compare the announced entries with the destination, check that they fit on the disk, make folders and links.

All are generators that yield after at most one file system call or READ_BYTES of hashing.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Generator, Iterator
from typing import NamedTuple

from launch.agent import Refusal
from launch.agent.destination import MIB, Destination, shown

READ_BYTES = 1 << 20
FILE, FOLDER, LINK = "file", "folder", "link"


class Row(NamedTuple):
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


def differing(destination: Destination, rows: dict[int, Row], host: str) -> Generator[None, None, dict[int, Row]]:
    """The rows whose entries are missing here or differ."""
    found = {}
    for index, row in rows.items():
        yield
        try:
            same = yield from _same(destination, row, host)
        except OSError as error:
            raise destination.refusal(error, row.path, host) from None
        if not same:
            found[index] = row
    return found


def _same(destination: Destination, row: Row, host: str) -> Generator[None, None, bool]:
    """Whether the entry is here and equal. Corrects a mode or time that differs."""
    found = destination.stat(row.path)
    if found is None:
        return False
    folder = stat.S_ISDIR(found.st_mode)
    if folder != (row.kind == FOLDER):
        kind = "a folder" if folder else "a link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        fix = "remove it there, or exclude it with --sync-exclude"
        where = shown(os.path.join(destination.path, row.path))
        raise Refusal(f"{where} is {kind} on {host}, but a {row.kind} in the copied folder: {fix}", 2)
    if row.kind == LINK:
        same = destination.read_link(row.path) == row.target
        if same and found.st_mtime_ns != row.mtime:
            destination.set_link_time(row.path, row.mtime)
        return same
    if row.kind == FILE:
        return (yield from _same_content(destination, row, found))
    return True


def _same_content(destination: Destination, row: Row, found: os.stat_result) -> Generator[None, None, bool]:
    if not stat.S_ISREG(found.st_mode) or found.st_size != row.size:
        return False
    try:
        descriptor = destination.read(row.path)
    except OSError:  # unreadable: replace it
        return False
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    try:
        while True:
            count = os.readv(descriptor, [buffer])
            if not count:
                break
            digest.update(memoryview(buffer)[:count])
            yield
        return digest.hexdigest() == row.content and _adjusted(descriptor, found, row)
    finally:
        os.close(descriptor)


def check_space(destination: Destination, rows: list[Row], host: str) -> Iterator[None]:
    """Refuse a copy that does not fit, before anything is written. Old files stay until the new ones are complete."""
    file_system = os.fstatvfs(destination.root)
    block = file_system.f_frsize or 4096
    change = peak = names = 0
    for row in rows:
        yield
        peak = max(peak, change + -(-row.size // block) * block)
        found = destination.stat(row.path)
        names += found is None
        replaced = found.st_blocks * 512 if found is not None and found.st_nlink == 1 else 0
        change += -(-row.size // block) * block - replaced
    free = file_system.f_bavail * file_system.f_frsize
    fix = "free some there, choose another --sync-dst-dir, or exclude files with --sync-exclude"
    where = f"not enough space in {shown(destination.path)} on {host}"
    if file_system.f_blocks and peak > free:  # some file systems report 0 blocks
        raise Refusal(f"{where}: {peak / MIB:.1f} MiB needed, {free / MIB:.1f} MiB free; {fix}", 2)
    if file_system.f_files and names > file_system.f_favail:
        raise Refusal(f"{where}: {names} new files (inodes) needed, {file_system.f_favail} free; {fix}", 2)


def make(destination: Destination, rows: list[Row], host: str) -> Iterator[None]:
    """Make the folders and links of `rows`."""
    for row in rows:
        yield
        try:
            if row.kind == FOLDER:
                destination.make_folder(row.path)
            else:
                destination.link(row.path, row.target, row.mtime)
        except OSError as error:
            raise destination.refusal(error, row.path, host) from None


def _adjusted(descriptor: int, found: os.stat_result, row: Row) -> bool:
    """Correct mode and time of a file with the right content; False if only a new file can have the mode."""
    mode = row.mode | stat.S_IRUSR
    try:
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(descriptor, mode)
        if found.st_mtime_ns != row.mtime:
            os.utime(descriptor, ns=(row.mtime, row.mtime))
    except OSError:  # another user's file or a read-only disk: only a missing permission to execute matters
        return not mode & 0o111 & ~found.st_mode
    return True
