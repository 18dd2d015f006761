"""One stream per host: jobs on two hosts (network namespaces joined by a cable), two workers and a server on each."""

import signal
import subprocess
import sys
import time

import pytest

from tests.cluster import requirements
from tests.forked_job import NETWORK


@pytest.fixture(scope="module")
def two_hosts():
    """place(name) -> no command prefix, and the environment that runs a process on its host: odd indices on the
    second."""
    if problem := requirements.missing():
        pytest.skip(f"no hosts: {problem}")
    wait = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    holders = [
        subprocess.Popen(["unshare", "--net", *wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for holder in holders:
            holder.stdout.readline()  # it is in its namespace
        first, second = (str(holder.pid) for holder in holders)
        run("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, pid in enumerate((first, second), 1):
            for words in (f"address add 10.77.0.{number}/24 dev eth0", "link set lo up", "link set eth0 up"):
                run("nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words.split())

        def place(name):
            number = int(name.partition("-")[2]) % 2
            own = {"DMLC_NODE_HOST": f"10.77.0.{number + 1}", "DMLC_PS_ROOT_URI": "10.77.0.1"}
            return [], {**own, NETWORK: f"/proc/{holders[number].pid}/ns/net"}

        yield place
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def run(*command):
    subprocess.run(command, check=True)


def results(start_forked, place, compression, steps="", **env):
    """The output of worker 0, and the bytes that each worker has sent to other hosts."""
    job = start_forked("relay.py", compression, -1, steps, workers=4, servers=2, place=place, env=env)
    job.succeed()
    found = [job.results(worker)[-1] for worker in range(4)]
    assert len({each["digest"] for each in found}) == 1, "all workers get the same"
    return found[0], [each["sent"] for each in found]


def test_a_host_sends_one_stream_with_the_same_bits_as_any_other_transport(start_forked, two_hosts):
    summed, sent = results(start_forked, two_hosts, "none", "steps")
    by_each, sent_by_each = results(start_forked, two_hosts, "none", DMLTRAIN_HOST_SUM="off")
    by_tcp, _ = results(start_forked, two_hosts, "none", DMLTRAIN_TRANSPORT="tcp")
    assert summed["digest"] == by_each["digest"] == by_tcp["digest"]
    assert summed["error"] < 1e-9
    assert max(sent[2:]) < 1000 < sent[0], "the first worker of each host sends for the others"
    assert sum(sent) == pytest.approx(sum(sent_by_each) / 2, rel=0.01)


def test_residuals_belong_to_the_host(start_forked, two_hosts):
    found, _ = results(start_forked, two_hosts, "2bit")
    assert found["error"] > 1e-3, "some of it is late"
    assert found["missing"] == pytest.approx(0.0, abs=1e-2), "but nothing is lost"


@pytest.mark.thorough
@pytest.mark.parametrize("early", [1, 3])
def test_a_worker_that_finishes_early_is_named(start_forked, two_hosts, early):
    job = start_forked("relay.py", "none", early, "", workers=4, servers=2, place=two_hosts)
    codes = job.wait()
    assert [codes[f"worker-{worker}"] for worker in range(4) if worker != early] == [75] * 3, job.outputs()
    for worker in range(4):
        if worker != early:
            assert f"worker {early} has finished already" in job.output(f"worker-{worker}"), job.outputs()


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker-1", "worker-3"])
def test_a_killed_worker_of_a_host_ends_the_job(start_forked, two_hosts, victim):
    job = start_forked("endless.py", "dist_sync", workers=4, servers=2, place=two_hosts)
    for worker in range(4):
        job.wait_for_line(f"worker-{worker}", "ready")
    killed = time.monotonic()
    job.processes[victim].kill()
    codes = job.wait(15.0)
    assert time.monotonic() - killed < 10.0
    assert {code for name, code in codes.items() if name != victim} == {75}, job.outputs()
    for name in codes.keys() - {victim, "scheduler-0"}:
        assert victim.replace("-", " ") in job.output(name), job.outputs()


@pytest.mark.parametrize("limit", [3.0, pytest.param(None, marks=pytest.mark.thorough)])
def test_a_relay_that_is_frozen_after_its_own_end_is_named(start_forked, two_hosts, limit):
    env = {"DMLTRAIN_HEARTBEAT_TIMEOUT": str(limit)} if limit else {}
    job = start_forked("staying.py", workers=4, servers=2, place=two_hosts, env=env)
    job.wait_for_line("scheduler-0", "worker 0 has finished, and still sums for its host")
    frozen = time.monotonic()
    job.processes["worker-0"].send_signal(signal.SIGSTOP)
    job.processes["scheduler-0"].wait(10.0)
    assert time.monotonic() - frozen < (limit or 8.5) + 1.5
    job.processes["server-1"].wait(10.0)
    for name in ("scheduler-0", "server-1"):
        assert "worker 0 on " in job.output(name) and "missed heartbeats" in job.output(name), job.outputs()
