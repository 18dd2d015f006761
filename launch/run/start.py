"""Make a job from the options, and run its attempts until one succeeds or no restart is left."""

from __future__ import annotations

import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import NAME, LaunchError, as_utf8, version
from launch.channels.exit_text import signal_name
from launch.clusters import LAUNCHERS, Cluster
from launch.job.host import Host
from launch.job.job import Job, placements
from launch.job.options import Options
from launch.job.role import SERVER, WORKER
from launch.preflight import script
from launch.preflight.needs import needs
from launch.run import report
from launch.run.event import Copied, Event
from launch.run.limit import FAULT_CODE, Limits
from launch.run.session import Session, catching
from launch.run.supervise import Supervisor
from launch.secret import redact, redact_all
from launch.terminal.epoch_table import print_epochs
from launch.terminal.log_folder import LOGS, LogFolder, default_path
from launch.terminal.output import Display, Output, Plain, Silent
from launch.terminal.usage_file import UsageFile

if TYPE_CHECKING:
    from launch.sync import Sync  # takes a moment to import, and few jobs need it

INTERRUPTED_SECONDS = 2.0  # after a signal: the longest wait for a terminal that blocks
COPY_SECONDS = 2.0
RESTART_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0  # between the end of an attempt and the next; doubles
Say = Callable[[str], None]


def make_job(options: Options, name: str) -> Job:
    """The job that the options describe; LaunchError if they are incomplete."""
    if options.num_workers is None:
        raise LaunchError(f"-n/--num-workers is missing: {NAME} -n 2 -s 2 train.py ...")
    _check_wire(options)
    job = Job(
        name=name,
        mark=new_mark(name),
        argv=options.program,
        num_workers=options.num_workers,
        num_servers=options.num_workers if options.num_servers is None else options.num_servers,
        workdir=_folder_here(),
        settings=options.settings,
        port=options.port,
        placement=options.placement,
        copy_to=options.sync_dst_dir,
        over_network=LAUNCHERS[options.launcher_name].over_network,
        interface=options.interface,
        subnet=options.subnet,
        memory={WORKER: options.worker_memory, SERVER: options.server_memory},
        torch_env=_torch_env(options),
        wire=options.wire,
        usage=options.usage,
    )
    return replace(job, needs=_needs(job.script)) if job.over_network else job


def _torch_env(options: Options) -> bool:
    """Whether workers get RANK and so on. With auto, scripts that use dmltrain do not: they may check for RANK."""
    return options.torch_env == "on" or (options.torch_env == "auto" and not script.read(options.program).uses_dmltrain)


def _check_wire(options: Options) -> None:
    found = script.read(options.program)
    if options.wire != "plain" and found.uses_mxnet and not found.uses_dmltrain:
        raise LaunchError(
            f"--wire {options.wire}: {script.script_of(options.program)} uses MXNet, whose parameter server can "
            "neither authenticate nor encrypt what it sends; start it without --wire"
        )


def advice(job: Job) -> list[str]:
    """Warnings before the job starts."""
    found, file = script.read(job.argv), script.script_of(job.argv)
    if job.wire != "plain" and file and not found.uses_dmltrain:
        return [f"{file} does not import dmltrain itself: --wire {job.wire} protects only what dmltrain sends"]
    if job.num_servers and found.uses_torch_distributed and not found.uses_dmltrain:
        message = f"{file} uses torch.distributed and not dmltrain"
        return [f"{message}: its servers have nothing to do; start it with -s 0, or move it to dmltrain"]
    return []


def _folder_here() -> str:
    try:
        return as_utf8(os.getcwd())
    except OSError as error:
        raise LaunchError(f"the working directory does not exist: {error.strerror}; cd to another one") from None


def new_mark(name: str) -> str:
    """The mark of a new attempt, by which its processes are found. It matches `launch.job.job.MARK`."""
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', name)}-{secrets.token_hex(8)}"


def _needs(script: str) -> tuple[str, ...]:
    """The modules that the script imports, so that each host is checked for them; () if the script is not readable."""
    try:
        return tuple(needs(Path(script).read_text())) if script else ()
    except (OSError, UnicodeDecodeError, SyntaxError):
        return ()


