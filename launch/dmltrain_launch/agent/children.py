"""The processes that the agent started: their output, their exits in order, and adopted orphans."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator

from dmltrain_launch.agent.channel import READ_BYTES, Channel
from dmltrain_launch.agent.events import Exited, Frozen, Reported, Started
from dmltrain_launch.agent.process import Process, process
from dmltrain_launch.agent.protocol import ProtocolError
from dmltrain_launch.agent.scheduler import SchedulerLink

FROZEN_SECONDS = 5.0  # a task that is stopped (state T) for so long is reported
FROZEN_LOOK_SECONDS = 1.0
LAST_REPORTS = 1000  # of a process that has ended; Linux keeps 300 for a connection, unless it is told to keep more


class Child:
    """A process that the agent started: its number in the job, its pipe (None once closed) and its pidfd.

    `leaves`: SIGTERM asks it to leave the job. `link`: of a scheduler (None once closed).
    """

    def __init__(
        self,
        task: int,
        popen: subprocess.Popen[bytes],
        pipe: int,
        leaves: bool = False,
        link: SchedulerLink | None = None,
    ):
        self.task, self.popen, self.leaves, self.link = task, popen, leaves, link
        self.pipe: int | None = pipe
        self.frozen_since: float | None = None  # when it was first found stopped
        os.set_blocking(pipe, False)
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except (AttributeError, OSError):
            self.pidfd = -1  # without a pidfd, only SIGCHLD reports the exit


class Children:
    """Sends events to `channel`. Set `zombies` at SIGCHLD, and then call `reap`."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel, now: float):
        self.selector, self.channel = selector, channel
        self.by_pid: dict[int, Child] = {}
        self.zombies = False
        self.paused = False  # no output is read because the channel is full
        self.look_at = now  # when to look for frozen tasks

    def add(self, child: Child) -> None:
        self.by_pid[child.popen.pid] = child
        self.channel.send(Started(self.channel.host, child.task, child.popen.pid))
        self._watch(child)
        if child.pidfd >= 0:
            self.selector.register(child.pidfd, selectors.EVENT_READ, lambda: self.collect(child))

    # -- output and reports -------------------------------------------------------------------------------------

    def follow_backlog(self) -> None:
        """Stop reading the processes while too much is unsent."""
        if not self.paused and self.channel.full:
            self.paused = True
            for child in self.by_pid.values():
                for descriptor, _ in self._sources(child):
                    self.selector.unregister(descriptor)
        elif self.paused and self.channel.has_room:
            self.paused = False
            for child in self.by_pid.values():
                self._watch(child)

    def _watch(self, child: Child) -> None:
        for descriptor, read in self._sources(child):
            if not self.paused and descriptor not in self.selector.get_map():
                self.selector.register(descriptor, selectors.EVENT_READ, read)

    def _sources(self, child: Child) -> Iterator[tuple[int, Callable[[], object]]]:
        """What the process sends: the descriptors, and how each is read."""
        if child.pipe is not None:
            yield child.pipe, lambda: self._pass_on(child)
        if child.link:
            yield child.link.fileno(), lambda: self._report(child)

    def _pass_on(self, child: Child) -> int:
        """Forward output of the process, at most READ_BYTES; returns how many bytes."""
        if child.pipe is None:
            return 0
        try:
            data = os.read(child.pipe, READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self.channel.send_output(child.task, data)
        else:  # every writer has closed the pipe; epoll would report it again and again
            if child.pipe in self.selector.get_map():
                self.selector.unregister(child.pipe)
            os.close(child.pipe)
            child.pipe = None
        return len(data)

    def _drain(self, child: Child) -> None:
        """Forward the current content of the pipe. Limited, because descendants may still be writing."""
        left = 2 * READ_BYTES
        while left > 0:
            count = self._pass_on(child)
            if not count:
                return
            left -= count

    def _report(self, child: Child) -> bool:
        """Pass on a report of a scheduler. Returns whether there was a message."""
        if not child.link:
            return False
        try:
            report = child.link.receive()
        except ProtocolError as error:
            if line := child.link.explain(error):
                self.channel.send_output(child.task, line)
            return True
        if report:
            self.channel.send(Reported(self.channel.host, child.task, report))
        elif child.link.over:
            self._close_link(child)
        return report is not None

    def _close_link(self, child: Child) -> None:
        if child.link:
            if child.link.fileno() in self.selector.get_map():
                self.selector.unregister(child.link.fileno())
            child.link.close()
            child.link = None

    def _end_link(self, child: Child) -> None:
        """Pass on the last reports of a scheduler that has ended. What a descendant would report does not count."""
        for _ in range(LAST_REPORTS):
            if not self._report(child):
                break
        self._close_link(child)

    def tell(self, task: int, message: str) -> None:
        """Pass a message on to a scheduler."""
        for child in self.by_pid.values():
            if child.task == task and child.link:
                child.link.tell(message)

    # -- leaving ------------------------------------------------------------------------------------------------

    @property
    def leaving(self) -> tuple[int, ...]:
        """The running tasks that leave the job when they get SIGTERM."""
        return tuple(child.task for child in self.by_pid.values() if child.leaves and child.popen.returncode is None)

    @property
    def leaving_pids(self) -> set[int]:
        return {child.popen.pid for child in self.by_pid.values() if child.leaves and child.popen.returncode is None}

    def ask_to_leave(self, tasks: Collection[int]) -> None:
        """Send SIGTERM to these tasks, and let one that is stopped run: it leaves only then."""
        for pid, child in self.by_pid.items():
            if child.task in tasks and child.popen.returncode is None:
                # not Popen.send_signal: it polls first, and so may reap a process that has just ended. Then `collect`
                # would not report the exit, for which the launcher waits.
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)

    # -- exits --------------------------------------------------------------------------------------------------

    def collect(self, child: Child) -> None:
        """Report the exit of a process, after its last output."""
        code = child.popen.poll() if child.popen.returncode is None else None
        if code is None:  # it still runs, or its exit has been reported
            return
        if child.pidfd >= 0:
            self.selector.unregister(child.pidfd)
            os.close(child.pidfd)
        self._drain(child)
        self._end_link(child)
        self.channel.send(Exited(self.channel.host, child.task, code))
        self.zombies = True

    def collect_all(self) -> None:
        """At the end of the job: report exits and forward the remaining output."""
        for child in self.by_pid.values():
            self.collect(child)
            self._drain(child)
            self._end_link(child)

    def reap(self) -> None:
        """Reap adopted orphans up to the next child of ours, because exits are reported in order."""
        self.zombies = False
        for child in self.by_pid.values():
            if child.pidfd < 0:
                self.collect(child)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            ours = self.by_pid.get(ended.si_pid)
            if ours and ours.popen.returncode is None:
                return
            os.waitpid(ended.si_pid, 0)

    def look_for_frozen(self, now: float) -> None:
        """Report tasks stopped for FROZEN_SECONDS. The scheduler only notices tasks that are registered with it."""
        self.look_at = now + FROZEN_LOOK_SECONDS
        for child in self.by_pid.values():
            current = process(child.popen.pid) if child.popen.returncode is None else None
            if current is None or current.state != "T":
                child.frozen_since = None
            elif child.frozen_since is None:
                child.frozen_since = now
            elif now - child.frozen_since >= FROZEN_SECONDS:
                self.channel.send(Frozen(self.channel.host, child.task, round(now - child.frozen_since)))

    def task_of(self, pid: int, processes: dict[int, Process]) -> int | None:
        """The number of the task whose process is `pid` or an ancestor of it."""
        while pid in processes:
            if pid in self.by_pid:
                return self.by_pid[pid].task
            pid = processes[pid].parent
        return None
