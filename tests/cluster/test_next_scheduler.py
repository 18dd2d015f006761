"""An elastic job on real hosts goes on when the host of its scheduler is switched off."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmltrain.audit.count import count
from tests.cluster.launching import LONGEST, ROOT, WAYS, Front
from tests.cluster.testbed import Testbed
from tests.forked_job import forked
from tests.waiting import wait_for

HOSTS = "h1 roles=server,worker\nh2 roles=worker\nh3 roles=scheduler,worker\n"
TRAINING = ["--kv-store", "dist_sync", "--batch-size", 16, "--num-epochs", 4, "--network", "mlp"]
SLOW = ["--emulate-step", 0.2]  # so that epochs end while the scheduler is away


@pytest.mark.thorough
def test_the_host_of_the_scheduler_and_a_worker_is_switched_off(testbed: Testbed, tmp_path: Path):
    front, hosts, audit = Front(testbed, tmp_path), tmp_path / "hosts", tmp_path / "audit"
    hosts.write_text(HOSTS)
    program = forked(ROOT / "examples/train_digits.py", *TRAINING, *SLOW, "--audit", audit)
    options = ["-n", 3, "-s", 1, "--elastic", "--env", "OMP_NUM_THREADS=1", "--restart-workers", 1]
    launched = front.start(*WAYS["ssh"][0], "--hostfile", hosts, *options, *program)
    rows = audit / "samples-0.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 8, "training", LONGEST)
    assert {row["host"] for row in launched.record["processes"] if row["role"] == "scheduler"} == {"h3"}
    testbed.kill("h3")
    result = launched.wait(250)
    assert result.code == 0, result
    assert "starting the scheduler again on h1, 1 of 3" in result.err
    last = result.err.splitlines()[-1]
    assert "lost: " in last and "scheduler 0 after " in last and "(replaced on h1)" in last
    assert "goes on after view 1" in launched.log("scheduler-0")
    found = count(audit)
    assert found.problems == () and all((times == 1).all() for times in found.times.values())
