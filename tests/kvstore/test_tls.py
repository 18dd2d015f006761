"""Whoever forwards a connection: `--wire tls` lets nobody take part or read; other levels notice what they say."""

import contextlib
import datetime
import queue
import socket
import ssl
import threading
import time
from dataclasses import replace

import pytest

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.transport import link, message, tls, wire
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message.job import Abort, Barrier, Heartbeat
from dmltrain.kvstore.transport.seal import SIZE
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header
from dmltrain_launch.certificate import new
from tests.kvstore.answering import answer, data_listener, tcp
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

CALLER = Caller.new("job", b"key", "worker", 3, "server 0", wire="tls")
TLS_HANDSHAKE = b"\x16"  # the first byte of such a record that is not encrypted


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Files with the certificates of two jobs."""
    paths = [tmp_path_factory.mktemp("tls") / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(new()[0])
    return [str(path) for path in paths]


@pytest.fixture
def meet(certificates, closed_at_the_end):
    """meet(caller's certificate, listener's, between) -> the caller's outcome and the listener's: a link or an error.
    `between`: what carries the bytes from one end to the other."""

    def connect(caller=0, listener=0, between=None):
        calling, accepting = between() if between else tcp()
        tls_listener = replace(data_listener(), wire="tls")

        def run(sock, greet):
            try:
                found = closed_at_the_end(greet())
                found.settle()
                return found
            except (FrameError, Closed, OSError) as error:
                sock.close()
                return error

        mine = begun(run, calling, lambda: link.greet(calling, CALLER, certificate=certificates[caller]))
        theirs = begun(run, accepting, lambda: answer(accepting, tls_listener, certificates[listener]))
        return [mine.result(SECONDS), theirs.result(SECONDS)]

    return connect


def test_large_and_small_frames_pass_in_both_directions_at_once_until_the_link_is_cut(meet):
    ends = meet()
    frames = [
        (Header(FrameKind.PUSH, size).pack(), bytes([size % 251]) * size) for size in (0, 5, 1 << 22, 16384, 1, 70000)
    ]

    def send(end):
        for _ in range(5):
            end.send_all(frames)

    def receive(end):
        return [end.read_payload(end.read_header()) for _ in range(5 * len(frames))]

    sending, receiving = ([begun(call, end) for end in ends] for call in (send, receive))
    for each in receiving:
        assert each.result(SECONDS) == [payload for _, payload in frames] * 5
    assert [each.result(SECONDS) for each in sending] == [None, None]
    mine, theirs = meet()
    mine.cut()
    for end in (mine, theirs):
        with pytest.raises(Closed):
            end.read_header()


def relayed(pass_on):
    """Two sockets whose bytes are passed on by pass_on(source, target, towards the caller)."""
    (mine, towards_caller), (theirs, towards_listener) = tcp(), tcp()
    begun(pass_on, towards_caller, towards_listener, False)
    begun(pass_on, towards_listener, towards_caller, True)
    return mine, theirs


def test_nothing_can_be_read_on_the_way(meet):
    seen = bytearray()

    def record(source, target, towards_caller):
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)

    mine, theirs = meet(between=lambda: relayed(record))
    secret = b"gradients and weights"
    mine.send(Header(FrameKind.PUSH, len(secret)).pack(), secret)
    assert theirs.read_payload(theirs.read_header()) == secret
    assert b"CHALLENGE" not in seen and b"worker" in seen, "the handshake of the job's key comes first"
    assert secret not in seen


@pytest.mark.parametrize("caller, listener", [(0, 1), (1, 0)])
def test_only_the_jobs_certificate_is_accepted(meet, caller, listener):
    outcomes = meet(caller, listener)
    assert all(isinstance(outcome, (FrameError, Closed, OSError)) for outcome in outcomes)
    assert "CERTIFICATE_VERIFY_FAILED: the peer has another certificate" in str(outcomes)
    assert "DMLTRAIN_CERTIFICATE_FILE" in str(outcomes)


def test_the_end_of_tls_is_the_peer_of_the_handshake(certificates):
    """Who has the certificate, but is not this peer, cannot put its own TLS connection in place."""
    socks = socket.socketpair()
    ends = [tls_stream(sock, certificates[0], listens) for sock, listens in zip(socks, (False, True), strict=True)]
    calls = [begun(ends[0].handshake, b"one" * 11, False), begun(ends[1].handshake, b"two" * 11, True)]
    for call in calls:
        with pytest.raises((FrameError, OSError), match="not the peer of the handshake"):
            call.result(SECONDS)


def tls_stream(sock, certificate, listens):
    return tls.TlsStream(sock, tls.context(certificate, listens), listens, lambda: None)


def test_a_tls_handshake_that_drips_is_given_up(meet, monkeypatch):
    """The limit is for the whole handshake, also for its part inside TLS."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.5)

    def pass_on(source, target, towards_caller):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                drips = towards_caller and data.startswith(TLS_HANDSHAKE)
                for part in map(bytes, zip(data, strict=True)) if drips else [data]:
                    target.sendall(part)
                    time.sleep(0.1 if drips else 0.0)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    caller, _ = meet(between=lambda: relayed(pass_on))
    assert "silent for 0.5 s during the TLS handshake" in str(caller)


