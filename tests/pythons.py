"""The Pythons of this machine by their versions: those in PATH, those of pyenv, and those in DMLTRAIN_PYTHONS."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

VARIABLE = "DMLTRAIN_PYTHONS"  # folders that hold pythonX.Y, separated by colons


def python(version: str) -> str:
    """The path of an interpreter of that version, such as 3.12; skips the test where there is none."""
    path = _found(version)
    if not path:
        pytest.skip(f"no Python {version} on this machine: put it in PATH, or name its folder in {VARIABLE}")
    return path


@cache
def _found(version: str) -> str:
    """Every candidate is started: pyenv's shims are there for versions that cannot be started as well."""
    name = f"python{version}"
    folders = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(":") if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [*(folder / name for folder in folders), shutil.which(name), *pyenv.glob(f"versions/*/bin/{name}")]
    return next((str(path) for path in candidates if path and _starts(path, version)), "")


def _starts(path: str | Path, version: str) -> bool:
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-c", program], capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version
