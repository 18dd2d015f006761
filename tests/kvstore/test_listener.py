"""Who is let in, and what becomes of the listener when a caller or the system fails."""

import contextlib
import errno
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, message, rendezvous, wire
from dmltrain.kvstore.transport.handshake import MEMORY, Caller
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import MAX_CALLERS, SLOW_SECONDS, accept_loop
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.unauthenticated import LINES
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind

ENVIRONMENT = Environment(role="server", job="job", key=b"key")
CALLER = Caller.new("job", b"key", "worker", 3, "server 0")


@pytest.fixture
def listening():
    """begin(admit, complete, stays) -> the socket of an accept loop, what it serves, and an event for its end."""
    sockets = []

    def begin(admit=None, complete=None, stays=False):
        sock, served, ended = link.listen("127.0.0.1"), queue.Queue(), threading.Event()
        sockets.append(sock)

        def run():
            accept_loop(sock, ENVIRONMENT, "server 0", lambda *caller: served.put(caller), admit, complete, stays)
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        return sock, served, ended

    yield begin
    for each in sockets:
        each.close()


def test_callers_are_served_as_who_they_are_also_after_unauthenticated_peers(listening, capfd):
    sock, served, _ = listening()
    address = sock.getsockname()
    with pytest.raises(FrameError):
        link.connect(address, Caller.new("job", b"wrong", "worker", 0, "server 0"), 5.0)
    mine = link.connect(address, CALLER, 5.0)
    theirs, role, index = served.get(timeout=5.0)
    assert (role, index) == ("worker", 3) and served.empty()
    theirs.send(Header(Kind.PULL).pack())
    assert mine.read_header() == Header(Kind.PULL)
    assert "server 0: cut off an unauthenticated peer from 127.0.0.1:" in capfd.readouterr().err
    for each in (mine, theirs):
        each.close()


def test_who_is_not_admitted_is_cut_off(listening, capfd):
    def admit(connection):
        raise FrameError("another user's process")

    sock, served, _ = listening(admit)
    mine = link.connect(sock.getsockname(), CALLER, 5.0)
    with pytest.raises(Closed):
        mine.read_header()
    assert served.empty()
    assert "another user's process" in capfd.readouterr().err
    mine.close()


def test_unauthenticated_peers_take_no_slots_of_later_callers(listening):
    sock, served, _ = listening()
    for _ in range(MAX_CALLERS + 5):
        with socket.create_connection(sock.getsockname(), 5.0) as peer:
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass
    for _ in range(2):
        link.connect(sock.getsockname(), CALLER, 5.0).close()
        served.get(timeout=5.0)


def test_callers_get_in_however_many_unauthenticated_peers_stay(listening, capfd):
    """Random unauthenticated peers leave for them; and so may the caller, which tries again."""
    sock, served, _ = listening()
    unauthenticated = [socket.create_connection(sock.getsockname(), 5.0) for _ in range(3 * MAX_CALLERS)]
    link.connect(sock.getsockname(), CALLER, 5.0).close()
    served.get(timeout=5.0)
    left = sum(not is_open(each) for each in unauthenticated)
    assert 2 * MAX_CALLERS <= left <= 2 * MAX_CALLERS + 2
    assert f"more than {MAX_CALLERS} handshakes at once" in capfd.readouterr().err
    for each in unauthenticated:
        each.close()


