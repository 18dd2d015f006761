"""Hosts of a Slurm allocation: of one that is there, or with --submit of one that sbatch asks for."""

from __future__ import annotations

import os

from dmltrain_launch.clusters.launcher import HOSTS, Launcher, own_options
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Record, number, option

ASK_SECONDS = 60.0  # for an answer of squeue, sbatch and scancel


def _job(options: SlurmOptions) -> int:
    """The allocation that the job uses; 0 if it uses none."""
    text = os.environ.get("SLURM_JOB_ID", "") if options.launcher_name == "slurm" else ""
    return options.slurm_job or int(text if text.isdecimal() else 0)


@own_options
class SlurmOptions(Options):
    """The options of --launcher slurm."""

    slurm_args: tuple[str, ...] = option(
        "ARG",
        "extra argument for srun, or for sbatch with --submit; may be repeated",
        default=(),
        after="--mpirun-args",
        record=Record(),
    )
    slurm_server_args: tuple[str, ...] = option(
        "ARG",
        "the same for the nodes of the servers, the second component of a heterogeneous job; may be repeated",
        default=(),
        record=Record(),
    )
    slurm_job: int = option(
        "ID",
        "allocation of Slurm to use (default: the one that this command runs in)",
        number(int, 1),
        0,
        after="--submit",
        record=Record(_job, most=(1 << 32) - 1),
    )


LAUNCHER = Launcher(
    "hosts of a Slurm allocation",
    SlurmOptions,
    (*HOSTS, "submit", "queue"),
    cluster="hosts",
    queue="queue",
    undetached="srun ends the job when its launcher is lost; use --submit, which returns at once and whose "
    "launcher runs in Slurm, and leave --detach out",
)
