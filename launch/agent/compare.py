"""Which entries of a copy are missing or different here, whether they fit on the disk, and its folders and links.

All are generators that yield after at most one call of the file system or READ_BYTES of hashing.
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
    """The rows that are missing here or differ."""
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
    found = destination.look(row.path)
    if found is None:
        return False
    folder = stat.S_ISDIR(found.st_mode)
    if folder != (row.kind == FOLDER):
        kind = "a folder" if folder else "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
        fix = "remove it there, or leave it out with --sync-exclude"
        where = shown(os.path.join(destination.path, row.path))
        raise Refusal(f"{where} is {kind} on {host}, and a {row.kind} where it is copied from: {fix}", 2)
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
    except OSError:  # not readable: replace it
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


def check_room(destination: Destination, rows: list[Row], host: str) -> Iterator[None]:
    """Refuse a copy that does not fit, before anything is written. An old file stays until the new one is complete."""
    room = os.fstatvfs(destination.root)
    block = room.f_frsize or 4096
    change = peak = names = 0
    for row in rows:
        yield
        peak = max(peak, change + -(-row.size // block) * block)
        found = destination.look(row.path)
        names += found is None
        replaced = found.st_blocks * 512 if found is not None and found.st_nlink == 1 else 0
        change += -(-row.size // block) * block - replaced
    free = room.f_bavail * room.f_frsize
    fix = "make room there, choose another --sync-dst-dir, or leave files out with --sync-exclude"
    where = f"not enough room in {shown(destination.path)} on {host}"
    if room.f_blocks and peak > free:  # some file systems report 0
        raise Refusal(f"{where}: {peak / MIB:.1f} MiB needed, {free / MIB:.1f} MiB free; {fix}", 2)
    if room.f_files and names > room.f_favail:
        raise Refusal(f"{where}: {names} new files (inodes) needed, {room.f_favail} free; {fix}", 2)


def make(destination: Destination, rows: list[Row], host: str) -> Iterator[None]:
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
    """Give a file of the right content its mode and time; False when only a new file can have them."""
    mode = row.mode | stat.S_IRUSR
    try:
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(descriptor, mode)
        if found.st_mtime_ns != row.mtime:
            os.utime(descriptor, ns=(row.mtime, row.mtime))
    except OSError:  # another user's file, a read-only disk: only what cannot be executed matters
        return not mode & 0o111 & ~found.st_mode
    return True
