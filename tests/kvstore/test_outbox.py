"""Outboxes: frames that wait for a link."""

import contextlib
import queue
import socket
import threading
from concurrent import futures
from types import SimpleNamespace

import pytest

from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.outbox import BEFORE_ALL, LAST, Frame, Outbox
from tests.kvstore.answering import tcp
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS, wait_for

NAME = "to the other end"


@contextlib.contextmanager
def connected(sock, other):
    """The outbox of a link, and the socket at its other end. In the end all frames are sent."""
    with sock, other:
        other.settimeout(SECONDS)
        outbox = Outbox(Link(sock), NAME)
        yield outbox, other
        assert outbox.finish(SECONDS)


@pytest.fixture(params=["tcp", "unix"])
def ends(request):
    with connected(*(tcp() if request.param == "tcp" else socket.socketpair())) as made:
        yield made


@pytest.fixture
def inside():
    """Within a host, with a small buffer."""
    sock, other = socket.socketpair()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    with connected(sock, other) as made:
        yield made


class Gate:
    """A frame that is made until the test releases it; no other frame is sent before."""

    def __init__(self, outbox, header=b"", **options):
        self.begun, self.may_go_on, self.header = threading.Event(), threading.Event(), header
        outbox.put_all([Frame(b"", prepare=self._made, **options)])
        assert self.begun.wait(SECONDS)

    def _made(self):
        self.begun.set()
        self.may_go_on.wait(SECONDS)
        return self.header, None


def read(other, size):
    found = bytearray()
    while len(found) < size:
        found += other.recv(size - len(found))
    return bytes(found)


def test_a_reused_buffer_is_sent_before_it_is_overwritten():
    """With any window of the link: all pushes of a slice are encoded into the same buffer."""
    memory = bytearray(4)

    def made(value):
        memory[:] = value
        return b"", memoryview(memory)

    with connected(*tcp()) as (outbox, other):
        outbox.link.window = SimpleNamespace(size=16 << 20, sent=lambda count: None)
        gate = Gate(outbox, b"0")
        outbox.put_all([Frame(b"", prepare=lambda value=value: made(value)) for value in (b"1111", b"2222")])
        gate.may_go_on.set()
        assert read(other, 9) == b"011112222"


def test_frames_are_sent_by_priority_and_then_in_order(ends):
    """Those without a priority are in order with those of none."""
    outbox, other = ends
    gate = Gate(outbox)
    for header, priority in ((b"a", 0), (b"b", 5), (b"c", LAST), (b"d", 5), (b"e", 0), (b"f", -3), (b"g", BEFORE_ALL)):
        outbox.put(header, None, priority)
    outbox.put(b"h")
    outbox.put_all([Frame(b"i")])
    outbox.put(b"j", None, 0)
    gate.may_go_on.set()
    assert read(other, 10) == b"gbdaehijfc"


class Recorder:
    """A link that sends only when the test says so. Its outbox is sending a first frame."""

    def __init__(self, window=None):
        self.sock = SimpleNamespace(family=socket.AF_INET)
        self.window = SimpleNamespace(size=window) if window else None
        self.given, self.taken = queue.Queue(), threading.Semaphore(0)
        self.outbox = Outbox(self, NAME)
        self.outbox.put(b"first")
        assert self.given.get(timeout=SECONDS) == [5]

    def send_all(self, frames):
        self.given.put([len(view) for frame in frames for view in frame])
        self.taken.acquire(timeout=SECONDS)

    def take(self):
        self.taken.release()
        return self.given.get(timeout=SECONDS)

    def finish(self):
        self.taken.release()
        assert self.outbox.finish(SECONDS) and self.given.empty()


@pytest.mark.parametrize(
    "window, size, together",
    [
        (None, 1 << 18, 4),  # a mebibyte
        (None, (1 << 18) - 1, 5),
        (1 << 19, 1 << 18, 2),  # what the link's path holds, where that is less
        (1 << 30, 1 << 18, 4),
        (None, 0, 256),
        (None, 3 << 20, 1),
        (None, (1 << 20) - 1, 2),
    ],
)
def test_small_frames_are_sent_together_but_not_so_many_that_an_urgent_one_waits(window, size, together):
    link = Recorder(window)
    link.outbox.put_all([Frame(b"", memoryview(bytes(size))) for _ in range(together + 1)])
    assert link.take() == [0, size] * together
    link.outbox.put(b"!", None, 1)
    assert link.take() == [1, 0, size]
    link.finish()


@pytest.mark.parametrize("more, batches", [({}, [[1], [1]]), ({"prepared_bytes": 100}, [[1, 1]])])
def test_a_frame_made_when_sent_is_sent_separately_unless_declared_small(more, batches):
    link = Recorder()
    link.outbox.put_all([Frame(b"", prepare=lambda: (b"x", None), **more) for _ in range(2)])
    assert [link.take() for _ in batches] == batches
    link.finish()


def test_memory_is_released_after_sending_also_on_a_cut_link(ends):
    outbox, other = ends
    sent = queue.Queue()

    def put(name, payload=b"payload"):
        outbox.put(b"header", memoryview(payload), sent=lambda: sent.put(name))

    put("first")
    assert read(other, 13) == b"headerpayload"
    assert sent.get(timeout=SECONDS) == "first"
    put("second", bytes(16 << 20))  # more than is on its way unread
    outbox.link.cut()
    assert sent.get(timeout=SECONDS) == "second"
    put("third")
    assert sent.get(timeout=SECONDS) == "third"
    assert outbox.finish(SECONDS)
    put("too late")
    assert sent.get(timeout=SECONDS) == "too late"


