"""A worker of an elastic job takes the place of a lost one: its link to a server, and what becomes of the earlier."""

import contextlib
import gc
import queue
import socket
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.server import service
from dmltrain.kvstore.transport import host, message, wire
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message import Declare, Enter, Heartbeat, Key, Leave, Left, LinkLost, Register
from dmltrain.kvstore.transport.wire import Header, Kind
from dmltrain.kvstore.view import Lost, View
from dmltrain.kvstore.worker import membership
from dmltrain.kvstore.worker.keys import Entries
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.routes import Sharing
from tests.kvstore.made import start
from tests.kvstore.served import DEADLINE, ELASTIC, FIRST, Peer, Process, Server, heard, push, until
from tests.kvstore.whole_job import NEVER

LOST = Lost(2, "frozen")
SECOND = FIRST.without([2], base=1, lost=(LOST,))
THIRD = View(3, 2, ((0,), (1,), (2,)), (0,))  # the replacement is in it
AT_ONCE = View(2, 1, ((0,), (1,), (2,)), (0,), lost=(LOST,))
FOURTH = View(4, 3, ((0,), (1,), (2,)), (0,), lost=(LOST,))


def key(number, size=4, weight=True):
    return Key(number, f"k{number}", "float32", weight, {"type": "none"}, ((0, size),))


def declare(peer, view, *keys):
    peer.link.send(message.encode(Declare("dist_sync", 0.0, keys), view=view))


class Blocked:
    """What a server does for a frame that concerns all slices: wait until it may go on."""

    def __init__(self):
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, connection, header):
        self.begun.set()
        assert self.may_go_on.wait(DEADLINE)
        return Header(Kind.DONE, 0, header.view).pack(), None


@pytest.fixture(params=[False, True], ids=["tcp", "shm"])
def shared(request):
    return request.param


@pytest.fixture
def serve(shared):
    made = []

    def begin(view=FIRST, **options):
        server = Server(environment=ELASTIC, shared=shared, **options)
        made.append(server)
        for rank in range(3):
            assert heard(server.peer(rank)) == []
        server.service.enter(view)
        return server

    yield begin
    for each in made:
        each.close()


def expect_sum(peers, view, total, shared, clock=1):
    """All these get the value, and have read it."""
    for peer in peers:
        header, value = peer.value()
        assert (header.view, header.clock, value) == (view, clock, [total] * 4)
        if shared:
            peer.send(Kind.RELEASE, wire.release([(0, 0, header.offset)]), view=view)


def joined(server, view=THIRD):
    """The peers, once worker 2 was replaced and the server has entered this view."""
    late = server.another(2)
    assert heard(late) == []
    server.service.enter(view)
    return server.peer(0), server.peer(1), late


@pytest.mark.parametrize("views", [[SECOND, THIRD], [AT_ONCE]], ids=["two views", "one view"])
def test_a_replacement_takes_part_from_its_view_on(serve, shared, views):
    """It connects before the server has the view without the lost one, and is faster than the server."""
    server, last = serve(), views[-1].number
    first, second, third = (server.peer(rank) for rank in range(3))
    push(third, [1] * 4, 1, shared)
    third.link.close()
    assert server.lost.get(timeout=DEADLINE).peer.index == 2
    late = server.another(2)
    assert heard(late) == []
    declare(late, last, key(0), key(1))
    push(late, [300] * 4, last, shared)
    for view in views:
        server.service.enter(view)
    assert late.answer()[0].kind == Kind.DONE
    for peer, value in ((first, 10), (second, 20)):
        push(peer, [value] * 4, last, shared)
    expect_sum((first, second, late), last, 330, shared)
    for peer in (first, second, late):
        push(peer, [1] * 4, last, shared, clock=2)
    expect_sum((first, second, late), last, 3, shared, clock=2)
    late.link.close()
    assert server.lost.get(timeout=DEADLINE).peer.index == 2, "the replacement is missed as any worker"


MORE = View(2, 1, ((0, 1, 3), (2,)), (0,), joined=(3,))


