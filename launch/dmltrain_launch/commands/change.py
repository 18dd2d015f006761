"""`dmltrain job add`, `job remove` and `job set`: ask the launcher of a running job for a change, and wait for it."""

from __future__ import annotations

import platform
from collections.abc import Callable

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.commands import show
from dmltrain_launch.commands.log_choice import find
from dmltrain_launch.commands.visit import read
from dmltrain_launch.control.client import FAULT_CODE, ask
from dmltrain_launch.control.message import Request
from dmltrain_launch.terminal.log_folder import JOURNAL


def change(do: str, target: str, what: str, write_line: Callable[[str], None]) -> int:
    """Ask for it. Returns the exit code; LaunchError if the job's launcher cannot be asked."""
    folder = find(target)
    job = read(folder, AllOptions())
    if job.ended:
        raise LaunchError(f"job {job.job} has ended", FAULT_CODE)
    if job.launcher.host != platform.node():
        raise LaunchError(f"job {job.job} was started on {job.launcher.host}: run this command there")
    if show.Record(folder).abandoned and (folder / JOURNAL).exists():
        raise LaunchError(f"job {job.job} has no launcher now: dmltrain job attach {target} takes it up", FAULT_CODE)
    if show.Record(folder).abandoned:
        raise LaunchError(f"the launcher of job {job.job} no longer runs: it was killed, and its job ends", FAULT_CODE)
    if not job.control:
        raise LaunchError(
            f"job {job.job} cannot change while it runs: start it with servers, and with this version of dmltrain"
        )
    answer = ask(job.control, Request(do, what))
    for line in answer.lines:
        write_line(line)
    return answer.code
