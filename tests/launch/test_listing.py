"""--ps: the processes of a job as /proc has them, and as people read them."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dmltrain_launch.agent import listing
from dmltrain_launch.agent.process import members
from dmltrain_launch.commands import processes
from tests.launch.conftest import wait_for
from tests.other_user import OTHER_USER, as_user, python

PARENT = """
import os, subprocess, sys, time
bare = {"PATH": os.environ["PATH"]}
child = subprocess.Popen(["sleep", "600"], env=bare)
block = b"x" * (64 << 20)
end = time.process_time() + 0.5
while time.process_time() < end: pass
print("ready", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A job's mark; what carries it is killed."""
    name = f"listing-{secrets.token_hex(6)}"
    yield name
    for row in listing.rows(name):
        os.kill(row["pid"], signal.SIGKILL)


def start(mark: str, role: str, rank: int, *argv: str, **more: str) -> subprocess.Popen:
    environment = dict(os.environ, DMLTRAIN_JOB=mark, DMLC_ROLE=role, DMLC_TASK_ID=str(rank), **more)
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE)


def line(child: subprocess.Popen) -> list[bytes]:
    return child.stdout.readline().split()


def test_a_process_and_its_descendant(mark):
    parent = start(mark, "worker", 3, sys.executable, "-c", PARENT, "one", "a b\nc", "")
    child = int(line(parent)[1])
    found = {row["pid"]: row for row in listing.rows(mark)}
    assert set(found) == {parent.pid, child}
    row = found[parent.pid]
    assert (row["role"], row["rank"], row["parent"]) == ("worker", 3, os.getpid())
    assert row["command"] == [sys.executable, "-c", PARENT, "one", "a b\nc", ""]
    assert 64 <= row["rss_mib"] < 200 and row["state"] in "SR"
    assert 0.5 <= row["cpu_seconds"] < 20 and row["cpu_seconds"] <= row["age_seconds"] + 0.1 < 600
    bare = found[child]
    assert (bare["role"], bare["rank"], bare["parent"]) == ("worker", 3, parent.pid), "by its ancestor"
    assert bare["command"] == ["sleep", "600"] and bare["rss_mib"] < 64
    json.dumps(list(found.values()))


def test_states_agents_and_orphans(mark):
    stopped = start(mark, "server", 1, "sleep", "600")
    stopped.send_signal(signal.SIGSTOP)
    agent = subprocess.Popen(["sleep", "600"], env=dict(os.environ, DMLTRAIN_AGENT=mark))
    orphan = start(mark, "worker", 0, "sh", "-c", "sleep 600 >/dev/null & echo $!")
    pid = int(line(orphan)[0])
    orphan.wait()
    expected = {stopped.pid: ("server", 1, "T"), agent.pid: ("agent", None, "S"), pid: ("worker", 0, "S")}

    def found() -> dict:
        return {row["pid"]: (row["role"], row["rank"], row["state"]) for row in listing.rows(mark)}

    wait_for(lambda: found() == expected, "all three with their own environments")


def test_what_descends_from_an_agent_alone_has_no_role_and_a_rank_is_a_number(mark):
    script = "env -i sleep 600 & echo $!; wait"
    pipe = {"stdout": subprocess.PIPE, "start_new_session": True}
    agent = subprocess.Popen(["sh", "-c", script], env=dict(os.environ, DMLTRAIN_AGENT=mark), **pipe)
    helper = int(line(agent)[0])
    odd = subprocess.Popen(["sleep", "600"], env=dict(os.environ, DMLTRAIN_JOB=mark, DMLC_ROLE="r", DMLC_TASK_ID="-"))
    expected = {agent.pid: ("agent", None), helper: ("", None), odd.pid: ("r", None)}

    def found() -> dict:
        return {row["pid"]: (row["role"], row["rank"]) for row in listing.rows(mark)}

    wait_for(lambda: found() == expected, "all three, the helper with its own environment")


def test_a_rank_of_many_digits_is_none():
    found = listing._identity({b"DMLTRAIN_JOB": b"m", b"DMLC_ROLE": b"worker", b"DMLC_TASK_ID": b"9" * 5000}, "m")
    assert found == {"role": "worker", "rank": None}


def test_a_process_of_another_user_is_none_of_the_jobs_whatever_mark_it_has(mark):
    script = "print('ready', flush=True); input()"
    environment = {"DMLTRAIN_JOB": mark, "DMLC_ROLE": "worker", "DMLC_TASK_ID": "0"}
    command = as_user(OTHER_USER, python(), "-I", "-S", "-c", script)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd="/", **pipes) as other:
        assert other.stdout.readline() == "ready\n"
        assert other.pid not in members(mark, listing.NO_ROOT)
        other.communicate("\n")


