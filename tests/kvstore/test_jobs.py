"""Whole jobs: their results, also on two hosts (network namespaces); lost and unauthenticated processes."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent import futures
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.transport import link, wire
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.listener import LINES, PERIOD_SECONDS, Unauthenticated
from dmltrain.kvstore.transport.message import decode, encode, expect
from dmltrain.kvstore.transport.message.handshake import Challenge
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header
from tests.cluster import requirements
from tests.copied_tree import search_path
from tests.forked_job import NETWORK
from tests.waiting import SECONDS


def trained(store=None, pauses=0):
    """The weights of a network after 12 steps on batches of 50 samples, which the workers share by stride; all start
    from worker 0's weights. `pauses`: how long they pause at random before pushes. Without a store: plain PyTorch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tests.connected import connected

    rank, workers = (store.rank, store.num_workers) if store else (0, 1)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(linear(20, 700), relu(), linear(700, 600), relu(), linear(600, 10))
    start, data, chance = torch.Generator().manual_seed(rank), np.random.default_rng(7), random.Random(rank)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=start) * 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if store:
        optimizer = connected(model, optimizer, store, average=False)
    for _ in range(12):
        images = torch.from_numpy(data.standard_normal((50, 20), np.float32))
        labels = torch.from_numpy(data.integers(0, 10, 50))
        time.sleep(pauses * chance.random() * 0.03)
        optimizer.zero_grad()
        found = model(images[rank::workers])
        (torch.nn.functional.cross_entropy(found, labels[rank::workers], reduction="sum") / 50).backward()
        optimizer.step()
    if store:
        optimizer.synchronize()
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()])


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_training_is_exact(whole_job, workers):
    """dist_sync with n workers and s servers: bit-identical over s and arrival order, and one process's result within
    1e-5. The workers of the second job pause at random before their pushes, so that the order of arrival differs."""
    plain, results = trained(), []
    for servers, pauses in ((1, 0), (3, 1)):
        job = whole_job(workers=workers, servers=servers)
        results += [each.tobytes() for each in job.all(lambda store, pauses=pauses: trained(store, pauses))]
    assert len(set(results)) == 1
    difference = np.linalg.norm(np.frombuffer(results[0], np.float32) - plain) / np.linalg.norm(plain)
    assert difference < 1e-5, f"{workers} workers: {difference}"


def test_a_load_waits_for_the_pulls_of_slower_workers(whole_job, tmp_path):
    """Otherwise a resumed run with compression would start from other weights on the slower worker."""
    job, path, ones = whole_job(), str(tmp_path / "state"), np.ones(8, np.float32)

    def train(store):
        store.init("w", np.zeros(8, np.float32))
        store.set_optimizer({"name": "plain"})
        store.pushpull("w", ones, np.empty(8, np.float32))
        if store.rank == 0:
            store.save_optimizer_states(path)
        store.barrier()
        store.pushpull("w", ones, np.empty(8, np.float32))

    def pulled(store):
        out = np.empty(8, np.float32)
        store.pull("w", out)
        return out.tolist()

    job.all(train)
    assert pulled(job.stores[0]) == [-4.0] * 8
    loading = job.at_once(lambda store: store.load_optimizer_states(path), 0)
    assert not futures.wait([loading], timeout=0.5).done, "worker 1 has not pulled"
    assert pulled(job.stores[1]) == [-4.0] * 8, "what worker 0 loads"
    job.stores[1].load_optimizer_states(path)
    loading.result(SECONDS)
    assert job.all(pulled) == [[-2.0] * 8] * 2


STATES = Path(__file__).parents[1] / "golden" / "server-states"


@pytest.mark.parametrize("name, spec", [("sgd", {"lr": 0.1, "momentum": 0.9}), ("adam", {"lr": 0.01})])
def test_states_of_version_0_4_are_continued_bit_exactly(whole_job, name, spec):
    """It saved them after three steps of one worker and two servers, and NAME-after.npz after two more."""
    pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch.backend import make_step

    (store,) = whole_job(workers=1, make_step=make_step).stores
    weights = {"w": np.zeros((8, 12), np.float32), "b": np.zeros(7, np.float64)}
    store.init(list(weights), list(weights.values()))
    store.set_optimizer({"name": name, **spec})
    store.load_optimizer_states(f"{STATES}/{name}")
    for number in (3, 4):
        for key, value in weights.items():
            gradient = np.random.default_rng([number, value.size]).standard_normal(value.shape).astype(value.dtype)
            store.pushpull(key, gradient, value)
    with np.load(STATES / f"{name}-after.npz") as expected:
        assert set(expected) == set(weights)
        for key, value in weights.items():
            assert value.tobytes() == expected[key].tobytes(), key


