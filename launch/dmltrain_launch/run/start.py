"""Run a job's attempts until one succeeds or no restart is left."""

from __future__ import annotations

import contextlib
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
from dmltrain_launch.clusters.ssh import hosts_of
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, placements
from dmltrain_launch.job.options import Options
from dmltrain_launch.own_program import own_program
from dmltrain_launch.run import report
from dmltrain_launch.run.described import advice, limits, new_mark
from dmltrain_launch.run.requests import Requests
from dmltrain_launch.run.session import Session, catching
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.backoff import backoff
from dmltrain_launch.run.supervisor.event import Copied, Event
from dmltrain_launch.run.supervisor.limit import FAULT_CODE
from dmltrain_launch.run.supervisor.policy import policy_of
from dmltrain_launch.run.watch import HostsWatch
from dmltrain_launch.secret import redact, redact_all
from dmltrain_launch.terminal.choice import make_display
from dmltrain_launch.terminal.log_folder import LOGS, LogFolder
from dmltrain_launch.terminal.output import Output
from dmltrain_launch.terminal.usage_file import UsageFile

if TYPE_CHECKING:
    from dmltrain_launch.run.records import KeptJob  # few jobs have a journal
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

INTERRUPTED_SECONDS = 2.0  # after a signal: the longest wait for a terminal that blocks
COPY_SECONDS = 2.0  # between two lines about the progress of a copy
TABLE_SECONDS = 60.0  # for dmltrain-parse to print its table
LINE_BYTES = 1 << 16  # that are read of a log's line at once
RESTART_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0  # between the end of an attempt and the next; doubles
Say = Callable[[str], None]


