"""Processes of this host as /proc has them: whose they are, and how to signal them. Linux."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Process(NamedTuple):
    """One line of /proc/PID/stat: `start` (ticks since boot) tells a process from a later one with its pid."""

    pid: int
    parent: int
    state: str
    start: int


def process(pid: int) -> Process | None:
    """The process `pid` as /proc has it now; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the command's name, in brackets, may hold anything
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]))


def living() -> dict[int, Process]:
    """All processes of this host that are not zombies."""
    found = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {each.pid: each for each in found if each is not None and each.state not in "ZX"}


def carries(pid: int, marks: tuple[bytes, ...]) -> bool:
    """Whether the process was started with one of `marks` (b"NAME=value") in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry in marks for entry in file.read().split(b"\0"))
    except OSError:  # gone, or another user's
        return False


def members(mark: str, root: int, look: Callable[[], dict[int, Process]] = living) -> dict[int, Process]:
    """The living processes of job `mark`: carriers of its mark, agents older than `root`, and all below these and it.

    Parents come before their children: a shell whose child is ended first exits with the child's status, and what
    ended the shell would be lost. A younger agent is no business of an older one: it has come to end that one, or to
    say that there are two here.
    """
    everyone = look()
    of_job, of_agent = (name + os.fsencode(mark) for name in (b"DMLTRAIN_JOB=", b"DMLTRAIN_AGENT="))
    own = everyone.get(root)
    children: dict[int, list[int]] = {}
    for each in everyone.values():
        children.setdefault(each.parent, []).append(each.pid)
    pending = [root]
    for pid, each in everyone.items():
        older = own is None or (each.start, pid) < (own.start, root)
        if pid != root and carries(pid, (of_job, of_agent) if older else (of_job,)):
            pending.append(pid)
    found: set[int] = set()
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending.extend(children.get(pid, ()))
    left = sorted(found & everyone.keys() - {root}, key=lambda pid: generation(pid, everyone))
    return {pid: everyone[pid] for pid in left}


def generation(pid: int, everyone: dict[int, Process]) -> int:
    """How many of the process's ancestors are among `everyone`."""
    ancestors: set[int] = set()
    parent = everyone[pid].parent
    while parent in everyone and parent not in ancestors:  # a snapshot of changing processes may hold a ring
        ancestors.add(parent)
        parent = everyone[parent].parent
    return len(ancestors)


def send_signal(target: Process, number: int) -> None:
    """Signal `target`, and never a later process that got its pid (where the kernel has pidfds: 5.3)."""
    with contextlib.suppress(OSError):  # it is gone, or another user's: then it stays and is reported as left
        try:
            descriptor = os.pidfd_open(target.pid)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):  # an old Python or kernel, a container that forbids it, no descriptor left
            return os.kill(target.pid, number)
        try:
            now = process(target.pid)
            if now is not None and now.start == target.start:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def become_subreaper() -> None:
    """Have orphaned descendants become this process's children; where that fails, the mark finds them."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass
