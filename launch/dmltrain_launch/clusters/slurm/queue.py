"""With --submit a script of sbatch starts the launcher in its allocation."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters.queue import SUBMITTED, Inside, Submitted, refusal
from dmltrain_launch.clusters.slurm import ASK_SECONDS, SlurmOptions
from dmltrain_launch.own_program import own_program

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


class Queue:
    """See `dmltrain_launch.clusters.queue`. Without --nodes in --slurm-args a job asks for one node for each worker,
    and without it in --slurm-server-args, if these are given, for one more for each server."""

    def artefact(self, job: Inside[SlurmOptions]) -> list[str]:
        argv, script = sbatch(job)
        return [f"{shlex.join(argv)} << 'END'", *script.splitlines(), "END"]

    def submit(self, job: Inside[SlurmOptions]) -> Submitted:
        text = _answer(*sbatch(job)).strip().partition(";")[0]
        if not text.isdecimal():
            raise LaunchError(f"sbatch --parsable printed {text!r}: expected the number of a job")
        where = f"in Slurm's queue, as its job {text}; it will print to {job.path}/slurm-{text}.out"
        return Submitted({"slurm_job": int(text)}, where)

    def held(self, record: Mapping[str, Any], where: Path) -> Held:
        number = record.get("slurm_job")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise LaunchError(f"{where}: slurm_job is {number!r}: expected a whole number, 1 or more")
        return Held(number)


@dataclass(frozen=True)
class Held:
    """Slurm's job of this number."""

    number: int

    @property
    def lives(self) -> bool:
        return bool(self._found())

    def state(self) -> list[str]:
        found = self._found()
        words = found.split(None, 1) or ["has ended"]
        whole = [f"Slurm's job {self.number} {'is ' if found else ''}{words[0]}", *(f"({word})" for word in words[1:])]
        return [" ".join(whole)]

    def _found(self) -> str:
        """Its state and the reason for it, of the component that has one; "" if Slurm knows it no more."""
        asked = ("squeue", "--noheader", f"--jobs={self.number}", "--format=%T %r")
        lines = _answer(asked, allowed="Invalid job id").splitlines()
        return min(lines, key=lambda line: line.endswith(" None"), default="").strip()

    def cancel(self) -> None:
        _answer(("scancel", str(self.number)), allowed="Invalid job id")


def sbatch(job: Inside[SlurmOptions]) -> tuple[tuple[str, ...], str]:
    """argv of sbatch, and the script that it reads from its standard input. Pure."""
    options = job.options
    for name, arguments in (("args", options.slurm_args), ("server-args", options.slurm_server_args)):
        for argument in arguments:
            for sign, why in REFUSED.items():
                if sign.match(argument):
                    raise LaunchError(f"--slurm-{name}={argument} {why}")
    output = str(job.path.absolute()).replace("%", "%%") + "/slurm-%j.out"
    own = [f"--job-name={job.name}", f"--nodes={options.num_workers}", f"--output={output}", "--open-mode=append"]
    own += [f"--partition={options.queue}"] if options.queue else []
    if options.slurm_server_args and not options.servers:
        raise LaunchError("--slurm-server-args needs servers, and this job has none: remove it, or -s 0")
    second = [":", f"--job-name={job.name}", f"--nodes={options.servers}", *options.slurm_server_args]
    launcher = [
        *own_program(sys.executable, "dmltrain_launch.cli"),
        "--job",
        job.name,
        "--log-dir",
        str(job.path),
        *job.argv,
    ]
    script = f"#!/bin/sh\nexport {SUBMITTED}=1\nexec {shlex.join(launcher)}\n"
    first = ("sbatch", "--parsable", *own, *options.slurm_args)
    return (*first, *(second if options.slurm_server_args else ())), script


def _answer(argv: Sequence[str], stdin: str = "", allowed: str = "") -> str:
    """The standard output of a command of Slurm; LaunchError if it fails, other than with the words `allowed`."""
    try:
        ran = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=ASK_SECONDS)
    except FileNotFoundError:
        raise LaunchError(f"{argv[0]} is not installed here: use a machine of the Slurm cluster", 127) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]} does not run: {error}", 126) from None
    if ran.returncode and not (allowed and allowed in ran.stderr):
        said = ran.stderr.strip() or "nothing"
        raise LaunchError(f"{argv[0]} exited with {ran.returncode} and printed\n{said}{refusal(said, FIXES)}")
    return ran.stdout
