"""The manifest: the files of a folder to copy, with hashes of their content; renewed for files that changed meanwhile.

Paths are relative, with "/" between names. Bytes that are not UTF-8 are surrogates (PEP 383), in any locale. Excluded
are .git, paths that .gitignore files and --sync-exclude name, files of copies themselves, and `leave_out`. Symbolic
links are entries of their own and never followed. Sockets, pipes and devices are skipped with a note.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.copy.destination import LIST, PREFIX
from dmltrain_launch.agent.copy.safe_folder import shown
from dmltrain_launch.sync import ignore as sync_ignore
from dmltrain_launch.sync.ignore import Chain

FILE, FOLDER, LINK = "file", "folder", "link"
NEVER = (b".git", LIST)
READ_BYTES = 1 << 20
THREADS = 8  # hashing releases the GIL; more threads than a disk and a few cores can use


class Over(Exception):
    """The copying was cancelled."""


@dataclass(frozen=True)
class ManifestEntry:
    """A file, folder or link. `size` in bytes, `mtime` in ns since 1970, `mode` a file's permission bits."""

    path: str
    kind: str
    mode: int = 0
    mtime: int = 0
    size: int = 0
    sha256: str = ""  # of a file's first `size` bytes, in hexadecimal
    target: str = ""  # of a link, as stored in it


@dataclass(frozen=True)
class Manifest:
    """The entries to copy from `folder` (absolute, links resolved). A folder comes before its contents."""

    folder: bytes
    entries: tuple[ManifestEntry, ...]
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> int:
        return sum(entry.kind == FILE for entry in self.entries)

    def where(self, index: int) -> bytes:
        """The path of an entry on this machine."""
        return os.path.join(self.folder, encoded(self.entries[index].path))

    def has(self, path: str) -> bool:
        """Whether the folder has this path, also one that is not copied. What a link leads to does not count."""
        where = os.path.join(self.folder, encoded(path))
        parent = os.path.dirname(where)
        return os.path.lexists(where) and os.path.realpath(parent) == parent

    def renewed(self, indices: Sequence[int]) -> tuple[Manifest, tuple[int, ...]]:
        """The manifest with the current state of these files, and which of them still are files."""
        entries, still = list(self.entries), []
        for index in indices:
            entry = _file(self.where(index), entries[index].path)
            if entry is not None:
                entries[index] = entry
                still.append(index)
        return replace(self, entries=tuple(entries)), tuple(still)


def encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def decoded(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def manifest(
    folder: str | Path,
    excludes: Sequence[str] = (),
    leave_out: Sequence[str | Path] = (),
    cancelled: Callable[[], bool] = lambda: False,
) -> Manifest:
    """The current contents of `folder`. `leave_out` are paths, absolute, relative to the working directory or with ~;
    they need not exist or be inside. LaunchError if a file cannot be read; Over soon after `cancelled` returns True."""
    top = os.path.realpath(os.fsencode(folder))
    chosen = sync_ignore.chosen(excludes)
    out = {os.path.realpath(os.path.expanduser(os.fsencode(path))) for path in leave_out}
    chain = (*sync_ignore.above(Path(os.fsdecode(top))), chosen)
    notes: list[str] = []

    def complete(entry: ManifestEntry) -> ManifestEntry | None:
        where = os.path.join(top, encoded(entry.path))
        return _file(where, entry.path, cancelled) if entry.kind == FILE else entry

    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(complete, list(_walk(top, chain, out, notes)))
        return Manifest(top, tuple(entry for entry in entries if entry is not None), tuple(notes))


def _walk(top: bytes, chain: Chain, out: set[bytes], notes: list[str]) -> Iterator[ManifestEntry]:
    """The entries below `top`, files with their names only. Not recursive, because trees may be deep."""
    pending: list[tuple[str, Chain]] = [("", chain)]
    while pending:
        base, chain = pending.pop()
        where = os.path.join(top, encoded(base))
        listed = _listed(where)
        if listed is None:
            continue
        if base:
            yield ManifestEntry(base[:-1], FOLDER)
        text = sync_ignore.gitignore(Path(os.fsdecode(where)))
        if text is not None:  # those of --sync-exclude stay last
            chain = (*chain[:-1], sync_ignore.below(text, base), chain[-1])
        folders = []
        for entry in listed:
            path = base + decoded(entry.name)
            folder = entry.is_dir(follow_symlinks=False)
            if entry.path in out or sync_ignore.ignored(chain, path + "/" * folder):
                continue
            if folder:
                folders.append((path + "/", chain))
            elif entry.is_symlink():
                yield from _link(entry.path, path)
            elif entry.is_file(follow_symlinks=False):
                yield ManifestEntry(path, FILE)
            else:
                notes.append(f"{shown(encoded(path))} is not copied: it is a socket, a pipe or a device")
        pending += reversed(folders)


def _listed(folder: bytes) -> list[os.DirEntry[bytes]] | None:
    """The contents of the folder, sorted by name; None if it has vanished."""
    try:
        with os.scandir(folder) as entries:
            each = [entry for entry in entries if entry.name not in NEVER and not entry.name.startswith(PREFIX)]
            return sorted(each, key=lambda entry: entry.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(folder, error) from None


def _link(where: bytes, path: str) -> Iterator[ManifestEntry]:
    try:
        yield ManifestEntry(path, LINK, mtime=os.lstat(where).st_mtime_ns, target=decoded(os.readlink(where)))
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(where, error) from None


def _file(where: bytes, path: str, cancelled: Callable[[], bool] = lambda: False) -> ManifestEntry | None:
    """The file with the hash of as many bytes as it had when it was opened; None if it is no longer a file."""
    descriptor = opened(where)
    if descriptor is None:
        return None
    try:
        status = os.fstat(descriptor)
        size, digest = _digest(descriptor, status.st_size, cancelled)
    except OSError as error:
        raise unreadable(where, error) from None
    finally:
        os.close(descriptor)
    return ManifestEntry(path, FILE, stat.S_IMODE(status.st_mode) & 0o777, status.st_mtime_ns, size, digest)


def _digest(descriptor: int, size: int, cancelled: Callable[[], bool]) -> tuple[int, str]:
    """The number of bytes, at most `size`, and their SHA-256."""
    digest, got, buffer = hashlib.sha256(), 0, bytearray(min(READ_BYTES, max(size, 1)))
    with memoryview(buffer) as view:
        while got < size:
            if cancelled():
                raise Over
            count = os.readv(descriptor, [view[: size - got]])
            if not count:
                break
            digest.update(view[:count])
            got += count
    return got, digest.hexdigest()


def opened(where: bytes) -> int | None:
    """A descriptor of the file; None if it does not exist or is not a regular file."""
    try:
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if os.path.islink(where):
            return None
        raise unreadable(where, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


def unreadable(where: bytes, error: OSError) -> LaunchError:
    fix = "make it readable, or exclude it with --sync-exclude"
    return LaunchError(f"cannot read {shown(where)} to copy it: {error.strerror}; {fix}")
