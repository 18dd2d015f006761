"""Who is let in, and what becomes of the listener when a caller or the system fails."""

import errno
import queue
import socket
import threading
import time

import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.transport import link, rendezvous
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import MAX_HANDSHAKES, accept_loop
from dmltrain.kvstore.transport.wire import FrameError

ENVIRONMENT = Environment(job="job", key=b"key")
CALLER = Caller.new("job", b"key", "worker", 3)


@pytest.fixture
def listening():
    """begin(admit) -> the address of an accept loop, what it serves, and an event for its end."""
    sockets = []

    def begin(admit=None):
        sock, served, ended = link.listen("127.0.0.1"), queue.Queue(), threading.Event()
        sockets.append(sock)

        def run():
            accept_loop(sock, ENVIRONMENT, "server 0", lambda *caller: served.put(caller), admit)
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        return sock, served, ended

    yield begin
    for each in sockets:
        each.close()


def test_callers_are_served_as_who_they_are_also_after_strangers(listening, capfd):
    sock, served, _ = listening()
    address = sock.getsockname()
    with pytest.raises(FrameError):
        link.connect(address, Caller.new("job", b"wrong", "worker", 0), 5.0)
    mine = link.connect(address, CALLER, 5.0)
    theirs, role, index = served.get(timeout=5.0)
    assert (role, index) == ("worker", 3) and served.empty()
    theirs.send(b"x")
    target = bytearray(1)
    mine.read_into(memoryview(target))
    assert target == b"x"
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


def test_a_service_that_fails_takes_no_slot_from_the_next_caller(listening):
    """Neither do strangers, however many have been cut off."""
    sock, served, _ = listening()
    for _ in range(MAX_HANDSHAKES + 5):
        with socket.create_connection(sock.getsockname(), 5.0) as stranger:
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    for _ in range(2):
        link.connect(sock.getsockname(), CALLER, 5.0).close()
        served.get(timeout=5.0)


def test_silent_callers_hold_so_many_slots_at_once_and_no_more(listening):
    sock, served, _ = listening()
    silent = [socket.create_connection(sock.getsockname(), 5.0) for _ in range(MAX_HANDSHAKES - 1)]
    link.connect(sock.getsockname(), CALLER, 5.0).close()
    served.get(timeout=5.0)
    silent.append(socket.create_connection(sock.getsockname(), 5.0))
    late = threading.Thread(target=lambda: link.connect(sock.getsockname(), CALLER, 20.0).close(), daemon=True)
    late.start()
    with pytest.raises(queue.Empty):
        served.get(timeout=0.3)
    silent.pop().close()
    served.get(timeout=5.0)
    for each in silent:
        each.close()
    late.join(5.0)


def test_strangers_of_this_host_are_named_so(capfd):
    """They call a socket without addresses."""
    sock, name = rendezvous.listen()
    served = queue.Queue()
    threading.Thread(
        target=accept_loop, args=(sock, ENVIRONMENT, "server 0", lambda *caller: served.put(caller)), daemon=True
    ).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{name}")
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 5)
        while stranger.recv(4096):
            pass
    logged, deadline = "", time.monotonic() + 5.0
    while "server 0: cut off an unauthenticated peer from this host: not a dmltrain frame" not in logged:
        assert time.monotonic() < deadline
        logged += capfd.readouterr().err
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


class Failing:
    """A socket whose accept fails, first for want of descriptors, then because it is closed."""

    def __init__(self, last):
        self.errors = [OSError(errno.EMFILE, "Too many open files"), last]

    def accept(self):
        raise self.errors.pop(0)

    def fileno(self):
        return 7


@pytest.mark.parametrize("last", [errno.EBADF, errno.EINVAL])
def test_want_of_descriptors_is_said_and_no_end(last, capfd):
    failing, since = Failing(OSError(last, "closed")), time.monotonic()
    accept_loop(failing, ENVIRONMENT, "server 0", pytest.fail)
    assert time.monotonic() - since > 0.05, "descriptors may be free again a little later"
    assert failing.errors == []
    assert capfd.readouterr().err.count("server 0: cannot accept a connection: Too many open files") == 1
