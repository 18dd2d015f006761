"""--ps and --kill: short connections to the hosts of a job that another launcher started, as job.json records it."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.agent import KILL_SECONDS
from dmltrain_launch.agent.commands import Command, JobCommand, List, Stop
from dmltrain_launch.agent.events import Ended, Event, Listing
from dmltrain_launch.agent.process import Process, boot_id, process, send_signal
from dmltrain_launch.agent.protocol import EVENT, ProtocolError, decode_event, encode_command
from dmltrain_launch.clusters import LAUNCHERS, Cluster, Released, make_cluster
from dmltrain_launch.commands import show, submit
from dmltrain_launch.commands.log_choice import find
from dmltrain_launch.commands.recorded import Launcher, Recorded, recorded
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options
from dmltrain_launch.run import journal
from dmltrain_launch.run.supervisor.limit import AGENT_SILENCE_SECONDS, FAULT_CODE, SILENCE_SECONDS, as_shell
from dmltrain_launch.terminal.log_folder import KILLED, RECORD, LogFolder, seconds_of, stamp
from dmltrain_launch.terminal.record import read_own_record

ENDED_CODE = as_shell(-signal.SIGTERM)  # of a job that somebody has ended
CAUSE = "dmltrain job kill has ended the job, which had no launcher"
LAUNCHER_SECONDS = 15.0  # for a launcher to end its job
Answers = dict[str, Event | LaunchError]
Commands = Callable[[Host], Sequence[Command]]


def processes(options: Options, write_line: Callable[[str], None]) -> int:
    """List the job's processes on all its hosts."""
    from dmltrain_launch.commands.processes import lost, table
    from dmltrain_launch.secret import secrets

    folder = find(options.target)
    if held := submit.held(folder):
        for line in held.state():
            write_line(line)
        return 0
    job = read(folder, options)
    answers = _visited(job, lambda host: [List(job.mark)], Listing, write_line)
    rows = {host: answer.rows for host, answer in answers.items() if isinstance(answer, Listing)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in [*table(rows, secrets(os.environ.items()), width), *lost(read_own_record(folder / RECORD))]:
        write_line(line)
    return _report_unreached(answers, write_line)


def kill(options: Options, write_line: Callable[[str], None]) -> int:
    """End the job: through its launcher if that runs on this machine, then all processes left on its hosts."""
    folder = find(options.target)
    if held := submit.held(folder):
        held.cancel()
        submit.mark_ended(folder, ENDED_CODE)
        for line in held.state():
            write_line(line)
        return 0
    job = read(folder, options)
    _forbid_restarts(folder / KILLED)
    if end_launcher(job, folder):
        write_line(f"the launcher of job {job.job} has ended it")
    silence = AGENT_SILENCE_SECONDS + options.grace  # this program sends no heartbeats

    def commands(host: Host) -> list[Command]:
        return [JobCommand(job.mark, host.name, options.grace, silence), Stop(options.grace)]

    answers = _visited(job, commands, Ended, write_line)
    left = {host: answer.left for host, answer in answers.items() if isinstance(answer, Ended)}
    unreached = _report_unreached(answers, write_line)
    pids = [f"pid {pid} on {host}" for host, pids_left in left.items() for pid in pids_left]
    write_line(
        f"{len(pids)} process{'' if len(pids) == 1 else 'es'} left on {len(left)} host{'' if len(left) == 1 else 's'}"
        + (f": {', '.join(pids)}" if pids else "")
    )
    if not unreached and not pids:
        write_end(folder, job.launcher)
    return unreached or (FAULT_CODE if pids else 0)


def _forbid_restarts(path: Path) -> None:
    """Create the file that keeps a launcher, also one on another machine, from restarting the job."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        pass
    except OSError as error:
        why = f"cannot create {path}: {error.strerror}"
        raise LaunchError(
            f"{why}; without it the job's launcher might restart the job: run this as its owner"
        ) from None


def read(folder: Path, options: Options) -> Recorded:
    """The job.json in the log folder; LaunchError if there is none, or if it may be another user's."""
    path = folder / RECORD
    try:
        return recorded(read_own_record(path), path, options)
    except FileNotFoundError:
        raise LaunchError(f"{path} is missing: the job's hosts are unknown") from None


def end_launcher(job: Recorded, folder: Path) -> bool:
    """Ask the job's launcher to end it, and wait. True if it ran on this machine and has exited."""
    launcher = None if job.ended or show.Record(folder).abandoned else running_launcher(job.launcher, folder)
    if not launcher:
        return False
    for number in (signal.SIGCONT, signal.SIGTERM):  # a stopped process handles TERM only after it continues
        send_signal(launcher, number)
    deadline = time.monotonic() + LAUNCHER_SECONDS
    while running_launcher(job.launcher, folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running_launcher(job.launcher, folder)


def running_launcher(launcher: Launcher, folder: Path) -> Process | None:
    """The launcher, if its pid still belongs to it: the process has its start time, and has the job's folder open."""
    running = process(launcher.pid) if launcher.host == platform.node() else None
    if not running or running.state in "ZX" or not _has_open(running.pid, folder):
        return None
    same = not launcher.start or (launcher.start, launcher.boot_id) == (running.start, boot_id())
    return running if same else None


def _has_open(pid: int, folder: Path) -> bool:
    """Whether a process of this user has the folder open, as its launcher does to lock it."""
    try:
        wanted = os.stat(folder)
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it is gone, or another user's
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return True
    return False


def visit(job: Recorded, commands: Commands, last: type[Event]) -> Answers:
    """Send `commands` to a new agent on each host of the job. Returns the event `last` of each, or the error."""
    origin = job.launcher.host
    if not LAUNCHERS[job.cluster].over_network and origin != platform.node():
        how = f"--launcher {job.cluster}"
        raise LaunchError(f"job {job.job} was started on {origin} with {how}: run this command on {origin}")
    cluster = make_cluster(job.cluster, job.options, job.hosts)
    answers: queue.SimpleQueue[tuple[str, Event | LaunchError]] = queue.SimpleQueue()

    def call(host: Host) -> None:
        try:
            answers.put((host.name, _converse(cluster, host, job.mark, commands(host), last, job.options.grace)))
        except LaunchError as error:
            answers.put((host.name, error))
        except Exception as error:  # a bug of the launcher; without an answer the main thread would wait forever
            answers.put((host.name, LaunchError(f"launcher failure: {error!r}", FAULT_CODE)))

    try:
        for host in job.hosts:
            threading.Thread(target=call, args=(host,), daemon=True).start()
        answered = dict(answers.get() for _ in job.hosts)
    finally:
        cluster.close()
    return {host.name: answered[host.name] for host in job.hosts}


def _visited(job: Recorded, commands: Commands, last: type[Event], write_line: Callable[[str], None]) -> Answers:
    """`visit`; no answers if the job has no hosts any more."""
    try:
        return visit(job, commands, last)
    except Released as released:
        write_line(f"{released}: nothing of the job runs on its hosts")
        return {}


def _converse(
    cluster: Cluster, host: Host, mark: str, commands: Sequence[Command], last: type[Event], grace: float
) -> Event:
    channel = cluster.connect(host, mark)
    try:
        for command in commands:
            channel.write(encode_command(command))
        deadline = SILENCE_SECONDS + grace + KILL_SECONDS
        for kind, _, payload in channels.frames(channel, deadline):
            if kind == EVENT and isinstance(event := decode_event(payload, host.name), last):
                return event
        raise LaunchError(f"the agent on {host.name} ended without an answer", FAULT_CODE)
    except (OSError, channels.ChannelError, ProtocolError) as error:
        raise LaunchError(f"the agent on {host.name} {channel.close()}: {error}", FAULT_CODE) from None
    finally:
        channel.close()


def _report_unreached(answers: Answers, write_line: Callable[[str], None]) -> int:
    errors = {host: answer for host, answer in answers.items() if isinstance(answer, LaunchError)}
    for host, error in errors.items():
        write_line(f"unknown for {host}: {error}")
    return FAULT_CODE if errors else 0


def write_end(folder: Path, launcher: Launcher) -> None:
    """Write the end of a job of which nothing is left to its job.json, in the place of its launcher.

    The record stays as it is if the launcher has written the end, or may still do so: whether a launcher on another
    machine runs cannot be seen here.
    """
    if launcher.host != platform.node() or not show.Record(folder).abandoned:
        return
    try:
        locked = LogFolder(folder, again=True)
    except LaunchError:  # a launcher has just attached
        return
    record = read_own_record(folder / RECORD)
    if not record.get("ended"):
        now, began = time.time(), seconds_of(record.get("started"))
        seconds = None if began is None else max(0.0, round(now - began, 3))
        end = {"ended": stamp(now), "seconds": seconds, "exit_code": ENDED_CODE, "cause": CAUSE, "cause_log": None}
        locked.write_record({**record, **end})
        journal.remove(folder)
