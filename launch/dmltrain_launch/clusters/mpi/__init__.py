"""Hosts reached by mpirun."""

from __future__ import annotations

from dmltrain_launch.clusters.launcher import HOSTS, Launcher, own_options
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import Record, absolute, option, text


def _recorded(options: MpiOptions) -> str:
    """An absolute path, unless it is found in PATH."""
    return absolute(options.mpirun) if "/" in options.mpirun else options.mpirun


def _wrong_program(program: str) -> str:
    from dmltrain_launch.job.hosts.attribute import PATH_OR_COMMAND, PYTHON  # --help needs none

    return "" if PYTHON.fullmatch(program) else f"{PATH_OR_COMMAND}; use --mpirun PATH"


@own_options
class MpiOptions(Options):
    """The options of --launcher mpi."""

    mpirun: str = option(
        "PATH",
        "mpirun of Open MPI or MPICH, for --launcher mpi (default: mpirun)",
        text("a program"),
        "mpirun",
        after="--connect-timeout",
        record=Record(_recorded, _wrong_program),
    )
    mpirun_args: tuple[str, ...] = option(
        "ARG", "extra argument for mpirun; may be repeated", default=(), record=Record()
    )


LAUNCHER = Launcher(
    "hosts reached by mpirun",
    MpiOptions,
    HOSTS,
    cluster="hosts",
    inelastic="mpirun ends the job with its first lost process",
    undetached="mpirun ends the job when its launcher is lost; use --launcher ssh",
)
