"""Control groups that tests make: where they are, how one is frozen, and how one is removed with all that is in it.

The freezer is that of cgroup v1 where that is mounted, else cgroup2's. Unlike SIGSTOP a process does not see it.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import wait_for

STATES = {"freezer.state": ("THAWED", "FROZEN"), "cgroup.freeze": ("0", "1")}  # what is written to thaw, and to freeze


def mounts() -> list[tuple[str, Path]]:
    """The mounted hierarchies: "freezer" or another controller, or "cgroup2"; and the folder."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = []
    for _, place, system, options, *_ in lines:
        if system == "cgroup2":
            found.append(("cgroup2", Path(place)))
        elif system == "cgroup":
            found += [(word, Path(place)) for word in options.split(",") if word == "freezer"] or [("", Path(place))]
    return found


def freezer(user: int) -> tuple[Path | None, str]:
    """The folder of the hierarchy that can freeze; or what is missing for that."""
    by_name = {name: folder for name, folder in reversed(mounts())}
    folder = by_name.get("freezer") or by_name.get("cgroup2")
    if folder is None:
        return None, "a mount of the freezer of cgroup v1, or of cgroup2"
    return (folder, "") if user == 0 else (None, "root, who may make control groups")


def members(group: Path) -> list[int]:
    """The processes in it and in the groups below."""
    found: list[int] = []
    for each in (group, *group.glob("*/")):
        with contextlib.suppress(OSError):  # the group is gone
            found += map(int, (each / "cgroup.procs").read_text().split())
    return [pid for pid in found if pid]  # 0 is of another namespace of pids


def enter(group: Path, pid: int) -> bool:
    """Whether the process could be moved there: it may have ended."""
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def set_frozen(group: Path, frozen: bool) -> None:
    for name, words in STATES.items():
        with contextlib.suppress(OSError):
            if (group / name).exists():
                (group / name).write_text(words[frozen])


@contextlib.contextmanager
def held(pid: int, cell: Path) -> Iterator[bool]:
    """Freezes the process in `cell`, a group below its own. Gives whether it is there."""
    there = enter(cell, pid)
    try:
        if there:
            set_frozen(cell, True)
        yield there
    finally:
        set_frozen(cell, False)
        for member in members(cell):  # also children that it had on the way
            enter(cell.parent, member)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def remove(group: Path) -> None:
    """Thaws and kills what is in it, and removes it with the groups below."""

    def gone() -> bool:
        for each in (*group.glob("*/"), group):
            set_frozen(each, False)
            for pid in members(each):
                kill(pid)
            with contextlib.suppress(OSError):  # what was killed is on its way out
                each.rmdir()
        return not group.exists()

    wait_for(gone, lambda: f"{group} removed; in it: {members(group)}")
