"""job.json: the record of a job, the version of its format, and whose record it is.

Format 1 is the record of 0.4 with the field "format". A record without that field has format 0, that of 0.4 and
before, with the same fields. A change that removes a field or changes its meaning must increase FORMAT.

A record names programs and hosts. So only one that no other user can have written is used to reach hosts: the file
belongs to this user or root, and only they can write it. Its folder belongs to them as well, so that no other user
exchanges the record for that of another job of this user; a group that shares the folder could. All is checked on open
descriptors. Records of others can be shown.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmltrain.base import json_text, schema
from dmltrain_launch import LaunchError
from dmltrain_launch.agent.copy.ownership import is_foreign, others_can_write, user_name

FORMAT = 1
MODE = 0o644  # others can never write it, whatever the umask
MOST_BYTES = 16 << 20  # a job of 1,000 hosts and 3,000 processes needs 1 MiB
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe of that name keeps nobody waiting


def read_record(path: Path) -> dict[str, Any]:
    """The record in a job.json. FileNotFoundError if there is none; LaunchError if it is not a valid record."""
    with _opened(path, path, OPEN) as descriptor:
        return _parsed(path, _content(path, descriptor))


def read_own_record(path: Path) -> dict[str, Any]:
    """The same; LaunchError also if another user can have written it."""
    with _opened(path, path.parent, OPEN | os.O_DIRECTORY) as folder:
        _check_folder(path.parent, os.fstat(folder))
        with _opened(path, path.name, OPEN | os.O_NOFOLLOW, folder) as descriptor:
            _check_file(path, descriptor)
            return _parsed(path, _content(path, descriptor))


@contextlib.contextmanager
def _opened(path: Path, name: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """The descriptor of `name`, a part of `path`. FileNotFoundError if it is missing; other errors name `path`."""
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error.strerror) from None


def _check_folder(folder: Path, status: os.stat_result) -> None:
    if is_foreign(status):
        raise _foreign(folder, status)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _writable(folder, status)


def _check_file(path: Path, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if is_foreign(status):
        raise _foreign(path, status)
    if others_can_write(status, descriptor):
        raise _writable(path, status)


def _foreign(path: Path, status: os.stat_result) -> LaunchError:
    owner, own = user_name(status.st_uid), f"{user_name(os.geteuid())} or " if os.geteuid() else ""
    return LaunchError(
        f"{path} belongs to {owner}, not to {own}root: a record names programs to run on the job's hosts, so it "
        f"must be yours; run this command as {owner}"
    )


def _writable(path: Path, status: os.stat_result) -> LaunchError:
    return LaunchError(
        f"other users can write to {path} (mode {stat.S_IMODE(status.st_mode):04o}): a record names programs to run on "
        f"the job's hosts, so only you may; check what it says, and chmod go-w {path}"
    )


def _unreadable(path: Path, why: object) -> LaunchError:
    return LaunchError(f"cannot read {path}: {why}; expected the record of a job, which the launcher writes there")


def _content(path: Path, descriptor: int) -> bytes:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise _unreadable(path, "it is not a regular file")
    with open(descriptor, "rb", closefd=False) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise _unreadable(path, f"it is larger than {MOST_BYTES >> 20} MiB")
    return content


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        record = json_text.parse_object(content)
    except schema.Invalid as error:
        raise _unreadable(path, error) from None
    version = record.get("format", 0)
    if type(version) is not int or not 0 <= version <= FORMAT:
        versions = record.get("versions")
        by = str(versions.get("dmltrain")) if isinstance(versions, dict) else "a newer version"
        raise LaunchError(
            f"{path} has format {version!r}, and this dmltrain reads formats 0 to {FORMAT}: "
            f"use dmltrain {by if by.isprintable() else ascii(by)}, which wrote it"
        )
    return record
