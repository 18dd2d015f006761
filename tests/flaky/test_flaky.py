"""make flaky finds what a fast machine hides."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import control_groups, leftovers, owners
from tests.flaky.changed import COMMITS, changed_tests
from tests.flaky.conditions import Conditions
from tests.running_job import ROOT
from tests.waiting import wait_for

pytestmark = pytest.mark.thorough
TOP, WHY = control_groups.freezer(os.geteuid())
freezes = pytest.mark.skipif(not TOP, reason=f"nothing can be frozen here: missing is {WHY}")

ANSWERS = """
import subprocess, sys, time

ANSWER = "import sys\\nfor line in sys.stdin: print(line, end='', flush=True)"

def test_answers():
    with subprocess.Popen([sys.executable, "-c", ANSWER], stdin=-1, stdout=-1, text=True, bufsize=1) as process:
        for number in range(30):
            began = time.monotonic()
            process.stdin.write(f"{number}\\n")
            assert process.stdout.readline() == f"{number}\\n"
            assert time.monotonic() < began + 0.5
            time.sleep(0.1)
        process.stdin.close()
"""
ORDER = """
import subprocess, sys

SAYS = "import sys, time; time.sleep(float(sys.argv[1])); print(sys.argv[1], flush=True)"

def test_order():
    for _ in range(6):
        commands = [[sys.executable, "-I", "-S", "-c", SAYS, wait] for wait in ("0.6", "0.2")]
        with subprocess.Popen(["cat"], stdin=-1, stdout=-1, text=True) as both:
            processes = [subprocess.Popen(command, stdout=both.stdin) for command in commands]
            assert [process.wait() for process in processes] == [0, 0]
            said = both.communicate()[0].split()
        assert said == ["0.2", "0.6"]
"""
STAYS = """
import subprocess

def test_stays():
    subprocess.run(["sleep", "1000"])
"""
TAKES_LONG = """
import time

def test_first():
    time.sleep(3)

def test_second():
    raise AssertionError
"""
SENDS = """
import os, socket, sys, time
a, b = socket.socketpair()
ways = {
    "send": lambda: a.send(b"x"),
    "sendall": lambda: a.sendall(b"x"),
    "sendmsg": lambda: a.sendmsg([b"x"]),
    "write": lambda: os.write(a.fileno(), b"x"),
    "writev": lambda: os.writev(a.fileno(), [b"x"]),
}
for name, way in ways.items():
    longest = 0.0
    for _ in range(60):
        began = time.perf_counter()
        way()
        longest = max(longest, time.perf_counter() - began)
        assert b.recv(10) == b"x"
    print(name, longest)
"""


def flaky(path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.flaky", str(path), "--seed", "1", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "test_it.py").write_text(text)
        return tmp_path / "test_it.py"

    return write


@freezes
@pytest.mark.parametrize("text", [ANSWERS, ORDER], ids=["a time", "an order"])
def test_a_test_that_expects_what_nothing_guarantees_fails(write, text):
    process = flaky(write(text), "--busy", "0", "--times", "20", "--exitfirst")
    said, _ = process.communicate()
    assert process.returncode == 1, said
    assert re.search(r"seed 1, run \d: .*test_it.py failed", said) and "FAILED" in said
    assert re.search(r"Load: \d", said)
    assert re.search(r"\d s, for [01]\.\d+ s: \d+ .*python", said), said


def test_no_test_starts_after_the_time_is_over(write):
    process = flaky(write(TAKES_LONG), "--busy", "0", "--times", "2", "--seconds", "2")
    said, _ = process.communicate()
    assert (
        process.returncode == 0 and "1 of 2 runs made, the last one perhaps in part, as 2 s are over; 0 failed" in said
    ), said


@freezes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_one_leaves_nothing(write, number):
    process = flaky(write(STAYS), "--busy", "1")
    group = TOP / f"dmltrain-flaky-{process.pid}"
    wait_for(lambda: any(control_groups.members(cell) for cell in group.glob("frozen*")), "a process is frozen")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = [*control_groups.members(group), *map(int, children)]
    assert len(pids) >= 3  # sleep, pytest, a busy loop
    process.send_signal(number)
    process.communicate()
    if number == signal.SIGKILL:
        leftovers.remove()
    else:
        assert process.returncode == 130
    assert not group.exists() and not (ROOT / f"build/flaky-{process.pid}").exists()
    wait_for(lambda: not any(map(owners.started, pids)), "the end of all processes")  # a busy loop looks for its parent


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler, which builds the library")
def test_sends_are_delayed(tmp_path):
    conditions = Conditions(tmp_path / "of-it", random.Random(1), 0, (None, "root"))
    try:
        conditions.start()
        environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "of-it/delayed_sends.so")}
        done = subprocess.run(
            [sys.executable, "-c", SENDS], env=environment, capture_output=True, text=True, check=True
        )
    finally:
        conditions.close()
    longest = {name: float(seconds) for name, seconds in map(str.split, done.stdout.splitlines())}
    assert len(longest) == 5 and min(longest.values()) > 0.005, longest


def test_changed_files(tmp_path):
    def git(words: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@y"]
        subprocess.run(["git", *identity, *words.split()], cwd=tmp_path, check=True, capture_output=True)

    def commit(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_text(f"{time.monotonic()}")
        git("add .")
        git("commit -m change")

    git("init -b main")
    commit("test_old.py", "test_gone.py", "test_tagged.py")
    assert changed_tests(tmp_path) == []
    git("tag v1")
    commit("test_tagged.py", "other.py")
    assert changed_tests(tmp_path) == ["test_tagged.py"]
    git("update-ref refs/remotes/origin/main HEAD")
    git("rm -q test_gone.py")
    commit("test_branch.py")
    (tmp_path / "test_old.py").write_text("not committed")
    assert changed_tests(tmp_path) == ["test_branch.py", "test_old.py"]
    git("tag v2")
    git("commit -am more")
    git("update-ref refs/remotes/origin/main HEAD")
    assert changed_tests(tmp_path) == ["test_old.py"]  # nothing is new on the branch, so since the tag
    git("tag -d v1 v2")
    assert changed_tests(tmp_path) == ["test_branch.py", "test_old.py", "test_tagged.py"]
    for _ in range(COMMITS - 1):
        git("commit --allow-empty -m nothing")
    assert changed_tests(tmp_path) == ["test_old.py"]
    git("commit --allow-empty -m nothing")
    assert changed_tests(tmp_path) == []
