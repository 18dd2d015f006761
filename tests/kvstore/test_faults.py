"""Killed and frozen processes in real jobs, which end within 10 s and name the loss, and unauthenticated peers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, wire
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.message import Challenge, decode, encode, expect
from dmltrain.kvstore.transport.unauthenticated import LINES, PERIOD_SECONDS, Unauthenticated
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from tests.waiting import SECONDS

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


def expect_the_end(job, victim):
    """All others end with the code of a lost job, and name it. Returns after how many seconds."""
    since = time.monotonic()
    codes = {process.wait(SECONDS) for name, process in job.processes.items() if name != victim}
    assert codes == {LOST}, job.outputs()
    assert victim.replace("-0", "").replace("-", " ") in job.output("worker-0"), job.outputs()
    return time.monotonic() - since


def still_there(job):
    return all(process.poll() is None for process in job.processes.values())


victims = pytest.mark.parametrize("victim", ["worker-1", "server-0", "scheduler-0"])


@victims
@pytest.mark.parametrize("kind", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.thorough)])
def test_a_killed_process_ends_the_job(start_forked, victim, kind):
    """At once, not when its heartbeats are missed."""
    job = training_job(start_forked, kind, HEARTBEAT_TIMEOUT=str(2 * SECONDS))
    job.processes[victim].kill()
    assert expect_the_end(job, victim) < SECONDS
    assert job.processes[victim].wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "victim, more", [("worker-1", {}), *((each, {"HEARTBEAT_TIMEOUT": "3"}) for each in ("server-0", "scheduler-0"))]
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
    assert not [each for each in server.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
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
        assert Header.unpack(sock.recv(wire.HEADER_SIZE, socket.MSG_WAITALL)).kind == Kind.ACCEPT
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
