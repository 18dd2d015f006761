"""Who is let in, and what becomes of the listener when a caller or the system fails."""

import contextlib
import errno
import os
import queue
import re
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
from tests.readable import readable
from tests.waiting import SECONDS, wait_for

ENVIRONMENT = Environment(role="server", job="job", key=b"key")
CALLER = Caller.new("job", b"key", "worker", 3, "server 0")
HTTP = b"GET / HTTP/1.1\r\n" * 5


@pytest.fixture
def listening():
    """begin(admit, complete, stays) -> the socket of an accept loop, what it serves, and an event for its end."""
    sockets = []

    def begin(admit=None, complete=None, stays=False, sock=None, daemon=True):
        sock, served, ended = sock or link.listen("127.0.0.1"), queue.Queue(), threading.Event()
        sockets.append(sock)

        def serve(*caller):
            served.put((*caller, threading.current_thread()))

        def run():
            accept_loop(sock, ENVIRONMENT, "server 0", serve, admit, complete, stays)
            ended.set()

        threading.Thread(target=run, daemon=daemon).start()
        return sock, served, ended

    yield begin
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # wakes the loop
        each.close()


def greet(sock, served):
    """What a caller gets, who is let in: its link, and the listener's with role, index and thread."""
    return link.connect(sock.getsockname(), CALLER, SECONDS), *served.get(timeout=SECONDS)


def cut_off(address, data=b""):
    """Send this, and wait for the end of the connection. Returns what came before."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as peer:
        peer.connect(address)
        peer.sendall(data)
        found = b""
        while more := peer.recv(4096):
            found += more
        return found


@pytest.mark.parametrize("daemon", [True, False])
def test_callers_are_served_as_who_they_are_on_a_thread_with_their_address(listening, logged, daemon):
    """Also after unauthenticated peers, and if the loop's own thread is not a daemon."""
    sock, served, _ = listening(daemon=daemon)
    with pytest.raises(FrameError):
        link.connect(sock.getsockname(), replace(CALLER, key=b"wrong"), SECONDS)
    mine, theirs, role, index, thread = greet(sock, served)
    assert (role, index) == ("worker", 3) and served.empty()
    assert thread.name == "link {}:{}".format(*mine.sock.getsockname()) and thread.daemon
    theirs.send(Header(Kind.PULL).pack())
    assert mine.read_header() == Header(Kind.PULL)
    assert "server 0: cut off an unauthenticated peer from 127.0.0.1:" in logged.text
    for each in (mine, theirs):
        each.close()


def test_who_is_not_admitted_is_cut_off(listening, logged):
    def admit(connection):
        raise FrameError("another user's process")

    sock, served, _ = listening(admit)
    mine = link.connect(sock.getsockname(), CALLER, SECONDS)
    with pytest.raises(Closed):
        mine.read_header()
    assert served.empty()
    logged.wait_for("another user's process")
    mine.close()


def test_callers_get_in_however_many_unauthenticated_peers_stay(listening, logged):
    """Random unauthenticated peers leave for them; and so may the caller, which tries again."""
    sock, served, _ = listening()
    unauthenticated = [socket.create_connection(sock.getsockname(), SECONDS) for _ in range(3 * MAX_CALLERS)]
    greet(sock, served)[0].close()
    left = len(readable(unauthenticated, 0.0))  # their ends
    assert 2 * MAX_CALLERS <= left <= 2 * MAX_CALLERS + 2
    assert f"more than {MAX_CALLERS} handshakes at once" in logged.text
    for each in unauthenticated:
        each.close()


