"""Outboxes: frames that wait for a link."""

import queue
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.outbox import BEFORE_ALL, LAST, Frame, Outbox

DEADLINE = 10.0


def test_a_reused_buffer_is_sent_before_it_is_overwritten():
    """With any window of the link: all pushes of a slice are encoded into the same buffer."""
    memory, begun, may_go_on = bytearray(4), threading.Event(), threading.Event()

    def first():
        begun.set()
        may_go_on.wait(DEADLINE)
        return b"0", None

    def made(value):
        memory[:] = value
        return b"", memoryview(memory)

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        other, _ = listening.accept()
        other.settimeout(DEADLINE)
        link = Link(sock)
        link.window = SimpleNamespace(size=16 << 20, sent=lambda count: None)
        outbox = Outbox(link, "to the other end")
        outbox.put_all([Frame(b"", prepare=first)])
        assert begun.wait(DEADLINE)
        outbox.put_all([Frame(b"", prepare=lambda value=value: made(value)) for value in (b"1111", b"2222")])
        may_go_on.set()
        assert outbox.finish(DEADLINE)
        with other:
            assert other.recv(9, socket.MSG_WAITALL) == b"011112222"


@pytest.fixture(params=["tcp", "unix"])
def ends(request):
    """A link, and the socket at its other end."""
    if request.param == "unix":
        sock, other = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            sock = socket.create_connection(listening.getsockname())
            other, _ = listening.accept()
    other.settimeout(DEADLINE)
    yield Link(sock), other
    sock.close()
    other.close()


class Gate:
    """A frame that is made until the test releases it; no other frame is sent before."""

    def __init__(self, outbox):
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        outbox.put_all([Frame(b"", prepare=self._made)])
        assert self.begun.wait(DEADLINE)

    def _made(self):
        self.begun.set()
        self.may_go_on.wait(DEADLINE)
        return b"", None


def read(other, size):
    found = bytearray()
    while len(found) < size:
        found += other.recv(size - len(found))
    return bytes(found)


def test_frames_are_sent_by_priority_and_then_in_order(ends):
    link, other = ends
    outbox = Outbox(link, "to the other end")
    gate = Gate(outbox)
    for header, priority in ((b"a", 0), (b"b", 5), (b"c", LAST), (b"d", 5), (b"e", 0), (b"f", -3), (b"g", BEFORE_ALL)):
        outbox.put(header, None, priority)
    gate.may_go_on.set()
    assert read(other, 7) == b"gbdaefc"
    assert outbox.finish(DEADLINE)


class Recorder:
    """A link that sends only when the test says so."""

    def __init__(self, window=None):
        self.sock = SimpleNamespace(family=socket.AF_INET)
        self.window = SimpleNamespace(size=window) if window else None
        self.given, self.taken = queue.Queue(), threading.Semaphore(0)

    def send_all(self, frames):
        self.given.put([len(view) for frame in frames for view in frame])
        self.taken.acquire(timeout=DEADLINE)

    def take(self):
        self.taken.release()
        return self.given.get(timeout=DEADLINE)


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
    outbox = Outbox(link, "to the other end")
    outbox.put(b"first")
    assert link.given.get(timeout=DEADLINE) == [5]
    outbox.put_all([Frame(b"", memoryview(bytes(size))) for _ in range(together + 1)])
    link.taken.release()
    assert link.given.get(timeout=DEADLINE) == [0, size] * together
    outbox.put(b"!", None, 1)
    assert link.take() == [1, 0, size]
    link.taken.release()
    assert outbox.finish(DEADLINE)


def test_a_frame_made_when_sent_is_sent_separately_unless_declared_small():
    for size, batches in ((None, [[1], [1]]), (100, [[1, 1]])):
        link = Recorder()
        outbox = Outbox(link, "to the other end")
        outbox.put(b"first")
        assert link.given.get(timeout=DEADLINE) == [5]
        more = {} if size is None else {"prepared_bytes": size}
        outbox.put_all([Frame(b"", prepare=lambda: (b"x", None), **more) for _ in range(2)])
        for batch in batches:
            assert link.take() == batch
        link.taken.release()
        assert outbox.finish(DEADLINE)


def test_memory_is_released_after_sending_also_on_a_cut_link(ends):
    link, other = ends
    outbox = Outbox(link, "to the other end")
    sent = queue.Queue()
    outbox.put(b"header", memoryview(b"payload"), sent=lambda: sent.put("first"))
    assert read(other, 13) == b"headerpayload"
    assert sent.get(timeout=DEADLINE) == "first"
    outbox.put(b"", memoryview(bytes(16 << 20)), sent=lambda: sent.put("second"))  # more than is on its way unread
    link.cut()
    assert sent.get(timeout=DEADLINE) == "second"
    outbox.put(b"header", memoryview(b"payload"), sent=lambda: sent.put("third"))
    assert sent.get(timeout=DEADLINE) == "third"
    assert outbox.finish(DEADLINE)
    outbox.put(b"header", memoryview(b"payload"), sent=lambda: sent.put("too late"))
    assert sent.get(timeout=DEADLINE) == "too late"


def test_closing_reports_whether_all_was_sent_in_time(ends):
    link, other = ends
    outbox = Outbox(link, "to the other end")
    size = 16 << 20
    outbox.put(b"", memoryview(bytes(size)))
    assert not outbox.finish(0.1), "the peer does not read"
    assert len(read(other, size)) == size
    assert outbox.finish(DEADLINE)


def test_a_frame_that_cannot_be_made_cuts_the_link_so_that_no_peer_waits_for_it(ends, capfd):
    link, other = ends
    outbox = Outbox(link, "to the other end")

    def made():
        raise MemoryError("no room")

    outbox.put_all([Frame(b"", prepare=made)])
    assert other.recv(1) == b""
    assert outbox.finish(DEADLINE)
    assert "MemoryError: no room" in capfd.readouterr().err


