"""Who made what tests leave behind, and whether he lives: told by the pid in its name, and a file that a living process
has locked. A pid alone does not tell: it is used again, and a process in a namespace of pids does not see the others.
"""

import atexit
import contextlib
import fcntl
import os
import re
from functools import cache
from pathlib import Path

MARK = "OWNER_PYTEST"  # in the environment of what tests start: the namespace and the pid of pytest, and its start
FILES = Path("/tmp")  # seen from all namespaces of pids


def lock_file(pid: int) -> Path:
    return FILES / f"dmltrain-owner-{pid}.lock"


@cache
def own() -> None:
    """This process owns what has its pid in its name. The lock ends with it, and no child inherits it."""
    pid, path = os.getpid(), lock_file(os.getpid())
    with contextlib.suppress(OSError):  # another user's, or another namespace's of the same pid
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        atexit.register(lambda: os.getpid() == pid and path.unlink(missing_ok=True))


def started(pid: int) -> float:
    """When the process started, in seconds since the boot; 0 where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def is_dead(pid: int) -> bool:
    """Whether the owner with this pid, in whatever namespace, is no more."""
    if pid == os.getpid():
        return False  # to open the file and close it would give up the lock
    try:
        with open(lock_file(pid), "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock_file(pid).unlink(missing_ok=True)
        return True
    except FileNotFoundError:  # it ended in order; or it has no lock, as in older versions
        return not _may_be_one(pid)
    except OSError:  # locked, or another user's
        return False


def forget_the_dead() -> None:
    """Remove their files."""
    for path in FILES.glob("dmltrain-owner-*.lock"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit():
            is_dead(int(pid))


def _may_be_one(pid: int) -> bool:
    """Whether a process has the number that can be of pytest or of a benchmark."""
    try:
        return bool(started(pid) and re.search(rb"python|pytest", Path(f"/proc/{pid}/cmdline").read_bytes()))
    except OSError:
        return False


def namespace() -> str:
    """Of pids, this process'."""
    return os.readlink("/proc/self/ns/pid")


def mark() -> str:
    """This process, as the value of MARK."""
    return f"{namespace()} {os.getpid()} {started(os.getpid())}"


def is_mark_of_dead(value: str) -> bool:
    """Whether the process of the mark is gone; no where it belongs to another namespace."""
    match = re.fullmatch(r"(pid:\[\d+\]) (\d+) (\S+)", value)
    return bool(match and match[1] == namespace() and str(started(int(match[2]))) != match[3])