def used_hosts(job: Job, hosts: Sequence[Host]) -> list[Host]:
    """The hosts that have a process of the job, in their order; LaunchError if the job does not fit on them."""
    used = {host.name for _, _, host in placements(job, hosts)}
    return [host for host in hosts if host.name in used]


def name_and_path(options: Options, now: float) -> tuple[str, Path]:
    """The job's name and its log folder."""
    name = options.job or report.new_job_name(options.program, now)
    if options.log_dir:
        return name, Path(options.log_dir)
    return default_path(name, exact=bool(options.job))


def limits(options: Options) -> Limits:
    endless = float("inf")
    return Limits(options.grace, options.timeout or endless, options.start_timeout or endless)


class Start:
    """A job and its attempts. `run` returns the exit code of the last one."""

    def __init__(self, options: Options, job: Job, cluster: Cluster, path: Path, say: Say):
        self.options, self.job, self.cluster, self._say = options, job, cluster, say
        self.began = time.time()
        self.path, self.folder = path, LogFolder(path)  # of the current attempt
        self.first = self.folder  # of the first attempt; has the job.json of all
        self.ends: list[dict[str, Any]] = []  # of the earlier attempts
        self.hidden = job.secrets(cluster.hosts)
        self._copied = threading.Event()
        self._interrupted, self._signal = threading.Event(), 0
        self._session: Session | None = None

    def run(self) -> int:
        for each in advice(self.job):
            self.say(f"{NAME}: warning: {each}")
        with catching(self._interrupt):
            while True:
                supervisor, code = self._attempt()
                if not self._restarts(supervisor):
                    return code
                self._next_attempt(supervisor)
                if self._interrupted.wait(min(RESTART_SECONDS * 2 ** (self.job.restart - 1), LONGEST_PAUSE_SECONDS)):
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
        """Whether another attempt follows. It also does if a restart did not reach a host, which may be rebooting."""
        lost = supervisor.restartable or (self.ends and supervisor.ending.unreached and not supervisor.interrupted)
        return bool(lost) and len(self.ends) < self.options.max_restarts and not self.first.killed

    def say(self, line: str) -> None:
        self._say(redact(line, self.hidden))

    def _attempt(self) -> tuple[Supervisor, int]:
        supervisor = Supervisor(self.job, self.cluster.hosts, limits(self.options))
        names = [f"{role}-{rank}" for role, rank, _ in placements(self.job, self.cluster.hosts)]
        folder = self.folder.path
        self._record(supervisor)
        self.say(report.start_line(supervisor, str(self.path)))
        output = Output(self.folder, names, make_display(self.options, names))
        copier = self._copier() if self.job.copy_to else None
        usage = UsageFile(self.folder, lambda problem: self.say(f"{NAME}: warning: {problem}"))
        recorded = partial(self._record, supervisor)
        session = Session(supervisor, self.cluster, output, recorded, copier, self._trace, usage.write)
        self._session = session
        if self._interrupted.is_set():
            session.interrupt(self._signal)
        try:
            session.run(folder)
            self._session = None
            self._copied.set()
            code, lines = supervisor.exit_code, report.failure(supervisor, output.last_lines, str(self.path))
            try:
                self._record(supervisor, None if self._restarts(supervisor) else time.time())
            except LaunchError as error:
                code, lines = code or FAULT_CODE, [*lines, f"error: {error}"]
        finally:
            output.close(INTERRUPTED_SECONDS if supervisor.interrupted else None)
            usage.close()
        for line in lines:
            self.say(line if line.startswith(" ") else f"{NAME}: {line}")
        if not code and not self.options.quiet:
            print_epochs(folder, self.first.shown)
        self.say(report.last_line(supervisor))
        return supervisor, code

    def _copier(self) -> Sync:
        from launch.sync import Sync
        from launch.sync.manifest import manifest

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
        facts = report.record(supervisor, version(), self.options, self.began, ended)
        self.first.write_record({**redact_all(facts, self.hidden), "restarts": self.ends})

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


def make_display(options: Options, names: Sequence[str]) -> Display:
    if options.quiet:
        return Silent()
    if sys.stdout.isatty() and options.live and os.environ.get("TERM", "dumb") != "dumb":
        from launch.terminal.live import Live  # rich takes a while to import

        return Live(names)
    return Plain(sys.stdout.fileno(), names, coloured())


def coloured() -> bool:
    """Whether to print colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
