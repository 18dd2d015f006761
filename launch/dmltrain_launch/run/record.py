"""The content of job.json. Starts and writes nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any

from dmltrain_launch.agent.process import boot_id, process
from dmltrain_launch.channels.exit_text import signal_name
from dmltrain_launch.command_line.table import reached_by
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.options import Options
from dmltrain_launch.run.supervisor.attempt import Attempt
from dmltrain_launch.run.supervisor.limit import as_shell
from dmltrain_launch.run.supervisor.process import Process
from dmltrain_launch.terminal.log_folder import stamp
from dmltrain_launch.terminal.record import FORMAT

CHANGED = ("joined_after", "left_after")  # of processes that came to the running job, or left it on purpose


def record(
    supervisor: Attempt, version: str, options: Options, began: float, ended: float | None, control: str = ""
) -> dict[str, Any]:
    """The content of job.json. It has neither environment nor key, because they may be secret. `control`: the name
    of the launcher's control socket."""
    job, cause = supervisor.job, supervisor.cause
    return {
        "format": FORMAT,
        "job": job.name,
        "mark": job.mark,
        "command": list(job.argv),
        "workdir": job.workdir,
        "launcher": options.launcher_name,
        "launched_from": _launcher(),
        "control": control,
        "reached_by": reached_by(options),
        "num_workers": job.num_workers,
        "num_servers": job.num_servers,
        "versions": {"dmltrain": version, "python": platform.python_version(), "system": platform.platform()},
        "hosts": [_host(host) for host in supervisor.hosts.values()],
        "started": stamp(began),
        "ended": None if ended is None else stamp(ended),
        "seconds": None if ended is None else round(ended - began, 3),
        "exit_code": None if ended is None else supervisor.exit_code,
        "cause": cause.text if cause else None,
        "cause_log": _log(job.restart, cause.process) if cause and cause.process else None,
        "processes": [_lineage(lineage) for lineage in supervisor.tasks.lineages],
        "kvstore_changes": [
            {**vars(kvstore_change), "after": round(kvstore_change.after, 3)}
            for kvstore_change in supervisor.kvstore_changes
        ],
    }


HOST_FACTS = ("name", "address", "interface", "hostname", "user", "port", "python")


def _launcher() -> dict[str, Any]:
    """This process: its start time tells it from a later process with the same pid."""
    own = process(os.getpid())
    return {"host": platform.node(), "pid": os.getpid(), "start": own.start if own else 0, "boot_id": boot_id()}


def _log(restart: int, process: Process) -> str:
    """The log of a process, below the folder of job.json."""
    return f"restart-{restart}/" * bool(restart) + f"{process.task.name}.log"


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
