"""One stream per host: jobs on two hosts (network namespaces joined by a cable), two workers and a server on each."""

import signal
import subprocess
import sys

import pytest

from tests.cluster import requirements
from tests.forked_job import NETWORK
from tests.waiting import SECONDS


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
        first, second = (holder.pid for holder in holders)
        cable = f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}"
        subprocess.run(cable.split(), check=True)
        for number, pid in enumerate((first, second), 1):
            for words in (f"address add 10.77.0.{number}/24 dev eth0", "link set lo up", "link set eth0 up"):
                subprocess.run(f"nsenter --net=/proc/{pid}/ns/net ip {words}".split(), check=True)

        def place(name):
            number = int(name.partition("-")[2]) % 2
            own = {"DMLC_NODE_HOST": f"10.77.0.{number + 1}", "DMLC_PS_ROOT_URI": "10.77.0.1"}
            return [], {**own, NETWORK: f"/proc/{holders[number].pid}/ns/net"}

        yield place
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def results(start_forked, place, steps="", **env):
    """The output of worker 0, and the bytes that each worker has sent to other hosts."""
    job = start_forked("relay.py", steps, workers=4, servers=2, place=place, env=env)
    job.succeed()
    found = [job.results(worker)[-1] for worker in range(4)]
    assert len({each["digest"] for each in found}) == 1, "all workers get the same"
    return found[0], [each["sent"] for each in found]


def test_a_host_sends_one_stream_with_the_same_bits_as_any_other_transport(start_forked, two_hosts):
    summed, sent = results(start_forked, two_hosts, "steps")
    by_each, sent_by_each = results(start_forked, two_hosts, DMLTRAIN_HOST_SUM="off")
    by_tcp, _ = results(start_forked, two_hosts, DMLTRAIN_TRANSPORT="tcp")
    assert summed["digest"] == by_each["digest"] == by_tcp["digest"]
    assert summed["error"] < 1e-9
    assert max(sent[2:]) < 1000 < sent[0], "the first worker of each host sends for the others"
    assert sum(sent) == pytest.approx(sum(sent_by_each) / 2, rel=0.01)


def test_a_relay_that_is_frozen_after_its_own_end_is_named(start_forked, two_hosts):
    env = {"DMLTRAIN_HEARTBEAT_TIMEOUT": "3"}
    job = start_forked("staying.py", workers=4, servers=2, place=two_hosts, env=env)
    job.wait_for_line("scheduler-0", "worker 0 has finished, and still sums for its host")
    job.processes["worker-0"].send_signal(signal.SIGSTOP)
    for name in ("scheduler-0", "server-1"):
        job.processes[name].wait(SECONDS)
        assert "worker 0 on " in job.output(name) and "missed heartbeats" in job.output(name), job.outputs()


SUMS_LATE = """
import atexit, threading
from dmltrain.kvstore.server.pool import Pool

pool, done = Pool(2, "arithmetic"), threading.Event()

def late():
    pool.submit(done.set)
    print(done.wait(60.0))

atexit.register(late)
"""


def test_a_relay_still_sums_for_others_after_its_own_program_has_ended():
    """Kvstores that the program left open are closed then, when concurrent.futures accepts no more work."""
    ended = subprocess.run([sys.executable, "-c", SUMS_LATE], stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert ended.stdout == "True\n"
