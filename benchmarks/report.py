"""The facts that every benchmark reports with its figures (command, machine, versions), and how it prints them.

Benchmarks measure the dmltrain of this checkout (CHECKOUT), even if another version is installed.
"""

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import machine

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = [str(CHECKOUT), str(CHECKOUT / "launch")]  # the folders of dmltrain and dmltrain_launch
SEARCH_PATH = os.pathsep.join(PACKAGES)  # PYTHONPATH of programs that import them
INTERPRETER: list[str] = []  # the command that runs training programs; none: Python, as this process has it


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None; for dmltrain the version of this checkout."""
    if distribution == "dmltrain":
        sys.path[:0] = PACKAGES
        import dmltrain

        return dmltrain.__version__
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def facts(program: str, argv: Sequence[str] | None, versions: dict[str, str | None]) -> dict[str, object]:
    """Command, machine and versions, to repeat a run of benchmarks/`program`; `argv` None: this process's arguments."""
    return {
        "command": shlex.join(["python", f"benchmarks/{program}", *(sys.argv[1:] if argv is None else argv)]),
        "machine": machine.describe(),
        "versions": {"python": platform.python_version(), **versions},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(result: dict, form: str, table: Callable[[dict], str]) -> None:
    """Print the result: `form` is "json" or "table"."""
    print(json.dumps(result, indent=1, default=vars) if form == "json" else table(result))


def fail(program: str, why: object, code: int = 1) -> int:
    """Print on standard error why benchmarks/`program` ends; returns the exit code."""
    print(f"{program}: error: {why}", file=sys.stderr)
    return code