def test_a_worker_comes_in_addition(shared):
    """Before the server has a view. With its rank the host of the first two would have its relay."""
    server = Server(environment=replace(ELASTIC, max_workers=4), shared=shared)
    try:
        for rank in range(3):
            assert heard(server.peer(rank)) == []
        late = server.another(3)
        assert heard(late) == []
        assert server.another(4).error() == "server 0: cut off worker 4: not a worker of this job, or already connected"
        server.service.enter(FIRST)
        server.service.enter(MORE)
        declare(late, 2, key(0))
        assert late.answer()[0].kind == Kind.DONE
        peers = [*(server.peer(rank) for rank in range(3)), late]
        for rank, peer in enumerate(peers):
            push(peer, [10**rank] * 4, 2, shared)
        expect_sum(peers, 2, 1111, shared)
    finally:
        server.close()


@pytest.mark.parametrize("views", [[SECOND, THIRD], [AT_ONCE]], ids=["two views", "one view"])
def test_a_frozen_process_wakes_up_and_changes_nothing(serve, shared, views):
    """Its frames were in the server's memory already when its replacement joined."""
    blocked = Blocked()
    server, last = serve(other=blocked), views[-1].number
    first, second, third = (server.peer(rank) for rank in range(3))
    third.send(Kind.PULL, view=1)
    offset, earlier = third.value()[0].offset, server.service._answers.outboxes[2].link
    third.send(Kind.READ_STATE, view=1)
    assert blocked.begun.wait(DEADLINE)
    push(third, [1000] * 4, 1, shared)
    declare(third, 1, key(7))
    if shared:
        third.send(Kind.RELEASE, wire.release([(0, 0, offset)]), view=1)
    third.link.send(message.encode(Leave(), view=1))
    connecting, entered = threading.Event(), []

    def replace():
        entered.append(server.another(2))
        connecting.set()
        entered.append(heard(entered[0]))

    thread = threading.Thread(target=replace)
    thread.start()
    assert connecting.wait(DEADLINE)
    for view in views:
        server.service.enter(view)
    thread.join(DEADLINE)
    late, answers = entered
    assert answers == []
    late.send(Kind.PULL, view=last)
    assert late.value()[0].offset == offset, "both read the same value"
    buffer = server.core.slices()[0, 0].value
    blocked.may_go_on.set()
    until(lambda: earlier.sock.fileno() < 0)
    assert buffer.readers == (1 if shared else 0), "the replacement's"
    assert list(server.core.slices()) == [(0, 0), (1, 0)] and not server.core.workers.finished
    for peer, value in ((first, 10), (second, 20), (late, 300)):
        push(peer, [value] * 4, last, shared)
    expect_sum((first, second, late), last, 330, shared)
    late.link.close()
    assert server.lost.get(timeout=DEADLINE).peer.index == 2 and server.lost.empty()


def test_a_process_that_is_frozen_while_it_sends_is_cut_off(serve):
    """The memory for its push is used again."""
    server = serve()
    slice_ = server.core.slices()[0, 0]
    (buffer,) = slice_.spare["value"]
    server.peer(2).link.send(Header(Kind.PUSH, 16, 1, 0, clock=1).pack() + bytes(5))
    until(lambda: not slice_.spare["value"])
    server.service.enter(SECOND)
    until(lambda: slice_.spare["value"] == [buffer])
    with pytest.raises(Closed):
        server.peer(2).link.read_header()


def test_a_second_process_with_the_rank_of_a_member_is_refused(serve, shared, monkeypatch):
    monkeypatch.setattr(service, "REPLACE_SECONDS", 0.1)
    server = serve()
    said = "server 0: cut off worker 2: not a worker of this job, or already connected"
    assert server.another(2).error() == said
    for rank in range(3):
        push(server.peer(rank), [1] * 4, 1, shared)
    expect_sum([server.peer(rank) for rank in range(3)], 1, 3, shared)
    server.service.enter(SECOND)
    server.service.enter(THIRD)
    late = server.another(2)
    assert heard(late) == [] and server.another(2).error() == said


