"""A worker of an elastic job takes the place of a lost one: its link to a server, and what becomes of the earlier."""

import gc
import socket
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from dmltrain.base.errors import JobLost, UserError
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.server.links import admission
from dmltrain.kvstore.transport import host, message, wire
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey, Leave
from dmltrain.kvstore.transport.message.job import LinkLost
from dmltrain.kvstore.transport.message.views import Enter, Left
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.view import Lost, View
from dmltrain.kvstore.worker import membership
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.routes import Sharing
from dmltrain.kvstore.worker.membership import Membership
from tests.kvstore import served
from tests.kvstore.made import SYNC, start
from tests.kvstore.served import ELASTIC, FIRST, Peer, Process, Server, answered, expect_sum, heard, leave, push
from tests.kvstore.whole_job import NEVER, begun
from tests.waiting import SECONDS, wait_for

LOST = Lost(2, "frozen")
SECOND = FIRST.without([2], base=1, lost=(LOST,))
THIRD = View(3, 2, ((0,), (1,), (2,)), (0,))  # the replacement is in it
AT_ONCE = View(2, 1, ((0,), (1,), (2,)), (0,), lost=(LOST,))
FOURTH = View(4, 3, ((0,), (1,), (2,)), (0,), lost=(LOST,))


def key(number, size=4, weight=True):
    return DeclaredKey(number, f"k{number}", "float32", weight, {"type": "none"}, ((0, size),))


def declare(peer, view, *keys):
    peer.link.send(message.encode(Declare("dist_sync", 0.0, keys), view=view))


class Blocked:
    """Whoever asks for this state waits until they may go on."""

    def __init__(self):
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def pack_state(self):
        self.begun.set()
        assert self.may_go_on.wait(SECONDS)
        return b""


@pytest.fixture(params=[False, True], ids=["tcp", "shm"])
def shared(request):
    return request.param


@pytest.fixture
def serve(shared, closed_at_the_end):
    def begin(view=FIRST, unheard=None, **options):
        server = closed_at_the_end(Server(environment=ELASTIC, shared=shared, **options))
        for rank in {0, 1, 2} - {unheard}:
            assert heard(server.peer(rank)) == []
        server.service.enter(view)
        return server

    return begin


def push_sum(peers, view, shared, values=(10, 20, 300), clock=1):
    """These push these values, and get the sum."""
    for peer, value in zip(peers, values, strict=False):
        push(peer, [value] * 4, view, shared, clock=clock)
    expect_sum(peers, view, sum(values[: len(peers)]), shared, clock)


def lost_by(server):
    """The rank of the worker whose link the server reports as lost."""
    return server.lost.get(timeout=SECONDS).peer.index


def joined(server, view=THIRD):
    """The peers, once worker 2 was replaced and the server has entered this view."""
    late = server.another(2)
    assert heard(late) == []
    server.service.enter(view)
    return server.peer(0), server.peer(1), late


TWO_VIEWS_OR_ONE = pytest.mark.parametrize("views", [[SECOND, THIRD], [AT_ONCE]], ids=["two views", "one view"])


@TWO_VIEWS_OR_ONE
def test_a_replacement_takes_part_from_its_view_on(serve, shared, views):
    """It connects before the server has the view without the lost one, and is faster than the server."""
    server, last = serve(), views[-1].number
    first, second, third = (server.peer(rank) for rank in range(3))
    push(third, [1] * 4, 1, shared)
    third.link.close()
    assert lost_by(server) == 2
    late = server.another(2)
    assert heard(late) == []
    declare(late, last, key(0), key(1))
    push(late, [300] * 4, last, shared)
    for view in views:
        server.service.enter(view)
    assert late.answer()[0].kind == FrameKind.DONE
    for peer, value in ((first, 10), (second, 20)):
        push(peer, [value] * 4, last, shared)
    expect_sum((first, second, late), last, 330, shared)
    push_sum((first, second, late), last, shared, clock=2)
    late.link.close()
    assert lost_by(server) == 2, "the replacement is missed as any worker"


MORE = View(2, 1, ((0, 1, 3), (2,)), (0,), joined=(3,))


def test_a_worker_comes_in_addition(shared, closed_at_the_end):
    """Before the server has a view. With its rank the host of the first two would have its relay."""
    server = closed_at_the_end(Server(environment=replace(ELASTIC, max_workers=4), shared=shared))
    peers = [*(server.peer(rank) for rank in range(3)), server.another(3)]
    assert [heard(peer) for peer in peers] == [[]] * 4
    assert "cut off worker 4: not a worker of this job" in server.another(4).error()
    server.service.enter(FIRST)
    server.service.enter(MORE)
    answered(peers[3], Declare("dist_sync", 0.0, (key(0),)), view=2)
    push_sum(peers, 2, shared, (1, 10, 100, 1000))


