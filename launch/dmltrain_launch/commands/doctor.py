"""dmltrain-doctor: one page about this machine, for a report of a problem.

It needs no package but this one. The facts are those of a job's agent, its warnings those of `dmltrain check`. Of the
environment it shows names alone, and values where none can be a secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dmltrain.base import capacity
from dmltrain_launch import LaunchError, version
from dmltrain_launch.agent.host import cores
from dmltrain_launch.agent.host.probe import Probe
from dmltrain_launch.ending import end_with, show
from dmltrain_launch.job.host import Host
from dmltrain_launch.preflight import Facts, problems

NAME = "dmltrain-doctor"
USAGE = f"""usage: {NAME} [--help] [--version]

Print one page about this machine, to paste into a report of a problem: versions, cores, memory, limits, clock, network.
It has addresses and paths of this machine, and no values of variables but numbers of threads and GPUs.

  -h, --help                      print this help and exit
  --version                       print the version and exit
"""
PACKAGES = (
    "dmltrain",
    "numpy",
    "torch",
    "mxnet",
    "cryptography",
    "paramiko",
    "psutil",
    "ray",
    "kubernetes",
    "lightning",
)
PROGRAMS = ("ssh", "mpirun", "srun", "kubectl", "yarn", "nvidia-smi")
VARIABLES = re.compile("((DMLTRAIN|DMLC|PS|OMP|MKL|MALLOC|CUDA|HIP|ROCR|NCCL|GLOO|TORCH|MXNET|LD)_|PYTHON)[A-Z0-9_]+")
OF_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SHOWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *OF_GPUS)  # the only ones whose values are shown
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
DRIVER = "/proc/driver/nvidia/version"
TIME_ERROR = 5  # of adjtimex(2): the kernel's clock is not synchronized
CUDA_SECONDS = 120.0  # of a first import of torch from a slow disk, and of a driver that does not answer
CUDA = """import torch
c, v = torch.cuda, torch.version
print(v.cuda or v.hip and "ROCm-" + v.hip, c.is_available(), c.device_count())"""


def main(argv: Sequence[str] | None = None) -> None:
    """dmltrain-doctor."""
    end_with(NAME, doctor, argv)


def doctor(argv: Sequence[str]) -> int:
    """Print the page. Returns 0; LaunchError for arguments."""
    if argv and list(argv) not in (["-h"], ["--help"], ["--version"]):
        raise LaunchError(f"{argv[0]}: this program takes no arguments but --help and --version")
    if argv:
        print(f"{NAME} {version()}" if argv[0] == "--version" else USAGE.rstrip())
    else:
        show(page(probed(), os.environ))
    return 0


def probed() -> Facts:
    """What an agent reports of its host before a job."""
    with contextlib.closing(Probe({"packages": PACKAGES})) as probe:
        while (facts := probe.poll()) is None:
            probe.selector.select(max(0.0, probe.deadline - time.monotonic()))
        return facts


def page(facts: Facts, environment: Mapping[str, str]) -> str:
    """The text. Paths in the home folder begin with ~, because the name of the user may be one's own."""
    rows = [(name, text) for name, text in _rows(facts, environment) if text]
    wide = max(len(name) for name, _ in rows)
    warnings = [f"warning: {each.text}" for each in problems(Host("this machine"), facts, {})] or ["no warnings"]
    lines = [f"dmltrain {version()}", *(f"{name.ljust(wide)}  {text}" for name, text in rows), *warnings]
    return "\n".join(lines).replace(str(Path.home()) + os.sep, f"~{os.sep}")


def _rows(facts: Facts, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    inspection = facts["inspection"]
    packages: Mapping[str, str | None] = inspection.get("packages") or {}
    yield "system", f"{_distribution()}, Linux {facts['kernel']}, {platform.machine()}"
    yield "Python", f"{facts['python']} ({platform.python_implementation()}), {sys.executable}"
    yield "packages", ", ".join(f"{name} {number}" for name, number in packages.items() if number)
    yield "not found", ", ".join(name for name, number in packages.items() if not number)
    yield "error", inspection.get("error", "")
    yield "GPUs", ", ".join([*(gpu["name"] for gpu in facts["gpus"]), *_driver()]) or "none"
    yield "CUDA", _cuda() if facts["gpus"] and packages.get("torch") else ""
    yield "cores", _cores()
    yield "memory", _memory(facts["memory"])
    yield "free space", ", ".join(f"{path} {free} MiB" for path, free in facts["disk"].items())
    yield "limits", ", ".join(f"{name} {_limit(number)}" for name, number in LIMITS.items())
    yield "clock", _clock(facts["time"])
    yield from (("network", _interface(row)) for row in facts["interfaces"] if not row["loopback"])
    yield "programs", ", ".join(name for name in PROGRAMS if shutil.which(name)) or "none"
    yield "variables", ", ".join(_variables(environment)) or "none"


def _distribution() -> str:
    with contextlib.suppress(OSError, KeyError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return "unknown distribution"


def _driver() -> list[str]:
    return [f"driver {number}" for number in re.findall(r" (\d+\.[\d.]+) ", capacity.text(DRIVER))[:1]]


def _cuda() -> str:
    """As torch sees it, in a process of its own: a faulty driver can block for ever."""
    command = [sys.executable, "-c", CUDA]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=CUDA_SECONDS)
    except subprocess.TimeoutExpired:
        return f"torch has not answered in {CUDA_SECONDS:g} s"
    if done.returncode:
        return f"torch cannot be imported: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    built, available, count = done.stdout.split()[-3:]
    return f"torch is built for {built}, available: {available}, {count} GPUs"


def _cores() -> str:
    """Those that this process may use, the machine's, and the quotas of control groups."""
    report = cores.report()
    quotas = ", ".join(f"{limit:g}" for limit in sorted(report["limits"].values()))
    text = f"{cores.usable(report)} usable: {len(report['cpus'])} of {os.cpu_count()} by affinity"
    return f"{text}, quota of control groups {quotas or 'none'}"


def _memory(mebibytes: int | None) -> str:
    folders = [folder for hierarchy in capacity.groups("memory") for folder in hierarchy]
    limits = [limit >> 20 for limit in map(capacity.memory_limit, folders) if limit]
    lowest = min(limits, default=1 << 43)  # control groups of version 1 say 2**63 for none
    return f"{mebibytes or 'unknown'} MiB, limit of control groups {f'{lowest} MiB' if lowest < 1 << 42 else 'none'}"


def _limit(number: int) -> str:
    """Soft/hard."""
    return "/".join("unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(number))


def _clock(now: float) -> str:
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # a struct timex of zeros changes nothing
        synchronized = "unknown" if state < 0 else "no" if state == TIME_ERROR else "yes"
        return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(now))}, synchronized: {synchronized}"
    return "unknown"


def _interface(row: Mapping[str, object]) -> str:
    speed = f", {row['speed']} Mbit/s" if row["speed"] else ""
    return f"{row['name']} {row['address']}/{row['prefix']}{'' if row['running'] else ', unplugged'}{speed}"


def _variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(filter(VARIABLES.fullmatch, environment)):
        shown = name in SHOWN and re.fullmatch(r"[0-9,]{1,40}", environment[name])
        yield f"{name}={environment[name]}" if shown else name
