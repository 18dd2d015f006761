"""The folder on the agent's host that files are copied to, and the operations in it. No path leads out of it.

Folders are opened one below the other by descriptor, never through a symbolic link. A file is written under a temporary
name and then renamed, so no incomplete file has its final name. A temporary file is locked while its writer lives:
so those of a killed agent can be removed, and those of another job that copies to the same folder stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.copy import ownership, safe_folder
from dmltrain_launch.agent.copy.safe_folder import shown

PREFIX = b".dmltrain-sync-"  # of temporary names; such files are never copied
LIST = b".dmltrain-copied"  # see `dmltrain_launch.agent.copy.copied`; never copied
MIB = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def checked(path: str) -> bytes:
    """The path of an entry as bytes; Refusal unless it is relative and stays inside the folder."""
    name = path.encode("utf-8", "surrogateescape")
    if b"\0" in name or any(part in (b"", b".", b"..") for part in name.split(b"/")):
        raise Refusal(
            f"the launcher sent {shown(name)} as a path to copy to: expected a relative path without . and ..", 125
        )
    return name


class Temporary:
    """A file being written: its descriptor, its name, and a descriptor of its folder, which it owns."""

    def __init__(self, folder: int):
        self.folder = os.dup(folder)
        try:
            while not self._create():
                os.close(self.descriptor)  # another agent removed it before it was locked
        except OSError:
            os.close(self.folder)
            raise

    def _create(self) -> bool:
        self.name = PREFIX + os.urandom(8).hex().encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(self.name, flags, 0o600, dir_fd=self.folder)
        return _lock(self.descriptor) and _names(self.folder, self.name, self.descriptor)

    def install(self, folder: int, name: bytes, mode: int, mtime: int) -> None:
        """Set its mode and time and move it to its final path."""
        with contextlib.suppress(OSError):  # file systems without modes or times
            os.fchmod(self.descriptor, mode)
            os.utime(self.descriptor, ns=(mtime, mtime))
        os.rename(self.name, name, src_dir_fd=self.folder, dst_dir_fd=folder)
        self._close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.name, dir_fd=self.folder)
        self._close()

    def _close(self) -> None:
        os.close(self.descriptor)  # which also unlocks it
        os.close(self.folder)


class Destination:
    """The folder `path` (absolute) on `host`, created if missing.

    OSError if that fails; Refusal if another user could change it, or a folder in it belongs to another user.
    """

    def __init__(self, path: bytes, host: str):
        self.path, self.host = path, host
        self.root = safe_folder.opened(path, host)
        status = os.fstat(self.root)
        self.device, self.is_own = status.st_dev, status.st_uid == os.geteuid()
        self.mode = stat.S_IMODE(status.st_mode)
        self.last = b"", self.root  # path and descriptor of the folder used last

    @property
    def was_open(self) -> bool:
        """Whether other users could enter the folder before: they may still have files in it open."""
        return bool(self.mode & safe_folder.OTHERS)

    def make_private(self) -> bool:
        """Take the rights of others away. Returns whether they had any."""
        if not self.was_open or not self.is_own:
            return False
        try:
            os.fchmod(self.root, self.mode & ~safe_folder.OTHERS)
        except OSError:  # a read-only file system, or one without modes
            return False
        return True

    def close(self) -> None:
        self._keep(b"", self.root)
        os.close(self.root)

    def folder(self, path: bytes) -> int:
        """A descriptor of the folder `path`, valid until the next call. OSError also if a link is on the way."""
        if self.last[0] == path:
            return self.last[1]
        current = self.root
        for part in path.split(b"/") if path else ():
            try:
                inner = os.open(part, _FOLDER, dir_fd=current)
            finally:
                if current != self.root:
                    os.close(current)
            current = inner
            self._check_inner(current, path)
        self._keep(path, current)
        return current

    def _check_inner(self, folder: int, path: bytes) -> None:
        """Refusal if the folder belongs to another user. If others could enter the root before, and could write here,
        take their rights away."""
        status = os.fstat(folder)
        if ownership.is_foreign(status):
            os.close(folder)
            where = os.path.join(self.path, path)
            raise safe_folder.refusal(where, status, self.host, "or a folder above it belongs to another user")
        if self.was_open and ownership.others_can_write(status, folder):
            with contextlib.suppress(OSError):  # a read-only file system, or one without modes
                os.fchmod(folder, stat.S_IMODE(status.st_mode) & ~safe_folder.OTHERS)

    def _keep(self, path: bytes, descriptor: int) -> None:
        if self.last[1] != self.root:
            os.close(self.last[1])
        self.last = path, descriptor

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """The descriptor of the folder that contains `path`, and the name in it."""
        folder, _, name = path.rpartition(b"/")
        return self.folder(folder), name

    def stat(self, path: bytes) -> os.stat_result | None:
        """The status of `path`, without following a link; None if it does not exist."""
        try:
            folder, name = self.parent(path)
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, path: bytes) -> int:
        """A descriptor for reading the file."""
        folder, name = self.parent(path)
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)

    def read_link(self, path: bytes) -> bytes:
        """The link's target; b"" if it is not a link."""
        folder, name = self.parent(path)
        try:
            return os.fsencode(os.readlink(name, dir_fd=folder))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return b""

    def set_link_time(self, path: bytes, mtime: int) -> None:
        folder, name = self.parent(path)
        with contextlib.suppress(OSError):  # a read-only file system, or one without times for links
            os.utime(name, ns=(mtime, mtime), dir_fd=folder, follow_symlinks=False)

    def temporary(self, path: bytes) -> Temporary:
        """A temporary file for `path`: in the root, which remove_left() cleans, unless `path` is on another disk."""
        folder, _ = self.parent(path)
        elsewhere = os.fstat(folder).st_dev != self.device
        return Temporary(folder if elsewhere else self.root)

    def link(self, path: bytes, target: bytes, mtime: int) -> None:
        folder, name = self.parent(path)
        temporary = PREFIX + os.urandom(8).hex().encode()
        os.symlink(target, temporary, dir_fd=folder)
        try:
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(temporary, dir_fd=folder)
            raise
        self.set_link_time(path, mtime)

    def make_folder(self, path: bytes) -> None:
        folder, name = self.parent(path)
        with contextlib.suppress(FileExistsError):  # on a shared file system another host may create it first
            os.mkdir(name, dir_fd=folder)

    def remove(self, path: bytes) -> None:
        """Remove the file or link."""
        folder, name = self.parent(path)
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, path: bytes) -> None:
        """Remove the folder; OSError if it is not empty."""
        folder, name = self.parent(path)
        os.rmdir(name, dir_fd=folder)

    def remove_left(self) -> None:
        """Remove temporary files that killed agents left here."""
        for name in os.listdir(self.root):
            if os.fsencode(name).startswith(PREFIX):
                self._remove_if_left(os.fsencode(name))

    def _remove_if_left(self, name: bytes) -> None:
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.root)
        except OSError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=self.root)
        except OSError:  # its writer still runs, or this file system has no locks
            pass
        finally:
            os.close(descriptor)

    def refusal(self, error: OSError, path: bytes) -> Refusal:
        """The Refusal for an error while `path` was written."""
        what = f"{shown(path)} in {shown(self.path)}" if path else shown(self.path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = os.fstatvfs(self.root)
            free = room.f_bavail * room.f_frsize / MIB
            return Refusal(
                f"no space left on {self.host} while {what} was written ({free:.1f} MiB free): "
                f"free some there, or choose another --sync-dst-dir",
                2,
            )
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return Refusal(
                f"{what} on {self.host} cannot be written: a folder of its path is a link or a file there; "
                f"remove that, or exclude the path with --sync-exclude",
                2,
            )
        return Refusal(
            f"cannot write {what} on {self.host}: {error.strerror}; "
            f"choose another --sync-dst-dir, or exclude the path with --sync-exclude",
            2,
        )


def _lock(descriptor: int) -> bool:
    """Lock the file; False if another process has the lock. Without locks True: then nothing is removed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _names(folder: int, name: bytes, descriptor: int) -> bool:
    """Whether the name in the folder still belongs to this file."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(descriptor))