def test_killing_everything_leaves_nothing(start_forked):
    """In memory that processes share."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    job = start_forked("endless.py", "dist_sync")
    job.wait_for_line("worker-0", "ready")
    for process in job.processes.values():
        process.send_signal(signal.SIGSTOP)  # else one may end because another is lost
    for process in job.processes.values():
        process.kill()
    assert set(job.wait().values()) == {-signal.SIGKILL}
    assert set(shared.iterdir()) <= before


FOUR, SIX = "10.77.0.", "fd00:77::"  # the addresses of two hosts begin so


@pytest.fixture(scope="module")
def hosts_of():
    """hosts_of(FOUR or SIX) -> place(name) -> no command prefix, and the environment that runs a process on its host:
    odd indices on the second."""
    if problem := requirements.missing():
        pytest.skip(f"no hosts: {problem}")
    wait = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holders = [subprocess.Popen(["unshare", "--net", *wait], **pipes) for _ in range(2)]
    try:
        for holder in holders:
            holder.stdout.readline()  # it is in its namespace
        first, second = (holder.pid for holder in holders)
        cable = f"ip link add eth0 netns {first} type veth peer name eth0 netns {second}"
        subprocess.run(cable.split(), check=True)
        for number, pid in enumerate((first, second), 1):
            addresses = [f"address add {FOUR}{number}/24 dev eth0", f"address add {SIX}{number}/64 dev eth0 nodad"]
            for words in (*addresses, "link set lo up", "link set eth0 up"):
                subprocess.run(f"nsenter --net=/proc/{pid}/ns/net ip {words}".split(), check=True)

        def place(prefix, name):
            number = int(name.partition("-")[2]) % 2
            own = {"DMLC_NODE_HOST": f"{prefix}{number + 1}", "DMLC_PS_ROOT_URI": f"{prefix}1"}
            return [], {**own, NETWORK: f"/proc/{holders[number].pid}/ns/net"}

        yield lambda prefix: partial(place, prefix)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.fixture
def two_hosts(hosts_of):
    return hosts_of(FOUR)


def results(start_forked, place, steps="", **env):
    """The output of worker 0, and the bytes that each worker has sent to other hosts."""
    job = start_forked("relay.py", steps, workers=4, servers=2, place=place, env=env)
    job.succeed()
    found = [job.results(worker)[-1] for worker in range(4)]
    assert len({each["digest"] for each in found}) == 1, "all workers get the same"
    return found[0], [each["sent"] for each in found]


def test_a_host_sends_one_stream_with_the_same_bits_as_any_other_transport(start_forked, hosts_of, two_hosts):
    """Over IPv4 and IPv6."""
    summed, sent = results(start_forked, two_hosts, "steps")
    by_six, _ = results(start_forked, hosts_of(SIX), "steps")
    by_each, sent_by_each = results(start_forked, two_hosts, DMLTRAIN_HOST_SUM="off")
    by_tcp, _ = results(start_forked, two_hosts, DMLTRAIN_TRANSPORT="tcp")
    assert summed["digest"] == by_six["digest"] == by_each["digest"] == by_tcp["digest"]
    assert summed["error"] < 1e-9
    assert max(sent[2:]) < 1000 < sent[0], "the first worker of each host sends for the others"
    assert sum(sent) == pytest.approx(sum(sent_by_each) / 2, rel=0.01)


def test_a_relay_that_is_frozen_after_its_own_end_is_named(start_forked, two_hosts):
    env = {"DMLTRAIN_HEARTBEAT_TIMEOUT": "6"}
    job = start_forked("staying.py", workers=4, servers=2, place=two_hosts, env=env)
    job.wait_for_line("scheduler-0", "worker 0 has finished, and still sums for its host")
    job.processes["worker-0"].send_signal(signal.SIGSTOP)
    for name in ("scheduler-0", "server-1"):
        job.processes[name].wait(SECONDS)
        assert "worker 0 on " in job.output(name) and "missed heartbeats" in job.output(name), job.outputs()


SUMS_LATE = """
import atexit, threading
from dmltrain.kvstore.server.links.arithmetic import Pool

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


LOST = 75


def training_job(start_forked, kind="dist_sync", workers=2, **environment):
    """A job that trains already. Its scheduler listens; its server does not any more."""
    job = start_forked("endless.py", kind, workers=workers, env={f"DMLTRAIN_{k}": v for k, v in environment.items()})
    for rank in range(workers):
        job.wait_for_line(f"worker-{rank}", "ready")
    return job


@pytest.fixture
def training(start_forked):
    return training_job(start_forked, workers=1)


def test_a_second_process_of_a_worker_is_told_what_may_have_made_it(training):
    training.processes["second"] = training.start("worker-0", "second")
    training.wait_for_line("second", "worker 0 is already registered")
    assert training.processes["second"].wait(SECONDS) == LOST
    assert "if the program uses torch.multiprocessing.spawn: call the function itself" in training.output("second")


