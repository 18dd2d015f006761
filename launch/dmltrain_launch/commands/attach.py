"""`dmltrain job attach`: take up a job that was started with --detach, from a launcher that still has it or that is
lost."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dmltrain_launch import LaunchError, version
from dmltrain_launch.clusters import AllOptions, make_cluster
from dmltrain_launch.commands import show
from dmltrain_launch.commands.log_choice import find
from dmltrain_launch.commands.recorded import Recorded
from dmltrain_launch.commands.visit import read
from dmltrain_launch.control.client import ask
from dmltrain_launch.control.message import ATTACH, Request
from dmltrain_launch.job.options import Options
from dmltrain_launch.run import journal
from dmltrain_launch.run.keeper import Keeper
from dmltrain_launch.run.start import Start
from dmltrain_launch.run.supervisor.limit import FAULT_CODE
from dmltrain_launch.terminal.log_folder import JOURNAL, RECORD, LogFolder
from dmltrain_launch.terminal.record import read_own_record

RELEASE_SECONDS = 15.0  # for the launcher that has the job to leave it


def attach(options: Options, say: Callable[[str], None]) -> int:
    """The job's exit code. LaunchError if the job cannot be taken up."""
    folder = find(options.target)
    job = read(folder, AllOptions())
    if job.ended:
        return _report(folder, job, say)
    if job.launcher.host != platform.node():
        raise LaunchError(f"job {job.job} was started on {job.launcher.host}: run this command there")
    if not (folder / JOURNAL).is_file():
        raise LaunchError(f"job {job.job} was not started with --detach, so no other launcher can take it up")
    locked = _locked(folder, job)
    if (job := read(folder, AllOptions())).ended:  # the other launcher has just ended it
        return _report(folder, job, say)
    try:
        story, size = journal.read(folder, version())
    except FileNotFoundError:
        raise LaunchError(f"the launcher of job {job.job} was killed before it started the job") from None
    if story.beginning.job.mark != job.mark:
        raise LaunchError(f"{folder / JOURNAL} is of another job than {folder / RECORD}")
    began, path = story.beginning, Path(locked.shown)
    shown = replace(began.options, quiet=options.quiet, live=options.live)
    cluster = make_cluster(shown.launcher_name, shown, began.hosts)
    keeper = Keeper(taken=(story, size))
    try:
        return Start(shown, began.job, cluster, path, say, began.listed, keeper, locked, began.began).run()
    finally:
        cluster.close()


def _report(folder: Path, job: Recorded, say: Callable[[str], None]) -> int:
    record = read_own_record(folder / RECORD)
    code, cause = record.get("exit_code"), record.get("cause")
    why = f": {cause}" if cause else ""
    say(f"job {job.job} has ended at {record.get('ended')} with exit code {code}{why}")
    return code if isinstance(code, int) else FAULT_CODE


def _locked(folder: Path, job: Recorded) -> LogFolder:
    """The job's folder, when no other launcher has it any more."""
    if job.control and not show.Record(folder).abandoned:
        answer = ask(job.control, Request(ATTACH, "launcher"))
        if answer.code:
            raise LaunchError(f"job {job.job}: {'; '.join(answer.lines)}", answer.code)
    until = time.monotonic() + RELEASE_SECONDS
    while not show.Record(folder).abandoned and time.monotonic() < until:
        time.sleep(0.05)
    try:
        return LogFolder(folder, again=True)
    except LaunchError:
        raise LaunchError(f"job {job.job} has a launcher: another one has just attached to it") from None
