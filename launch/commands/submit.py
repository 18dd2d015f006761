"""`--submit`: put a job into the queue of Slurm, and return. A script of sbatch starts the launcher in its allocation.

The launcher there has the same command line. SUBMITTED in its environment says that it is not to submit the job again.
Until it runs, QUEUED in the log folder has the number that Slurm gave the job.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import LaunchError, whole_file
from launch.job.options import Options
from launch.terminal.log_folder import LOGS, QUEUED, RECORD, LogFolder, stamp, unwritable
from launch.terminal.record import MODE, read_own_record

SUBMITTED = "DMLTRAIN_SUBMITTED"
SECONDS = 60.0  # for an answer of Slurm
REFUSED = {
    re.compile("--signal=R?B:"): "would end the launcher: leave B: out, so that the job's processes get the signal",
    re.compile("--gpus-per-task"): "counts tasks of srun, and the launcher has one on each node: ask for the GPUs of a "
    "node with --slurm-args=--gpus-per-node=N; its workers divide them",
}
# what sbatch says: what to do
FIXES = {
    "Requested node configuration is not available": "no node has what --slurm-args ask for, or not enough have: "
    "`sinfo -N -o '%N %P %c %m %G'` prints CPUs, memory (MB) and GPUs of each node",
    "invalid partition specified": "`sinfo -o %P` prints the partitions",
    "not permitted to use this partition": "`scontrol show partition` prints who may use which (AllowGroups); choose "
    "another one with --slurm-args=--partition=NAME, or ask the cluster's administrators",
}


@dataclass(frozen=True)
class Submission:
    """`argv` of sbatch, which reads `script` from its standard input."""

    argv: tuple[str, ...]
    script: str

    def lines(self) -> list[str]:
        """For `--dry-run`: the command, which also works by hand."""
        return [f"{shlex.join(self.argv)} << 'END'", *self.script.splitlines(), "END"]


def submission(options: Options, argv: Sequence[str], name: str, path: Path) -> Submission:
    """Of the job `name`, whose command line is `argv` and whose logs go to `path`. Pure.

    Without --nodes in --slurm-args it asks for one node for each worker.
    """
    _check(options.slurm_args)
    output = str(path.absolute()).replace("%", "%%") + "/slurm-%j.out"
    own = [f"--job-name={name}", f"--nodes={options.num_workers}", f"--output={output}", "--open-mode=append"]
    launcher = [sys.executable, "-m", "launch.cli", "--job", name, "--log-dir", str(path), *argv]
    script = f"#!/bin/sh\nexport {SUBMITTED}=1\nexec {shlex.join(launcher)}\n"
    return Submission(("sbatch", "--parsable", *own, *options.slurm_args), script)


def _check(arguments: Sequence[str]) -> None:
    """LaunchError for arguments of sbatch that do not do what they seem to."""
    for each in arguments:
        for sign, why in REFUSED.items():
            if sign.match(each):
                raise LaunchError(f"--slurm-args={each} {why}")


def submit(made: Submission, name: str, path: Path, say: Callable[[str], None]) -> int:
    """Ask Slurm, and say what it has answered. LaunchError if it refuses."""
    if path.is_dir() and (number := queued(path)) and _in_queue(number):
        raise LaunchError(f"{path}: {state(number)}, and has this log folder; give another --job or --log-dir")
    folder = LogFolder(path)  # an earlier run's files go to previous-1
    text = _answer(made.argv, made.script).strip().partition(";")[0]
    if not text.isdecimal():
        raise LaunchError(f"sbatch --parsable printed {text!r}: expected the number of a job")
    record = {"launcher": "slurm", "slurm_job": int(text), "submitted": stamp(time.time())}
    try:
        whole_file.write(folder.path / QUEUED, (json.dumps(record) + "\n").encode(), MODE)
    except OSError as error:
        raise unwritable(folder.path / QUEUED, error) from None
    say(f"job {name} is in Slurm's queue, as its job {text}; it will print to {path}/slurm-{text}.out")
    known_by = shlex.quote(name if path == Path(LOGS) / name else str(path))
    say(f"dmltrain job ps {known_by}, and the same with logs and kill, find it from here")
    return 0


def queued(folder: Path) -> int:
    """Slurm's number of the job with this log folder that was submitted and has not begun to run; 0: there is none."""
    if (folder / RECORD).exists():
        return 0
    try:
        record = read_own_record(folder / QUEUED)
    except FileNotFoundError:
        return 0
    number = record.get("slurm_job") if isinstance(record, Mapping) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise LaunchError(f"{folder / QUEUED}: slurm_job is {number!r}: expected a whole number, 1 or more")
    return number


def state(number: int) -> str:
    """What Slurm says about a job: its state and the reason for it."""
    found = _in_queue(number)
    words = found.split(None, 1) or ["has ended"]
    return " ".join([f"Slurm's job {number} {'is ' if found else ''}{words[0]}", *(f"({each})" for each in words[1:])])


def _in_queue(number: int) -> str:
    """The state of a job and the reason for it; "" if Slurm knows it no more."""
    asked = ("squeue", "--noheader", f"--jobs={number}", "--format=%T %r")
    return _answer(asked, allowed="Invalid job id").strip()


def cancel(number: int) -> None:
    """Take a job out of Slurm's queue, or end it."""
    _answer(("scancel", str(number)), allowed="Invalid job id")


def _answer(argv: Sequence[str], told: str = "", allowed: str = "") -> str:
    """The standard output of a command of Slurm; LaunchError if it fails, other than with the words `allowed`."""
    try:
        ran = subprocess.run(argv, input=told, capture_output=True, text=True, timeout=SECONDS, env=os.environ)
    except FileNotFoundError:
        raise LaunchError(f"{argv[0]} is not installed here: use a machine of the Slurm cluster", 127) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]} does not run: {error}", 126) from None
    if ran.returncode and not (allowed and allowed in ran.stderr):
        fix = "".join(f"\n{fix}" for said, fix in FIXES.items() if said in ran.stderr)
        raise LaunchError(f"{argv[0]} exited with {ran.returncode} and printed\n{ran.stderr.strip() or 'nothing'}{fix}")
    return ran.stdout
