"""Elastic jobs on real hosts over SSH: hosts come and leave, and lost workers and schedulers are replaced."""

import re
import signal
from pathlib import Path

import pytest

from dmltrain.audit.count import count
from tests.cluster.launching import LONGEST, Front, Launched
from tests.cluster.testbed import Testbed
from tests.copied_tree import ROOT
from tests.forked_job import forked
from tests.launch.test_change_commands import PROGRAM
from tests.waiting import wait_for

pytestmark = pytest.mark.thorough
TRAINING = ["--kv-store", "dist_sync", "--batch-size", 16, "--network", "mlp"]


def waiting(front: Front, *options: object) -> Launched:
    """A job of 2 workers and a server that waits for a file."""
    launched = front.start("--launcher", "ssh", "-s", 1, "--elastic", *options, front.script(PROGRAM).name)
    launched.wait_for_words("ready", "scheduler-0", "server-0", "worker-0", "worker-1")
    wait_for(lambda: all(row["pid"] for row in launched.record["processes"]), "the record", LONGEST)
    return launched


def training(front: Front, hosts: str, rounds: int, *words: object, options: tuple[object, ...] = ()) -> Launched:
    """A job on these lines of a hosts file that has trained for so many rounds."""
    (front.folder / "hosts").write_text(hosts)
    audit = front.folder / "audit"
    program = forked(ROOT / "examples/train_digits.py", *TRAINING, *words, "--audit", audit)
    fixed = ["--launcher", "ssh", "-H", "hosts", "--elastic", "--env", "OMP_NUM_THREADS=1"]
    launched = front.start(*fixed, *options, *program)
    rows = audit / "samples-0.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > rounds, "training", LONGEST)
    return launched


def ended(launched: Launched) -> str:
    """It ends well when it may. Returns the launcher's last line."""
    (launched.logs.parent / "done").touch()
    result = launched.wait(250)
    assert result.code == 0, result
    return result.err.splitlines()[-1]


def each_sample_once(front: Front) -> None:
    found = count(front.folder / "audit")
    assert found.problems == () and all((times == 1).all() for times in found.times.values())


def says(launched: Launched, text: str) -> None:
    wait_for(lambda: text in launched.err, text, LONGEST)


def test_a_host_is_added_and_removed_and_one_that_is_off_is_named(testbed: Testbed, front: Front):
    launched = waiting(front, "--hosts", "h1,h2", "-n", 2, "--connect-timeout", 20)  # which h4 will take
    code, out = front.change(launched, "add", "h3:2")
    (one, first), (other, second) = re.findall(r"worker (\d) on h3 has joined the job in view (\d)\n", out)
    assert (code, {one, other}, [first, second]) == (0, {"2", "3"}, ["2", "3"]), "either may be the first"
    assert [host["address"] for host in launched.record["hosts"] if host["name"] == "h3"] == [testbed.address("h3")]
    assert front.change(launched, "remove", "worker:1") == (0, "worker 1 has left the job\n")
    code, out = front.change(launched, "remove", "h3")
    said = ["h3 is not part of the job any more", "worker 2 has left the job", "worker 3 has left the job"]
    assert (code, sorted(out.splitlines())) == (0, said)
    wait_for(lambda: testbed.processes("h3") == [], "the end of its agent", LONGEST)
    testbed.kill("h4")
    code, out = front.change(launched, "add", "h4,h1")
    assert code == 125 and "h4 was not added: " in out and "worker 4 on h1 has joined the job in view 7" in out, out
    assert re.match("0 processes left on 3 hosts; joined: worker [23] on h3 after ", ended(launched))


def test_a_training_goes_on_when_the_host_of_the_scheduler_and_a_server_is_removed(testbed: Testbed, front: Front):
    hosts = "h1 roles=server,worker\nh2 roles=scheduler,server,worker\n"
    words = ["--num-epochs", 3, "--emulate-step", 0.1]
    launched = training(front, hosts, 2, *words, options=("-n", 2, "-s", 2))
    (leaves,) = [row["rank"] for row in launched.record["processes"] if (row["role"], row["host"]) == ("worker", "h2")]
    code, out = front.change(launched, "remove", "h2")
    said = ["h2 is not part of the job any more", f"worker {leaves} has left the job"]
    assert (code, sorted(out.splitlines())) == (0, said)
    wait_for(lambda: testbed.processes("h2") == [], "the agent of h2 to end, a moment after its last word", LONGEST)
    last = ended(launched)
    assert "; left: worker " in last and "server " in last and "(replaced on h1)" in last and "lost: " not in last, last
    each_sample_once(front)


