"""The result of a job: messages for the terminal, and the content of job.json. Starts and writes nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

from dmltrain_launch.agent.process import boot_id, process
from dmltrain_launch.channels.exit_text import signal_name
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.limit import as_shell
from dmltrain_launch.run.supervisor.process import Process
from dmltrain_launch.terminal.log_folder import stamp
from dmltrain_launch.terminal.record import FORMAT

WIDTH = 400  # characters shown of each line of a process's output


def failure(supervisor: Attempt, last_lines: Callable[[int], list[str]], folder: str) -> list[str]:
    """Why the job failed, as lines; [] if it did not fail."""
    cause = supervisor.cause
    if cause is None:
        return []
    lines = [cause.text]
    if cause.process:
        lines += _last_output(supervisor, cause.process, last_lines, folder)
    suspect = supervisor.verdict.suspect
    if suspect and suspect is not cause and supervisor.losses.explain(cause):
        lines.append(f"after that, {suspect.text}")
        lines += _last_output(supervisor, suspect.process, last_lines, folder) if suspect.process else []
    elif suspect and suspect is not cause:
        lines.append(f"before that, {suspect.text}")
    lines += losses(supervisor)
    lines += [f"{label} is stopped (SIGSTOP?)" for label in supervisor.ending.stopped]
    return lines


def losses(supervisor: Attempt) -> list[str]:
    """A line for each process without which the job went on."""
    return [f"lost {process.lost_after:.0f} s after the start: {process.fate}" for process in _lost(supervisor)]


def _last_output(
    supervisor: Attempt, process: Process, last_lines: Callable[[int], list[str]], folder: str
) -> list[str]:
    lines = last_lines(supervisor.processes.index(process))
    log = f"{folder}/{process.task.name}.log"
    heading = f"its last lines ({log}):" if lines else f"it printed nothing ({log})"
    return [heading, *(f"    {line[:WIDTH]}" for line in lines)]


def _lost(supervisor: Attempt) -> list[Process]:
    lost = [process for process in supervisor.processes if process.lost and process.left_after is None]
    return sorted(lost, key=lambda each: each.lost_after)


def _gone(process: Process, after: float) -> str:
    """A process that ended so many seconds after the start, and where another one took its place."""
    replaced = f" (replaced on {process.replaced_by.task.host.name})" if process.replaced_by else ""
    return f"{process.task.role} {process.task.rank} after {after:.0f} s{replaced}"


def announcements(supervisor: Attempt, last_lines: Callable[[int], list[str]], folder: str) -> list[str]:
    """What an elastic job has to tell since the last call, as lines."""
    lines = []
    for announcement in supervisor.take_announcements():
        lines.append(announcement.text)
        if announcement.process:
            lines += _last_output(supervisor, announcement.process, last_lines, folder)
    return lines


def explained(
    supervisor: Attempt,
    notes: Sequence[tuple[str, int | None]],
    last_lines: Callable[[int], list[str]],
    folder: str,
) -> list[str]:
    """The notes of an answer as lines, each with the last lines of its process, if it names one."""
    lines = []
    for text, task in notes:
        lines += text.splitlines()
        lines += [] if task is None else _last_output(supervisor, supervisor.processes[task], last_lines, folder)
    return lines


def start_line(supervisor: Attempt, folder: str) -> str:
    job = supervisor.job
    parts = [_count(job.num_workers, "worker"), _count(job.num_servers, "server")] if job.num_servers else []
    parts = [*parts, "1 scheduler"] if parts else [_count(job.num_workers, "worker")]
    return f"job {job.name}: {', '.join(parts)} on {_count(len(supervisor.hosts), 'host')}; logs in {folder}"


def last_line(supervisor: Attempt) -> str:
    """The last message: how many processes are left on how many hosts, as the agents reported, and which were lost."""
    known = {host: pids for host, pids in supervisor.ending.left.items() if pids is not None}
    pids = [f"pid {pid} on {host}" for host, pids_left in known.items() for pid in pids_left]
    unknown = [host for host in supervisor.hosts if supervisor.ending.left.get(host, ()) is None]
    unreached = [host for host in supervisor.hosts if host in supervisor.ending.unreached]
    line = f"{_count(len(pids), 'process', 'es')} left on {_count(len(known), 'host')}"
    details = ([", ".join(pids)] if pids else []) + ([f"unknown for {', '.join(unknown)}"] if unknown else [])
    details += [f"never reached: {', '.join(unreached)}"] if unreached else []
    line = f"{line}: {'; '.join(details)}" if details else line
    lost = [_gone(process, process.lost_after) for process in _lost(supervisor)]
    joined = [
        f"worker {process.task.rank} on {process.task.host.name} after {at:.0f} s"
        for process, at in _changed(supervisor, 0)
    ]
    left = [_gone(process, at) for process, at in _changed(supervisor, 1)]
    kvstores = [f"{kvstore_change.now} {kvstore_change.where}" for kvstore_change in supervisor.kvstore_changes]
    changes = {"lost": lost, "joined": joined, "left": left, "changed": kvstores}
    return "; ".join([line, *(f"{name}: {', '.join(some)}" for name, some in changes.items() if some)])


def _changed(supervisor: Attempt, which: int) -> list[tuple[Process, float]]:
    """The processes with this attribute of CHANGED, and its value."""
    changes = [(process, getattr(process, CHANGED[which])) for process in supervisor.processes]
    return sorted(((process, at) for process, at in changes if at is not None), key=lambda pair: pair[1])


def record(
    supervisor: Attempt, version: str, options: Options, began: float, ended: float | None, control: str = ""
) -> dict[str, Any]:
    """The content of job.json. It has neither environment nor key, because they may be secret. `control`: the name
    of the launcher's control socket."""
    job = supervisor.job
    return {
        "format": FORMAT,
        "job": job.name,
        "mark": job.mark,
        "command": list(job.argv),
        "workdir": job.workdir,
        "launcher": options.launcher_name,
        "launched_from": _launcher(),
        "control": control,
        "reached_by": {name: getattr(options, name) for name in REACHED_BY}
        | {
            "identity": absolute(options.identity),
            "mpirun": _command(options.mpirun),
            "slurm_job": _slurm_job(options),
        },
        "num_workers": job.num_workers,
        "num_servers": job.num_servers,
        "versions": {"dmltrain": version, "python": platform.python_version(), "system": platform.platform()},
        "hosts": [_host(host) for host in supervisor.hosts.values()],
        "started": stamp(began),
        "ended": None if ended is None else stamp(ended),
        "seconds": None if ended is None else round(ended - began, 3),
        "exit_code": None if ended is None else supervisor.exit_code,
        "cause": supervisor.cause.text if supervisor.cause else None,
        "processes": [_lineage(lineage) for lineage in supervisor.tasks.lineages],
        "kvstore_changes": [
            {**vars(kvstore_change), "after": round(kvstore_change.after, 3)}
            for kvstore_change in supervisor.kvstore_changes
        ],
    }