@TWO_VIEWS_OR_ONE
def test_a_frozen_process_wakes_up_and_changes_nothing(serve, shared, views):
    """Its frames were in the server's memory already when its replacement joined."""
    blocked = Blocked()
    server, last = serve(states=blocked), views[-1].number
    third = server.peer(2)
    third.send(FrameKind.PULL, view=1)
    offset, earlier = third.value()[0].offset, server.service.answers.outboxes[2].link
    third.send(FrameKind.READ_STATE, view=1)
    assert blocked.begun.wait(SECONDS)
    push(third, [1000] * 4, 1, shared)
    declare(third, 1, key(7))
    if shared:
        third.send(FrameKind.RELEASE, wire.release([(0, 0, offset)]), view=1)
    third.link.send(message.encode(Leave(), view=1))
    connecting = threading.Event()

    def replace():
        late = server.another(2)
        connecting.set()
        assert heard(late) == []
        return late

    replacing = begun(replace)
    assert connecting.wait(SECONDS)
    for view in views:
        server.service.enter(view)
    late = replacing.result(SECONDS)
    late.send(FrameKind.PULL, view=last)
    assert late.value()[0].offset == offset, "both read the same value"
    buffer = server.core.slices()[0, 0].value
    blocked.may_go_on.set()
    wait_for(lambda: earlier.sock.fileno() < 0, "the link of the frozen process is closed")
    assert buffer.readers == (1 if shared else 0), "the replacement's"
    assert list(server.core.slices()) == [(0, 0), (1, 0)] and not server.core.workers.finished
    push_sum((server.peer(0), server.peer(1), late), last, shared)
    late.link.close()
    assert lost_by(server) == 2 and server.lost.empty()


def test_a_process_that_is_frozen_while_it_sends_is_cut_off(serve):
    """The memory for its push is used again."""
    server = serve()
    slice_ = server.core.slices()[0, 0]
    (buffer,) = slice_.spare["value"]
    server.peer(2).link.send(Header(FrameKind.PUSH, 16, 1, 0, clock=1).pack() + bytes(5))
    wait_for(lambda: not slice_.spare["value"], "the push is received")
    server.service.enter(SECOND)
    wait_for(lambda: slice_.spare["value"] == [buffer], "its memory is free")
    with pytest.raises(Closed):
        server.peer(2).link.read_header()


def test_a_second_process_with_the_rank_of_a_member_is_refused(serve, shared, monkeypatch):
    monkeypatch.setattr(admission, "REPLACE_SECONDS", 0.1)
    server = serve()
    said = "server 0: cut off worker 2: not a worker of this job, or already connected"
    assert server.another(2).error() == said
    push_sum([server.peer(rank) for rank in range(3)], 1, shared)
    server.service.enter(SECOND)
    server.service.enter(THIRD)
    late = server.another(2)
    assert heard(late) == [] and server.another(2).error() == said


def test_a_worker_that_gave_up_its_handshake_gets_in_when_it_connects_again(serve, shared, monkeypatch):
    """ACCEPT came too late for it, and nobody is lost. A replacement comes with a view without the lost one."""

    def given_up():
        server = serve(unheard=2)
        server.peer(2).link.close()
        wait_for(lambda: 2 in server.service.answers.outboxes, "it was accepted")
        return server, [server.peer(0), server.peer(1), server.another(2)]

    server, peers = given_up()
    server.service.enter(SECOND)
    server.service.enter(THIRD)
    push_sum(peers, 3, shared)
    monkeypatch.setattr(admission, "REPLACE_SECONDS", 0.1)
    server, peers = given_up()
    push_sum(peers, 1, shared)
    peers[2].link.close()
    assert lost_by(server) == 2 and server.lost.empty()


def test_a_replacement_that_leaves_before_its_view_or_what_the_lost_one_has_finished_is_not_at_its_end(serve):
    server = serve(SECOND)
    late = server.another(2)
    assert heard(late) == []
    late.link.close()
    assert heard(server.peer(0)) == [] and server.lost.empty()
    server.service.enter(THIRD)
    assert lost_by(server) == 2
    server = serve(SECOND)
    leave(server.another(2))
    server.service.enter(THIRD)
    assert heard(server.peer(0)) == [] and server.lost.empty() and not server.core.workers.finished
    server = serve()
    answered(server.peer(2), Leave(), view=1)
    assert server.core.workers.finished == {2}
    server.service.enter(AT_ONCE)
    assert not server.core.workers.finished


