"""Start a job with --detach, which lives on without its launcher, or take such a job up again (records.py)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dmltrain_launch import NAME, LaunchError, version
from dmltrain_launch.clusters import Cluster
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.options import Options
from dmltrain_launch.run import journal, report
from dmltrain_launch.run.background import into_background
from dmltrain_launch.run.journal import Beginning, Journal, JournalContent
from dmltrain_launch.run.records import KeptJob
from dmltrain_launch.run.repeated import Repeated
from dmltrain_launch.run.start import Start
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Continue
from dmltrain_launch.run.supervisor.limit import FAULT_CODE
from dmltrain_launch.terminal.choice import make_display
from dmltrain_launch.terminal.log_folder import JOURNAL, LogFolder, is_full
from dmltrain_launch.terminal.output import Output

RETRY_SECONDS = 1.0  # between attempts to write to a full disk
REQUESTS = 1 << 20  # numbers of requests for each launcher, so that no launcher uses one of an earlier launcher


class DetachedStart(Start):
    """`started` is called once when all processes run, with a text for the user."""

    started: Callable[[str], None] | None = None
    foreground = False
    _left = False

    def __init__(
        self,
        options: Options,
        job: Job,
        cluster: Cluster,
        path: Path,
        say: Callable[[str], None],
        listed: Sequence[Host] = (),
        folder: LogFolder | None = None,
    ):
        super().__init__(options, job, cluster, path, say, listed, folder)
        self.retry = self.folder.retry = FullDiskRetry(self.say)

    def make_output(self, names: Sequence[str]) -> Output:
        shown = self.options if self.foreground else replace(self.options, quiet=True)
        return Output(self.folder, names, make_display(shown, names))

    def kept(self, output: Output) -> KeptJob:
        given = self.options
        options = replace(
            given,
            hostfile=report.absolute(given.hostfile),
            worker_hostfile=report.absolute(given.worker_hostfile),
            server_hostfile=report.absolute(given.server_hostfile),
            identity=report.absolute(given.identity),
        )
        hosts, listed = tuple(self.cluster.hosts), tuple(self.listed)
        beginning = Beginning(options, self.job, hosts, listed, str(self.path), self.began)
        kept = journal.Kept(self.folder.path, self.retry)
        return KeptJob(Journal(self.folder.path, version(), retry=self.retry), kept, output, beginning)

    def after_news(self) -> None:
        self.retry.wait()
        if self.started:
            started, self.started = self.started, None
            self.to_background(started)

    def leave(self, supervisor: Supervisor, why: str) -> int:
        self._left = True
        self.retry.give_up()  # another launcher may write to the logs from now on
        self._record(supervisor)
        self.say(f"{NAME}: {why}; the job goes on without this launcher: dmltrain job attach {self.path}")
        return FAULT_CODE

    def _record_failure(self, supervisor: Supervisor, error: LaunchError | OSError) -> None:
        """Record the failure unless there is a journal: with a journal the job goes on without this launcher."""
        if not (self.folder.path / JOURNAL).exists():
            super()._record_failure(supervisor, error)

    def run(self) -> int:
        """Returns the exit code of the job; FAULT_CODE if this launcher leaves the job."""
        code = super().run()
        if not self._left:
            journal.remove(self.folder.path)
        return code

    def _interrupt(self, number: int) -> None:
        """Handle a signal. SIGHUP does not end the job, because it only says that the terminal has closed."""
        if number == signal.SIGHUP:
            return self.to_background()
        self.retry.give_up()
        super()._interrupt(number)

    def to_background(self, started: Callable[[str], None] | None = None) -> None:
        """Go on without a terminal."""
        self.foreground = False
        if self._session and self._session.records:
            self._session.records.foreground = False
        if started:
            os.setsid()
            started(
                f"{NAME}: job {self.job.name} goes on without this terminal; logs in {self.path}; "
                f"to take it up again: dmltrain job attach {self.path if self.options.log_dir else self.job.name}"
            )
        into_background(self.folder.path)


class AttachedStart(DetachedStart):
    """A job that another launcher has started. `folder` is locked by this one."""

    foreground = True

    def __init__(
        self, content: JournalContent, size: int, cluster: Cluster, folder: LogFolder, say: Callable[[str], None]
    ):
        began = content.beginning
        self._content, self._length = content, size
        super().__init__(began.options, began.job, cluster, Path(folder.shown), say, began.listed, folder)
        self.began = began.began
        self.first_request = (content.lease + 1) * REQUESTS
        self.retry.wait()

    def _supervisor(self) -> Supervisor:
        self._repeated = Repeated(super()._supervisor(), self._content)
        return self._repeated.supervisor

    def greet(self, supervisor: Supervisor) -> None:
        self.say(f"{NAME}: attached to job {self.job.name}, logs in {self.path}")
        for line in report.losses(supervisor):
            self.say(f"{NAME}: {line}")

    def kept(self, output: Output) -> KeptJob:
        for action in self._repeated.opened:
            if isinstance(action, Continue):
                output.add(action.task)
            else:
                output.open(action.name)
        kept = journal.Kept(self.folder.path, self.retry)
        names: dict[str, list[int]] = {}
        for number, process in enumerate(self._repeated.supervisor.processes):
            names.setdefault(process.task.name, []).append(number)
        for tasks in names.values():
            for task in tasks:
                output.expect_again(task, kept.size(tasks))
        open_journal = Journal(self.folder.path, version(), self._length, self.retry)
        self._record(self._repeated.supervisor)  # with the name of this launcher's control socket
        return KeptJob(open_journal, kept, output, self._repeated, self._content.lease)


class FullDiskRetry:
    """Makes writes wait for room on a full disk, because the job lives on without its launcher.

    Call it with the error of a write. It returns whether to try the write again: after RETRY_SECONDS, if the disk is
    full, `wait` was called, and `give_up` was not. `say` gets one warning for each new error.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say, self._said = say, ""
        self._waits = False
        self._given_up = threading.Event()

    def wait(self) -> None:
        self._waits = True

    def give_up(self) -> None:
        self._given_up.set()

    def __call__(self, error: OSError) -> bool:
        if not self._waits or not is_full(error) or self._given_up.is_set():
            return False
        text = str(error.strerror)
        if text != self._said:
            self._said = text
            self._say(
                f"{NAME}: warning: {text} for the log folder: the job goes on, and its output waits for room there"
            )
        return not self._given_up.wait(RETRY_SECONDS)
