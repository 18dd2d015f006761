"""The cores that this host's processes may use: its CPU affinity, and the CPU quotas of its control groups. Linux."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TypedDict

from launch.agent.process import boot_id

UNLIMITED = ("max", "-1")  # in cgroup v2, in v1
OTHER_ROOT = ".."  # in the path of a control group outside of this namespace


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
        "limits": limits(),
    }


def usable(found: Report) -> int:
    """The number of whole cores according to a `report`, at least 1."""
    return max(1, int(min([len(found["cpus"]), *found["limits"].values()])))


def limits(proc: str = "/proc", root: str = "") -> dict[str, float]:
    """The cores that each control group of this process allows, by the group's identity on this kernel.

    The process's group and all groups that contain it have quotas of their own. `root` precedes the mount points.
    """
    found: dict[str, float] = {}
    mounts = _mounts(_text(f"{proc}/self/mountinfo"))
    for line in _text(f"{proc}/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        kind = "cgroup2" if number == "0" and not controllers else "cpu" if "cpu" in controllers.split(",") else ""
        if kind in mounts:
            top, mount = mounts[kind]
            for folder in _upwards(root + mount, _below(path, top)):
                cores = _cores(folder)
                if cores is not None:
                    there = os.stat(folder)  # the identity, the same in every namespace of one kernel
                    found[f"{there.st_dev}:{there.st_ino}"] = cores
    return found


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """{"cgroup2" or "cpu": (mounted group, mount point)}; man 5 proc describes the lines."""
    found: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        mounts, sources = mount.split(), source.split()
        if len(mounts) < 5 or len(sources) < 3:
            continue
        if sources[0] == "cgroup2":
            found.setdefault("cgroup2", (_plain(mounts[3]), _plain(mounts[4])))
        elif sources[0] == "cgroup" and "cpu" in sources[2].split(","):
            found.setdefault("cpu", (_plain(mounts[3]), _plain(mounts[4])))
    return found


def _plain(path: str) -> str:
    """A path without the escapes of /proc: \\040 is a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)


def _below(path: str, top: str) -> list[str]:
    """The names from the mounted group `top` down to the group `path`; [] if it is not below `top`."""
    names, above = ([name for name in each.split("/") if name] for each in (path, top))
    if OTHER_ROOT in names or names[: len(above)] != above:
        return []
    return names[len(above) :]


def _upwards(mount: str, names: list[str]) -> list[str]:
    """The folders of the group and of all groups that contain it."""
    return [os.path.join(mount, *names[:count]) for count in range(len(names), -1, -1)]


def _cores(folder: str) -> float | None:
    """The quota of one group in cores; None without a quota."""
    words = _text(f"{folder}/cpu.max").split()
    if not words:
        words = [_text(f"{folder}/cpu.cfs_{each}_us").strip() for each in ("quota", "period")]
    if words[0] in UNLIMITED:
        return None
    with contextlib.suppress(ValueError, IndexError, ZeroDivisionError):
        return float(words[0]) / float(words[1])
    return None


def _text(path: str) -> str:
    """The text of a file; "" if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path) as file:
        return file.read()
    return ""