# The options that are needed to connect to the job's hosts again.
REACHED_BY = (
    *("ssh", "ssh_port", "identity", "mpirun", "mpirun_args", "slurm_args", "slurm_server_args", "slurm_job"),
    *("address", "host_ip"),
)
HOST_FACTS = ("name", "address", "interface", "hostname", "user", "port", "python")


def absolute(path: str) -> str:
    """An absolute path, because `dmltrain job` may run in another folder."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _command(program: str) -> str:
    """The same for a program, unless it is found in PATH."""
    return absolute(program) if "/" in program else program


def _slurm_job(options: Options) -> int:
    """The allocation that the job uses; 0 if it uses none."""
    text = os.environ.get("SLURM_JOB_ID", "") if options.launcher_name == "slurm" else ""
    return options.slurm_job or int(text if text.isdecimal() else 0)


def _launcher() -> dict[str, Any]:
    """This process: its start time tells it from a later process with the same pid."""
    own = process(os.getpid())
    return {"host": platform.node(), "pid": os.getpid(), "start": own.start if own else 0, "boot_id": boot_id()}


def _host(host: Host) -> dict[str, Any]:
    return {name: getattr(host, name) for name in HOST_FACTS}


def end_of_attempt(supervisor: Attempt, folder: str) -> dict[str, Any]:
    """Why an attempt ended, for job.json."""
    text = supervisor.cause.text if supervisor.cause else None
    return {"exit_code": supervisor.exit_code, "cause": text, "ended": stamp(time.time()), "logs": folder}


def _lineage(processes: Sequence[Process]) -> dict[str, Any]:
    """The row of a role and rank: its newest process, and in `earlier` those that this one replaced, if any."""
    *earlier, newest = map(_row, processes)
    return newest if not earlier else {**newest, "earlier": earlier}


def _row(process: Process) -> dict[str, Any]:
    code = process.code
    return {
        "role": process.task.role,
        "rank": process.task.rank,
        "host": process.task.host.name,
        "pid": process.pid or None,
        "exit_code": None if code is None else as_shell(code),
        "signal": signal_name(-code) if code is not None and code < 0 else None,
        "ended_by_launcher": process.ended_by_us,
        "lost_after": round(process.lost_after, 3) if process.lost and process.left_after is None else None,
        **{name: round(at, 3) for name in CHANGED if (at := getattr(process, name)) is not None},
    }


CHANGED = ("joined_after", "left_after")  # of processes that came to the running job, or left it on purpose


def new_job_name(program: tuple[str, ...], now: float) -> str:
    """Program and time, such as train_cifar10-20261120-120000."""
    script = next((word for word in program if word.endswith(".py")), program[0] if program else "job")
    name = script.rstrip("/").rpartition("/")[2].removesuffix(".py")[:60].replace("\n", "_") or "job"
    return time.strftime(f"{name.replace('%', '%%')}-%Y%m%d-%H%M%S", time.localtime(now))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