def test_a_strangers_environment_is_shown_in_a_short_line(mark):
    """It has the job's mark, and else no word that is text."""
    odd = {b"DMLTRAIN_JOB": mark.encode(), b"DMLC_ROLE": b"\xff\n" * 50000, b"DMLC_TASK_ID": b"\xb2"}
    large = {b"\xfe%d" % number: b"\xff\n" * 50000 for number in range(10)}
    stranger = subprocess.Popen(["sh", "-c", "read line", b"\xff\x1b"], env={**odd, **large}, stdin=subprocess.PIPE)
    found = wait_for(lambda: listing.rows(mark), "the process")
    _, line, _ = processes.table({"h1": json.loads(json.dumps(found))})
    assert f" {stranger.pid} " in line and "read line" in line and r"\x1b" in line and len(line) < 1000
    stranger.communicate(b"\n")


def test_a_process_is_as_old_as_its_start_is_long_ago(mark):
    began = time.monotonic()
    young = start(mark, "worker", 0, "sleep", "600")
    (row,) = wait_for(lambda: listing.rows(mark), "the process")
    before = time.process_time()
    assert len(listing.rows(mark)) == 1
    assert time.process_time() - before < 1.0, "of a core, with all processes of this machine to look through"
    assert row["pid"] == young.pid
    assert 0.0 <= row["age_seconds"] <= time.monotonic() - began + 0.1
    assert 0.0 <= row["cpu_seconds"] <= row["age_seconds"] + 0.1


def test_a_command_of_just_4096_bytes_is_whole_and_longer_ones_are_cut_between_arguments(mark):
    same = ["sh", "-c", "sleep 600; : $@"]
    just = [*same, "x" * (4096 - len("sh-csleep 600; : $@"))]
    expected = {
        tuple(just): just,
        (*just[:-1], just[-1] + "x"): [*same, "..."],
        (*same, "x" * 3000, "y" * 3000, "z", "\udcff"): [*same, "x" * 3000, "..."],
        (*same, "\udcff"): [*same, "\udcff"],
    }
    pids = {start(mark, "worker", rank, *argv).pid: argv for rank, argv in enumerate(expected)}

    def shown() -> dict:
        rows = json.loads(json.dumps(listing.rows(mark)))
        return {row["pid"]: row["command"] for row in rows if row["pid"] in pids}

    wait_for(lambda: shown() == {pid: expected[argv] for pid, argv in pids.items()}, "all commands")


def row(pid: int, role: str = "worker", rank: int | None = 0, **more: object) -> dict:
    facts = {"parent": 1, "state": "S", "cpu_seconds": 1.0, "rss_mib": 99.6, "age_seconds": 2.0, "command": ["sleep"]}
    return {"pid": pid, "role": role, "rank": rank, **facts, **more}


def test_the_table():
    hosts = {
        "h1": [
            row(9, "agent", None),
            row(8, "worker", 10, cpu_seconds=93784.0, age_seconds=59.94),
            row(7, "worker", 2, cpu_seconds=307, state="T", command=["python", "a b", "--key=se'same"]),
            row(3, "", None),
            row(4, "server", 0),
            row(5, "scheduler", 0),
        ],
        "host-2": [row(123456, "worker", 0, rss_mib=20000, state="X", command=["x\n\x1b[31m\udcff", "é"])],
        "h3": [],
    }
    assert processes.table(hosts, ("se'same",)) == [
        "HOST    ROLE       RANK     PID  STATE          CPU  RSS MiB     AGE  COMMAND",
        "h1      scheduler     0       5  sleeping     1.0 s      100   2.0 s  sleep",
        "h1      server        0       4  sleeping     1.0 s      100   2.0 s  sleep",
        "h1      worker        2       7  stopped       5:07      100   2.0 s  python 'a b' '--key=***'",
        "h1      worker       10       8  sleeping  26:03:04      100  59.9 s  sleep",
        "h1      -             -       3  sleeping     1.0 s      100   2.0 s  sleep",
        "h1      agent         -       9  sleeping     1.0 s      100   2.0 s  sleep",
        "host-2  worker        0  123456  X            1.0 s    20000   2.0 s  'x\\n\\x1b[31m\\udcff' 'é'",
        "7 processes on 3 hosts",
    ]
    cut = processes.table(hosts, (), 60)
    assert {len(line) for line in cut[1:-1]} == {60} and all(line.endswith("...") for line in cut[1:-1])
    assert processes.table({"h1": []}) == ["0 processes on 1 host"]
    assert processes.table({"h1": [row(1)]})[-1] == "1 process on 1 host"
