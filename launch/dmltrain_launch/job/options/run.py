"""Options: a job's name, logs and limits, and what happens when a part of it is lost."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dmltrain_launch import LaunchError
from dmltrain_launch.job.options.option import FILE, number, option, parsed, switch, text
from dmltrain_launch.job.rule import EXAMPLE, Rule, parse_rule


def _job(value: str, name: str) -> str:
    if not re.fullmatch(r"[^/\0\n]{1,100}", value) or value in (".", ".."):
        raise LaunchError(f"{name} is {value!r}: expected a folder name without / and of at most 100 characters")
    return value


@dataclass(frozen=True)
class RunOptions:
    """See `Options`. Times are in seconds; 0: no limit."""

    log_dir: str = option("DIR", "folder for the logs and job.json (default: logs/JOB)", text("a folder"), here=True)
    log_file: str = option("FILE", "also write the launcher's messages to FILE", text(FILE), here=True)
    log_level: str = "INFO"
    job: str = option("NAME", "name of the job (default: program and start time)", _job, also="--jobname", here=True)
    port: int = option("PORT", "TCP port of the scheduler (default: any free port)", number(int, 0), 0)
    grace: float = option(
        "SECONDS", "time between SIGTERM and SIGKILL when the job ends (default: 5)", number(float, 0), 5.0
    )
    timeout: float = option(
        "SECONDS",
        "end the job after this time, log all stacks and exit with 124 (default: no limit)",
        number(float, 0),
        0.0,
    )
    start_timeout: float = option(
        "SECONDS", "time limit for starting all processes, not counting the copy (default: 60)", number(float, 0), 60.0
    )
    max_restarts: int = option("N", "restart a failed job at most N times (default: 0)", number(int, 0), 0)
    rules: tuple[Rule, ...] = option(
        "RULE",
        f"change the kvstore while the job runs: '{EXAMPLE}'; may be repeated",
        parsed(parse_rule),
        (),
        name="--rule",
    )
    detach: bool = switch(
        "return when the job runs; it goes on if its launcher dies, and dmltrain job attach JOB takes it up"
    )
    elastic: bool = switch(
        "go on when workers, servers or the scheduler are lost; needs PyTorch and dist_sync, dist_async or dist_ssp"
    )
    min_workers: int | None = option(
        "M",
        "with --elastic: end the job when fewer than M workers are left (default: 1; with -n N:M: N)",
        number(int, 1),
        None,
    )
    restart_workers: int | None = option(
        "N", "with --elastic: replace lost workers, at most N times (default: 0)", number(int, 0), None
    )
    restart_servers: int | None = option(
        "N", "with --elastic: replace lost servers, at most N times (default: 0)", number(int, 0), None
    )
    restart_scheduler: int | None = option(
        "N",
        "with --elastic: start the scheduler again when it is lost, at most N times (default: 3)",
        number(int, 0),
        None,
    )
    watch_hosts: bool = switch(
        "with --elastic: read the hosts file again when it changes; new hosts get workers, those that are gone leave"
    )
    wait_for_hosts: float | None = option(
        "SECONDS",
        "with --elastic: when fewer workers than the minimum are left, wait so long for more (default: 0)",
        number(float, 0),
        None,
    )
    usage: float = option(
        "SECONDS",
        "sample the CPUs, memory and GPUs of each host every SECONDS, and less often in a long job, into usage.csv; "
        "0: never (default: 2)",
        number(float, 0),
        2.0,
    )
