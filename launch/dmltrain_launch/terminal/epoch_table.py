"""Print the table of a training job's epochs with dmltrain-parse, and the command that makes a page of the job."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from dmltrain_launch.own_program import own_program

TABLE_SECONDS = 60.0
LINE_BYTES = 1 << 16


def print_epochs(folder: Path, job_folder: str) -> None:
    """Print the table for the logs in `folder`, if they have epochs and dmltrain-parse is installed.

    `job_folder` is that of all attempts, as the user knows it.
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
