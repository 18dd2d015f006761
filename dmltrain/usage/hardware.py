"""A description of this machine, and the peak memory of this process."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import psutil


def describe() -> str:
    """'AMD EPYC, 2 cores, 23.4 GiB memory, Linux 6.1, Python 3.11.2'."""
    memory = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.1f} GiB memory, {system}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def peak_memory() -> float:
    """The peak resident set size of this process in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
