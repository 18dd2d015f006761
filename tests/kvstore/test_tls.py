"""`--wire tls`: what two threads of each end send arrives, and nobody else can take part."""

import contextlib
import datetime
import socket
import ssl
import threading
import time
from dataclasses import replace

import pytest

from dmltrain.errors import UserError
from dmltrain.kvstore.transport import link, tls
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from launch.certificate import new
from tests.kvstore.answering import answer, data_listener

CALLER = Caller.new("job", b"key", "worker", 3, "server 0", wire="tls")
DEADLINE = 20.0
TLS_HANDSHAKE = b"\x16"  # the first byte of such a record that is not encrypted


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Files with the certificates of two jobs."""
    paths = [tmp_path_factory.mktemp("tls") / name for name in ("one", "two")]
    for path in paths:
        path.write_bytes(new()[0])
    return [str(path) for path in paths]


def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calling = socket.create_connection(listening.getsockname())
        accepting, _ = listening.accept()
    return calling, accepting


@pytest.fixture
def meet(certificates):
    """meet(caller's certificate, listener's, between) -> the caller's outcome and the listener's: a link or an error.
    `between`: what carries the bytes from one end to the other."""
    links = []

    def connect(caller=0, listener=0, between=None):
        calling, accepting = between() if between else tcp()
        outcomes = [None, None]

        def run(number, greet):
            try:
                outcomes[number] = greet()
                links.append(outcomes[number])
                outcomes[number].settle()
            except (FrameError, Closed, OSError) as error:
                outcomes[number] = error
                (calling, accepting)[number].close()

        tls_listener = replace(data_listener(), wire="tls")
        threads = [
            threading.Thread(target=run, args=each, daemon=True)
            for each in (
                (0, lambda: link.greet(calling, CALLER, certificate=certificates[caller])),
                (1, lambda: answer(accepting, tls_listener, certificates[listener])),
            )
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(DEADLINE)
        return outcomes

    yield connect
    for each in links:
        each.close()


def test_large_and_small_frames_pass_in_both_directions_at_once(meet):
    ends = meet()
    frames = [(Header(Kind.PUSH, size).pack(), bytes([size % 251]) * size) for size in (0, 5, 1 << 22, 16384, 1, 70000)]
    received = {}

    def send(end):
        for _ in range(5):
            end.send_all(frames)

    def receive(number, end):
        received[number] = []
        for _ in range(5 * len(frames)):
            target = bytearray(end.read_header().length)
            end.read_into(memoryview(target))
            received[number].append(bytes(target))

    threads = [threading.Thread(target=send, args=(end,), daemon=True) for end in ends]
    threads += [threading.Thread(target=receive, args=each, daemon=True) for each in enumerate(ends)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE)
    assert received == {number: [payload for _, payload in frames] * 5 for number in (0, 1)}


def test_nothing_can_be_read_on_the_way(meet):
    seen = bytearray()

    def between():
        """Two sockets whose bytes pass through a recorder."""
        (mine, towards_caller), (theirs, towards_listener) = tcp(), tcp()
        for source, target in ((towards_caller, towards_listener), (towards_listener, towards_caller)):
            threading.Thread(target=record, args=(source, target), daemon=True).start()
        return mine, theirs

    def record(source, target):
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)

    mine, theirs = meet(between=between)
    secret = b"gradients and weights"
    mine.send(Header(Kind.PUSH, len(secret)).pack(), secret)
    assert theirs.read_payload(theirs.read_header()) == secret
    assert b"CHALLENGE" not in seen and b"worker" in seen, "the handshake of the job's key comes first"
    assert secret not in seen


def test_a_link_that_is_cut_ends_for_its_reader(meet):
    mine, theirs = meet()
    mine.cut()
    for end in (mine, theirs):
        with pytest.raises(Closed):
            end.read_header()


@pytest.mark.parametrize("caller, listener", [(0, 1), (1, 0)])
def test_only_the_jobs_certificate_is_accepted(meet, caller, listener):
    outcomes = meet(caller, listener)
    assert all(isinstance(each, (FrameError, Closed, OSError)) for each in outcomes)
    assert "CERTIFICATE_VERIFY_FAILED: the peer has another certificate" in str(outcomes)
    assert "set the same DMLTRAIN_CERTIFICATE_FILE for all processes of the job" in str(outcomes)


def test_the_end_of_tls_is_the_peer_of_the_handshake(certificates):
    """Who has the certificate, but is not this peer, cannot put its own TLS connection in place."""
    ends = [tls_stream(sock, certificates[0], listens) for listens, sock in streams()]
    said = []

    def run(end, key, listens):
        try:
            end.handshake(key, listens)
        except (FrameError, OSError) as error:
            said.append(str(error))

    threads = [
        threading.Thread(target=run, args=each, daemon=True)
        for each in ((ends[0], b"one" * 11, False), (ends[1], b"two" * 11, True))
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(DEADLINE)
    assert said == ["the other end of the TLS connection is not the peer of the handshake"] * 2


def tls_stream(sock, certificate, listens):
    return tls.TlsStream(sock, tls.context(certificate, listens), listens, lambda: None)


def streams():
    return zip((False, True), socket.socketpair(), strict=True)


def test_a_tls_handshake_that_drips_is_given_up(meet, monkeypatch):
    """The limit is for the whole handshake, also for its part inside TLS."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.5)

    def between():
        """Two sockets; the caller gets the answer in TLS as a byte now and then."""
        (mine, towards_caller), (theirs, towards_listener) = tcp(), tcp()
        threading.Thread(target=pass_on, args=(towards_caller, towards_listener), daemon=True).start()
        threading.Thread(target=pass_on, args=(towards_listener, towards_caller, 0.1), daemon=True).start()
        return mine, theirs

    def pass_on(source, target, pause=0.0):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                drips = pause and data.startswith(TLS_HANDSHAKE)
                for part in map(bytes, zip(data, strict=True)) if drips else [data]:
                    target.sendall(part)
                    time.sleep(pause if drips else 0.0)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    since = time.monotonic()
    outcomes = meet(between=between)
    assert time.monotonic() - since < DEADLINE / 4
    assert "silent for 0.5 s during the TLS handshake" in str(outcomes[0])


@pytest.mark.parametrize("years", [-20, 20])
def test_a_host_whose_clock_is_wrong_can_take_part(meet, certificates, tmp_path, years):
    """The certificate belongs to one job, so its dates say nothing."""
    path = tmp_path / "certificate"
    path.write_bytes(new(datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=366 * years))[0])
    certificates.append(str(path))
    mine, theirs = meet(-1, -1)
    mine.send(Header(Kind.PULL).pack())
    assert theirs.read_header() == Header(Kind.PULL)


def test_older_versions_of_tls_are_refused(certificates):
    calling, accepting = tcp()
    stream = tls_stream(accepting, certificates[0], True)
    said = []

    def listen():
        try:
            stream.handshake(b"key", True)
        except FrameError as error:
            said.append(str(error))
            accepting.close()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):
        old.wrap_socket(calling)
    thread.join(DEADLINE)
    assert said and "UNSUPPORTED_PROTOCOL" in said[0]
    calling.close()


@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_an_unusable_certificate_is_a_users_error(tmp_path, content):
    path = tmp_path / "certificate"
    if content is not None:
        path.write_bytes(content)
    for listens in (False, True):
        with pytest.raises(UserError, match="expected a PEM file with a certificate and its private key"):
            tls.context(str(path), listens)
