"""A job among unauthenticated peers: they connect to everything that listens, during its start and while it trains."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmltrain.kvstore.transport.unauthenticated import LINES, PERIOD_SECONDS

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