def test_handshakes_take_no_threads(listening):
    sock, served, _ = listening()
    before = threading.active_count()
    unauthenticated = [socket.create_connection(sock.getsockname(), SECONDS) for _ in range(MAX_CALLERS // 2)]
    for each in unauthenticated:
        each.sendall(message.encode(CALLER.hello()))
        assert each.recv(4096), "the challenge"
    assert threading.active_count() <= before
    for each in unauthenticated:
        each.close()


def test_who_is_refused_gets_the_reason(listening):
    """Also if it has sent much more than is read. test_handshake.py has all reasons."""
    sock, served, _ = listening()
    for changed, said in (({"job": "other"}, "refused: .*another job"), ({"key": b"guess"}, "this job's key")):
        with pytest.raises(FrameError, match=said):
            link.connect(sock.getsockname(), replace(CALLER, **changed), SECONDS)
    assert served.empty()
    with socket.create_connection(sock.getsockname(), SECONDS) as calling:
        calling.sendall(HTTP + bytes(1 << 16))
        peer = Link(calling)
        found = peer.read_message(peer.read_header())
        assert isinstance(found, message.Refuse) and "not a dmltrain frame: starts with b'GET '" in found.reason


@pytest.mark.parametrize("sent", [b"", Header(Kind.HELLO, 9).pack()[:10], message.encode(CALLER.hello())])
def test_a_unauthenticated_peer_that_falls_silent_is_cut_off(listening, monkeypatch, logged, sent):
    """But not a caller that was accepted before."""
    sock, served, _ = listening()
    mine, theirs, *_ = greet(sock, served)
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    cut_off(sock.getsockname(), sent)
    assert "silent for 0.2 s during the handshake" in logged.text
    mine.send(Header(Kind.PULL).pack())
    assert theirs.read_header() == Header(Kind.PULL)
    for each in (mine, theirs):
        each.close()


def test_a_unauthenticated_peer_that_sends_a_byte_now_and_then_is_cut_off(listening, monkeypatch):
    """The limit is for the whole handshake."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 0.2)
    sock, _, _ = listening()
    sent = 0
    with socket.create_connection(sock.getsockname(), SECONDS) as calling, contextlib.suppress(OSError):
        for byte in Header(Kind.HELLO, 9).pack():
            calling.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert 1 < sent < wire.HEADER_SIZE


def test_a_refused_unauthenticated_peer_that_stays_is_not_waited_for_long(listening, monkeypatch):
    """It gets less time than the handshake."""
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", SECONDS)
    sock, _, _ = listening()
    with socket.create_connection(sock.getsockname(), SECONDS) as calling:
        calling.sendall(HTTP)
        while calling.recv(4096):
            pass

        def is_cut_off():
            with contextlib.suppress(OSError):
                return not calling.sendall(b"more") and False
            return True

        wait_for(is_cut_off, "the end of the connection", SECONDS / 2)


def test_when_nobody_is_expected_a_listener_closes(listening):
    complete = threading.Event()
    sock, served, ended = listening(complete=complete)
    for _ in range(2):
        assert not ended.is_set()
        greet(sock, served)[0].close()
    complete.set()
    assert ended.wait(SECONDS) and sock.fileno() == -1


def test_when_nobody_is_expected_unauthenticated_peers_are_accepted_slowly(listening):
    """The scheduler's share of the cores belongs to the job then."""
    complete = threading.Event()
    sock, served, _ = listening(complete=complete, stays=True)
    complete.set()
    since = time.monotonic()
    for _ in range(5):
        cut_off(sock.getsockname(), HTTP)
    assert time.monotonic() - since > 4 * SLOW_SECONDS
    greet(sock, served)[0].close()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@as_root
def test_a_worker_of_another_user_does_not_wait_for_a_server_that_drops_it(listening, monkeypatch):
    """It uses TCP at once."""
    monkeypatch.setattr(rendezvous, "CONNECT_SECONDS", 2 * SECONDS)
    sock, name = rendezvous.listen()
    _, served, _ = listening(sock=sock)
    caller, since = Caller.new("job", b"key", "worker", 3, "server 0", MEMORY), time.monotonic()
    os.seteuid(2002)
    try:
        assert rendezvous.connect(name, caller, Arena(1 << 20)) is None
    finally:
        os.seteuid(0)
    assert time.monotonic() - since < SECONDS and served.empty()


@as_root
def test_another_users_process_is_cut_off_before_anything_is_read(listening, logged):
    sock, name = rendezvous.listen()
    listening(sock=sock)
    program = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print(s.recv(1))"
    command = ["setpriv", "--reuid=2002", "--regid=2002", "--clear-groups", "/usr/bin/python3", "-c", program]
    peer = subprocess.run(command, capture_output=True, text=True)
    assert peer.stdout == "b''\n", peer.stderr
    logged.wait_for("cut off an unauthenticated peer from this host: it is another user's process")


def test_unauthenticated_peers_of_this_host_are_named_so(listening, logged):
    """They call a socket without addresses."""
    sock, name = rendezvous.listen()
    _, served, _ = listening(sock=sock)
    cut_off(f"\0{name}", HTTP)
    logged.wait_for("server 0: cut off an unauthenticated peer from this host: not a dmltrain frame")
    assert served.empty()


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


@as_root
def test_want_of_threads_is_said_and_no_end():
    ran = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True)
    assert ran.stdout == "dropped\nserved worker 3\n", ran.stderr
    assert "server 0: cut off worker 3 from 127.0.0.1:" in ran.stderr and "can't start new thread" in ran.stderr


class Failing:
    """A listening socket whose accepts end so, each after the one before: with an error, or as they would."""

    family = socket.AF_INET

    def __init__(self, sock, *ends):
        self.sock, self.ends = sock, list(ends)

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def accept(self):
        if self.ends and (number := self.ends.pop(0)):
            raise OSError(number, os.strerror(number))
        return self.sock.accept()


def test_want_of_descriptors_fills_no_log(listening, logged):
    """However often it happens; and each time a random unauthenticated peer leaves."""
    failing = Failing(link.listen("127.0.0.1"), *[errno.EMFILE, 0] * 40)
    sock, served, _ = listening(sock=failing)
    unauthenticated = [socket.create_connection(sock.getsockname(), SECONDS) for _ in range(50)]
    greet(sock, served)[0].close()
    assert failing.ends == []
    lines = logged.text.splitlines()
    assert sum("cannot accept a connection: Too many open files" in line for line in lines) == 1
    assert 0 < sum("Too many open files, and one was chosen at random" in line for line in lines) <= LINES
    for each in unauthenticated:
        each.close()


def test_unauthenticated_peers_take_no_slots_and_the_last_are_counted_when_the_listener_closes(listening, logged):
    sock, served, ended = listening()
    for _ in range(MAX_CALLERS + LINES):
        cut_off(sock.getsockname(), HTTP)
    for _ in range(2):
        greet(sock, served)[0].close()
    sock.close()
    assert ended.wait(SECONDS)
    assert re.search(rf"server 0: cut off {MAX_CALLERS} more unauthenticated peers in \d+ s", logged.text)


@pytest.mark.parametrize("last", [errno.EBADF, errno.EINVAL])
def test_want_of_descriptors_is_said_and_no_end(last, logged):
    failing, since = Failing(link.listen("127.0.0.1"), errno.EMFILE, last), time.monotonic()
    with failing.sock, socket.create_connection(failing.getsockname()):
        accept_loop(failing, ENVIRONMENT, "server 0", pytest.fail)
    assert time.monotonic() - since > 0.05, "descriptors may be free again a little later"
    assert failing.ends == []
    assert logged.text.count("server 0: cannot accept a connection: Too many open files") == 1
