"""Killed and frozen processes and unauthenticated peers, in real jobs: the job ends within 10 s and names the loss."""

import contextlib
import signal
import socket
import time

import psutil
import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, wire
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.message import Challenge, decode, encode, expect
from dmltrain.kvstore.transport.unauthenticated import LINES
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