def test_the_host_of_the_scheduler_and_a_worker_is_switched_off(testbed: Testbed, front: Front):
    """Epochs are slow, so that some end while the scheduler is away."""
    hosts = "h1 roles=server,worker\nh2 roles=worker\nh3 roles=scheduler,worker\n"
    words = ["--num-epochs", 4, "--emulate-step", 0.2]
    launched = training(front, hosts, 8, *words, options=("-n", 3, "-s", 1, "--restart-workers", 1))
    assert {row["host"] for row in launched.record["processes"] if row["role"] == "scheduler"} == {"h3"}
    testbed.kill("h3")
    last = ended(launched)
    assert "starting the scheduler again on h1, 1 of 3" in launched.err
    assert "lost: " in last and "scheduler 0 after " in last and "(replaced on h1)" in last
    assert "goes on after view 1" in launched.log("scheduler-0")
    each_sample_once(front)


def test_the_hosts_file_is_followed(testbed: Testbed, front: Front):
    hosts: Path = front.folder / "hosts"
    hosts.write_text("h1\nh2\n")
    launched = waiting(front, "-H", hosts, "-n", "2:3", "--watch-hosts", "--min-workers", 1)
    away = next(row for row in launched.record["processes"] if row["role"] == "worker" and row["host"] != "h1")
    hosts.write_text("h1 slots=x\n")
    says(launched, "the job goes on with the hosts that it has")
    hosts.write_text("h1\nh3\n")
    says(launched, f"worker {away['rank']} (pid {away['pid']} on h2) has left the job")
    hosts.write_text("h1\nh3\nh4\n")
    says(launched, "worker 2 on h")
    says(launched, "has joined the job in view")
    assert "; joined: worker 2 on h" in ended(launched)


def test_a_host_of_the_file_that_was_off_returns_to_the_training(testbed: Testbed, front: Front):
    words = ["--num-epochs", 60, "--emulate-step", 0.1]
    launched = training(front, "h1\nh2 roles=worker\n", 2, *words, options=("-n", 2, "-s", 1, "--watch-hosts"))
    testbed.kill("h2")
    says(launched, "h2 is in the hosts file: it is tried again in 10 s (--watch-hosts)")
    testbed.boot("h2")
    says(launched, "worker 2 on h2 has joined the job in view 3")
    wait_for(lambda: launched.log("worker-2").count("Train-accuracy") > 1, "the end of its second epoch", LONGEST)
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait().code == 130
    *whole, _ = count(front.folder / "audit").times.values()
    assert whole and all((times == 1).all() for times in whole)


def test_sigterm_to_an_agent_is_a_notice_for_its_host(testbed: Testbed, front: Front):
    launched = waiting(front, "--hosts", "h1,h2", "-n", 2)
    (agent,) = [process for process in testbed.processes("h2") if "dmltrain-agent" in str(process)]
    testbed.run("h2", ["kill", str(agent.inner)])
    says(launched, "has left the job; 1 worker is left")
    wait_for(lambda: testbed.processes("h2") == [], "the end of the agent", LONGEST)
    ended(launched)


JOINS = """
import os, time
print(f"runs on {os.uname().nodename}, joins: {os.environ.get('DMLTRAIN_JOIN')}", flush=True)
while not os.path.exists("done"):
    time.sleep(0.05)
"""


def pid_of(launched: Launched, rank: int) -> int:
    rows = [row for row in launched.record["processes"] if (row["role"], row["rank"]) == ("worker", rank)]
    return rows[0]["pid"]


def test_a_killed_worker_returns_on_its_host_and_those_of_a_dead_host_on_another_one(testbed: Testbed, front: Front):
    options = ["-n", 3, "-s", 1, "--elastic", "--restart-workers", 2]
    launched = front.start("--launcher", "ssh", "--hosts", "h1:2,h2:2,h3:2", *options, front.script(JOINS).name)
    launched.wait_for_words("runs on h2, joins: None", "worker-0")
    launched.wait_for_words("runs on h3, joins: None", "worker-1")
    launched.wait_for_words("runs on h1, joins: None", "worker-2", "server-0", "scheduler-0")
    wait_for(lambda: pid_of(launched, 1), "the record", LONGEST)
    testbed.run("h3", ["kill", "-9", str(pid_of(launched, 1))])
    says(launched, "starting the replacement of worker 1 on h3 in 1 s, 1 of 2")
    launched.wait_for_words("runs on h3, joins: 1", "worker-1")
    testbed.kill("h2")
    says(launched, "starting the replacement of worker 0 on h1 in 1 s, 2 of 2")
    launched.wait_for_words("runs on h1, joins: 1", "worker-0")
    last = ended(launched)
    assert last.startswith("0 processes left on 2 hosts: unknown for h2; lost: worker 1 after ")
    assert " s (replaced on h3), worker 0 after " in last and last.endswith(" s (replaced on h1)")
