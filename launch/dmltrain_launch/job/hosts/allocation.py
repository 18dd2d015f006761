"""The hosts that a batch system (Slurm, PBS) has allocated to this job."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host


def allocation(environ: Mapping[str, str]) -> list[Host]:
    """The hosts of the Slurm or PBS allocation; [] outside of one."""
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        where = "SLURM_JOB_NODELIST"
        names = _slurm_names(nodes)
    elif file := environ.get("PBS_NODEFILE"):
        where = f"PBS_NODEFILE {file}"
        try:
            names = Path(file).read_text().split()
        except OSError as error:
            raise LaunchError(f"{where}: {error.strerror}") from None
    else:
        return []
    return [Host(name, where=where) for name in dict.fromkeys(names)]


def _slurm_names(nodes: str) -> list[str]:
    try:
        ran = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"SLURM_JOB_NODELIST is set, but scontrol does not run: {error}; give the hosts with --hosts"
        ) from None
    if ran.returncode or not ran.stdout.strip():
        raise LaunchError(f"SLURM_JOB_NODELIST={nodes}: scontrol failed: {ran.stderr.strip()!r}; use --hosts")
    return ran.stdout.split()