def test_a_replacement_that_leaves_before_its_view_is_missed_from_then_on(serve):
    """Also if it has said nothing."""
    server = serve(SECOND)
    late = server.another(2)
    until(lambda: 2 in server.service._answers.joining)
    late.link.close()
    assert heard(server.peer(0)) == [] and server.lost.empty()
    server.service.enter(THIRD)
    assert server.lost.get(timeout=DEADLINE).peer.index == 2


def test_a_replacement_can_be_replaced_before_its_view_and_after(serve, shared):
    """Also if it is only frozen."""
    server = serve(SECOND)
    frozen = server.another(2)
    assert heard(frozen) == []
    first, second, late = joined(server)
    with pytest.raises(Closed):
        frozen.link.read_header()
    push(late, [9] * 4, 3, shared)
    assert heard(late) == []
    late.link.close()
    assert server.lost.get(timeout=DEADLINE).peer.index == 2
    first, second, last = joined(server, FOURTH)
    for peer in (first, second, last):
        push(peer, [1] * 4, 4, shared)
    expect_sum((first, second, last), 4, 3, shared)
    assert server.lost.empty()


def test_a_replacement_that_leaves_in_good_order_before_its_view_has_not_finished(serve):
    server = serve(SECOND)
    late = server.another(2)
    late.link.send(message.encode(Leave()))
    assert late.answer()[0].kind == Kind.DONE
    late.link.close()
    server.service.enter(THIRD)
    assert heard(server.peer(0)) == [] and server.lost.empty() and not server.core.workers.finished


def test_what_a_lost_worker_has_finished_does_not_count_for_its_replacement(serve):
    server = serve()
    third = server.peer(2)
    third.link.send(message.encode(Leave(), view=1))
    assert third.answer()[0].kind == Kind.DONE and server.core.workers.finished == {2}
    server.service.enter(AT_ONCE)
    assert not server.core.workers.finished


@pytest.mark.parametrize(
    "keys, said",
    [
        ((key(9, weight=False), key(0), key(1, 5)), "as 'k1' (float32, slices [[0, 5]]), another worker as 'k1'"),
        ((key(9, weight=False), key(0), key(1), key(2)), "as 'k2' (float32, slices [[0, 4]]), which the others do not"),
    ],
)
def test_a_replacement_with_another_network_ends_alone(serve, shared, keys, said):
    """The round of its view is in progress, and nothing that it has declared stays."""
    server = serve(SECOND)
    first, second, late = joined(server)
    for peer, value in ((first, 10), (second, 20)):
        push(peer, [value] * 4, 3, shared)
        assert heard(peer) == []
    declare(late, 3, *keys)
    error = late.error()
    assert said in error and error.endswith("all workers must train the same model")
    lost = server.lost.get(timeout=DEADLINE)
    assert lost.peer.index == 2 and lost.error == error and server.failed.empty()
    assert list(server.core.slices()) == [(0, 0), (1, 0)]
    server.service.enter(View(4, 2, ((0,), (1,)), (0,), lost=(LOST,)))
    declare(first, 4, key(9, 3, weight=False))
    assert first.answer()[0].kind == Kind.DONE
    for peer, value in ((first, 10), (second, 20)):
        push(peer, [value] * 4, 4, shared)
    expect_sum((first, second), 4, 30, shared)