def test_a_replacement_can_be_replaced_before_its_view_and_after(serve, shared):
    """Also if it is only frozen."""
    server = serve(SECOND)
    frozen = server.another(2)
    assert heard(frozen) == []
    *_, late = joined(server)
    with pytest.raises(Closed):
        frozen.link.read_header()
    push(late, [9] * 4, 3, shared)
    assert heard(late) == []
    late.link.close()
    assert lost_by(server) == 2
    push_sum(joined(server, FOURTH), 4, shared)
    assert server.lost.empty()


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
    *others, late = joined(server)
    for peer in others:
        push(peer, [10] * 4, 3, shared)
        assert heard(peer) == []
    declare(late, 3, *keys)
    error = late.error()
    assert said in error and error.endswith("all workers must train the same model")
    lost = server.lost.get(timeout=SECONDS)
    assert lost.peer.index == 2 and lost.error == error and server.failed.empty()
    assert list(server.core.slices()) == [(0, 0), (1, 0)]
    server.service.enter(View(4, 2, ((0,), (1,)), (0,), lost=(LOST,)))
    answered(others[0], Declare("dist_sync", 0.0, (key(9, 3, weight=False),)), view=4)
    push_sum(others, 4, shared)


@pytest.mark.parametrize("shared", [True])
def test_the_memory_of_a_lost_worker_is_freed(serve, shared):
    """A dead process's arena lives as long as somebody has mapped it. The server is told that the worker is lost."""
    server = serve()
    third = server.peer(2)
    mapping = weakref.ref(server.service.answers.outboxes[2].link.peer_arena)
    push(third, [1] * 4, 1, shared=True)
    assert heard(third) == []
    server.service.enter(SECOND)
    wait_for(lambda: (gc.collect(), mapping() is None)[1], "its memory is unmapped")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_process_goes_on_without_a_lost_worker_and_enters_what_the_scheduler_says(monkeypatch, transport):
    """Also a view with a replacement."""
    monkeypatch.setattr(Control, "link_lost", pytest.fail)  # it would end this process after some seconds
    process = Process(transport)
    address, shared = process.socket_name or process.address, transport == "shm"
    first, second, third = (Peer(address, rank) for rank in range(3))
    for peer in (first, second, third):
        answered(peer, Declare("dist_sync", 0.0, (key(0),)))
    process.send(Enter(FIRST))
    push(third, [1] * 4, 1, shared)
    third.link.close()
    lost = process.heard.get(timeout=SECONDS)
    assert isinstance(lost, LinkLost) and (lost.peer.role, lost.peer.index) == ("worker", 2)
    process.send(Enter(SECOND))
    push_sum((first, second), 2, shared)
    late = Peer(address, 2)
    assert heard(late) == []
    process.send(Enter(THIRD))
    answered(late, Declare("dist_sync", 0.0, (key(0),)), view=3)
    push_sum((first, second, late), 3, shared)
    for rank, peer in enumerate((first, second, late)):
        leave(peer, 7 + rank, view=3)
        assert process.heard.get(timeout=SECONDS) == Left(3, rank, 7 + rank)
    assert process.close() == [], "nothing but the lost link, and who has left"


# -- the worker -------------------------------------------------------------------------------------------------------


def join(address, socket_name="", transport="tcp"):
    """Worker 2 joins a job with this server: its scheduler, and its membership to be waited for."""
    scheduler = served.Scheduler()
    its = replace(ELASTIC, role="worker", index=2, joins=True, root_port=scheduler.port, transport=transport)
    its = replace(its, lost_seconds=60.0)
    member = begun(Membership, its, Sharing(its, sums=False), NEVER)
    scheduler.registered()
    scheduler.send(start([(host.identity(), "")] * 3, [(*address, socket_name, host.identity())]))
    return scheduler, member


def test_a_joining_worker_that_is_rejected_says_why_and_ends_no_job(serve, shared):
    server = serve(SECOND)
    by_memory = (server.met[1], "shm") if shared else ()
    scheduler, joining = join(server.listening.getsockname(), *by_memory)
    member = joining.result(SECONDS)
    server.service.enter(THIRD)
    for each in member.routes.links:
        each.enter(3)
    entries = KeyEntries(member.routes, 3, SYNC, SECONDS)
    entries.declare(["k0"], [np.zeros(9, np.float32)], is_weight=True)
    with pytest.raises(JobLost, match="another worker as 'k0' .*same model"):
        member.flush()
    member.abort("ended by JobLost")
    assert not [each for each in scheduler.rest() if not isinstance(each, LinkLost)]


@pytest.mark.parametrize(
    "transport, error, said",
    [("tcp", JobLost, "server 0 at .* cannot be reached"), ("shm", UserError, "--transport shm: server 0 at")],
)
def test_a_joining_worker_that_cannot_reach_a_server_ends_no_job(monkeypatch, transport, error, said):
    monkeypatch.setattr(membership, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(Control, "abort", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    scheduler, joining = join(address, transport=transport)
    with pytest.raises(error, match=said):
        joining.result(SECONDS)
    scheduler.link.cut()
