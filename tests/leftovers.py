"""What test runs left that were killed, or interrupted too hard: it is found by the pid of its owner, who is dead
(tests/owners.py).

    python -m tests.leftovers       # removes it, and says what that was

Each pytest does this at its start and at its end, for all dead owners: test beds (with their network namespaces and the
sshd there), control groups, processes that tests started, sockets of forking processes, private folders of jobs and of
tests in the folder for temporary files. What belongs to a living process, or to nobody known, stays.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests import control_groups, owners
from tests.cluster.command import TestbedError
from tests.cluster.layout import BASE
from tests.cluster.testbed import Testbed
from tests.forked_job import PLACE

BEDS = re.compile(r"(?:pytest|other|bench|benchmark)(\d+)(?:_\w+)?")
NAMESPACES = Path("/run/netns")  # where ip(8) has those with names
BED_OF = re.compile(r"testbed-(.+)-(?:h\d+|login|switch)")  # the name of a network namespace
GROUPS = re.compile(r"dmltrain-(?:cost|flaky|test)-(\d+)")
FOLDERS = re.compile(r"dmltrain-(?:(?:fuzz|browser|test)-|(?P<mark>.+)\.)[a-z0-9_]{8}")  # of tests; of a job
MARK_OF_A_TEST = re.compile(r"[a-z]+-(\d+)-\d+")  # with the pid of its pytest
BUILD = Path(__file__).parents[1] / "build"
EVERY_PROCESS = "pid:[4026531836]"  # the namespace that sees all of them: PROC_PID_INIT_INO of linux/proc_ns.h
OLD = {"a job": 600.0, "a test": 86400.0}  # s that a folder stays whose owner is not known


def age(path: Path) -> float:
    """Seconds since it changed; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def is_ones_own(path: Path) -> bool:
    """No where it is gone meanwhile."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def beds() -> Iterator[Testbed]:
    found = os.listdir(NAMESPACES) if NAMESPACES.exists() else []
    names = {match[1] for match in map(BED_OF.fullmatch, found) if match}
    for name in sorted(names | {path.name for path in BASE.glob("*/")}):
        match = BEDS.fullmatch(name)
        if match and owners.is_dead(int(match[1])):
            yield Testbed(name)


def owned(folder: Path, names: re.Pattern[str]) -> Iterator[Path]:
    """The folders in it with these names whose owners are dead."""
    for path in folder.glob("*/"):
        match = names.fullmatch(path.name)
        if match and owners.is_dead(int(match[1])):
            yield path


def environments() -> dict[int, list[str]]:
    """NAME=value of all processes that may be seen."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found[int(path.parent.name)] = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
    return found


def processes() -> Iterator[int]:
    for pid, variables in environments().items():
        marks = [variable.partition("=")[2] for variable in variables if variable.startswith(f"{owners.MARK}=")]
        if marks and owners.is_mark_of_dead(marks[0]):
            yield pid


def folders() -> Iterator[Path]:
    found = list(Path(tempfile.gettempdir()).glob("dmltrain-*/"))  # before the processes: these make their folders
    variables = [each.partition("=") for every in environments().values() for each in every]
    sees_all = owners.namespace() == EVERY_PROCESS
    running = {value for name, _, value in variables if name in ("DMLTRAIN_JOB", "DMLTRAIN_AGENT")}
    for path in found:
        match = FOLDERS.fullmatch(path.name)
        if not match or path.is_symlink() or not is_ones_own(path) or match["mark"] in running:
            continue
        owner = MARK_OF_A_TEST.fullmatch(match["mark"] or "")
        kind = "a job" if match["mark"] else "a test"
        if owners.is_dead(int(owner[1])) if owner else sees_all and age(path) > OLD[kind]:
            yield path


def remove() -> list[str]:
    """What it has removed, in words."""
    done = []
    for pid in list(processes()):
        control_groups.kill(pid)
        done.append(f"process {pid}")
    done += _remove_what_root_made() if os.geteuid() == 0 else []
    for path in [*folders(), *owned(BUILD, re.compile(r"flaky-(\d+)"))]:
        shutil.rmtree(path, ignore_errors=True)
        done.append(f"folder {path}")
    for path in PLACE.glob("dmltrain-forker-*"):
        if owners.is_dead(int(path.name.split("-")[2])):
            path.unlink(missing_ok=True)
            done.append(f"socket {path}")
    owners.forget_the_dead()
    return done


def _remove_what_root_made() -> list[str]:
    found = [(f"test bed {bed.layout.name}", bed.down) for bed in beds()]
    for group in [group for _, top in control_groups.mounts() for group in owned(top, GROUPS)]:
        found.append((f"control group {group}", partial(control_groups.remove, group)))
    done = []
    for name, remove_it in found:
        try:
            remove_it()
            done.append(name)
        except (TestbedError, OSError, pytest.fail.Exception) as error:  # such as one that another run removes as well
            done.append(f"{name}, by half: {error}")
    return done


if __name__ == "__main__":
    print("\n".join(remove()) or "Nothing is left of dead test runs.")
