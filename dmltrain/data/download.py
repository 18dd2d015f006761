"""Downloads a data file once per host, also if several processes need it at once, and checks it before use.

The file is written under another name, checked by md5, flushed to disk and renamed: under its own name it is always
complete. Of several processes the one with the lock file downloads; the others wait and use the result. The kernel
releases the lock when its holder dies.
"""

import contextlib
import fcntl
import hashlib
import http.client
import importlib.util
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dmltrain.base.errors import UserError
from dmltrain.base.safe_text import safe_lines

CHUNK = 1 << 20  # bytes
Advance = Callable[[int], None]  # called with the number of bytes since the last call
# Called with the file's name and its size in bytes, if known.
Progress = Callable[[str, int | None], contextlib.AbstractContextManager[Advance]]


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded: md5 in hexadecimal."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def fetch(
    remote: Remote, folder: Path, *, timeout: float = 10.0, stall: float = 60.0, progress: Progress | None = None
) -> Path:
    """The path of the file in the folder, downloaded if it is missing. A failure is a UserError that states the fix.

    timeout: seconds without any byte after which the server counts as unreachable. stall: longest time in seconds
    without progress of another process that downloads the file.
    """
    target = folder / remote.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(target, stall):
            if not target.exists():
                _download(remote, target, timeout, progress or terminal_progress)
    except (OSError, http.client.HTTPException, _Broken) as error:
        raise UserError(
            f"{remote.name} is not in {folder} and cannot be downloaded from {remote.url}: {_reason(error)}; "
            f"put {remote.name} (md5 {remote.md5}) into {folder}"
        ) from None
    return target


class _Broken(Exception):
    """The download is incomplete, or has other content, or another process that downloads it makes no progress."""


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _download(remote: Remote, target: Path, timeout: float, progress: Progress) -> None:
    part = _part(target)
    try:
        with urllib.request.urlopen(remote.url, timeout=timeout) as answer, part.open("wb") as file:
            _copy(answer, file, remote, progress)
            file.flush()
            os.fsync(file.fileno())
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)


def _part(target: Path) -> Path:
    """The incomplete file. The name is fixed, so the next download overwrites what a killed one left."""
    return target.with_name(f".{target.name}.part")


def _copy(answer: http.client.HTTPResponse, file: BinaryIO, remote: Remote, progress: Progress) -> None:
    """Raises _Broken unless all announced bytes arrive with the expected md5."""
    length = answer.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    checksum, count = hashlib.md5(usedforsecurity=False), 0
    with progress(remote.name, total) as advance:
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            checksum.update(chunk)
            count += len(chunk)
            advance(len(chunk))
    if total is not None and count != total:
        raise _Broken(f"the connection ended after {count} of {total} bytes")
    if checksum.hexdigest() != remote.md5:
        raise _Broken(f"the download has md5 {checksum.hexdigest()}, expected {remote.md5}")


@contextlib.contextmanager
def _lock(target: Path, stall: float, poll: float = 0.1) -> Iterator[None]:
    """Hold the target's lock file, and delete it afterwards. _Broken: its holder makes no progress for `stall` s."""
    path = target.with_name(f".{target.name}.lock")
    size, since, waiting = -1, time.monotonic(), False
    while (file := _try_lock(path)) is None:
        if not waiting:
            _say(f"waiting for another process that downloads {target.name}")
        waiting = True
        if (now := _size(_part(target))) != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > stall:
            raise _Broken(f"another process, which holds {path}, has made no progress for {stall:g} s")
        time.sleep(poll)
    try:
        yield
    finally:
        # Deleted while it is locked: a process that has opened it sees by its inode that it is gone (_try_lock).
        path.unlink(missing_ok=True)
        file.close()


def _size(path: Path) -> int:
    """Bytes; 0 if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _try_lock(path: Path) -> BinaryIO | None:
    """The lock file, open and locked, or None if another process has the lock."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A race: the holder of the lock may have deleted the file between `open` and `flock`.
        if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


@contextlib.contextmanager
def terminal_progress(name: str, total: int | None) -> Iterator[Advance]:
    """A progress bar on a terminal if rich is installed, else a line of text per tenth."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich") is not None):
        yield _Lines(name, total).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.update(task, advance=count)


class _Lines:
    """Progress as plain lines: one per tenth of the file, or per 10 MB if its size is unknown."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total, self._count = name, total, 0
        self._step = max(1, total // 10) if total else 10_000_000
        self._next = self._step
        self._start = time.monotonic()

    def advance(self, count: int) -> None:
        self._count += count
        if self._count < self._next:
            return
        self._next = (self._count // self._step + 1) * self._step
        of_total = f" of {self._total / 1e6:.1f}" if self._total else ""
        speed = self._count / 1e6 / max(time.monotonic() - self._start, 1e-9)
        _say(f"downloading {self._name}: {self._count / 1e6:.1f}{of_total} MB, {speed:.1f} MB/s")


def _say(line: str) -> None:
    sys.stderr.write(safe_lines(line) + "\n")
    sys.stderr.flush()
