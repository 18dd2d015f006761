"""Killed and frozen processes and unauthenticated peers, in real jobs: the job ends within 10 s and names the loss."""

import signal
import socket
import time
import zlib

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmltrain.kvstore.transport import link, wire
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.message import Challenge, decode, encode, expect
from dmltrain.kvstore.transport.unauthenticated import LINES
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from tests.tiers import examples

LOST = 75


def others(job, victim):
    return {name: code for name, code in job.wait(15.0).items() if name != victim}


@pytest.mark.parametrize("victim", ["worker-1", "server-0", "scheduler-0"])
@pytest.mark.parametrize("kind", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.thorough)])
def test_a_killed_process_ends_the_job(start_forked, victim, kind):
    job = start_forked("endless.py", kind)
    job.wait_for_line("worker-0", "ready")
    job.wait_for_line("worker-1", "ready")
    killed = time.monotonic()
    job.processes[victim].kill()
    codes = others(job, victim)
    assert time.monotonic() - killed < 10.0
    assert job.processes[victim].returncode == -signal.SIGKILL
    assert set(codes.values()) == {LOST}, job.outputs()
    assert victim.replace("-0", "").replace("-", " ") in job.output("worker-0"), job.outputs()


@pytest.mark.parametrize("victim", ["worker-1", "server-0", "scheduler-0"])
def test_a_frozen_process_ends_the_job(start_forked, victim):
    job = start_forked("endless.py", "dist_sync", env={"DMLTRAIN_HEARTBEAT_TIMEOUT": "3"})
    job.wait_for_line("worker-0", "ready")
    job.wait_for_line("worker-1", "ready")
    frozen = time.monotonic()
    job.processes[victim].send_signal(signal.SIGSTOP)
    survivors = {name: process for name, process in job.processes.items() if name != victim}
    for process in survivors.values():
        process.wait(max(0.1, frozen + 10.0 - time.monotonic()))
    assert {process.returncode for process in survivors.values()} == {LOST}, job.outputs()
    assert "missed heartbeats for" in job.output("worker-0")
    assert victim.replace("-0", "").replace("-", " ") in job.output("worker-0"), job.outputs()


def test_a_frozen_process_is_named_within_ten_seconds_by_default(start_forked):
    job = start_forked("endless.py", "dist_sync")
    job.wait_for_line("worker-0", "ready")
    frozen = time.monotonic()
    job.processes["worker-1"].send_signal(signal.SIGSTOP)
    job.processes["worker-0"].wait(10.0)
    assert 5.0 < time.monotonic() - frozen < 10.0
    assert "worker 1" in job.output("worker-0")


def test_a_worker_that_dies_before_it_registers_is_named(start_job):
    job = start_job("endless.py", "dist_sync", env={"DMLTRAIN_START_TIMEOUT": "4"})
    job.processes["worker-1"].kill()
    assert set(others(job, "worker-1").values()) == {LOST}
    assert "worker 1" in job.output("worker-0"), job.outputs()


def test_a_worker_that_others_wait_for_too_long_is_named(start_forked):
    job = start_forked("endless.py", "dist_sync", env={"DMLTRAIN_WAIT_TIMEOUT": "2"}, workers=2)
    job.wait_for_line("worker-0", "ready")
    started = time.monotonic()
    job.processes["worker-1"].send_signal(signal.SIGSTOP)  # its heartbeats are not overdue yet
    job.processes["worker-0"].wait(10.0)
    assert time.monotonic() - started < 6.0
    assert "worker 1" in job.output("worker-0"), job.outputs()


def test_a_wrong_key_is_refused(start_forked):
    job = start_forked("endless.py", "dist_sync", env={"DMLTRAIN_START_TIMEOUT": "3"}, workers=1)
    job.wait_for_line("worker-0", "ready")
    peer = Caller.new("test", b"wrong", "worker", 0, "scheduler 0", CONTROL)
    with pytest.raises(FrameError, match="does not know this job's key"):
        link.connect(("127.0.0.1", job.port), peer, 5.0)
    job.wait_for_line("scheduler-0", "cut off an unauthenticated peer")
    assert job.processes["worker-0"].poll() is None


def noise(port: int, data: bytes) -> bytes:
    """The listener's answer before it closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 5.0) as peer:
        peer.settimeout(8.0)
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while piece := peer.recv(65536):
                answer += piece
        except OSError:
            pass  # cut off in the middle of its noise
    return answer


@pytest.fixture
def training(start_forked):
    """A job that trains. Its scheduler listens; its server does not any more."""
    job = start_forked("endless.py", "dist_sync", workers=1)
    job.wait_for_line("worker-0", "ready")
    return job


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
    assert b"protocol version 77, expected 8" in answer
    assert training.output("scheduler-0").count("cut off an unauthenticated peer") == LINES, "the others are counted"
    server = psutil.Process(training.processes["server-0"].pid)
    assert not [each for each in server.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert all(process.poll() is None for process in training.processes.values()), training.outputs()
    training.processes["worker-0"].send_signal(signal.SIGINT)  # it still trains, and ends the job as it would have
    training.wait(10.0)


def test_random_bytes_never_disturb_a_job(training):
    @settings(
        max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )
    @given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda b: wire.MAGIC + b"\x01\x01" + b))
    def fuzz(data):
        noise(training.port, data)

    fuzz()
    assert all(process.poll() is None for process in training.processes.values()), training.outputs()


def test_a_replayed_connection_is_refused(training):
    """Record a whole handshake of a caller with the key, then replay its bytes."""
    port = training.port
    caller = Caller.new("test", training.key.read_bytes(), "worker", 5, "scheduler 0", CONTROL)
    hello = encode(caller.hello())
    with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
        sock.sendall(hello)
        header = Header.unpack(sock.recv(wire.HEADER_SIZE, socket.MSG_WAITALL))
        challenge = expect(decode(header.kind, sock.recv(header.length, socket.MSG_WAITALL)), Challenge)
        proof = encode(caller.proof(challenge))
        sock.sendall(proof)
        assert Header.unpack(sock.recv(wire.HEADER_SIZE, socket.MSG_WAITALL)).kind == Kind.ACCEPT
    with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
        for recorded in (hello, proof):
            sock.sendall(recorded)
            answer = sock.recv(4096)
    assert b"does not know this job's key" in answer
    assert all(process.poll() is None for process in training.processes.values())
