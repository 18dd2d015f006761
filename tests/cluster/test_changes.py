"""Hosts come to a running elastic job and leave it, on real hosts over SSH."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain.audit.count import count
from tests.cluster.launching import LONGEST, ROOT, Front, Launched, way
from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.forked_job import forked
from tests.launch.test_change_commands import PROGRAM
from tests.waiting import wait_for


def ask(front: Front, launched: Launched, do: str, what: object) -> tuple[int, str]:
    """The exit code and the output of `dmltrain job`, run on the launcher's machine."""
    words = [sys.executable, "-c", "import launch.cli; launch.cli.job_main()", do, str(launched.logs), str(what)]
    done = front.testbed.start(
        LOGIN,
        words,
        cwd=front.folder,
        env=front.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.wait(LONGEST), done.stdout.read()


@pytest.mark.thorough
def test_a_host_is_added_and_removed_and_one_that_is_off_is_named(testbed: Testbed, tmp_path: Path):
    front = Front(testbed, tmp_path)
    options = ["-n", 2, "-s", 1, "--elastic", front.script(PROGRAM).name]
    launched = front.start(*way("ssh", "h1,h2"), *options)
    launched.wait_for_words("ready", "scheduler-0", "server-0", "worker-0", "worker-1")
    wait_for(lambda: all(row["pid"] for row in launched.record["processes"]), "the record", LONGEST)
    code, out = ask(front, launched, "add", "h3:2")
    (one, first), (other, second) = re.findall(r"worker (\d) on h3 has joined the job in view (\d)\n", out)
    assert (code, {one, other}, [first, second]) == (0, {"2", "3"}, ["2", "3"]), "either may be the first"
    assert [host["address"] for host in launched.record["hosts"] if host["name"] == "h3"] == [testbed.address("h3")]
    assert ask(front, launched, "remove", "worker:1") == (0, "worker 1 has left the job\n")
    code, out = ask(front, launched, "remove", "h3")
    assert code == 0 and sorted(out.splitlines()) == [
        "h3 is not part of the job any more",
        "worker 2 has left the job",
        "worker 3 has left the job",
    ]
    wait_for(lambda: testbed.processes("h3") == [], "the end of its agent", LONGEST)
    testbed.kill("h4")
    code, out = ask(front, launched, "add", "h4,h1")
    assert code == 125 and "h4 was not added: " in out and "worker 4 on h1 has joined the job in view 7" in out, out
    (tmp_path / "done").touch()
    result = launched.wait()
    assert result.code == 0, result
    last = result.err.splitlines()[-1]
    assert re.match("0 processes left on 3 hosts; joined: worker [23] on h3 after ", last), last


TRAINING = ["--kv-store", "dist_sync", "--batch-size", 16, "--num-epochs", 3, "--network", "mlp", "--emulate-step", 0.1]


@pytest.mark.thorough
def test_a_training_goes_on_when_the_host_of_the_scheduler_and_a_server_is_removed(testbed: Testbed, tmp_path: Path):
    front, hosts, audit = Front(testbed, tmp_path), tmp_path / "hosts", tmp_path / "audit"
    hosts.write_text("h1 roles=server,worker\nh2 roles=scheduler,server,worker\n")
    options = ["-n", 2, "-s", 2, "--elastic", "--env", "OMP_NUM_THREADS=1", "--hostfile", hosts]
    program = forked(ROOT / "examples/train_digits.py", *TRAINING, "--audit", audit)
    launched = front.start("--launcher", "ssh", *options, *program)
    rows = audit / "samples-0.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 2, "training", LONGEST)
    (leaves,) = [row["rank"] for row in launched.record["processes"] if (row["role"], row["host"]) == ("worker", "h2")]
    code, out = ask(front, launched, "remove", "h2")
    assert (code, sorted(out.splitlines())) == (
        0,
        ["h2 is not part of the job any more", f"worker {leaves} has left the job"],
    )
    wait_for(lambda: testbed.processes("h2") == [], "the agent of h2 to end, a moment after its last word", LONGEST)
    result = launched.wait(250)
    assert result.code == 0, result
    last = result.err.splitlines()[-1]
    assert "; left: worker " in last and "server " in last and "(replaced on h1)" in last and "lost: " not in last, last
    found = count(audit)
    assert found.problems == () and all((times == 1).all() for times in found.times.values())


@pytest.mark.thorough
def test_the_hosts_file_is_followed(testbed: Testbed, tmp_path: Path):
    front, hosts = Front(testbed, tmp_path), tmp_path / "hosts"
    hosts.write_text("h1\nh2\n")
    options = ["-H", hosts, "-n", "2:3", "-s", 1, "--elastic", "--watch-hosts", "--min-workers", 1]
    launched = front.start("--launcher", "ssh", *options, front.script(PROGRAM).name)
    launched.wait_for_words("ready", "scheduler-0", "server-0", "worker-0", "worker-1")
    wait_for(lambda: all(row["pid"] for row in launched.record["processes"]), "the record", LONGEST)
    away = next(row for row in launched.record["processes"] if row["role"] == "worker" and row["host"] != "h1")
    hosts.write_text("h1 slots=x\n")
    wait_for(lambda: "the job goes on with the hosts that it has" in launched.err, "the notice", LONGEST)
    hosts.write_text("h1\nh3\n")
    wait_for(lambda: f"worker {away['rank']} (pid {away['pid']} on h2) has left the job" in launched.err, "h2", LONGEST)
    hosts.write_text("h1\nh3\nh4\n")
    wait_for(lambda: "worker 2 on h" in launched.err and "has joined the job in view" in launched.err, "h3", LONGEST)
    (tmp_path / "done").touch()
    result = launched.wait()
    assert result.code == 0, result
    assert "; joined: worker 2 on h" in result.err.splitlines()[-1]


@pytest.mark.thorough
def test_a_host_of_the_file_that_was_off_returns_to_the_training(testbed: Testbed, tmp_path: Path):
    front, hosts, audit = Front(testbed, tmp_path), tmp_path / "hosts", tmp_path / "audit"
    hosts.write_text("h1\nh2 roles=worker\n")
    options = ["-H", hosts, "-n", 2, "-s", 1, "--elastic", "--watch-hosts", "--env", "OMP_NUM_THREADS=1"]
    program = forked(ROOT / "examples/train_digits.py", *TRAINING, "--num-epochs", 60, "--audit", audit)
    launched = front.start("--launcher", "ssh", *options, *program)
    rows = audit / "samples-0.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 2, "training", LONGEST)
    testbed.kill("h2")
    again = "h2 is in the hosts file: it is tried again in 10 s (--watch-hosts)"
    wait_for(lambda: again in launched.err, "the loss of h2", LONGEST)
    testbed.boot("h2")
    wait_for(lambda: "worker 2 on h2 has joined the job in view 3" in launched.err, "the return of h2", LONGEST)
    wait_for(lambda: "Epoch[" in launched.log("worker-2"), "the end of its first epoch", LONGEST)
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait().code == 130
    *whole, _ = count(audit).times.values()
    assert len(whole) > 1 and all((times == 1).all() for times in whole)


@pytest.mark.thorough
def test_sigterm_to_an_agent_is_a_notice_for_its_host(testbed: Testbed, tmp_path: Path):
    front = Front(testbed, tmp_path)
    launched = front.start(*way("ssh", "h1,h2"), "-n", 2, "-s", 1, "--elastic", front.script(PROGRAM).name)
    launched.wait_for_words("ready", "scheduler-0", "server-0", "worker-0", "worker-1")
    wait_for(lambda: all(row["pid"] for row in launched.record["processes"]), "the record", LONGEST)
    (agent,) = [each for each in testbed.processes("h2") if "dmltrain-agent" in str(each)]
    testbed.run("h2", ["kill", str(agent.inner)])
    wait_for(lambda: "has left the job; 1 worker is left" in launched.err, "the end of the worker", LONGEST)
    wait_for(lambda: testbed.processes("h2") == [], "the end of the agent", LONGEST)
    (tmp_path / "done").touch()
    assert launched.wait().code == 0
