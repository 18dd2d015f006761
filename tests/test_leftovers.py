"""What a killed pytest leaves, the next one removes; an interrupted pytest leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import control_groups, leftovers, owners
from tests.cluster.command import namespaces
from tests.cluster.requirements import missing
from tests.cluster.testbed import Testbed, locked
from tests.running_job import ROOT
from tests.waiting import wait_for


@pytest.fixture
def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_process_is_killed_once_its_pytest_is_gone(dead):
    here, (_, me, since) = owners.namespace(), owners.mark().split()
    for mark, killed in (
        (f"{here} {me} {since}", False),
        (f"{here} {dead} {since}", True),
        (f"{here} {me} 1.0", True),
        (f"pid:[1] {dead} {since}", False),  # in another namespace of pids
    ):
        with subprocess.Popen(["sleep", "1000"], env={**os.environ, owners.MARK: mark}) as process:
            wait_for(lambda pid=process.pid: leftovers.environments().get(pid), "its environment")
            leftovers.remove()
            if not killed:
                assert process.poll() is None
                process.kill()
            assert process.wait() == -signal.SIGKILL


def test_a_control_group_is_removed_with_its_frozen_processes(dead, sleeping):
    top, why = control_groups.freezer(os.geteuid())
    if not top:
        pytest.skip(f"no control group that freezes: missing is {why}")
    group, of_this = top / f"dmltrain-test-{dead}", top / f"dmltrain-cost-{os.getpid()}"
    try:
        of_this.mkdir(exist_ok=True)
        (group / "frozen").mkdir(parents=True)
        control_groups.enter(group / "frozen", sleeping.pid)
        control_groups.set_frozen(group / "frozen", True)
        leftovers.remove()
        assert not group.exists() and sleeping.wait() == -signal.SIGKILL
        assert of_this.exists()
    finally:
        with contextlib.suppress(OSError):  # that of --cost is in use
            of_this.rmdir()


def test_private_folders_of_jobs_that_are_over_are_removed(dead, sleeping):
    running = f"test-{dead}-{uuid.uuid4().int % 10**9}"
    process = subprocess.Popen(["sleep", "1000"], env={**os.environ, "DMLTRAIN_JOB": running})
    wait_for(lambda: f"DMLTRAIN_JOB={running}" in leftovers.environments()[process.pid], "its environment")
    marks = {f"ssh-{dead}-12": False, f"ssh-{os.getpid()}-12": True, "train-12ab": True, "train-34cd": False}
    marks[running] = True
    folders = {Path(tempfile.mkdtemp(prefix=f"dmltrain-{mark}.")): stays for mark, stays in marks.items()}
    old = next(folder for folder in folders if "34cd" in folder.name)
    os.utime(old, (0, 0))
    try:
        leftovers.remove()
        assert {folder: folder.exists() for folder in folders} == folders
    finally:
        process.kill()
        process.wait()
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def test_an_owner_lives_though_its_pid_is_not_seen(dead, sleeping):
    """As in tests of a mutant, which run in a namespace of pids. Another process with its number is not the owner."""
    code = "from tests import owners; owners.own(); input()"
    ask = "import sys; from tests import owners; print(*(owners.is_dead(int(pid)) for pid in sys.argv[1:]))"
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces of pids can be made here")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT) as owner:
        wait_for(owners.lock_file(owner.pid).exists, "the owner's lock")
        asked = [*apart, sys.executable, "-c", ask, *map(str, (owner.pid, os.getpid(), dead))]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.split() == ["False", "False", "True"], done.stderr
        owner.kill()
    assert owners.is_dead(owner.pid) and not owners.lock_file(owner.pid).exists()
    wait_for(lambda: owners.is_dead(sleeping.pid), "sleep runs, which is no pytest")


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    """pytest with two workers, each of which has a test bed. After SIGTERM, which comes to the first process only, the
    workers do not end and are killed."""
    if lacking := missing():
        pytest.skip(f"no test bed: it needs {lacking}")
    words = f"-m pytest -q -n 2 --basetemp {tmp_path / 'of-it'} tests/cluster/programs/stays.py".split()
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    leftovers.remove()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def beds_of(process: subprocess.Popen[bytes]) -> list[str]:
    """Names of the test beds of both of its workers, once they are there."""

    def booted() -> list[str]:
        names = [f"pytest{pid}" for pid in children(process.pid)]
        there = [name for name in names if Testbed(name).stored() and Testbed(name).pid_1("h5")]
        return there if len(there) == 2 else []

    return wait_for(booted, "the test beds of two workers")


def left_of(beds: list[str]) -> list[str]:
    return [name for name in namespaces() for bed in beds if name.startswith(f"testbed-{bed}-")]


@pytest.mark.thorough
def test_the_next_run_removes_what_a_killed_one_has_left(run):
    beds = beds_of(run)
    with ExitStack() as stack:
        for bed in beds:  # nobody else removes it meanwhile
            stack.enter_context(locked(f"bed-{bed}"))
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        assert len(left_of(beds)) >= 2 * 6
    next_run = [sys.executable, *["-m", "pytest", "--collect-only", "-q", "tests/test_tiers.py"]]
    subprocess.run(next_run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert left_of(beds) == [] and not any(Testbed(bed).folder.exists() for bed in beds)


@pytest.mark.thorough
def test_an_interrupted_run_leaves_nothing(run):
    beds = beds_of(run)
    workers = children(run.pid)
    os.killpg(run.pid, signal.SIGINT)  # as at a terminal
    run.wait()
    assert left_of(beds) == [] and not any(Testbed(bed).folder.exists() for bed in beds)
    marks = [f"{owners.MARK}={owners.namespace()} {pid} " for pid in workers]
    assert not [each for every in leftovers.environments().values() for each in every if each.startswith(tuple(marks))]
