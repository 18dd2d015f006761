"""torch.distributed over the servers of jobs on several hosts, by our launcher and by torchrun."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.copied_tree import search_path
from tests.forked_job import forked
from tests.waiting import wait_for

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.thorough
PROGRAM = Path(__file__).parent / "programs/torch_hosts.py"
RUN = Path(torch.__file__).parent / "distributed/run.py"  # torchrun
WORKERS, SUM = 4, 8_000_000  # two workers on each of two hosts; bytes
SETTINGS = {"OMP_NUM_THREADS": "1"}
KINDS = {
    "barrier",
    "all_gather",
    "broadcast",
    "all_to_all",
    "small all_reduce",
    "recv",
    "recv of any",
    "send",
    "future",
}


def by_launcher(front, *words):
    hosts = front.script("h1 slots=2\nh2 slots=2\n", "hosts")
    # The scheduler, which names the worker, decides long before the launcher misses the host.
    settings = SETTINGS | ({"DMLTRAIN_HEARTBEAT_TIMEOUT": "6"} if "cut off" in words else {})
    settings = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    options = ["-H", hosts, "-n", WORKERS, "-s", 2, "--grace", 120, *settings]
    return [front.start(*options, *forked(PROGRAM, *words)).process]


def by_torchrun(front, *words):
    more = {"cwd": front.folder, "env": {**os.environ, **SETTINGS, "PYTHONPATH": search_path()}}
    started = []
    for number, host in enumerate(("h1", "h2")):
        options = ["--nnodes", 2, "--node-rank", number, "--nproc-per-node", 2, "--no-python"]
        options += ["--master-addr", front.testbed.address("h1"), "--master-port", 29500]
        with open(front.folder / f"torchrun-{host}.log", "wb") as said:
            command = forked(RUN, *options, *forked(PROGRAM, *words))
            started.append(front.testbed.start(host, command, stdout=said, stderr=subprocess.STDOUT, **more))
    return started


LAUNCHERS = {"ours": by_launcher, "torchrun": by_torchrun}


def said(folder):
    """What each worker has said, by its number."""
    return {int(path.stem[7:]): json.loads(path.read_text()) for path in folder.glob("worker-*.json")}


def outputs(folder):
    return "\n".join(f"--- {each.name}\n{each.read_text(errors='replace')[-3000:]}" for each in folder.rglob("*.log"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_host_sends_the_sum_of_its_workers_once(front, tmp_path, launcher):
    started = LAUNCHERS[launcher](front, "bytes_", tmp_path)
    wait_for(lambda: all(each.poll() is not None for each in started), "the end of the job", 240)
    assert [each.poll() for each in started] == [0] * len(started), outputs(tmp_path)
    found = said(tmp_path)
    assert len(found) == WORKERS
    for each in found.values():
        assert each["right"] and each["plain is right"] == 0 and each["int8 is right"] < 0.02
        assert each["summed"] > 2 * SUM
        # Half of the sum goes to the other host's server, and that of the other half comes back: for one worker as for
        # two. What a host's workers exchange is in shared memory.
        assert SUM < each["sum"]["eth0"] < 1.6 * SUM
        assert each["sum"]["lo"] < 0.01 * SUM
    assert found[2]["int8"]["eth0"] < 0.3 * found[2]["plain"]["eth0"]


@pytest.mark.parametrize(
    ("kind", "launcher", "large"),
    [("killed", "ours", "hook"), ("stopped", "torchrun", "sum"), ("cut off", "ours", "sum")]
    + [
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [("killed", "torchrun", "sum"), ("stopped", "ours", "hook"), ("cut off", "torchrun", "hook")]
    ],
)
def test_every_operation_that_waits_for_a_lost_peer_names_it(front, testbed, tmp_path, kind, launcher, large):
    LAUNCHERS[launcher](front, "fault", tmp_path, kind, large)
    if kind == "cut off":
        wait_for((tmp_path / "ready").exists, lambda: outputs(tmp_path), 240)
        (tmp_path / "struck").write_text(str(time.time()))
        testbed.partition("h2")
    done = lambda: sum("done" in each for each in said(tmp_path).values()) == 3  # noqa: E731
    wait_for(done, lambda: f"{said(tmp_path)} {outputs(tmp_path)}", 240)
    struck = float((tmp_path / "struck").read_text())
    for worker, facts in said(tmp_path).items():
        told = {name: value for name, value in facts.items() if isinstance(value, list)}
        assert told.keys() == KINDS | {large}, (worker, told)
        for name, (ended, error) in told.items():
            assert "DistBackendError: " in error and " on h2" in error, (worker, name, error)
            assert "lost: end of stream" in error if kind == "killed" else "missed heartbeats" in error
            assert ended - struck < 60, (worker, name, error)  # 10 s on an idle machine
