"""Open the folder that a copy goes to, if no other user can change it or put another one in its place.

The path is walked from / with descriptors: each folder is opened relative to the one before it (openat(2)) and checked
after it is open, so that nobody can exchange a folder between the check and its use. Allowed on the path are folders of
this user and of root that others cannot write, and sticky folders such as /tmp, where others cannot rename what is not
theirs. A link is followed if it belongs to this user or root, and the path that it names is checked in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.copy.ownership import is_foreign, others_can_write, user_name

# O_PATH needs no right to read: users may pass through many a /home, but not list it.
_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_LINKS = 40  # as in the kernel
SHOWN = 5  # paths in a message
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def shown(path: bytes) -> str:
    """The path for a one-line message."""
    text = path.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)


def shown_paths(paths: Sequence[bytes]) -> str:
    """The first SHOWN paths for a one-line message, and how many more there are."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(map(shown, paths[:SHOWN])) + more


def opened(path: bytes, host: str) -> int:
    """A descriptor of the folder `path`, which is absolute. Missing folders are made, the last one with mode 0700.

    Refusal if another user could change it; OSError if it cannot be opened or made.
    """
    walk = _Walk(path, host)
    try:
        walk.check()
        while walk.names:
            walk.step()
        walk.check()
        return os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=walk.folder)
    finally:
        os.close(walk.folder)


class _Walk:
    """`names` are still to come, the next one last; `folder` is a descriptor of the folder `where`."""

    def __init__(self, path: bytes, host: str):
        self.host, self.links = host, 0
        self.names: list[bytes] = []
        self.folder, self.where = os.open(b"/", _PATH_FLAGS), b"/"
        self._add(path)

    def _add(self, path: bytes) -> None:
        self.names += [name for name in reversed(path.split(b"/")) if name not in (b"", b".")]

    def step(self) -> None:
        name = self.names.pop()
        try:
            self._move(os.open(name, _PATH_FLAGS, dir_fd=self.folder), name)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another host that shares the file system was faster
                # 0o755: the umask can only remove rights, so others can never write the folders above the last one
                os.mkdir(name, 0o755 if self.names else 0o700, dir_fd=self.folder)
            self.names.append(name)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self._follow(name, error)

    def _move(self, folder: int, name: bytes) -> None:
        os.close(self.folder)
        self.folder, self.where = folder, os.path.normpath(os.path.join(self.where, name))
        self.check()

    def _follow(self, name: bytes, error: OSError) -> None:
        """Go where the link `name` leads. Nobody else can exchange a link in a folder that `check` has accepted."""
        status = os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            raise error
        self.links += 1
        if self.links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if is_foreign(status):
            raise refusal(os.path.join(self.where, name), status, self.host, "is a link that belongs to another user")
        target = os.fsencode(os.readlink(name, dir_fd=self.folder))
        if target.startswith(b"/"):
            self._move(os.open(b"/", _PATH_FLAGS), b"/")
        self._add(target)

    def check(self) -> None:
        """Refusal if the folder belongs to another user, or if others can write in it.

        Others may write in a sticky folder on the path, but not in the last folder.
        """
        status = os.fstat(self.folder)
        if is_foreign(status):
            raise refusal(self.where, status, self.host, "belongs to another user")
        passed_through = self.names and status.st_mode & stat.S_ISVTX
        if not passed_through and others_can_write(status, self.folder):
            raise refusal(self.where, status, self.host, "can be written by other users")


def refusal(path: bytes, status: os.stat_result, host: str, what: str) -> Refusal:
    """Why nothing is copied to this place; `what` says what is wrong with it."""
    facts = f"owner: {user_name(status.st_uid)}, group: {status.st_gid}, mode: {stat.S_IMODE(status.st_mode):04o}"
    fix = "choose another --sync-dst-dir, for example '~/job'"
    if not is_foreign(status):
        fix += f", or look for files of others in {shown(path)} and run there: chmod go-w {shown(path)}"
    owners = f"{user_name(os.geteuid())} or root" if os.geteuid() else "root"
    return Refusal(
        f"{shown(path)} on {host} {what} ({facts}), so their code could get into the job; the folder and those "
        f"above it must belong to {owners}, and nobody else may write there: {fix}",
        2,
    )
