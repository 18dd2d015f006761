"""Run a job's attempts until one succeeds or no restart is left."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmltrain_launch import NAME, LaunchError, version
from dmltrain_launch.channels.exit_text import signal_name
from dmltrain_launch.clusters import Cluster
from dmltrain_launch.clusters.named_hosts import named_hosts
from dmltrain_launch.command_line.table import OPTIONS
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, placements
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import absolute
from dmltrain_launch.own_program import own_program
from dmltrain_launch.run import report
from dmltrain_launch.run.described import advice, limits, new_mark
from dmltrain_launch.run.job_record import JobRecord
from dmltrain_launch.run.requests import Requests
from dmltrain_launch.run.session import Session, catching
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.limit import FAULT_CODE, backoff
from dmltrain_launch.run.supervisor.policy import policy_of
from dmltrain_launch.run.watch import HostsWatch
from dmltrain_launch.terminal.choice import make_display
from dmltrain_launch.terminal.log_folder import LOGS, LogFolder
from dmltrain_launch.terminal.output import Output
from dmltrain_launch.terminal.usage_file import UsageFile

if TYPE_CHECKING:
    from dmltrain_launch.run.journal import Beginning  # few jobs have a journal
    from dmltrain_launch.run.keeper import Keeper
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

INTERRUPTED_SECONDS = 2.0  # after a signal: the longest wait for a terminal that blocks
COPY_SECONDS = 2.0  # between two lines about the progress of a copy
TABLE_SECONDS = 60.0  # for dmltrain-parse to print its table
LINE_BYTES = 1 << 16  # that are read of a log's line at once
RESTART_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0  # between the end of an attempt and the next; doubles
Say = Callable[[str], None]


class Start:
    """A job and its attempts.

    `listed`: all hosts that the user has described, also those that the job does not use. `keeper`: of a job that lives
    on without its launcher. `folder` is locked by this launcher, and the job `began` at that time (s since 1970), if
    another launcher has started it.
    """

    def __init__(
        self,
        options: Options,
        job: Job,
        cluster: Cluster,
        path: Path,
        say: Say,
        listed: Sequence[Host] = (),
        keeper: Keeper | None = None,
        folder: LogFolder | None = None,
        began: float | None = None,
    ):
        self.options, self.job, self.cluster, self.keeper = options, job, cluster, keeper
        self.path, self.folder = path, folder or LogFolder(path)  # of the current attempt
        began = time.time() if began is None else began
        self.record = JobRecord(self.folder, options, began, job.secrets(cluster.hosts), say)
        self.say = self.record.say
        self._copied = threading.Event()
        self._interrupted, self._signal = threading.Event(), 0
        self._session: Session | None = None
        self.listed = list(listed)
        if keeper:
            keeper.use(self.folder, self.say)

    def run(self) -> int:
        """Returns the exit code of the job; FAULT_CODE if this launcher leaves it."""
        code = self._run()
        if self.keeper:
            self.keeper.end()
        return code

    def _run(self) -> int:
        for each in advice(self.job, self.cluster.hosts, self.options.torch_env):
            self.say(f"{NAME}: warning: {each}")
        with catching(self._interrupt):
            while True:
                supervisor = self._supervisor()
                try:
                    code = self._attempt(supervisor)
                except (LaunchError, OSError) as error:
                    if not self.keeper or not self.keeper.has_journal:
                        self.record.write_failure(supervisor, error)
                    raise
                if not self._restarts(supervisor):
                    return code
                self._next_attempt(supervisor)
                if self._interrupted.wait(backoff(RESTART_SECONDS, LONGEST_PAUSE_SECONDS, self.job.restart - 1)):
                    self.record.write(supervisor, time.time())
                    self.say(f"{NAME}: the launcher got {signal_name(self._signal)}")
                    self.say(report.last_line(supervisor))
                    return 128 + self._signal

    def _next_attempt(self, supervisor: Supervisor) -> None:
        number = self.record.restart(supervisor, str(self.path))
        self.say(f"{NAME}: restart {number} of {self.options.max_restarts}")
        self.job = replace(self.job, restart=number, mark=new_mark(self.job.name))  # an old agent may still be ending
        self.path = Path(self.record.folder.shown) / f"restart-{number}"
        self.folder = LogFolder(self.path)

    def _interrupt(self, number: int) -> None:
        if self.keeper and not self.keeper.interrupted(number):
            return
        self._signal = number
        self._interrupted.set()
        if self._session:
            self._session.interrupt(number)

    def _restarts(self, supervisor: Supervisor) -> bool:
        """Whether another attempt follows. After a restart, a host that was not reached may be rebooting: try again."""
        lost = supervisor.restartable or (
            self.record.ends and supervisor.ending.unreached and not supervisor.interrupted
        )
        return bool(lost) and len(self.record.ends) < self.options.max_restarts and not self.record.folder.killed

    def _attempt(self, supervisor: Supervisor) -> int:
        """Returns the exit code."""
        names = [f"{role}-{rank}" for role, rank, _ in placements(self.job, self.cluster.hosts)]
        folder = self.folder.path
        keeper = self.keeper

        def explained(notes: Sequence[tuple[str, int | None]]) -> list[str]:
            lines = report.explained(supervisor, notes, output.last_lines, str(self.path))
            return [self.record.redacted(line) for line in lines]

        listens = bool(self.job.num_servers) or self.job.detach
        requests = Requests(self.job.mark, version(), explained, listens, keeper.first_request if keeper else 0)
        self.record.control = requests.name  # changes can be asked for as soon as a process runs
        self.record.write(supervisor)
        greeting = keeper.greeting(supervisor, self.path) if keeper else []
        for line in greeting or [report.start_line(supervisor, str(self.path))]:
            self.say(line)
        shown = self.options if not keeper or keeper.foreground else replace(self.options, quiet=True)
        output = Output(self.folder, names, make_display(shown, names))
        copier = self._copier() if self.job.copy_to else None
        usage = UsageFile(self.folder, lambda problem: self.say(f"{NAME}: warning: {problem}"))

        def recorded() -> None:
            self.record.say_lines(report.announcements(supervisor, output.last_lines, str(self.path)))
            self.record.write(supervisor)
            if keeper:
                keeper.news(self._goes_on)

        kept = keeper.kept(self._beginning, output) if keeper else None
        self._session = session = Session(
            supervisor, self.cluster, output, recorded, copier, self.record.trace, usage.write, requests, kept
        )
        watch = self._watch(session) if self.options.watch_hosts else None
        if self._interrupted.is_set():  # by a signal that came before `_session` was set
            session.interrupt(self._signal)
        try:
            session.run(folder)
            self._session, self.record.control = None, ""
            self._copied.set()
            if session.left:
                return self._leave(supervisor, session.left)
            code, lines = supervisor.exit_code, report.failure(supervisor, output.last_lines, str(self.path))
            try:
                self.record.write(supervisor, None if self._restarts(supervisor) else time.time())
            except LaunchError as error:
                code, lines = code or FAULT_CODE, [*lines, f"error: {error}"]
        finally:
            requests.close()
            if watch:
                watch.close()
            output.close(INTERRUPTED_SECONDS if supervisor.interrupted else None)
            usage.close()
        self.record.say_lines(lines)
        if not code and not self.options.quiet:
            print_epochs(folder, self.record.folder.shown)
        self.say(report.last_line(supervisor))
        return code

    def _leave(self, supervisor: Supervisor, why: str) -> int:
        """The job goes on without this launcher."""
        if self.keeper:
            self.keeper.leave()
        self.record.write(supervisor)
        self.say(f"{NAME}: {why}; the job goes on without this launcher: dmltrain job attach {self.path}")
        return FAULT_CODE

    @property
    def _goes_on(self) -> str:
        return (
            f"{NAME}: job {self.job.name} goes on without this terminal; logs in {self.path}; "
            f"to take it up again: dmltrain job attach {self.path if self.options.log_dir else self.job.name}"
        )

    @property
    def _beginning(self) -> Beginning:
        given = self.options
        files: dict[str, Any] = {row.field: absolute(getattr(given, row.field)) for row in OPTIONS if row.file}
        options = replace(given, **files)
        hosts, listed = tuple(self.cluster.hosts), tuple(self.listed)
        from dmltrain_launch.run.journal import Beginning

        return Beginning(options, self.job, hosts, listed, str(self.path), self.record.began)

    def _watch(self, session: Session) -> HostsWatch:
        options = self.options
        files = [file for file in (options.hostfile, options.worker_hostfile, options.server_hostfile) if file]
        return HostsWatch(files, lambda: named_hosts(options), session.events.put)

    def _supervisor(self) -> Supervisor:
        policy = policy_of(self.job, self.listed, self.options.watch_hosts)
        supervisor = Supervisor(self.job, self.cluster.hosts, limits(self.options), policy)
        return self.keeper.repeat(supervisor) if self.keeper else supervisor

    def _copier(self) -> Sync:
        from dmltrain_launch.sync import Sync
        from dmltrain_launch.sync.manifest import manifest

        logs = self.record.folder.path
        logs = logs.parent if logs.parent.name == LOGS else logs
        folder, left_out = self.job.workdir, [str(logs), self.job.copy_to]
        source = partial(manifest, folder, self.options.sync_exclude, left_out)
        copier = Sync(folder, source, [host.name for host in self.cluster.hosts])
        self._copied.clear()
        threading.Thread(target=self._report_progress, args=(copier,), daemon=True).start()
        return copier

    def _report_progress(self, copier: Sync) -> None:
        """Print the progress of the copy every COPY_SECONDS until it is done."""
        before = 0
        while not self._copied.wait(COPY_SECONDS):
            done, total = copier.progress()
            if done != before:
                self.say(f"{NAME}: copying: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
            before = done


def print_epochs(folder: Path, job_folder: str) -> None:
    """Print the table of the epochs with dmltrain-parse, and the command that makes a page of the job.

    Prints nothing if the logs in `folder` have no epochs, or if dmltrain-parse is not installed. `job_folder` is the
    folder of all attempts, as the user knows it.
    """
    try:
        with open(folder / "worker-0.log", "rb") as log:
            trains = any(b"Epoch[" in line for line in iter(lambda: log.readline(LINE_BYTES), b""))
        if trains:
            sys.stdout.flush()
            command = [*own_program(sys.executable, "dmltrain.report.cli"), str(folder)]
            done = subprocess.run(command, timeout=TABLE_SECONDS)
            if done.returncode == 0:
                page = shlex.join(["dmltrain", "report", job_folder, "-o", f"{job_folder}/report.html"])
                print(f"report: {page}", flush=True)
    except (OSError, subprocess.TimeoutExpired):
        return
