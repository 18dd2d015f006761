"""The end of a job that `dmltrain job kill` has ended, in its job.json: a launcher would have written it there."""

from __future__ import annotations

import platform
import signal
import time
from pathlib import Path

from dmltrain_launch import LaunchError
from dmltrain_launch.commands import show
from dmltrain_launch.commands.recorded import Launcher
from dmltrain_launch.run import journal
from dmltrain_launch.run.supervisor.limit import as_shell
from dmltrain_launch.terminal.log_folder import RECORD, LogFolder, seconds_of, stamp
from dmltrain_launch.terminal.record import read_own_record

CAUSE = "dmltrain job kill has ended the job, which had no launcher"
CODE = as_shell(-signal.SIGTERM)


def write_end(folder: Path, launcher: Launcher) -> None:
    """Nothing is left of the job. Its record stays as it is if a launcher has written the end, or still can: one on
    another machine may not be seen."""
    if launcher.host != platform.node() or not show.Record(folder).abandoned:
        return
    try:
        locked = LogFolder(folder, again=True)
    except LaunchError:  # a launcher has just attached
        return
    found = read_own_record(folder / RECORD)
    if not found.get("ended"):
        now, began = time.time(), seconds_of(found.get("started"))
        seconds = None if began is None else max(0.0, round(now - began, 3))
        end = {"ended": stamp(now), "seconds": seconds, "exit_code": CODE, "cause": CAUSE}
        locked.write_record({**found, **end})
        journal.remove(folder)
