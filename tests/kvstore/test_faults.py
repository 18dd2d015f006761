"""Killed and frozen processes and unauthenticated peers, in real jobs: the job ends within 10 s and names the loss."""

import contextlib
import signal
import socket
import time
import zlib

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, wire
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.message import Challenge, decode, encode, expect
from dmltrain.kvstore.transport.unauthenticated import LINES
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from tests.tiers import examples
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


def noise(port: int, data: bytes) -> bytes:
    """The listener's answer before it closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as peer, contextlib.suppress(ConnectionError):
        peer.sendall(data)  # it may be cut off in the middle of its noise
        peer.shutdown(socket.SHUT_WR)
        while piece := peer.recv(65536):
            answer += piece
    return answer


STRANGE = {
    "noise": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 10,
    "truncated frame": Header(Kind.HELLO, 100).pack()[:20],
    "truncated payload": Header(Kind.HELLO, 100).pack() + b"{",
    "huge length": Header(Kind.HELLO, 1 << 60).pack() + b"x" * 5000,
    "data before the handshake": Header(Kind.PUSH, 4, 0, 0, 0, 1).pack() + b"\0\0\0\0",
    "empty": b"",
    "not an object": Header(Kind.HELLO, 2).pack() + b"[]",
}


def test_unauthenticated_peers_are_cut_off_and_logged_and_training_goes_on(training):
    for data in STRANGE.values():
        noise(training.port, data)
    wrong_version = bytearray(Header(Kind.HELLO, 2).pack()[:-4])
    wrong_version[4] = 77
    answer = noise(training.port, bytes(wrong_version) + zlib.crc32(wrong_version).to_bytes(4, "big") + b"{}")
    assert b"version 77, expected 8" in answer
    assert training.output("scheduler-0").count("cut off an unauthenticated peer") == LINES, "the others are counted"
    peer = Caller.new("test", b"wrong", "worker", 0, "scheduler 0", CONTROL)
    with pytest.raises(FrameError, match="this job's key"):
        link.connect(("127.0.0.1", training.port), peer, SECONDS)
    server = psutil.Process(training.processes["server-0"].pid)
    assert not [each for each in server.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert still_there(training), training.outputs()
    training.processes["worker-0"].send_signal(signal.SIGINT)  # it still trains, and ends the job as it would have
    training.wait()


def test_random_bytes_never_disturb_a_job(training):
    @settings(
        max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )
    @given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda b: wire.MAGIC + b"\x01\x01" + b))
    def fuzz(data):
        noise(training.port, data)

    fuzz()
    assert still_there(training), training.outputs()


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
