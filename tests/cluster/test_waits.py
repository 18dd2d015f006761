"""Where a job's time goes on slow links, and which share of the bound it reaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.testbed import Testbed

PROGRAM = ROOT / "tests" / "kvstore" / "programs" / "waits.py"
RATE = 100e6 / 8  # bytes/s of the links
PUSHED, STEPS, COMPUTE = 2_000_000, 3, 0.02  # bytes and seconds of each worker's step


def start(testbed: Testbed, folder: Path, role: str, index: int) -> subprocess.Popen:
    host = f"h{index + 1}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
        "DMLC_PS_ROOT_URI": testbed.address("h1"),
        "DMLC_PS_ROOT_PORT": "9300",
        "DMLTRAIN_JOB": "waits",
        "DMLC_ROLE": role,
        f"DMLC_{role.upper()}_ID": str(index),
        "DMLC_NODE_HOST": testbed.address(host),
    }
    with open(folder / f"{role}-{index}.log", "wb") as log:
        command = [sys.executable, *map(str, (PROGRAM, PUSHED, STEPS, COMPUTE))]
        return testbed.start(host, command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


@pytest.mark.alone
def test_where_links_are_slow_the_wire_is_what_is_waited_for(testbed: Testbed, tmp_path: Path):
    for host in ("h1", "h2"):
        testbed.rate(host, "100mbit")
    places = [("scheduler", 0), *((role, index) for role in ("server", "worker") for index in (0, 1))]
    processes = [start(testbed, tmp_path, *place) for place in places]
    codes = [process.wait(60) for process in processes]
    assert codes == [0] * 5, "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    for index in (0, 1):
        found = json.loads((tmp_path / f"worker-{index}.log").read_text().splitlines()[-1])
        assert found["wire"] > 0.6 * found["epoch"], found
        assert found["straggler"] + found["server"] + found["own-host"] < 0.3 * found["epoch"], found
        assert found["bound"] > 0.5 and found["epoch"] > STEPS * PUSHED / RATE, found
        carried = float(found["limits"].split()[3])  # MB/s
        assert 0.75 * RATE < 1e6 * carried < 1.05 * RATE, found