def expect_the_end(job, victim):
    """All others end with the code of a lost job, and name it. Returns after how many seconds."""
    since = time.monotonic()
    codes = {process.wait(SECONDS) for name, process in job.processes.items() if name != victim}
    assert codes == {LOST}, job.outputs()
    assert victim.replace("-0", "").replace("-", " ") in job.output("worker-0"), job.outputs()
    return time.monotonic() - since


def still_there(job):
    return all(process.poll() is None for process in job.processes.values())


@pytest.mark.parametrize(
    "victim, kind", [("worker-1", "dist_sync"), ("server-0", "dist_async"), ("scheduler-0", "dist_sync")]
)
def test_a_killed_process_ends_the_job(start_forked, victim, kind):
    """At once, not when its heartbeats are missed."""
    job = training_job(start_forked, kind, HEARTBEAT_TIMEOUT=str(2 * SECONDS))
    job.processes[victim].kill()
    assert expect_the_end(job, victim) < SECONDS
    assert job.processes[victim].wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "victim, more", [("worker-1", {}), *((each, {"HEARTBEAT_TIMEOUT": "6"}) for each in ("server-0", "scheduler-0"))]
)
def test_a_frozen_process_ends_the_job(start_forked, victim, more):
    """By default after a time that leaves some of the promised ten seconds for telling the others."""
    job = training_job(start_forked, **more)
    job.processes[victim].send_signal(signal.SIGSTOP)
    took = expect_the_end(job, victim)
    assert "missed heartbeats for" in job.output("worker-0")
    assert more or 5.0 < Environment().lost_seconds < min(10.0, took + 2.0)


def end_of(peer):
    """What the listener answers before it closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := peer.recv(65536):
            answer += piece
    return answer


def test_unauthenticated_peers_are_cut_off_and_logged_and_training_goes_on(training):
    """Servers listen no more, and the scheduler refuses these: fuzzing (test_fuzz.py) has many more of them."""
    address, http = ("127.0.0.1", training.port), b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 10
    for data in (http, *[b""] * LINES):
        with socket.create_connection(address, SECONDS) as peer:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            assert b"not a dmltrain frame" in end_of(peer) or not data
    assert training.output("scheduler-0").count("cut off an unauthenticated peer") == LINES, "the others are counted"
    peer = Caller.new("test", b"wrong", "worker", 0, "scheduler 0", CONTROL)
    with pytest.raises(FrameError, match="this job's key"):
        link.connect(address, peer, SECONDS)
    server = psutil.Process(training.processes["server-0"].pid)
    assert not [
        net_connection
        for net_connection in server.net_connections("tcp")
        if net_connection.status == psutil.CONN_LISTEN
    ]
    assert still_there(training), training.outputs()
    training.processes["worker-0"].send_signal(signal.SIGINT)  # it still trains, and ends the job as it would have
    training.wait()


def test_a_replayed_connection_is_refused(training):
    """Record a whole handshake of a caller with the key, then replay its bytes."""
    address = ("127.0.0.1", training.port)
    caller = Caller.new("test", training.key.read_bytes(), "worker", 5, "scheduler 0", CONTROL)
    hello = encode(caller.hello())
    with socket.create_connection(address) as sock:
        sock.sendall(hello)
        header = Header.unpack(sock.recv(wire.HEADER_SIZE, socket.MSG_WAITALL))
        challenge = expect(decode(header.kind, sock.recv(header.length, socket.MSG_WAITALL)), Challenge)
        proof = encode(caller.proof(challenge))
        sock.sendall(proof)
        assert Header.unpack(sock.recv(wire.HEADER_SIZE, socket.MSG_WAITALL)).kind == FrameKind.ACCEPT
    with socket.create_connection(address) as sock:
        for recorded in (hello, proof):
            sock.sendall(recorded)
            answer = sock.recv(4096)
    assert b"does not know this job's key" in answer
    assert still_there(training)


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
    launcher = [
        sys.executable,
        "-m",
        "dmltrain_launch.cli",
        "--launcher",
        "local",
        "-n",
        "2",
        "-s",
        "2",
        "--log-dir",
        "logs",
    ]
    command = [*ALONE, "env", f"PYTHONPATH={search_path()}", *peers, *launcher, "program.py"]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
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
    said = "server 0: cut off an unauthenticated peer from 10.0.0.{}:1: it is silent"
    assert lines[:LINES] == [said.format(each) for each in range(LINES)]
    assert not any(lines[LINES:])
    assert unauthenticated.later(100.0 + PERIOD_SECONDS - 0.1) == ""
    said = "server 0: cut off 1,000 more unauthenticated peers in 10 s, the last from 10.0.0.1004:1: it is silent"
    assert unauthenticated.later(100.0 + PERIOD_SECONDS) == said
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
