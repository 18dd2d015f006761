"""How much of a host's CPUs and memory is in use, by any process: the counters of /proc and of control groups. Linux.

What a host has is here what this process may use. CPUs: those of its affinity, or as many cores as a CPU quota allows.
Memory: the machine's, or the limit of a control group. With a CPU quota only the group's own processes count as users.

Agents use it, too: standard library only, Python 3.8.
"""

from __future__ import annotations

import contextlib
import os
import re

UNLIMITED = ("max", "-1")  # in cgroup v2, in v1
OTHER_ROOT = ".."  # in the path of a control group outside of this namespace
TICKS = os.sysconf("SC_CLK_TCK")  # a second, in /proc


class Capacity:
    """What this process may use of its host. `root` precedes the mount points of control groups."""

    def __init__(self, proc: str = "/proc", root: str = ""):
        self.proc = proc
        self.cpus = {b"cpu%d" % number for number in os.sched_getaffinity(0)}
        self.cores: float = len(self.cpus)
        self._group = ""  # the file with the CPU time of the group whose quota counts
        for hierarchy in groups("cpu", proc, root):
            for folder in hierarchy:
                cores = quota(folder)
                if cores is not None and 0 < cores < self.cores and (file := _time_file(folder, hierarchy, proc, root)):
                    self.cores, self._group = cores, file
        total = self._memory()[0]
        self._limited = [
            folder
            for hierarchy in groups("memory", proc, root)
            for folder in hierarchy
            if 0 < memory_limit(folder) < total
        ]

    def busy(self) -> float | None:
        """CPU time in seconds until now; None if it is unknown. Divide a difference by `cores` and the time."""
        if self._group:
            return _group_seconds(self._group)
        busy, known = 0, False
        with contextlib.suppress(OSError, ValueError), open(f"{self.proc}/stat", "rb") as file:
            for line in file:
                if not line.startswith(b"cpu"):
                    break
                name, *ticks = line.split()  # user nice system idle iowait irq softirq steal
                if name in self.cpus:
                    busy += sum(map(int, ticks[:3])) + sum(map(int, ticks[5:7]))
                    known = len(ticks) > 3
        return busy / TICKS if known else None

    def memory(self) -> float | None:
        """The fraction of the memory that is in use. Of the machine and each limited control group, the largest."""
        total, available = self._memory()
        shares = [1 - available / total] if total else []
        for folder in self._limited:
            limit, used = memory_limit(folder), _used(folder)
            if limit and used is not None:
                shares.append(used / limit)
        return min(1.0, max(0.0, *shares)) if shares else None

    def _memory(self) -> tuple[int, int]:
        """All memory of the machine, and what is available, in bytes; 0 if unknown."""
        lines = re.findall(r"^(\w+): +(\d+) kB", text(f"{self.proc}/meminfo"), re.MULTILINE)
        known = {name: 1024 * int(number) for name, number in lines}
        return known.get("MemTotal", 0), known.get("MemAvailable", known.get("MemFree", 0))


# -- control groups --------------------------------------------------------------------------------------------------


def groups(controller: str, proc: str = "/proc", root: str = "") -> list[list[str]]:
    """The folders of this process's control group and of all groups that contain it, the process's own first: one list
    for each hierarchy that can have `controller` (v1's names: cpu, cpuacct, memory)."""
    mounts, hierarchies = _mounts(text(f"{proc}/self/mountinfo")), []
    for line in text(f"{proc}/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        kind = "cgroup2" if number == "0" and not controllers else ""
        kind = controller if controller in controllers.split(",") else kind
        if kind in mounts:
            top, mount = mounts[kind]
            hierarchies.append(_upwards(root + mount, _below(path, top)))
    return hierarchies


def quota(folder: str) -> float | None:
    """The CPU quota of one group in cores; None without a quota."""
    words = text(f"{folder}/cpu.max").split()
    if not words:
        words = [text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if words[0] in UNLIMITED:
        return None
    with contextlib.suppress(ValueError, IndexError, ZeroDivisionError):
        return float(words[0]) / float(words[1])
    return None


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """{"cgroup2" or a controller of v1: (mounted group, mount point)}; man 5 proc describes the lines."""
    known: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        mounts, sources = mount.split(), source.split()
        if len(mounts) < 5 or len(sources) < 3:
            continue
        controllers = {"cgroup2": ["cgroup2"], "cgroup": sources[2].split(",")}.get(sources[0], [])
        for controller in controllers:
            known.setdefault(controller, (_plain(mounts[3]), _plain(mounts[4])))
    return known


def _plain(path: str) -> str:
    """A path without the escapes of /proc: \\040 is a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), path)


def _below(path: str, top: str) -> list[str]:
    """The names from the mounted group `top` down to the group `path`; [] if it is not below `top`."""
    names, above = ([name for name in folder.split("/") if name] for folder in (path, top))
    if OTHER_ROOT in names or names[: len(above)] != above:
        return []
    return names[len(above) :]


def _upwards(mount: str, names: list[str]) -> list[str]:
    """The folders of the group and of all groups that contain it."""
    return [os.path.join(mount, *names[:count]) for count in range(len(names), -1, -1)]


def _time_file(folder: str, hierarchy: list[str], proc: str, root: str) -> str:
    """The file with the CPU time of a group that has a quota; "" if there is none. With cgroup v1 it may be in another
    hierarchy that has a group of the same name."""
    name = folder[len(hierarchy[-1]) :]
    beside = [
        group for groups_ in groups("cpuacct", proc, root) for group in groups_ if group[len(groups_[-1]) :] == name
    ]
    files = [f"{folder}/cpu.stat", *(f"{group}/cpuacct.usage" for group in beside)]
    return next((file for file in files if _group_seconds(file) is not None), "")


def _group_seconds(file: str) -> float | None:
    words = text(file).split()
    with contextlib.suppress(ValueError, IndexError):
        if file.endswith("cpu.stat"):
            return int(words[words.index("usage_usec") + 1]) / 1e6
        return int(words[0]) / 1e9
    return None


def memory_limit(folder: str) -> int:
    """The memory limit of one group in bytes; 0 without one."""
    return _number(f"{folder}/memory.max") or _number(f"{folder}/memory.limit_in_bytes")


def _used(folder: str) -> int | None:
    """The memory of one group in bytes without the files that the kernel can drop at once."""
    used = _number(f"{folder}/memory.current") or _number(f"{folder}/memory.usage_in_bytes")
    dropped = re.search(r"^(?:total_)?inactive_file (\d+)$", text(f"{folder}/memory.stat"), re.MULTILINE)
    return max(0, used - int(dropped[1]) if dropped else used) if used else None


def _number(path: str) -> int:
    content = text(path).strip()
    return int(content) if content.isdigit() else 0


def text(path: str) -> str:
    """The text of a file; "" if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path) as file:
        return file.read()
    return ""