def is_open(sock):
    sock.setblocking(False)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_handshakes_take_no_threads(listening):
    sock, served, _ = listening()
    before = threading.active_count()
    unauthenticated = [socket.create_connection(sock.getsockname(), 5.0) for _ in range(MAX_CALLERS // 2)]
    for each in unauthenticated:
        each.sendall(message.encode(CALLER.hello()))
        assert each.recv(4096), "the challenge"
    assert threading.active_count() <= before
    for each in unauthenticated:
        each.close()


@pytest.mark.parametrize(
    "caller, said",
    [
        (replace(CALLER, job="other"), "refused: 'the caller belongs to another job'"),
        (replace(CALLER, key=b"guess"), "the peer does not know this job's key"),
        (replace(CALLER, listener="server 1"), "refused: \"the caller wants 'server 1' for 'data', but this is"),
        (replace(CALLER, purpose="control", listener="scheduler 0"), "the caller wants 'scheduler 0' for 'control'"),
        (replace(CALLER, wire="auth"), "the caller has DMLTRAIN_WIRE=auth, this process has plain"),
    ],
    ids=["another job", "another key", "another server", "the scheduler", "another level"],
)
def test_a_refused_caller_gets_the_reason(listening, caller, said):
    sock, served, _ = listening()
    with pytest.raises(FrameError) as raised:
        link.connect(sock.getsockname(), caller, 5.0)
    assert said in str(raised.value)
    assert served.empty()


@pytest.mark.parametrize(
    "sent, said",
    [
        (Header(Kind.PULL).pack(), f"frame kind {Kind.PULL} during the handshake, expected HELLO"),
        (message.encode(message.Accept()), f"frame kind {Kind.ACCEPT} during the handshake, expected HELLO"),
        (Header(Kind.HELLO, wire.MAX_HELLO + 1).pack(), "control frame of 4097 bytes, the limit is 4096"),
        (b"GET / HTTP/1.1\r\n" * 5, "not a dmltrain frame: starts with b'GET '"),
    ],
    ids=["a pull", "another message", "a long hello", "http"],
)
def test_an_unauthenticated_peer_gets_the_reason_for_its_refusal(listening, sent, said):
    """Also if it has sent much more than is read."""
    sock, _, _ = listening()
    with socket.create_connection(sock.getsockname(), 5.0) as calling:
        calling.sendall(sent + bytes(1 << 16))
        peer = Link(calling)
        found = peer.read_message(peer.read_header())
        assert isinstance(found, message.Refuse) and said in found.reason


@pytest.mark.parametrize("sent", [b"", Header(Kind.HELLO, 9).pack()[:10], message.encode(CALLER.hello())])
def test_a_unauthenticated_peer_that_falls_silent_is_cut_off(listening, monkeypatch, capfd, sent):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    sock, _, _ = listening()
    with socket.create_connection(sock.getsockname(), 5.0) as calling:
        calling.sendall(sent)
        while calling.recv(4096):
            pass
    assert "silent for 0.2 s during the handshake" in capfd.readouterr().err


def test_a_unauthenticated_peer_that_sends_a_byte_now_and_then_is_cut_off(listening, monkeypatch):
    """The limit is for the whole handshake."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    sock, _, _ = listening()
    sent = 0
    with socket.create_connection(sock.getsockname(), 5.0) as calling, contextlib.suppress(OSError):
        for byte in Header(Kind.HELLO, 9).pack():
            calling.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert 1 < sent < wire.HEADER_SIZE


def test_a_refused_unauthenticated_peer_that_stays_is_not_waited_for_long(listening):
    sock, _, _ = listening()
    since = time.monotonic()
    with socket.create_connection(sock.getsockname(), 5.0) as calling:
        calling.sendall(b"GET / HTTP/1.1\r\n" * 5)
        while calling.recv(4096):
            pass
        with pytest.raises(OSError):
            while True:
                calling.sendall(b"more")
                time.sleep(0.02)
    assert time.monotonic() - since < 4.0, "less than the limit of the handshake"


def test_an_accepted_caller_is_not_cut_off_later(listening, monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    sock, served, _ = listening()
    mine = link.connect(sock.getsockname(), CALLER, 5.0)
    theirs, _, _ = served.get(timeout=5.0)
    time.sleep(0.25)
    mine.send(Header(Kind.PULL).pack())
    assert theirs.read_header() == Header(Kind.PULL)
    mine.close()
    theirs.close()


def test_when_nobody_is_expected_a_listener_closes(listening):
    complete = threading.Event()
    sock, served, ended = listening(complete=complete)
    link.connect(sock.getsockname(), CALLER, 5.0).close()
    served.get(timeout=5.0)
    assert not ended.wait(0.3)
    complete.set()
    assert ended.wait(5.0) and sock.fileno() == -1


def test_when_nobody_is_expected_unauthenticated_peers_are_accepted_slowly(listening):
    """The scheduler's share of the cores belongs to the job then."""
    complete = threading.Event()
    sock, served, _ = listening(complete=complete, stays=True)
    complete.set()
    since = time.monotonic()
    for _ in range(5):
        with socket.create_connection(sock.getsockname(), 5.0) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n" * 5)
            while peer.recv(4096):
                pass
    assert time.monotonic() - since > 4 * SLOW_SECONDS
    link.connect(sock.getsockname(), CALLER, 5.0).close()
    served.get(timeout=5.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_worker_of_another_user_does_not_wait_for_a_server_that_drops_it():
    """It uses TCP at once."""
    sock, name = rendezvous.listen()
    threading.Thread(target=accept_loop, args=(sock, ENVIRONMENT, "server 0", pytest.fail), daemon=True).start()
    caller, since = Caller.new("job", b"key", "worker", 3, "server 0", MEMORY), time.monotonic()
    os.seteuid(2002)
    try:
        assert rendezvous.connect(name, caller, Arena(1 << 20)) is None
    finally:
        os.seteuid(0)
    assert time.monotonic() - since < rendezvous.CONNECT_SECONDS / 2
    sock.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_process_is_cut_off_before_anything_is_read(capfd):
    sock, name = rendezvous.listen()
    served = queue.Queue()
    threading.Thread(
        target=accept_loop, args=(sock, ENVIRONMENT, "server 0", lambda *caller: served.put(caller)), daemon=True
    ).start()
    program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print(s.recv(1))"
    peer = subprocess.run(
        ["setpriv", "--reuid", "2002", "--regid", "2002", "--clear-groups", "/usr/bin/python3", "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
    )
    root = socket.socket(socket.AF_UNIX)
    root.connect(f"\0{name}")
    sock.close()
    assert peer.stdout == "b''\n", peer.stderr
    assert "cut off an unauthenticated peer from this host: it is another user's process" in capfd.readouterr().err
    root.close()


def test_unauthenticated_peers_of_this_host_are_named_so(logged):
    """They call a socket without addresses."""
    sock, name = rendezvous.listen()
    served = queue.Queue()
    threading.Thread(
        target=accept_loop, args=(sock, ENVIRONMENT, "server 0", lambda *caller: served.put(caller)), daemon=True
    ).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(f"\0{name}")
        peer.sendall(b"GET / HTTP/1.1\r\n" * 5)
        while peer.recv(4096):
            pass
    logged.wait_for("server 0: cut off an unauthenticated peer from this host: not a dmltrain frame")
    assert served.empty()
    sock.close()


def test_a_link_is_served_on_a_thread_with_its_peers_address(listening):
    sock, ended = link.listen("127.0.0.1"), queue.Queue()
    threading.Thread(
        target=accept_loop,
        args=(sock, ENVIRONMENT, "server 0", lambda *caller: ended.put(threading.current_thread())),
        daemon=False,
    ).start()
    mine = link.connect(sock.getsockname(), CALLER, 5.0)
    thread = ended.get(timeout=5.0)
    assert thread.name == "link {}:{}".format(*mine.sock.getsockname()) and thread.daemon
    mine.close()
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()


WITHOUT_THREADS = """import os, queue, resource, socket, threading
from dmltrain.env import Environment
from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
sock, served = link.listen("127.0.0.1"), queue.Queue()
environment = Environment(role="server", job="job", key=b"key")
caller = Caller.new("job", b"key", "worker", 3, "server 0")
threading.Thread(
    target=accept_loop, args=(sock, environment, "server 0", lambda *each: served.put(each)), daemon=True
).start()
calling = socket.create_connection(sock.getsockname())
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setresuid(2002, 2002, 2002)  # the limit does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
try:
    link.greet(calling, caller)
except Closed:
    print("dropped")
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
link.connect(sock.getsockname(), caller.again(), 5.0)
print("served", *served.get(timeout=5.0)[1:])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_want_of_threads_is_said_and_no_end():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, timeout=30)
    assert ran.stdout == "dropped\nserved worker 3\n", ran.stderr
    assert "server 0: cut off worker 3 from 127.0.0.1:" in ran.stderr and "can't start new thread" in ran.stderr


class Failing:
    """A socket whose accept fails, first for want of descriptors, then because it is closed."""

    family = socket.AF_INET

    def __init__(self, last):
        self.errors = [OSError(errno.EMFILE, "Too many open files"), last]
        self.ends = socket.socketpair()
        self.ends[1].send(b"x")  # readable, as with a caller that waits

    def setblocking(self, blocking):
        assert not blocking

    def accept(self):
        raise self.errors.pop(0)

    def fileno(self):
        return self.ends[0].fileno()


def test_want_of_descriptors_fills_no_log(capfd):
    """However often it happens; and each time a random unauthenticated peer leaves."""
    sock, served = link.listen("127.0.0.1"), queue.Queue()
    failing = Sometimes(sock, 40)
    threading.Thread(
        target=accept_loop, args=(failing, ENVIRONMENT, "server 0", lambda *caller: served.put(caller)), daemon=True
    ).start()
    unauthenticated = [socket.create_connection(sock.getsockname(), 5.0) for _ in range(50)]
    link.connect(sock.getsockname(), CALLER, 5.0).close()
    served.get(timeout=5.0)
    assert failing.left == 0
    lines = capfd.readouterr().err.splitlines()
    assert sum("cannot accept a connection: Too many open files" in line for line in lines) == 1
    assert 0 < sum("Too many open files, and one was chosen at random" in line for line in lines) <= LINES
    for each in (*unauthenticated, sock):
        each.close()


class Sometimes:
    """A listening socket for which every other accept fails, `left` times, for want of descriptors."""

    family = socket.AF_INET

    def __init__(self, sock, left):
        self.sock, self.left, self.fails = sock, left, False

    def setblocking(self, blocking):
        self.sock.setblocking(blocking)

    def fileno(self):
        return self.sock.fileno()

    def accept(self):
        self.fails = not self.fails and self.left > 0
        if self.fails:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.sock.accept()


def test_the_last_unauthenticated_peers_are_counted_when_the_listener_closes(listening, capfd):
    sock, _, ended = listening()
    for _ in range(LINES + 3):
        with socket.create_connection(sock.getsockname(), 5.0) as peer:
            peer.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
    sock.close()
    assert ended.wait(5.0)
    assert "server 0: cut off 3 more unauthenticated peers in 0 s" in capfd.readouterr().err


@pytest.mark.parametrize("last", [errno.EBADF, errno.EINVAL])
def test_want_of_descriptors_is_said_and_no_end(last, capfd):
    failing, since = Failing(OSError(last, "closed")), time.monotonic()
    accept_loop(failing, ENVIRONMENT, "server 0", pytest.fail)
    assert time.monotonic() - since > 0.05, "descriptors may be free again a little later"
    assert failing.errors == []
    assert capfd.readouterr().err.count("server 0: cannot accept a connection: Too many open files") == 1