class Start:
    """A job and its attempts. `run` returns the exit code of the last one.

    `listed`: all hosts that the user has described, also those that the job does not use.
    """

    def __init__(
        self,
        options: Options,
        job: Job,
        cluster: Cluster,
        path: Path,
        say: Say,
        listed: Sequence[Host] = (),
        folder: LogFolder | None = None,
    ):
        self.options, self.job, self.cluster, self._say = options, job, cluster, say
        self.began = time.time()
        self.path, self.folder = path, folder or LogFolder(path)  # of the current attempt
        self.first = self.folder  # of the first attempt; has the job.json of all
        self.ends: list[dict[str, Any]] = []  # of the earlier attempts
        self.hidden = job.secrets(cluster.hosts)
        self._copied = threading.Event()
        self._interrupted, self._signal = threading.Event(), 0
        self._session: Session | None = None
        self._control = ""  # the name of the control socket
        self.listed = list(listed)

    def run(self) -> int:
        for each in advice(self.job, self.cluster.hosts, self.options.torch_env):
            self.say(f"{NAME}: warning: {each}")
        with catching(self._interrupt):
            while True:
                supervisor = self._supervisor()
                try:
                    code = self._attempt(supervisor)
                except (LaunchError, OSError) as error:
                    self._record_failure(supervisor, error)
                    raise
                if not self._restarts(supervisor):
                    return code
                self._next_attempt(supervisor)
                if self._interrupted.wait(backoff(RESTART_SECONDS, LONGEST_PAUSE_SECONDS, self.job.restart - 1)):
                    self._record(supervisor, time.time())
                    self.say(f"{NAME}: the launcher got {signal_name(self._signal)}")
                    self.say(report.last_line(supervisor))
                    return 128 + self._signal

    def _next_attempt(self, supervisor: Supervisor) -> None:
        self.ends.append(redact_all(report.end_of_attempt(supervisor, str(self.path)), self.hidden))
        number = len(self.ends)
        self.say(f"{NAME}: restart {number} of {self.options.max_restarts}")
        self.job = replace(self.job, restart=number, mark=new_mark(self.job.name))  # an old agent may still be ending
        self.path = Path(self.first.shown) / f"restart-{number}"
        self.folder = LogFolder(self.path)

    def _interrupt(self, number: int) -> None:
        self._signal = number
        self._interrupted.set()
        if self._session:
            self._session.interrupt(number)

    def _restarts(self, supervisor: Supervisor) -> bool:
        """Whether another attempt follows. After a restart, a host that was not reached may be rebooting: try again."""
        lost = supervisor.restartable or (self.ends and supervisor.ending.unreached and not supervisor.interrupted)
        return bool(lost) and len(self.ends) < self.options.max_restarts and not self.first.killed

    def say(self, line: str) -> None:
        self._say(redact(line, self.hidden))

    def _attempt(self, supervisor: Supervisor) -> int:
        """Returns the exit code."""
        names = [f"{role}-{rank}" for role, rank, _ in placements(self.job, self.cluster.hosts)]
        folder = self.folder.path
        self._record(supervisor)
        self.greet(supervisor)
        output = self.make_output(names)
        copier = self._copier() if self.job.copy_to else None
        usage = UsageFile(self.folder, lambda problem: self.say(f"{NAME}: warning: {problem}"))

        def recorded() -> None:
            self._say_lines(report.announcements(supervisor, output.last_lines, str(self.path)))
            self._record(supervisor)
            self.after_news()

        def explained(notes: Sequence[tuple[str, int | None]]) -> list[str]:
            lines = report.explained(supervisor, notes, output.last_lines, str(self.path))
            return [redact(line, self.hidden) for line in lines]

        listens = bool(self.job.num_servers) or self.job.detach
        requests = Requests(self.job.mark, version(), explained, listens, self.first_request)
        self._control = requests.name
        kept = self.kept(output)
        self._session = session = Session(
            *(supervisor, self.cluster, output, recorded, copier, self._trace, usage.write, requests),
            *(kept, self.foreground),
        )
        watch = self._watch(session) if self.options.watch_hosts else None
        if self._interrupted.is_set():  # by a signal that came before `_session` was set
            session.interrupt(self._signal)
        try:
            session.run(folder)
            self._session, self._control = None, ""
            self._copied.set()
            if session.left:
                return self.leave(supervisor, session.left)
            code, lines = supervisor.exit_code, report.failure(supervisor, output.last_lines, str(self.path))
            try:
                self._record(supervisor, None if self._restarts(supervisor) else time.time())
            except LaunchError as error:
                code, lines = code or FAULT_CODE, [*lines, f"error: {error}"]
        finally:
            requests.close()
            if watch:
                watch.close()
            output.close(INTERRUPTED_SECONDS if supervisor.interrupted else None)
            usage.close()
        self._say_lines(lines)
        if not code and not self.options.quiet:
            print_epochs(folder, self.first.shown)
        self.say(report.last_line(supervisor))
        return code

    # -- for a job that lives on without its launcher: see `dmltrain_launch.run.detached_start` ----------------------

    first_request = 0
    foreground = True

    def greet(self, supervisor: Supervisor) -> None:
        self.say(report.start_line(supervisor, str(self.path)))

    def make_output(self, names: Sequence[str]) -> Output:
        return Output(self.folder, names, make_display(self.options, names))

    def kept(self, output: Output) -> KeptJob | None:
        """The journal of the job, just before its session begins."""
        return None

    def after_news(self) -> None:
        """Called when all processes run, and after each change since then; job.json is up to date."""

    def leave(self, supervisor: Supervisor, why: str) -> int:
        """The job goes on without this launcher."""
        raise NotImplementedError

    def _watch(self, session: Session) -> HostsWatch:
        options = self.options
        files = [file for file in (options.hostfile, options.worker_hostfile, options.server_hostfile) if file]
        return HostsWatch(files, lambda: hosts_of(options), session.events.put)

    def _supervisor(self) -> Supervisor:
        policy = policy_of(self.job, self.listed, self.options.watch_hosts)
        return Supervisor(self.job, self.cluster.hosts, limits(self.options), policy)

    def _say_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line if line.startswith(" ") else f"{NAME}: {line}")

    def _copier(self) -> Sync:
        from dmltrain_launch.sync import Sync
        from dmltrain_launch.sync.manifest import manifest

        logs = self.first.path.parent if self.first.path.parent.name == LOGS else self.first.path
        folder, left_out = self.job.workdir, [str(logs), self.job.copy_to]
        source = partial(manifest, folder, self.options.sync_exclude, left_out)
        copier = Sync(folder, source, [host.name for host in self.cluster.hosts])
        self._copied.clear()
        threading.Thread(target=self._report_progress, args=(copier,), daemon=True).start()
        return copier

    def _record(self, supervisor: Supervisor, ended: float | None = None) -> None:
        for warning in supervisor.take_warnings():
            self.say(f"{NAME}: warning: {warning}")
        facts = report.record(supervisor, version(), self.options, self.began, ended, self._control)
        self.first.write_record({**redact_all(facts, self.hidden), "restarts": self.ends})

    def _record_failure(self, supervisor: Supervisor, error: LaunchError | OSError) -> None:
        """Record the end of an attempt that failed on this machine, such as for lack of disk space or descriptors."""
        facts = report.record(supervisor, version(), self.options, self.began, time.time())
        end = {"exit_code": error.code if isinstance(error, LaunchError) else FAULT_CODE, "cause": str(error)}
        with contextlib.suppress(LaunchError):
            self.first.write_record({**redact_all({**facts, **end}, self.hidden), "restarts": self.ends})

    def _trace(self, event: Event) -> None:
        if isinstance(event, Copied):
            for line in (event.summary, *event.notes):
                self.say(f"{NAME}: {event.host}: {line}")
        if self.options.log_level == "DEBUG":
            shown = replace(event, **redact_all(vars(event), self.hidden))  # before repr adds quotes
            self.say(f"{NAME}: debug: {shown}")

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
