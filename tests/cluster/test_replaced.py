"""Lost workers of an elastic job on real hosts are replaced there, or on another host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launching import LONGEST, Front, Launched, way
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for

PROGRAM = """
import os, sys, time
print(f"runs on {os.uname().nodename}, joins: {os.environ.get('DMLTRAIN_JOIN')}", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


def said(launched: Launched, text: str) -> None:
    wait_for(lambda: text in launched.err, text, LONGEST)


def pid_of(launched: Launched, rank: int) -> int:
    rows = [row for row in launched.record["processes"] if (row["role"], row["rank"]) == ("worker", rank)]
    return rows[0]["pid"]


@pytest.mark.thorough
def test_a_killed_worker_returns_on_its_host_and_those_of_a_dead_host_on_another_one(testbed: Testbed, tmp_path: Path):
    front, done = Front(testbed, tmp_path), tmp_path / "done"
    options = ["-n", 3, "-s", 1, "--elastic", "--restart-workers", 2]
    launched = front.start(*way("ssh", "h1:2,h2:2,h3:2"), *options, front.script(PROGRAM).name, done)
    launched.wait_for_words("runs on h2, joins: None", "worker-0")
    launched.wait_for_words("runs on h3, joins: None", "worker-1")
    launched.wait_for_words("runs on h1, joins: None", "worker-2", "server-0", "scheduler-0")
    wait_for(lambda: pid_of(launched, 1), "the record", LONGEST)
    testbed.run("h3", ["kill", "-9", str(pid_of(launched, 1))])
    said(launched, "starting the replacement of worker 1 on h3 in 1 s, 1 of 2")
    launched.wait_for_words("runs on h3, joins: 1", "worker-1")
    testbed.kill("h2")
    said(launched, "starting the replacement of worker 0 on h1 in 1 s, 2 of 2")
    launched.wait_for_words("runs on h1, joins: 1", "worker-0")
    done.touch()
    result = launched.wait()
    assert result.code == 0, result
    last = result.err.splitlines()[-1]
    assert last.startswith("0 processes left on 2 hosts: unknown for h2; lost: worker 1 after ")
    assert " s (replaced on h3), worker 0 after " in last and last.endswith(" s (replaced on h1)")
