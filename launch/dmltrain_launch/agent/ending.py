"""The end of a job on this host."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Collection
from typing import IO

from dmltrain_launch.agent import KILL_SECONDS
from dmltrain_launch.agent.process import Process, members, send_signal

LOOK_SECONDS = 0.02, 0.2  # between two looks at the processes: first and longest interval
AGAIN_SECONDS = 0.3  # between two SIGTERM to a process that takes the first one for a notice to leave


def dump_stack(each: Process) -> None:
    """Make a Python process print the stacks of its threads and end.

    With PYTHONFAULTHANDLER, Python does so at SIGABRT. Without it, SIGABRT only ends the process.
    """
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(each.pid, resource.RLIMIT_CORE, (0, 0))  # no core file: the stacks are enough
    send_signal(each, signal.SIGABRT)
    if each.state == "T":
        send_signal(each, signal.SIGCONT)


def runs_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


class Ending:
    """The end of a job on this host: TERM to every process, KILL after `grace` seconds, until none is left.

    Call `look` at `look_at`. It is over once `left` (pids) is not None. `find(mark, agent's pid)` lists processes.
    `leaving`: pids of those that take SIGTERM for a notice, and end when they get it again.
    """

    def __init__(
        self,
        mark: str,
        now: float,
        grace: float,
        find: Callable[[str, int], dict[int, Process]] = members,
        leaving: Collection[int] = (),
    ):
        self.mark, self.find, self.leaving = mark, find, leaving
        self.again_at = now + AGAIN_SECONDS
        self.signalled: set[tuple[int, int]] = set()  # (pid, start)
        self.kill_at = now + grace
        self.look_at, self.pause = now, LOOK_SECONDS[0]
        self.empty_looks = 0
        self.left: list[int] | None = None

    @property
    def over(self) -> bool:
        return self.left is not None

    def shorten(self, now: float, grace: float) -> None:
        """Send KILL after `grace` seconds from now, if that is earlier."""
        self.kill_at = min(self.kill_at, now + grace)
        self.look_at = now

    def members(self) -> dict[int, Process]:
        return self.find(self.mark, os.getpid()) if self.mark else {}

    def look(self, now: float) -> None:
        """Find the processes that are left; send SIGTERM, or SIGKILL when due."""
        processes = self.members()
        self.empty_looks = 0 if processes else self.empty_looks + 1
        if (
            self.empty_looks >= 2 or now >= self.kill_at + KILL_SECONDS
        ):  # twice, because one look can miss a process that forks
            self.left = sorted(processes)
        elif now >= self.kill_at:
            for process in processes.values():
                send_signal(process, signal.SIGKILL)
        else:
            self.terminate(processes)
            self._insist(now, processes)
        self.look_at = min(now + self.pause, max(now + LOOK_SECONDS[0], self.kill_at)) if processes else now
        self.pause = min(2 * self.pause, LOOK_SECONDS[1])

    def _insist(self, now: float, processes: dict[int, Process]) -> None:
        if now >= self.again_at:
            self.again_at = now + AGAIN_SECONDS
            for process in processes.values():
                if process.pid in self.leaving:
                    send_signal(process, signal.SIGTERM)

    def dump(self, processes: dict[int, Process]) -> None:
        """Make Python processes print their stacks. They get no SIGTERM, which would end them first."""
        for process in processes.values():
            if runs_python(process.pid):
                self.signalled.add((process.pid, process.start))
                dump_stack(process)

    def terminate(self, processes: dict[int, Process]) -> None:
        """Send SIGTERM to the processes that have not had it."""
        for process in processes.values():
            if (process.pid, process.start) not in self.signalled:
                self.signalled.add((process.pid, process.start))
                send_signal(process, signal.SIGTERM)
            if process.state == "T":
                send_signal(process, signal.SIGCONT)  # a stopped process handles SIGTERM only once it runs again


def open_log(path: str) -> IO[str]:
    """Open a file to append to it. OSError also if others could have put something else there, such as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = open(os.open(path, flags, 0o666), "a")  # noqa: SIM115  the caller closes it
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
        file.close()
        raise PermissionError(errno.EPERM, "it is no file of this user alone", path)
    return file


def write_last_line(folder: str, host: str, why: str, left: Collection[int]) -> None:
    """Log what the launcher would have printed. `why` it was lost; `left`: pids."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    pids = ": " + ", ".join(f"pid {pid} on {host}" for pid in left) if left else ""
    with contextlib.suppress(OSError), open_log(os.path.join(folder, f"agent-{host}.log")) as file:
        file.write(f"{stamp} agent on {host} (pid {os.getpid()}): {why}; ended the job\n")
        file.write(f"{len(left)} process{'' if len(left) == 1 else 'es'} left on 1 host{pids}\n")
