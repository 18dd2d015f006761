"""The cores that this host's processes may use: its CPU affinity, and the CPU quotas of its control groups. Linux."""

from __future__ import annotations

import os
from typing import TypedDict

from dmltrain.base.capacity import groups, quota
from dmltrain_launch.agent.process import boot_id

# Of an engine that only counts CPUs: how many are the job's on this host, and a name for that, such as "4 nodeid".
VARIABLE = "DMLTRAIN_STEP_CPUS"


class Report(TypedDict):
    """The kernel, the CPUs that this host's processes may use, and their quotas."""

    boot_id: str
    cpus: list[int]  # numbers, ascending
    limits: dict[str, float]  # cores by control group


def report() -> Report:
    """The CPUs and quotas of this host's processes.

    Hosts with the same boot id run on the same kernel: they are containers or namespaces of one machine. They share its
    CPUs and their common control groups.
    """
    return {
        "boot_id": boot_id(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": {**limits(), **engines_limit(os.environ.get(VARIABLE, ""))},
    }


def engines_limit(given: str) -> dict[str, float]:
    """From the value of VARIABLE, such as "4 nodeid"; {} from others."""
    number, _, name = given.partition(" ")
    try:
        return {f"engine:{name}": float(number)} if name and float(number) > 0 else {}
    except ValueError:
        return {}


def usable(machine: Report) -> int:
    """The number of whole cores according to a `report`, at least 1."""
    return max(1, int(min([len(machine["cpus"]), *machine["limits"].values()])))


def limits(proc: str = "/proc", root: str = "") -> dict[str, float]:
    """The cores that each control group of this process allows, by the group's identity on this kernel.

    The process's group and all groups that contain it have quotas of their own. `root` precedes the mount points.
    """
    allowed: dict[str, float] = {}
    for hierarchy in groups("cpu", proc, root):
        for folder in hierarchy:
            cores = quota(folder)
            if cores is not None:
                status = os.stat(folder)  # the identity, the same in every namespace of one kernel
                allowed[f"{status.st_dev}:{status.st_ino}"] = cores
    return allowed