def test_inside_a_host_the_calling_thread_sends_headers():
    sock, other = socket.socketpair()
    other.settimeout(0)
    outbox, sent = Outbox(Link(sock), "to the other end"), []
    outbox.put_all([Frame(b"one", sent=lambda: sent.append(1)), Frame(b"two", sent=lambda: sent.append(2))])
    assert (sent, other.recv(100)) == ([1, 2], b"onetwo")
    assert outbox.finish(DEADLINE)
    sock.close()
    other.close()


@pytest.mark.parametrize("waiting", ["a payload", "what has to be made", "the rest of a header"])
def test_headers_do_not_overtake_queued_frames(waiting):
    sock, other = socket.socketpair()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    other.settimeout(DEADLINE)
    outbox, size = Outbox(Link(sock), "to the other end"), 1 << 20
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
    assert outbox.finish(DEADLINE)
    sock.close()
    other.close()


def test_frames_without_a_priority_are_in_order_with_those_of_none(ends):
    link, other = ends
    outbox = Outbox(link, "to the other end")
    gate = Gate(outbox)
    outbox.put(b"a", None, 0)
    outbox.put(b"b")
    outbox.put_all([Frame(b"c")])
    outbox.put(b"d", None, 0)
    gate.may_go_on.set()
    assert read(other, 4) == b"abcd"
    assert outbox.finish(DEADLINE)


def test_droppable_frames_are_dropped_and_their_memory_is_free(ends):
    """But not those of which a part may have been sent, nor frames that have to arrive."""
    link, other = ends
    outbox, sent = Outbox(link, "to the other end"), queue.Queue()
    begun, may_go_on = threading.Event(), threading.Event()

    def made():
        begun.set()
        may_go_on.wait(DEADLINE)
        return b"begun", None

    outbox.put_all([Frame(b"", prepare=made, droppable=True)])
    assert begun.wait(DEADLINE)
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
    may_go_on.set()
    assert read(other, 16) == b"begundpayloadfec"
    assert sent.get(timeout=DEADLINE) == "d"
    assert outbox.finish(DEADLINE)


def test_dropped_frames_take_no_room():
    link = Recorder()
    outbox = Outbox(link, "to the other end")
    outbox.put(b"first")
    link.given.get(timeout=DEADLINE)
    outbox.put_all([Frame(b"", memoryview(bytes(1 << 26)), droppable=True)])
    waiting = threading.Thread(target=outbox.wait_for_room)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    outbox.drop()
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    link.taken.release()
    assert outbox.finish(DEADLINE)
    assert link.given.empty()


def test_an_outbox_can_be_finished_on_its_own_thread(ends):
    """As when what follows from a sent frame ends the link. It does not wait for itself."""
    link, other = ends
    outbox, finished = Outbox(link, "to the other end"), queue.Queue()
    outbox.put(b"", memoryview(b"x"), sent=lambda: finished.put(outbox.finish(DEADLINE)))
    assert finished.get(timeout=DEADLINE) is False
    assert outbox.finish(DEADLINE)
    assert read(other, 1) == b"x"


def test_a_link_that_cannot_send_is_cut():
    """Its reader then reports the loss."""
    cuts = queue.Queue()

    class Failing(Recorder):
        def send_all(self, frames):
            raise Closed("no route")

        def cut(self):
            cuts.put("cut")

    outbox = Outbox(Failing(), "to the other end")
    outbox.put(b"first")
    assert cuts.get(timeout=DEADLINE) == "cut"
    assert outbox.finish(DEADLINE)


def test_headers_are_sent_by_the_calling_thread_again_after_a_payload():
    sock, other = socket.socketpair()
    other.settimeout(DEADLINE)
    outbox = Outbox(Link(sock), "to the other end")
    for _ in range(3):
        sent = threading.Event()
        outbox.put(b"one", memoryview(b"two"), sent=sent.set)
        assert sent.wait(DEADLINE) and read(other, 6) == b"onetwo"
        on = []
        deadline = time.monotonic() + DEADLINE
        while on[-1:] != [threading.current_thread()]:  # the sending thread may not yet be done
            assert time.monotonic() < deadline
            done = threading.Event()
            outbox.put(b"h", sent=lambda done=done, on=on: (on.append(threading.current_thread()), done.set()))
            assert done.wait(DEADLINE) and read(other, 1) == b"h"
    assert outbox.finish(DEADLINE)
    sock.close()
    other.close()


def test_the_sending_thread_is_named():
    sock, other = socket.socketpair()
    outbox = Outbox(Link(sock), "to the other end")
    (thread,) = [each for each in threading.enumerate() if each.name == "to the other end" and each.is_alive()]
    assert thread.daemon
    assert outbox.finish(DEADLINE)
    sock.close()
    other.close()


@pytest.mark.parametrize(("frames", "size"), [(2, (1 << 26) - 6), (1 << 14, 0)])
def test_a_queue_with_room_is_not_waited_for_and_a_full_one_is(frames, size):
    link = Recorder()
    outbox = Outbox(link, "to the other end")
    outbox.put(b"first")
    link.given.get(timeout=DEADLINE)
    payload = memoryview(bytes(size))
    outbox.put_all([Frame(b"", payload) for _ in range(frames - 1)])
    outbox.wait_for_room()
    outbox.put(b"", payload)
    waiting = threading.Thread(target=outbox.wait_for_room)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    while waiting.is_alive():
        link.taken.release()
        waiting.join(0.001)
    for _ in range(frames):  # more than there are batches
        link.taken.release()
    assert outbox.finish(DEADLINE)
    outbox.wait_for_room()