def test_closing_reports_whether_all_was_sent_in_time(ends):
    (outbox, other), size = ends, 16 << 20
    outbox.put(b"", memoryview(bytes(size)))
    assert not outbox.finish(0.1), "the peer does not read"
    assert len(read(other, size)) == size


def test_a_frame_that_cannot_be_made_cuts_the_link_so_that_no_peer_waits_for_it(ends, capfd):
    outbox, other = ends

    def made():
        raise MemoryError("no room")

    outbox.put_all([Frame(b"", prepare=made)])
    assert other.recv(1) == b""
    assert outbox.finish(SECONDS)
    assert "MemoryError: no room" in capfd.readouterr().err


def test_inside_a_host_the_calling_thread_sends_headers(inside):
    """Again after a payload, once the sending thread has sent it."""
    (thread,) = [each for each in threading.enumerate() if each.name == NAME]
    assert thread.daemon
    (outbox, other), on = inside, []
    outbox.put_all([Frame(each, sent=lambda: on.append(threading.current_thread())) for each in (b"one", b"two")])
    assert on == [threading.current_thread()] * 2 and read(other, 6) == b"onetwo"
    for _ in range(3):
        payload = threading.Event()
        outbox.put(b"one", memoryview(b"two"), sent=payload.set)
        assert payload.wait(SECONDS) and read(other, 6) == b"onetwo"

        def sender():
            found = queue.Queue()
            outbox.put(b"h", sent=lambda: found.put(threading.current_thread()))
            return found.get(timeout=SECONDS), read(other, 1)

        wait_for(lambda: sender() == (threading.current_thread(), b"h"), "the calling thread sends")


@pytest.mark.parametrize("waiting", ["a payload", "what has to be made", "the rest of a header"])
def test_headers_do_not_overtake_queued_frames(inside, waiting):
    (outbox, other), size = inside, 1 << 20
    made = {
        "a payload": Frame(b"", memoryview(bytes(size)), priority=3),
        "what has to be made": Frame(b"", prepare=lambda: (bytes(size), None), priority=3),
        "the rest of a header": Frame(bytes(size)),  # longer than any, so that the socket does not take it whole
    }[waiting]
    outbox.put_all([made])
    for number in range(3):
        outbox.put(b"%d" % number, None, number)
    found = read(other, size + 3)
    assert not any(found[:size]) and sorted(found[size:]) == sorted(b"012")


def test_droppable_frames_are_dropped_and_their_memory_is_free(ends):
    """But not those of which a part may have been sent, nor frames that have to arrive."""
    (outbox, other), sent = ends, queue.Queue()
    gate = Gate(outbox, b"begun", droppable=True)
    frames = [
        Frame(b"b", memoryview(b"payload"), 3, lambda: sent.put("b"), droppable=True),
        Frame(b"c", priority=-5),
        Frame(b"", priority=7, prepare=lambda: pytest.fail("it is dropped"), droppable=True),
        Frame(b"d", memoryview(b"payload"), 5, lambda: sent.put("d")),
        Frame(b"e", priority=-1),
    ]
    outbox.put_all(frames)
    outbox.drop()
    assert sent.get_nowait() == "b" and sent.empty()
    outbox.put_all([Frame(b"f", priority=1, droppable=True)])
    gate.may_go_on.set()
    assert read(other, 16) == b"begundpayloadfec"
    assert sent.get(timeout=SECONDS) == "d"


def test_an_outbox_can_be_finished_on_its_own_thread(ends):
    """As when what follows from a sent frame ends the link. It does not wait for itself."""
    (outbox, other), finished = ends, queue.Queue()
    outbox.put(b"", memoryview(b"x"), sent=lambda: finished.put(outbox.finish(SECONDS)))
    assert finished.get(timeout=SECONDS) is False
    assert outbox.finish(SECONDS)
    assert read(other, 1) == b"x"


def test_a_link_that_cannot_send_is_cut():
    """Its reader then reports the loss."""

    def send_all(frames):
        raise Closed("no route")

    cut = threading.Event()
    link = SimpleNamespace(sock=SimpleNamespace(family=socket.AF_INET), window=None, send_all=send_all, cut=cut.set)
    outbox = Outbox(link, NAME)
    outbox.put(b"first")
    assert cut.wait(SECONDS)
    assert outbox.finish(SECONDS)


def waiting_for_room(outbox):
    """A thread that waits for it."""
    waiting = begun(outbox.wait_for_room)
    assert not futures.wait([waiting], timeout=0.05).done
    return waiting


def test_dropped_frames_take_no_room():
    link = Recorder()
    link.outbox.put_all([Frame(b"", memoryview(bytes(1 << 26)), droppable=True)])
    waiting = waiting_for_room(link.outbox)
    link.outbox.drop()
    waiting.result(SECONDS)
    link.finish()


@pytest.mark.parametrize(("frames", "size"), [(2, (1 << 26) - 6), (1 << 14, 0)])
def test_a_queue_with_room_is_not_waited_for_and_a_full_one_is(frames, size):
    link, payload = Recorder(), memoryview(bytes(size))
    link.outbox.put_all([Frame(b"", payload) for _ in range(frames - 1)])
    link.outbox.wait_for_room()
    link.outbox.put(b"", payload)
    waiting = waiting_for_room(link.outbox)
    while not waiting.done():
        link.taken.release()
    for _ in range(frames):  # more than there are batches
        link.taken.release()
    assert link.outbox.finish(SECONDS)
    link.outbox.wait_for_room()