@pytest.mark.parametrize("years", [-20, 20])
def test_a_host_whose_clock_is_wrong_can_take_part(meet, certificates, tmp_path, years):
    """The certificate belongs to one job, so its dates say nothing."""
    path = tmp_path / "certificate"
    path.write_bytes(new(datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=366 * years))[0])
    certificates.append(str(path))
    mine, theirs = meet(-1, -1)
    mine.send(Header(FrameKind.PULL).pack())
    assert theirs.read_header() == Header(FrameKind.PULL)


def test_older_versions_of_tls_are_refused(certificates):
    calling, accepting = tcp()
    stream = tls_stream(accepting, certificates[0], True)

    def listen():
        try:
            stream.handshake(b"key", True)
        finally:
            accepting.close()

    listening = begun(listen)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):
        old.wrap_socket(calling)
    with pytest.raises(FrameError, match="UNSUPPORTED_PROTOCOL"):
        listening.result(SECONDS)
    calling.close()


@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_an_unusable_certificate_is_a_users_error(tmp_path, content):
    path = tmp_path / "certificate"
    if content is not None:
        path.write_bytes(content)
    for listens in (False, True):
        with pytest.raises(UserError, match="expected a PEM file"):
            tls.context(str(path), listens)


PLAIN_CALLER = Caller.new("job", b"key", "worker", 3, "server 0")
ABORT = message.encode(Abort("the forwarder wants it so"))
PUSH = Header(FrameKind.PUSH, 4).pack(), b"abcd"
HEARTBEAT = message.encode(Heartbeat())


class Forwarder:
    """Passes bytes on. `change(data)`, once set, replaces each piece that goes from the caller to the listener."""

    def __init__(self, address):
        self.change = lambda data: data
        self._listening, self._ends = socket.create_server(("127.0.0.1", 0)), []
        self.address = self._listening.getsockname()
        begun(self._run, address)

    def _run(self, address):
        caller, _ = self._listening.accept()
        listener = socket.create_connection(address)
        self._ends += [caller, listener]
        begun(self._pass, listener, caller, lambda data: data)
        self._pass(caller, listener, lambda data: self.change(data))

    def _pass(self, source, target, change):
        with contextlib.suppress(OSError):  # closed at the test's end
            while data := source.recv(1 << 16):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)

    def inject(self, data):
        """Send to the listener, as if the caller had."""
        self._ends[1].sendall(data)

    def close(self):
        for each in (self._listening, *self._ends):
            each.close()


@pytest.fixture
def between(closed_at_the_end):
    """between(level) -> the caller's link, the listener's, and the forwarder."""

    def connect(level):
        listening, served = closed_at_the_end(link.listen("127.0.0.1")), queue.Queue()
        environment = Environment(role="server", job="job", key=b"key", wire=level)
        begun(accept_loop, listening, environment, "server 0", lambda *caller: served.put(caller))
        forwarder = closed_at_the_end(Forwarder(listening.getsockname()))
        mine = closed_at_the_end(link.connect(forwarder.address, replace(PLAIN_CALLER, wire=level), SECONDS))
        return mine, closed_at_the_end(served.get(timeout=SECONDS)[0]), forwarder

    return connect


def received(end):
    header = end.read_header()
    return header.kind, bytes(end.read_payload(header)) if header.is_followed else b""


levels = pytest.mark.parametrize("level", ["plain", "auth"])


@levels
@pytest.mark.parametrize("injected", [ABORT, ABORT + bytes(SIZE)], ids=["without a seal", "with a seal"])
def test_an_injected_abort_is_not_believed(between, level, injected):
    mine, theirs, forwarder = between(level)
    mine.send(HEARTBEAT)
    assert received(theirs)[0] == FrameKind.CONTROL
    forwarder.inject(injected)
    mine.send(HEARTBEAT)
    with pytest.raises(FrameError, match="injected"):
        received(theirs)


@levels
def test_a_repeated_control_frame_is_not_believed(between, level):
    mine, theirs, forwarder = between(level)
    forwarder.change = lambda data: data + data
    mine.send(message.encode(Barrier("1")))
    assert received(theirs)[0] == FrameKind.CONTROL
    with pytest.raises(FrameError, match="repeated"):
        received(theirs)


CHANGES = {
    "another value": lambda data: data.replace(b"abcd", b"abce"),
    "another key": lambda data: Header(FrameKind.PUSH, 4, key=1).pack() + data[wire.HEADER_SIZE :],
    "injected": lambda data: b"".join(PUSH) + data,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_with_auth_data_frames_are_protected_too(between, change):
    mine, theirs, forwarder = between("auth")
    mine.send(*PUSH)
    assert received(theirs) == (FrameKind.PUSH, b"abcd")
    forwarder.change = change
    mine.send(*PUSH)
    with pytest.raises(FrameError, match="changed, injected"):
        received(theirs)


def test_with_plain_data_frames_are_not(between):
    """As docs/security.md says."""
    mine, theirs, forwarder = between("plain")
    forwarder.change = CHANGES["another value"]
    mine.send(*PUSH)
    assert received(theirs) == (FrameKind.PUSH, b"abce")


def test_a_frame_that_a_forwarder_withholds_is_missed(between):
    mine, theirs, forwarder = between("auth")
    withheld = threading.Event()
    forwarder.change = lambda data: withheld.set() or b""
    mine.send(*PUSH)
    assert withheld.wait(SECONDS)
    forwarder.change = lambda data: data
    mine.send(*PUSH)
    with pytest.raises(FrameError, match="lost"):
        received(theirs)
