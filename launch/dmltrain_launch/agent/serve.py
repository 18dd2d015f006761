"""The agent's loop, from the first command to the end of its job; the protocol is in
`dmltrain_launch.agent.protocol`."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dmltrain_launch.agent import Refusal, commands
from dmltrain_launch.agent.channel import Channel
from dmltrain_launch.agent.children import Children
from dmltrain_launch.agent.ending import LOOK_SECONDS, Ending, write_last_line
from dmltrain_launch.agent.events import Alive, Ended, Listing, Ready, Refused, Stopped, StoppedProcess
from dmltrain_launch.agent.host import cores
from dmltrain_launch.agent.host_job import HostJob
from dmltrain_launch.agent.preparation import Preparation
from dmltrain_launch.agent.process import become_subreaper
from dmltrain_launch.agent.protocol import ProtocolError, filler
from dmltrain_launch.agent.signals import Signals
from dmltrain_launch.agent.spawn import reached_at

if TYPE_CHECKING:
    from dmltrain_launch.agent.alone.detached import Detached  # few jobs need it

FAULT_CODE = 125


class Agent:
    """One host's part of one job. `serve` runs it from the first command to its end."""

    def __init__(self, stdin: int = 0, stdout: int = 1):
        self.selector = selectors.DefaultSelector()  # epoll: hands out events in the order they happened
        self.channel = Channel(self.selector, stdin, stdout)
        self.children = Children(self.selector, self.channel, time.monotonic())
        self.preparation = Preparation(self.selector, self.channel)
        self.job = HostJob(self.selector, self.channel, self.children, self.preparation.ports)
        self.signals = Signals(self.selector, self.channel, self.children)
        self.grace = 5.0
        self.log_folder: str | None = None
        self.ending: Ending | None = None
        self.orphaned = False  # the launcher is lost, and the agent ends the job for that reason
        self.detached: Detached | None = None  # the job lives on without its launcher
        self.wanted: commands.Attach | None = None  # the launcher wants to be connected with another agent

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> str:
        """Serve one job to its end. Returns why the launcher was lost, or ""."""
        self.selector.register(self.channel.stdin, selectors.EVENT_READ, self._read)
        while not self._over:
            self.channel.watch_output()
            self.children.follow_backlog()
            for key, _ in self.selector.select(self._wait_seconds(time.monotonic())):
                key.data()
            if self.children.zombies:
                self._reap(time.monotonic())
            now = time.monotonic()
            self._take_signal(now)
            self._check_launcher(now)
            self._proceed_with_end(now)
            if self.detached and self.detached.idle(now) and not self.ending:
                self._stop(self.grace, now)
            if self.wanted:
                from dmltrain_launch.agent.alone.bridge import connect

                return connect(self.channel, self.wanted)
            self.preparation.poll()
            if not self.ending and now >= self.children.look_at:
                self.children.look_for_frozen(now)
            self.job.sample(now)
        if self.detached:
            self.detached.close()
        if self.channel.lost and self.log_folder:
            left = (self.ending and self.ending.left) or []
            write_last_line(self.log_folder, self.channel.host, self.channel.lost, left)
        return self.channel.lost

    @property
    def _over(self) -> bool:
        ended = self.ending is not None and self.ending.over
        if not ended or self.channel.lost:
            return ended
        return self.detached.over(time.monotonic()) if self.detached else not self.channel.backlog

    def _wait_seconds(self, now: float) -> float:
        """The time until something is due without an event."""
        if self.ending and self.channel.lost:
            return max(0.0, self.ending.look_at - now)
        if self.preparation.busy:
            return 0.0
        due = min(self.channel.deadline, self.preparation.deadline)
        if self.detached:
            due = min(due, self.detached.deadline)
        if self.ending and not self.ending.over:
            due = min(due, self.ending.look_at)
        if self.children.by_pid and not self.ending:
            due = min(due, self.children.look_at)
        return max(0.0, min(due, self.job.due) - now)

    def _reap(self, now: float) -> None:
        if self.ending:
            self.ending.look_at = min(self.ending.look_at, now + LOOK_SECONDS[0])
        self.children.reap()

    def _take_signal(self, now: float) -> None:
        if number := self.signals.take(bool(self.ending)):
            name = signal.Signals(number).name
            self._refuse(Refusal(f"the agent on {self.channel.host} was ended by {name}", FAULT_CODE))
            self._stop(self.grace, now)

    def _check_launcher(self, now: float) -> None:
        self.channel.check_silence(now)
        if self.channel.lost and self.detached and self.detached.possible and not self.orphaned and not self.ending:
            self.detached.begin()
        elif self.channel.lost and not self.orphaned:
            self.orphaned = True
            self._stop(self.grace, now)

    def _proceed_with_end(self, now: float) -> None:
        if self.ending and not self.ending.over and now >= self.ending.look_at:
            self.ending.look(now)
            if self.ending.left is not None:
                self._finish(self.ending.left)

    # -- commands ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self.channel.read()
        self._take_all()

    def _take_all(self) -> None:
        while not self.wanted:
            try:
                for received in self.channel.incoming:
                    self._take(received)
                    if self.wanted:
                        break
                return
            except ProtocolError as error:
                message = f"the agent on {self.channel.host} cannot parse the launcher's message: {error}"
                self._refuse(Refusal(message, FAULT_CODE))

    def _take(self, received: commands.Command | bytes) -> None:
        try:
            if isinstance(received, bytes):
                self.preparation.take(received)
            else:
                self._execute(received)
        except Refusal as refusal:
            self._refuse(refusal)

    def _execute(self, command: commands.Command) -> None:
        """Call the method for this type of command, here or in Preparation."""
        if self.detached:
            self.detached.count(command)
        methods: dict[type[commands.Command], Callable[[Any], None]] = {
            commands.JobCommand: self._begin,
            commands.Attach: self._attach,
            commands.Kept: self._kept,
            commands.Probe: self.preparation.examine,
            commands.Bind: self.preparation.bind,
            commands.Reach: self.preparation.reach_peers,
            commands.Measure: self.preparation.measure,
            commands.Start: self._start,
            commands.Scheduler: self.job.follow,
            commands.Tell: self._tell,
            commands.NoticeCommand: self._notice,
            commands.Stop: self._end,
            commands.List: self._list,
            commands.Beat: self._answer_beat,
        }
        methods.get(type(command), self.preparation.receive)(command)

    def _refuse(self, refusal: Refusal) -> None:
        self.channel.send(Refused(self.channel.host, str(refusal), refusal.code))

    def _begin(self, job: commands.JobCommand) -> None:
        """Answers Ready."""
        self.grace, self.log_folder = job.grace, job.log_folder
        self.channel.host, self.channel.silence = job.host, job.silence
        self.preparation.key = job.key
        self.job.begin(job)
        if job.detach:
            from dmltrain_launch.agent.alone.detached import Detached

            self.detached = Detached(self.selector, self.channel, self.children, job)
        machine = cores.report()
        usable = cores.usable(machine)
        door, spool = (self.detached.door, self.detached.spool) if self.detached else ("", "")
        self.channel.send(
            Ready(job.host, os.getpid(), usable, sys.executable, reached_at(), dict(machine), door, spool)
        )

    def _start(self, command: commands.Start) -> None:
        if not (command.tasks and self.preparation.finished):
            self.preparation.finish()
        if command.tasks and self.detached:
            self.detached.open(self._read, self._take_all)
        self.job.start(command)

    def _attach(self, command: commands.Attach) -> None:
        self.wanted = command

    def _kept(self, command: commands.Kept) -> None:
        if self.channel.spool:
            self.channel.spool.confirm(command.frame)

    def _tell(self, command: commands.Tell) -> None:
        self.children.tell(command.task, command.message)

    def _notice(self, command: commands.NoticeCommand) -> None:
        self.children.ask_to_leave(command.tasks)

    def _list(self, command: commands.List) -> None:
        from dmltrain_launch.agent.listing import rows

        self.channel.send(Listing(self.channel.host, tuple(dict(row) for row in rows(command.mark))))

    def _answer_beat(self, command: commands.Beat) -> None:
        if not self.channel.backlog:  # any data shows the launcher that the agent lives
            self.channel.send(Alive(self.channel.host, filler()))

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self, command: commands.Stop) -> None:
        self._stop(command.grace, time.monotonic(), command.dump)

    def _stop(self, grace: float, now: float, dump: bool = False) -> None:
        """End every process of the job; a second call can only shorten the grace. `dump`: print Python stacks first."""
        if self.ending:
            return self.ending.shorten(now, grace)
        self.job.end(now)
        self.ending = Ending(self.job.mark, now, grace, self.job.members, self.children.leaving_pids)
        processes = self.ending.members()
        if dump:
            self.ending.dump(processes)
        stopped = tuple(
            StoppedProcess(process.pid, self.children.task_of(process.pid, processes))
            for process in processes.values()
            if process.state in "Tt"
        )
        if stopped:
            self.channel.send(Stopped(self.channel.host, stopped))
        self.ending.terminate(processes)

    def _finish(self, left: list[int]) -> None:
        self.preparation.close()
        self.children.collect_all()
        self.job.remove(keep=self.channel.spool.folder if self.channel.spool else "")
        self.channel.send(Ended(self.channel.host, tuple(left)))


def main() -> None:
    os.environ.pop("DMLTRAIN_AGENT", None)  # marks the agent only; its children do not inherit it
    become_subreaper()
    sys.exit(Agent().serve() or 0)  # a text goes to standard error: a launcher that was only frozen may still read it
