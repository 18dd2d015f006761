"""`dmltrain job add` and `remove` with a real launcher: programs that only pretend to train, and then one that does."""

import json
import os
import re
import signal
import time
from datetime import datetime

import pytest

from dmltrain.audit.count import count
from dmltrain_launch import LaunchError
from dmltrain_launch.agent.process import process
from dmltrain_launch.cli import job
from dmltrain_launch.control import client
from tests.forked_job import forked
from tests.launch.conftest import ROOT, go, said, wait_for

# The scheduler reports who joins and who leaves, as that of dmltrain does. All print lies, in the words of its log. A
# worker with the number in FAILS fails.
PROGRAM = """
import json, os, signal, socket, sys, time
role, rank = os.environ["DMLC_ROLE"], os.environ["DMLC_TASK_ID"]

def leave(number, frame):
    open(f"leaves-{rank}", "w").close()
    while not os.path.exists(f"left-{rank}"):
        time.sleep(0.01)
    sys.exit(0)

def report(op, **fields):
    agent.send(json.dumps({"op": op, **fields}).encode())

if role == "worker":
    if os.environ.get("FAILS") == rank:
        print(f"did not join the job: worker {rank} is not like the job's other workers: data 1 (the job: 2)")
        sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
    if "DMLTRAIN_JOIN" in os.environ:
        open(f"joins-{rank}", "w").close()
for line in ("worker 0 on localhost leaves on purpose: a lie", "view 9 after op 9: workers 0, 1, 2, 3"):
    print("2026-11-25 02:16:31,204", line, flush=True)
print("ready", role, os.environ["DMLTRAIN_MAX_WORKERS"], flush=True)
members, view, seen = {0, 1}, 1, set()
if role == "scheduler":
    agent = socket.socket(fileno=int(os.environ["DMLTRAIN_AGENT_FD"]))
    report("view", view=1, workers=[0, 1])
while not os.path.exists("done"):
    names = set(os.listdir(".")) - seen if role == "scheduler" else ()
    for name in sorted(each for each in names if each.startswith(("joins-", "leaves-"))):
        seen.add(name)
        what, number = name.split("-")
        if what == "leaves":
            report("leaves", rank=int(number), reason="SIGTERM")
        members = members - {int(number)} if what == "leaves" else members | {int(number)}
        view += 1
        report("view", view=view, workers=sorted(members))
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
    code = job([str(word) for word in words])
    return code, capsys.readouterr().out


def test_workers_come_and_leave_while_the_job_runs(running, capsys):
    launched = running()
    assert asks(capsys, "add", launched.logs, 1) == (0, "worker 2 on localhost has joined the job in view 2\n")
    wait_for(lambda: launched.log("worker-2").endswith(b"ready worker 1026\n"), "the worker's own log")
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
    assert "; left: worker 1 after " in last and "lost" not in last and "a lie" not in result.err
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
        job([str(word) for word in words])
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
        ({"control": 7}, "control is 7, expected a text"),
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


def test_a_stopped_launcher_is_named_and_not_waited_for(running, monkeypatch):
    launched = running()
    monkeypatch.setattr(client, "SILENT_SECONDS", 1.0)
    launched.signal(signal.SIGSTOP)
    pid = launched.process.pid
    wait_for(lambda: process(pid).state == "T", "its stop")
    text = refused("add", launched.logs, "1")
    assert f"process {pid} of this machine, has not answered for 1 s (it is stopped); kill -CONT {pid} lets" in text
    launched.signal(signal.SIGCONT)
    (launched.folder / "done").touch()
    launched.wait()


# -- a job that trains: each sample is used once -----------------------------------------------------------------------

WORDS = "--kv-store dist_sync --network mlp --batch-size 16 --num-epochs 4 --emulate-step 0.1"


@pytest.mark.thorough
def test_a_rule_changes_an_elastic_job_with_a_view(launcher):
    words = "--kv-store dist_sync --update-on-kvstore 1 --network mlp --batch-size 16 --num-epochs 2 "
    words += "--emulate-step 0.1 --slow-worker 1:2"
    rule = ["--rule", "when straggler > 20 % set kv_store=dist_ssp staleness=4"]
    program = forked(ROOT / "examples/train_digits.py", *words.split())
    launched = launcher.start("-n", 2, "-s", 1, "--elastic", *rule, *program)
    launched.ends()
    (change,) = launched.record["kvstore_changes"]
    assert change["now"] == "kv_store=dist_ssp staleness=4"
    assert change["by"].startswith("the rule 'when straggler > 20 %")
    assert b"kv_store=dist_ssp staleness=4" in launched.log("worker-0")


@pytest.mark.thorough
def test_a_worker_that_is_added_takes_its_part_of_the_samples_and_one_that_is_removed_hands_its_own_back(
    launcher, capsys
):
    program = forked(ROOT / "examples/train_digits.py", *WORDS.split(), "--audit", "audit")
    launched = launcher.start("-n", 2, "-s", 1, "--elastic", *program)
    wait_for(lambda: b"View 1" in launched.log("worker-1"), "the first view")
    assert asks(capsys, "add", launched.logs, 1) == (0, "worker 2 on localhost has joined the job in view 2\n")
    assert asks(capsys, "remove", launched.logs, "worker:1") == (0, "worker 1 has left the job\n")
    result = launched.ends()
    last = result.err.splitlines()[-1]
    assert "; joined: worker 2 on localhost after " in last and "; left: worker 1 after " in last and "lost" not in last
    found = count(launched.folder / "audit")
    assert found.problems == () and [*found.times] == [*range(4)]
    assert all((times == 1).all() for times in found.times.values())
    assert (launched.folder / "audit/samples-2.jsonl").read_text().count("\n") > 3, "it had its part"
    assert b"Final weights sha256=" in launched.log("worker-2")


# -- how soon ----------------------------------------------------------------------------------------------------------

SECONDS = 5.0  # docs/elastic-members.md has what it takes on a busy machine
# An epoch takes about 18 s: who waited for its end would be late.
STEADY = "--kv-store dist_sync --network mlp --batch-size 4 --num-epochs 2 --emulate-step 0.1 --disp-batches 1"


def when(log: bytes, pattern: bytes) -> float | None:
    """When the first such line was written, in s since 1970."""
    found = re.search(rb"^(.{23}) Node\[2\] " + pattern, log, re.MULTILINE)
    return datetime.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S,%f").timestamp() if found else None


@pytest.mark.alone
@pytest.mark.thorough
def test_a_worker_that_is_added_makes_its_first_step_within_5_s_of_its_own_start(launcher, capsys):
    """The program's own start, from when its process begins until it is ready, does not count."""
    program = forked(ROOT / "examples/train_digits.py", *STEADY.split())
    launched = launcher.start("-n", 2, "-s", 1, "--elastic", *program)
    wait_for(lambda: b"View 1" in launched.log("worker-1"), "the first view")
    asked = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert asks(capsys, "add", launched.logs, 1) == (0, "worker 2 on localhost has joined the job in view 2\n")
    wait_for(lambda: when(launched.log("worker-2"), rb"Epoch\[0\] Batch "), "its first step")
    (pid,) = (each["pid"] for each in launched.record["processes"] if (each["role"], each["rank"]) == ("worker", 2))
    found, log = process(pid), launched.log("worker-2")
    launched.process.send_signal(signal.SIGINT)
    ready, stepped = when(log, rb"Elastic: "), when(log, rb"Epoch\[0\] Batch ")
    assert found and ready and stepped
    tick = 1.0 / os.sysconf("SC_CLK_TCK")  # in which the kernel counts when a process started, and leaves the rest out
    parts = {"launcher": found.start * tick - asked, "join": stepped - ready}
    assert min(parts.values()) > -tick and sum(parts.values()) < SECONDS, parts
    launched.ends(130)
