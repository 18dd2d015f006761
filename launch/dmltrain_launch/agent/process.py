"""Processes of this host, read from /proc: which belong to a job, and how to signal them. Linux."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# read of an environment or of arguments: the kernel limits both at the start of a process to less, but a process can
# make them longer later (prctl(2), PR_SET_MM)
ENVIRONMENT_BYTES = 8 << 20


class Process(NamedTuple):
    """One line of /proc/PID/stat. `start` (ticks since boot) differs if a later process has the same pid."""

    pid: int
    parent: int
    state: str
    start: int


def process(pid: int) -> Process | None:
    """The process `pid` as it is now; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command's name, in parentheses, may contain any character
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def boot_id() -> str:
    """Differs between machines, and after each boot; "" if the kernel does not tell it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def living() -> dict[int, Process]:
    """All processes of this host that are not zombies."""
    processes = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {found.pid: found for found in processes if found is not None and found.state not in "ZX"}


def has_mark(pid: int, marks: tuple[bytes, ...]) -> bool:
    """Whether the process was started with one of `marks` (b"NAME=value") in its environment, and is this user's: root
    can read the environments of all, in which everybody can write a mark."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return os.fstat(file.fileno()).st_uid == os.geteuid() and any(
                entry in marks for entry in file.read(ENVIRONMENT_BYTES).split(b"\0")
            )
    except OSError:  # it is gone, or belongs to another user
        return False


def members(mark: str, root: int, look: Callable[[], dict[int, Process]] = living) -> dict[int, Process]:
    """The living processes of job `mark`: those with its mark, agents older than `root`, and all descendants of these
    and of `root`.

    Parents come before their children: if a shell's child is ended first, the shell exits with the child's status, and
    its own end is not reported. Younger agents are left out: such an agent was started to end this one, or to report
    that the host has two.
    """
    processes = look()
    of_job, of_agent = (name + os.fsencode(mark) for name in (b"DMLTRAIN_JOB=", b"DMLTRAIN_AGENT="))
    own = processes.get(root)
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    pending = [root]
    for pid, process in processes.items():
        older = own is None or (process.start, pid) < (own.start, root)
        if pid != root and has_mark(pid, (of_job, of_agent) if older else (of_job,)):
            pending.append(pid)
    pids: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in pids:
            pids.add(pid)
            pending.extend(children.get(pid, ()))
    left = sorted(pids & processes.keys() - {root}, key=lambda pid: generation(pid, processes))
    return {pid: processes[pid] for pid in left}


def generation(pid: int, processes: dict[int, Process]) -> int:
    """How many of the process's ancestors are among `processes`."""
    ancestors: set[int] = set()
    parent = processes[pid].parent
    while parent in processes and parent not in ancestors:  # a snapshot of changing processes may contain a cycle
        ancestors.add(parent)
        parent = processes[parent].parent
    return len(ancestors)


def send_signal(target: Process, number: int) -> None:
    """Signal `target`, but never a later process with the same pid (if the kernel has pidfds: from 5.3)."""
    with contextlib.suppress(OSError):  # it is gone, or belongs to another user: then it is reported as left
        try:
            descriptor = os.pidfd_open(target.pid)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):  # an old Python or kernel, a container without pidfds, no free descriptor
            return os.kill(target.pid, number)
        try:
            now = process(target.pid)
            if now is not None and now.start == target.start:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants. If that fails, they are found by their mark."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    except (ImportError, OSError, AttributeError):
        pass
