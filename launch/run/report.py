"""The result of a job: messages for the terminal, and the content of job.json. Starts and writes nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

from launch.agent.process import boot_id, process
from launch.channels.exit_text import signal_name
from launch.job.host import Host
from launch.job.options import Options
from launch.run.limit import as_shell
from launch.run.process import Process
from launch.run.supervise import Supervisor
from launch.terminal.log_folder import stamp
from launch.terminal.record import FORMAT

WIDTH = 400  # characters shown of each line of a process's output


def failure(supervisor: Supervisor, last_lines: Callable[[int], list[str]], folder: str) -> list[str]:
    """Why the job failed, as lines; [] if it did not fail."""
    cause = supervisor.cause
    if cause is None:
        return []
    lines = [cause.text]
    if cause.process:
        lines += _last_output(supervisor, cause.process, last_lines, folder)
    suspect = supervisor.verdict.suspect
    if suspect and suspect is not cause:
        lines.append(f"before that, {suspect.text}")
    lines += [f"{label} is stopped (SIGSTOP?)" for label in supervisor.ending.stopped]
    return lines


def _last_output(
    supervisor: Supervisor, process: Process, last_lines: Callable[[int], list[str]], folder: str
) -> list[str]:
    lines = last_lines(supervisor.processes.index(process))
    log = f"{folder}/{process.task.name}.log"
    heading = f"its last lines ({log}):" if lines else f"it printed nothing ({log})"
    return [heading, *(f"    {line[:WIDTH]}" for line in lines)]


def start_line(supervisor: Supervisor, folder: str) -> str:
    job = supervisor.job
    parts = [_count(job.num_workers, "worker"), _count(job.num_servers, "server")] if job.num_servers else []
    parts = [*parts, "1 scheduler"] if parts else [_count(job.num_workers, "worker")]
    return f"job {job.name}: {', '.join(parts)} on {_count(len(supervisor.hosts), 'host')}; logs in {folder}"


def last_line(supervisor: Supervisor) -> str:
    """The last message: how many processes are left on how many hosts, as the agents reported."""
    known = {host: pids for host, pids in supervisor.ending.left.items() if pids is not None}
    pids = [f"pid {pid} on {host}" for host, found in known.items() for pid in found]
    unknown = [host for host in supervisor.hosts if supervisor.ending.left.get(host, ()) is None]
    unreached = [host for host in supervisor.hosts if host in supervisor.ending.unreached]
    line = f"{_count(len(pids), 'process', 'es')} left on {_count(len(known), 'host')}"
    details = ([", ".join(pids)] if pids else []) + ([f"unknown for {', '.join(unknown)}"] if unknown else [])
    details += [f"never reached: {', '.join(unreached)}"] if unreached else []
    return f"{line}: {'; '.join(details)}" if details else line


def record(supervisor: Supervisor, version: str, options: Options, began: float, ended: float | None) -> dict[str, Any]:
    """The content of job.json. It has neither environment nor key, because they may be secret."""
    job = supervisor.job
    return {
        "format": FORMAT,
        "job": job.name,
        "mark": job.mark,
        "command": list(job.argv),
        "workdir": job.workdir,
        "launcher": options.launcher_name,
        "launched_from": _launcher(),
        "reached_by": {name: getattr(options, name) for name in REACHED_BY}
        | {"identity": _absolute(options.identity), "mpirun": _command(options.mpirun)},
        "num_workers": job.num_workers,
        "num_servers": job.num_servers,
        "versions": {"dmltrain": version, "python": platform.python_version(), "system": platform.platform()},
        "hosts": [_host(host) for host in supervisor.hosts.values()],
        "started": stamp(began),
        "ended": None if ended is None else stamp(ended),
        "seconds": None if ended is None else round(ended - began, 3),
        "exit_code": None if ended is None else supervisor.exit_code,
        "cause": supervisor.cause.text if supervisor.cause else None,
        "processes": [_row(process) for process in supervisor.processes],
    }


# The options that are needed to connect to the job's hosts again.
REACHED_BY = ("ssh", "ssh_port", "identity", "mpirun", "mpirun_args", "host_ip")
HOST_FACTS = ("name", "address", "interface", "hostname", "user", "port", "python")


def _absolute(path: str) -> str:
    """An absolute path, because `dmltrain job` may run in another folder."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def _command(program: str) -> str:
    """The same for a program, unless it is found in PATH."""
    return _absolute(program) if "/" in program else program


def _launcher() -> dict[str, Any]:
    """This process: its start time tells it from a later process with the same pid."""
    own = process(os.getpid())
    return {"host": platform.node(), "pid": os.getpid(), "start": own.start if own else 0, "boot_id": boot_id()}


def _host(host: Host) -> dict[str, Any]:
    return {name: getattr(host, name) for name in HOST_FACTS}


def end_of_attempt(supervisor: Supervisor, folder: str) -> dict[str, Any]:
    """Why an attempt ended, for job.json."""
    text = supervisor.cause.text if supervisor.cause else None
    return {"exit_code": supervisor.exit_code, "cause": text, "ended": stamp(time.time()), "logs": folder}


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
    }


def new_job_name(program: tuple[str, ...], now: float) -> str:
    """Program and time, such as train_cifar10-20261120-120000."""
    script = next((word for word in program if word.endswith(".py")), program[0] if program else "job")
    name = script.rstrip("/").rpartition("/")[2].removesuffix(".py")[:60].replace("\n", "_") or "job"
    return time.strftime(f"{name.replace('%', '%%')}-%Y%m%d-%H%M%S", time.localtime(now))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
