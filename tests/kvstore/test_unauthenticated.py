"""A job among unauthenticated peers, which connect to everything that listens, during its start and while it trains.
Log lines about them: a few, and then a count, so that nobody can fill a disk from outside."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmltrain.kvstore.transport.unauthenticated import LINES, PERIOD_SECONDS, Unauthenticated

ROOT = Path(__file__).parents[2]
PROGRAM = """import time
import numpy as np
from dmltrain import kvstore
store = kvstore.create("dist_sync")
store.init("w", np.zeros(100_000, np.float32))
out = np.zeros(100_000, np.float32)
for clock in range(1, 31):
    store.pushpull("w", np.ones(100_000, np.float32), out)
    assert (out == store.num_workers).all(), out
    time.sleep(0.05)
store.barrier()
store.close()
"""


ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # a network of its own


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace, where no other test listens")
def test_a_job_starts_and_trains_among_unauthenticated_peers(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    began = time.monotonic()
    peers = [sys.executable, str(ROOT / "tests/kvstore/programs/unauthenticated_peers.py"), "300", "new"]
    launcher = [sys.executable, "-m", "launch.cli", "--launcher", "local", "-n", "2", "-s", "2", "--log-dir", "logs"]
    job = subprocess.run(
        [*ALONE, *peers, *launcher, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    took = time.monotonic() - began
    assert job.returncode == 0, job.stdout + job.stderr
    assert json.loads(job.stdout.splitlines()[-1])["opened"] > 100, "there were unauthenticated peers"
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").glob("*.log")}
    assert "unauthenticated" in logs["scheduler-0.log"]
    lines = sum(text.count("unauthenticated") for text in logs.values())
    assert lines <= 6 * (LINES + 1 + took / PERIOD_SECONDS), "not a line for each"


def test_the_first_ones_have_a_line_each_and_the_others_are_counted():
    unauthenticated = Unauthenticated("server 0")
    lines = [unauthenticated.report(f"10.0.0.{each}:1", "it is silent", 100.0) for each in range(LINES + 1000)]
    assert lines[:LINES] == [
        f"server 0: cut off an unauthenticated peer from 10.0.0.{each}:1: it is silent" for each in range(LINES)
    ]
    assert not any(lines[LINES:])
    assert unauthenticated.later(100.0 + PERIOD_SECONDS - 0.1) == ""
    assert unauthenticated.later(100.0 + PERIOD_SECONDS) == (
        "server 0: cut off 1,000 more unauthenticated peers in 10 s, the last from 10.0.0.1004:1: it is silent"
    )
    assert unauthenticated.later(200.0) == ""


def test_a_later_unauthenticated_peer_has_a_line_again_and_those_before_the_end_are_counted():
    unauthenticated = Unauthenticated("server 0")
    for _ in range(LINES):
        assert unauthenticated.report("h", "r", 0.0)
    assert not unauthenticated.report("h", "r", 9.0)
    assert unauthenticated.later(10.0)
    assert not unauthenticated.report("h", "r", 11.0), "this period has a count only"
    assert unauthenticated.later(20.0)
    assert [bool(unauthenticated.report("h", "r", 30.0)) for _ in range(LINES + 2)] == [True] * LINES + [False] * 2
    said = "server 0: cut off 2 more unauthenticated peers in 3 s, the last from h: r"
    assert [unauthenticated.later(33.0, last=True) for _ in range(2)] == [said, ""]


def test_a_flood_without_end_has_one_line_in_each_period():
    unauthenticated, lines = Unauthenticated("s"), 0
    for millisecond in range(100_000):
        lines += bool(unauthenticated.report("h", "r", millisecond / 1000)) + bool(
            unauthenticated.later(millisecond / 1000)
        )
    assert lines <= LINES + 100 / PERIOD_SECONDS
