"""Where a job's time goes on slow links, and which share of the bound it reaches."""

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.testbed import Testbed

PROGRAM = ROOT / "tests/kvstore/programs/waits.py"
RATE = 100e6 / 8  # bytes/s of the links
PUSHED, STEPS, COMPUTE = 2_000_000, 3, 0.02  # bytes and seconds of each worker's step


@pytest.mark.alone
def test_where_links_are_slow_the_wire_is_what_is_waited_for(testbed: Testbed, start_job):
    for host in ("h1", "h2"):
        testbed.rate(host, "100mbit")

    def place(name: str) -> tuple[list[str], dict[str, str]]:
        host = f"h{int(name[-1]) + 1}"
        there = {"DMLC_NODE_HOST": testbed.address(host), "DMLC_PS_ROOT_URI": testbed.address("h1")}
        return testbed.command(host, []), there

    job = start_job(PROGRAM, PUSHED, STEPS, COMPUTE, workers=2, servers=2, place=place)
    job.succeed()
    for index in (0, 1):
        (found,) = job.results(index)
        assert found["wire"] > 0.6 * found["epoch"], found
        assert found["straggler"] + found["server"] + found["own-host"] < 0.3 * found["epoch"], found
        assert found["bound"] > 0.5 and found["epoch"] > STEPS * PUSHED / RATE, found
        carried = float(found["limits"].split()[3])  # MB/s
        assert 0.75 * RATE < 1e6 * carried < 1.05 * RATE, found
