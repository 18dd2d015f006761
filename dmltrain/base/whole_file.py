"""Write a file whole or not at all: a full disk, kill -9 and a power cut leave the old file or the new one.

The content goes to a temporary file beside the target. This file is synced and renamed, then the folder is synced. A
temporary file is locked while its writer lives. So files of killed writers can be told from those of running ones, and
are removed. On some shared file systems a lock is seen by one host only. So the name has a mark of the host, and files
of other hosts are removed only when they are a day old. Where files cannot be locked, none is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
EXCLUSIVE = fcntl.LOCK_EX | fcntl.LOCK_NB
OLD_SECONDS = 86400.0  # no file takes so long to write, and no two hosts' clocks differ so much
HELD = (errno.EAGAIN, errno.EACCES)  # man 2 flock; EACCES from file systems that lock as fcntl does


def write(
    target: Path,
    content: bytes | bytearray | memoryview | Iterable[bytes | memoryview],
    mode: int = 0o666,
    sync: Callable[[int], None] = os.fsync,
    lock: Callable[[int, int], None] = fcntl.flock,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Replace `target` by `content`, in one or more pieces, and remove temporary files of killed writers of it.

    OSError: it cannot be written. The target is then unchanged, unless only the folder could not be synced. mode: of a
    new file, less the umask. sync(descriptor): returns when the file, or the folder's entries, are on disk. confirm:
    called before the rename; it raises an error if the target must not be replaced after all.
    """
    remove_left(target.parent, re.escape(target.name), lock)
    with temporary(target, mode, lock) as (descriptor, path):
        for piece in [content] if isinstance(content, (bytes, bytearray, memoryview)) else content:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        confirm()
        put(path, descriptor, target, sync)


def put(path: Path, descriptor: int, target: Path, sync: Callable[[int], None] = os.fsync) -> None:
    """Sync the complete file at `path`, open as `descriptor`, rename it to `target`, and sync the folder."""
    sync(descriptor)
    os.replace(path, target)
    _sync_folder(target.parent, sync)


@contextlib.contextmanager
def temporary(
    target: Path, mode: int = 0o666, lock: Callable[[int, int], None] = fcntl.flock
) -> Iterator[tuple[int, Path]]:
    """A new locked file beside `target`: its descriptor and path. Removed at the end, unless it was renamed."""
    descriptor, path = _create(target, mode, lock)
    try:
        yield descriptor, path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)  # which also unlocks it


def _create(target: Path, mode: int, lock: Callable[[int, int], None]) -> tuple[int, Path]:
    while True:
        path = target.with_name(f".{target.name}.{HOST}-{secrets.token_hex(4)}.part")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        if _locked(descriptor, lock) and _names(path, descriptor):
            return descriptor, path
        # A race: before this process had the lock, another one took the file for a killed writer's, and removes it.
        os.close(descriptor)


def _locked(descriptor: int, lock: Callable[[int, int], None]) -> bool:
    """Lock the file; False if another process has the lock. True where files cannot be locked, because there no file of
    a killed writer is removed."""
    try:
        lock(descriptor, EXCLUSIVE)
    except OSError as error:
        return error.errno not in HELD
    return True


def _names(path: Path, descriptor: int) -> bool:
    """Whether the path is still that of this file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_left(folder: Path, names: str, lock: Callable[[int, int], None] = fcntl.flock) -> None:
    """Remove what killed writers left in the folder. `names`: a regular expression for the names of their targets."""
    left = re.compile(rf"\.(?:{names})\.(?P<host>[0-9a-f]{{8}})-[0-9a-f]{{8}}\.part")
    with contextlib.suppress(OSError):
        for match in filter(None, map(left.fullmatch, os.listdir(folder))):
            _remove_if_left(folder / match[0], 0.0 if match["host"] == HOST else OLD_SECONDS, lock)


def _remove_if_left(path: Path, age: float, lock: Callable[[int, int], None]) -> None:
    """Remove the file, unless its writer lives or it was changed in the last `age` seconds."""
    with contextlib.suppress(OSError):  # its writer lives, it belongs to another user, or files cannot be locked
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not age or time.time() - os.fstat(descriptor).st_mtime > age:
                lock(descriptor, EXCLUSIVE)
                path.unlink()
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path, sync: Callable[[int], None]) -> None:
    """A rename is on disk only after its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems whose folders cannot be synced
            raise
    finally:
        os.close(descriptor)