@pytest.mark.parametrize("shared", [True])
def test_the_memory_of_a_lost_worker_is_freed(serve, shared):
    """A dead process's arena lives as long as somebody has mapped it. The server is told that the worker is lost."""
    server = serve()
    third = server.peer(2)
    mapping = weakref.ref(server.service._answers.outboxes[2].link.peer_arena)
    push(third, [1] * 4, 1, shared=True)
    assert heard(third) == []
    server.service.enter(SECOND)

    def freed():
        gc.collect()
        return mapping() is None

    until(freed)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_process_of_an_elastic_job_accepts_replacements(transport):
    process = Process(ELASTIC, transport)
    address = process.socket_name or process.address
    shared = transport == "shm"
    first, second, third = (Peer(address, rank) for rank in range(3))
    for peer in (first, second, third):
        declare(peer, 0, key(0))
        assert peer.answer()[0].kind == Kind.DONE
    process.send(Enter(FIRST))
    push(third, [1] * 4, 1, shared)
    process.send(Enter(SECOND))
    late = Peer(address, 2)
    assert heard(late) == []
    process.send(Enter(THIRD))
    declare(late, 3, key(0))
    assert late.answer()[0].kind == Kind.DONE
    for peer in (first, second, late):
        push(peer, [1] * 4, 3, shared)
    for rank, peer in enumerate((first, second, late)):
        header, value = peer.value()
        assert (header.view, value) == (3, [3] * 4)
        peer.link.send(message.encode(Leave(7), view=3))
        assert peer.answer()[0].kind == Kind.DONE
        assert process.heard.get(timeout=DEADLINE) == Left(3, rank, 7)
    for peer in (first, second, third, late):
        peer.link.close()
    process.close()
    assert process.heard.empty()


# -- the worker -------------------------------------------------------------------------------------------------------


class Scheduler:
    """Lets worker 2 join a job with this server. `heard` has what it reports."""

    def __init__(self, address, socket_name):
        self._listening, self._links, self.heard = socket.create_server(("127.0.0.1", 0)), [], queue.Queue()
        self._start = start([(host.identity(), "")] * 3, [(*address, socket_name, host.identity())])
        transport = "shm" if socket_name else "tcp"
        port = self._listening.getsockname()[1]
        self.environment = replace(
            ELASTIC, role="worker", index=2, joins=True, root_port=port, transport=transport, lost_seconds=60.0
        )
        own = replace(ELASTIC, role="scheduler")
        threading.Thread(target=accept_loop, args=(self._listening, own, "scheduler", self._serve), daemon=True).start()

    def _serve(self, connection, role, index):
        self._links.append(connection)
        with contextlib.suppress(Closed):
            while True:
                found = connection.read_message(connection.read_header())
                if isinstance(found, Register):
                    connection.send(message.encode(self._start))
                elif not isinstance(found, Heartbeat):
                    self.heard.put(found)
        self.heard.put("end of stream")

    def join(self):
        return Membership(self.environment, Sharing(self.environment, sums=False), NEVER)

    def close(self):
        self._listening.close()
        for each in self._links:
            each.cut()


@pytest.fixture
def schedule():
    made = []

    def begin(*address):
        made.append(Scheduler(*address))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_a_joining_worker_that_is_rejected_says_why_and_ends_no_job(serve, shared, schedule):
    server = serve(SECOND)
    scheduler = schedule(server.listening.getsockname(), server.met[1] if shared else "")
    member = scheduler.join()
    server.service.enter(THIRD)
    for each in member.routes.links:
        each.enter(3)
    entries = Entries(member.routes, 3, "dist_sync", 0.0, DEADLINE)
    entries.declare(["k0"], [np.zeros(9, np.float32)], is_weight=True)
    with pytest.raises(JobLost, match="another worker as 'k0' .*: all workers must train the same model"):
        member.flush()
    member.abort("ended by JobLost")
    heard = list(iter(lambda: scheduler.heard.get(timeout=DEADLINE), "end of stream"))
    assert not [each for each in heard if not isinstance(each, LinkLost)]


@pytest.mark.parametrize(
    "transport, error, said",
    [("tcp", JobLost, "server 0 at .* cannot be reached"), ("shm", UserError, "--transport shm: server 0 at")],
)
def test_a_joining_worker_that_cannot_reach_a_server_ends_no_job(schedule, monkeypatch, transport, error, said):
    monkeypatch.setattr(membership, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(Control, "abort", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    scheduler = schedule(address, "")
    scheduler.environment = replace(scheduler.environment, transport=transport)
    with pytest.raises(error, match=said):
        scheduler.join()
