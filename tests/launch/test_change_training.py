"""Workers come to a training job that runs, and leave it, with its own launcher: each sample is used once."""

import os
import re
import signal
import time
from datetime import datetime

import pytest

from dmltrain.audit.count import count
from launch.agent.process import process
from launch.cli import job
from tests.forked_job import forked
from tests.launch.conftest import ROOT, wait_for

WORDS = "--kv-store dist_sync --network mlp --batch-size 16 --num-epochs 4 --emulate-step 0.1"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dist_async", "dist_sync --update-on-kvstore 1"])
def test_a_rule_changes_an_elastic_job_with_a_view(launcher, kind):
    words = f"--kv-store {kind} --network mlp --batch-size 16 --num-epochs 3 --emulate-step 0.1 --slow-worker 1:2"
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
    assert job(["add", str(launched.logs), "1"]) == 0
    assert capsys.readouterr().out == "worker 2 on localhost has joined the job in view 2\n"
    assert job(["remove", str(launched.logs), "worker:1"]) == 0
    assert capsys.readouterr().out == "worker 1 has left the job\n"
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
    launched = launcher.start("-n", 2, "-s", 1, "--elastic", ROOT / "examples/train_digits.py", *STEADY.split())
    wait_for(lambda: b"View 1" in launched.log("worker-1"), "the first view")
    asked = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert job(["add", str(launched.logs), "1"]) == 0
    assert capsys.readouterr().out == "worker 2 on localhost has joined the job in view 2\n"
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
