"""One mutant's trial: the nearest tests, in a copy of the project, in a process that is ended with all that it starts.

The process is forked from one that has imported what takes long, and nothing of the project.
"""

from __future__ import annotations

import compileall
import contextlib
import multiprocessing
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PRELOADED = ["numpy", "pytest", "hypothesis", "torch"]
LOOK_SECONDS = 0.5  # between two looks whether the whole session has been stopped
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of what git knows in `root`, or would take, in `folder`.

    Its compiled code is checked by the content of its source: by time and size, a mutant could pass for the module.
    """
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    (folder / "tmp").mkdir(exist_ok=True)
    compileall.compile_dir(str(folder), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return folder


def run(
    folder: Path, tests: list[str], seconds: float, stopped: threading.Event | None = None
) -> tuple[str, str, float]:
    """("passed" | "failed" | "too slow" | "broken", what pytest printed last, seconds that it took). It is ended early
    when `stopped` is set."""
    log, since = folder / "pytest.log", time.monotonic()
    process = context.Process(target=_pytest, args=(str(folder), tests, str(log)))
    process.start()
    while process.is_alive() and time.monotonic() - since < seconds and not (stopped and stopped.is_set()):
        process.join(LOOK_SECONDS)
    slow = process.is_alive()
    _end(process, folder)
    took = time.monotonic() - since
    words = {0: "passed", 1: "failed", 2: "failed"}  # 2: a test file that cannot be imported
    printed = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "too slow" if slow else words.get(process.exitcode or 0, "broken"), "\n".join(printed[-30:]), took


def _pytest(folder: str, tests: list[str], log: str) -> None:
    os.setsid()  # a group of its own: see _end
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    multiprocessing.set_start_method(None, force=True)  # the usual one, of processes that tests start
    packages = [folder, f"{folder}/launch"]
    os.environ |= {"PYTHONPATH": ":".join(packages), "TMPDIR": f"{folder}/tmp", "OMP_NUM_THREADS": "1"}
    sys.path[:0] = packages
    import pytest

    code = pytest.main(
        ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not alone", *tests]
    )
    sys.stdout.flush()
    os._exit(int(code))


def _end(process: multiprocessing.process.BaseProcess, folder: Path) -> None:
    """End the trial, its group, and whatever else it started: that is at home in the copy's folder for temporary
    files."""
    assert process.pid is not None  # it was started
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()
    while guests := [entry for entry in Path("/proc").glob("[0-9]*") if _is_at_home(entry, folder)]:
        for entry in guests:  # again, until they are gone: one that is about to end may yet write, or start another
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.name), signal.SIGKILL)
        time.sleep(0.01)


def _is_at_home(entry: Path, folder: Path) -> bool:
    """Whether a process, by its entry in /proc, has its working directory in `folder`; never this one."""
    if entry.name == str(os.getpid()):
        return False
    try:
        return Path(os.readlink(entry / "cwd")).is_relative_to(folder)
    except OSError:  # it has ended, or is another user's
        return False


def unmount(folder: Path) -> None:
    """Undo the mounts that tests which were ended have left below the folder, which could not be removed with them."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed(points):  # what was mounted last comes first
        if Path(point).is_relative_to(folder):
            subprocess.run(["umount", point], check=False)
