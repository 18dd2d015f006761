"""Run a benchmark as a user does, or take one of its modules to look at."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, *arguments: str, timeout: float = 250, **environ: str) -> subprocess.CompletedProcess[str]:
    """benchmarks/`name` with these arguments, and `environ` added to its environment."""
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | environ,
    )


def benchmark_module(name: str) -> ModuleType:
    """A module of benchmarks/, which find each other because they lie in one folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))
