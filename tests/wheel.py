"""The wheel of this project, built once for all test processes of a session; or that of `make dist`."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.copied_tree import copy_packages

ROOT = Path(__file__).parents[1]
DIST = os.environ.get("DMLTRAIN_TEST_DIST")  # a folder with the wheel and the source distribution of this commit


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`once(name, make)`: a folder that `make` fills once for all test processes of this session."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder = shared / name
        with locked(shared / f"{name}.lock"):
            if not folder.exists():
                draft = shared / f"{name}.draft"
                shutil.rmtree(draft, ignore_errors=True)
                make(draft)
                draft.rename(folder)
        return folder

    return made


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution found for" in done.stderr:
        pytest.skip(f"a package is not available: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def copy_source(folder: Path) -> Path:
    """What is packaged, in a new folder: building there leaves nothing in the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return copy_packages(folder, "dmltrain", "launch/bin", "launch/dmltrain_launch")


def build(folder: Path) -> None:
    pip("wheel", "--no-deps", "--wheel-dir", folder, copy_source(folder.with_name("source-of-the-wheel")))


def of_this_tree(once) -> Path:
    return next(once("wheel", build).glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(once) -> Path:
    return next(Path(DIST).glob("*.whl")) if DIST else of_this_tree(once)
