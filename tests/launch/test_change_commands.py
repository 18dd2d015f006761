"""`dmltrain job add` and `job remove` with a real launcher and real processes, whose programs only pretend to train."""

import json
import os
import signal
from pathlib import Path

import pytest

from launch import LaunchError
from launch.cli import job
from tests.launch.conftest import go, said, wait_for

# The scheduler says who joins and who leaves, as that of dmltrain does. A worker with the number in FAILS fails.
PROGRAM = """
import os, signal, sys, time
role, rank = os.environ["DMLC_ROLE"], os.environ["DMLC_TASK_ID"]

def leave(number, frame):
    open(f"leaves-{rank}", "w").close()
    while not os.path.exists(f"left-{rank}"):
        time.sleep(0.01)
    sys.exit(0)

def say(text):
    print("2026-11-25 02:16:31,204", text, flush=True)

if role == "worker":
    if os.environ.get("FAILS") == rank:
        print(f"did not join the job: worker {rank} is not like the job's other workers: data 1 (the job: 2)")
        sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
    if "DMLTRAIN_JOIN" in os.environ:
        open(f"joins-{rank}", "w").close()
print("ready", role, os.environ["DMLTRAIN_MAX_WORKERS"], flush=True)
members, view, seen = {0, 1}, 1, set()
if role == "scheduler":
    say("view 1 after op 0: workers 0, 1")
while not os.path.exists("done"):
    names = set(os.listdir(".")) - seen if role == "scheduler" else ()
    for name in sorted(each for each in names if each.startswith(("joins-", "leaves-"))):
        seen.add(name)
        what, number = name.split("-")
        if what == "leaves":
            say(f"worker {number} on localhost leaves on purpose: SIGTERM")
        members = members - {int(number)} if what == "leaves" else members | {int(number)}
        view += 1
        say(f"view {view} after op {view}: workers {', '.join(map(str, sorted(members)))}")
        if what == "leaves":
            open(f"left-{number}", "w").close()
    time.sleep(0.01)
"""


@pytest.fixture
def running(launcher):
    """Starts an elastic job of 2 workers and a server, and waits until all of it runs."""
    return lambda *options: launcher.ready(2, 1, "--elastic", *options, launcher.script(PROGRAM))


def asks(capsys, *words: object) -> tuple[int, str]:
    """The exit code and the output of `dmltrain job`."""
    code = job([str(each) for each in words])
    return code, capsys.readouterr().out


def test_workers_come_and_leave_while_the_job_runs(running, capsys):
    launched = running()
    assert asks(capsys, "add", launched.logs, 1) == (0, "worker 2 on localhost has joined the job in view 2\n")
    wait_for(lambda: launched.log("worker-2") == b"ready worker 1026\n", "the worker's own log")
    said(launched, "starting worker 2 on localhost\n")
    assert asks(capsys, "remove", launched.logs, "worker:1") == (0, "worker 1 has left the job\n")
    said(launched, " has left the job; 2 workers are left\n")
    os.kill(launched.agent(), signal.SIGTERM)
    said(launched, "the agent on localhost got a notice: asked to leave: worker 0 (pid ")
    said(launched, " has left the job; 0 workers are left\n")
    wait_for(lambda: sum("left_after" in row for row in launched.record["processes"]) == 3, "the record")
    lines = [line.rpartition(", ")[0] for line in asks(capsys, "ps", launched.logs)[1].splitlines()[-4:]]
    changes = ("joined: worker 2", "left: worker 0", "left: worker 1", "left: worker 2")
    assert lines == [f"{change} on localhost" for change in changes]
    go(launched, "done")
    result = launched.ends()
    last = result.err.splitlines()[-1]
    assert last.startswith("0 processes left on 1 host; joined: worker 2 on localhost after ")
    assert "; left: worker 1 after " in last and "lost" not in last
    assert b"[worker-2] ready" in result.out


@pytest.mark.thorough
def test_who_does_not_join_is_named_with_the_reason(running, capsys):
    launched = running("--env", "FAILS=3", "--restart-workers", 1)
    code, out = asks(capsys, "add", launched.logs, "localhost:2")
    assert code == 125
    lines = sorted(out.splitlines())
    assert lines[0] == "    did not join the job: worker 3 is not like the job's other workers: data 1 (the job: 2)"
    assert lines[1].startswith("its last lines (") and lines[1].endswith("worker-3.log):")
    assert lines[2] == "worker 2 on localhost has joined the job in view 2"
    assert lines[3].endswith(" exited with code 75 (it lost another process of the job), before it had joined the job")
    go(launched, "done")
    launched.ends()


def refused(*words: object) -> str:
    with pytest.raises(LaunchError) as caught:
        job([str(each) for each in words])
    return str(caught.value)


def test_who_cannot_be_asked_is_named(launcher):
    script = launcher.script("import time; print('ready', flush=True); time.sleep(600)")
    launched = launcher.ready(1, 0, script)
    assert "cannot change while it runs" in refused("add", launched.logs, "1")
    wait_for(lambda: all(row["pid"] for row in launched.record["processes"]), "the launcher's last word before the end")
    record = launched.record
    assert record["control"] == ""
    for change, text in (
        ({"launched_from": {**record["launched_from"], "host": "elsewhere"}}, "was started on elsewhere"),
        ({"control": str(launcher.folder / "gone")}, "does not answer: it has ended, or was killed"),
        ({"control": 7}, "control is 7: expected a value of type str"),
        ({"ended": "2026-11-25T02:16:31+0000"}, " has ended"),
    ):
        (launched.logs / "job.json").write_text(json.dumps({**record, **change}))
        assert text in refused("remove", launched.logs, "worker:0")
    (launched.logs / "job.json").write_text(json.dumps(record))
    launched.signal(signal.SIGTERM)
    launched.wait()
    assert " has ended" in refused("add", launched.logs, "1")
    (launched.logs / "job.json").write_text(json.dumps(record))
    assert "no longer runs: it was killed, and its job ends" in refused("add", launched.logs, "1")


@pytest.mark.thorough
def test_a_killed_launcher_leaves_no_socket(running):
    launched = running()
    sockets, name = Path("/proc/net/unix"), launched.record["control"]
    assert name in sockets.read_text()
    launched.signal(signal.SIGKILL)
    launched.wait()
    assert "no longer runs: it was killed" in refused("add", launched.logs, "1")
    assert name not in sockets.read_text()
    wait_for(lambda: not launched.left(), "the end of the job")
