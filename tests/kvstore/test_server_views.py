"""A server of an elastic job goes from one view to the next: what it forgets, keeps, takes back and gives to others."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.kvstore.kind import kind_of
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.links.service import Service
from dmltrain.kvstore.server.links.shared_core import SharedCore
from dmltrain.kvstore.server.work import Work
from dmltrain.kvstore.transport import message, wire
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey, Hold, Leave
from dmltrain.kvstore.transport.message.views import Enter
from dmltrain.kvstore.transport.wire import Flag, FrameKind, Header
from dmltrain.kvstore.view import Lost, View
from tests.kvstore import carrying_out
from tests.kvstore.served import ELASTIC, FIRST, Peer, Process, Server, answered, expect_sum, heard, leave, push
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS, wait_for

NONE = {"type": "none"}
SUM = 1 << 31  # number of the first key that is no weight
SECOND = FIRST.without([2], base=1, lost=(Lost(2, "end of stream"),))


class Arena:
    """Allocates memory that is shared, for all the core knows, and remembers it."""

    def __init__(self):
        self.bytes, self.offsets = 0, []

    def __call__(self, size):
        offset, self.bytes = self.bytes, self.bytes + max(1, size)
        self.offsets.append(offset)
        return offset, np.full(size, 255, np.uint8)


def key(number, size=2, weight=True, mean=False):
    return DeclaredKey(number, f"k{number}", "float32", weight, NONE, ((0, size),), mean)


def core_of(workers, *keys, **options):
    core = ServerCore(workers, allocate=Arena(), **options)
    core.workers.on_hosts([(worker,) for worker in range(workers)])
    for worker in range(workers):
        core.keys.declare(worker, Declare("dist_sync", 0.0, keys))
    return core


def pushed(core, worker, values, number=0, clock=1):
    """Push these values and pull; returns the replies that follow."""
    actions = carrying_out.pushed(core, worker, number, clock, values)
    return carrying_out.run(core, actions + core.pull(worker, number, 0, clock))


# -- the core ---------------------------------------------------------------------------------------------------------


def test_a_removed_worker_is_no_straggler_and_a_finished_one_still_is():
    core = core_of(4, key(0))
    core.finish(3)
    pushed(core, 0, [1, 1])
    core.views.enter([(0,), (2,), (3,)])
    core.finish(1)  # removed, and it leaves in good order
    pushed(core, 0, [1, 1])
    pushed(core, 2, [1, 1])
    assert core.overdue(0.0) == "" and "worker 3 has finished already" in core.overdue(1.0)
    core.views.enter([(0,), (2,)])
    pushed(core, 0, [1, 1])
    assert core.overdue(0.0) == core.overdue(1.0) == ""
    assert core.overdue(1e9).endswith("worker 2 (DMLTRAIN_WAIT_TIMEOUT)")


def test_sums_are_in_the_order_of_the_views_hosts_and_means_of_its_members():
    """Float sums show it: 2 + (1e9 - 1e9) is 2, and (2 + 1e9) - 1e9 is 0."""
    values = {0: [1e9], 1: [2.0], 2: [5.0], 3: [-1e9]}
    for hosts, expected in (([(1,), (0, 3)], 2.0), ([(1,), (0,), (3,)], 0.0), ([(0, 3), (1,)], 2.0)):
        core = core_of(4, key(0, 1))
        core.views.enter(hosts)
        (*_, reply) = [each for worker in (0, 3, 1) for each in pushed(core, worker, values[worker])]
        assert reply.buffer.array.tolist() == [expected]
    core = core_of(4, key(0, mean=True))
    core.views.enter([(0,), (2,)])
    pushed(core, 0, [1, 2])
    assert pushed(core, 2, [3, 6])[0].buffer.array.tolist() == [2, 4]


def test_a_view_comes_with_another_bound_on_staleness():
    core = ServerCore(2, make_step=lambda spec, key, value: lambda value, gradient, rate: None)
    for worker in range(2):
        core.keys.declare(worker, Declare("dist_ssp", 0.0, (key(0),)))
    core.keys.optimize({"name": "none"})
    core.views.enter([(0,), (1,)])
    pushed(core, 0, [1, 1], clock=1)
    assert pushed(core, 0, [1, 1], clock=2) == [], "worker 1 has made no step"
    core.views.enter([(0,), (1,)])
    core.views.become(kind_of(replace(FIRST, kvstore="dist_ssp", staleness=2.0)))
    assert [each.clock for each in pushed(core, 0, [1, 1], clock=1)] == [1]
    assert [each.clock for each in pushed(core, 0, [1, 1], clock=2)] == [2]
    assert pushed(core, 0, [1, 1], clock=3) == []
    core.keys.declare(1, Declare("dist_ssp", 2.0, (key(0),)))
    with pytest.raises(Rejected, match="start all with the same --kv-store"):
        core.keys.declare(1, Declare("dist_ssp", 0.0, (key(0),)))


def test_weights_stay_and_other_keys_are_forgotten_with_their_numbers_and_limits():
    core = core_of(2, key(0), key(SUM, 3, weight=False))
    core.keys.initialise(0, 0, 0, np.array([7, 8], np.float32))
    core.views.enter([(0,)])
    core.keys.initialise(0, 0, 0, np.array([1, 1], np.float32))
    (reply,) = core.pull(0, 0, 0, 0)
    assert reply.buffer.array.tolist() == [7, 8], "it was initialised before"
    with pytest.raises(Rejected, match=f"key {SUM} slice 0 was not declared"):
        core.buffer(0, SUM, 0, 12, 0)
    core.keys.declare(0, Declare("dist_sync", 0.0, (key(SUM, 5, weight=False),)))
    (reply,) = pushed(core, 0, [1, 2, 3, 4, 5], SUM)
    assert reply.buffer.array.tolist() == [1, 2, 3, 4, 5]
    core = core_of(2, key(0))
    core.keys.declared.max_bytes = 60
    for number in range(10):
        core.views.enter([(0,)])
        core.keys.declare(0, Declare("dist_sync", 0.0, (key(SUM + number, 10, weight=False),)))
    with pytest.raises(Rejected, match="bytes of values on one server"):
        core.keys.declare(0, Declare("dist_sync", 0.0, (key(SUM + 10, 10, weight=False),)))


def test_memory_of_forgotten_values_is_used_again_once_they_are_read():
    core = core_of(1, key(SUM, 3, weight=False))
    (old,) = pushed(core, 0, [1, 2, 3], SUM)
    receiving = core.buffer(0, SUM, 0, 12, 0)
    for clock in range(3):
        core.views.enter([(0,)])
        core.keys.declare(0, Declare("dist_sync", 0.0, (key(SUM, 3, weight=False),)))
        (reply,) = pushed(core, 0, [clock] * 3, SUM)
        assert reply.buffer.offset != old.buffer.offset != receiving.offset
        reply.release()
    assert old.buffer.array.tolist() == [1, 2, 3]
    allocated = len(core.keys.memory.allocate.offsets)
    old.release()
    receiving.give_back()
    core.keys.declare(0, Declare("dist_sync", 0.0, (key(SUM + 1, 3, weight=False),)))
    assert len(core.keys.memory.allocate.offsets) == allocated
    assert {old.buffer.offset, receiving.offset} <= set(offsets_of(core.slices()[SUM + 1, 0]))
    # Of a key that one worker pushes the value of the round before is kept, too.
    core = core_of(1)
    for _ in range(3):
        core.keys.declare(0, Declare("dist_sync", 0.0, (replace(key(SUM, 3, weight=False), pusher=0),)))
        for clock in (1, 2, 3):
            (reply,) = pushed(core, 0, [clock] * 3, SUM, clock)
            reply.release()
        allocated = len(core.keys.memory.allocate.offsets)
        core.views.enter([(0,)])
    assert allocated == 3


def offsets_of(slice_):
    """Of all shared memory that a slice at rest has."""
    return [buffer.offset for buffer in [slice_.value, *slice_.spare["value"]]]


def test_a_late_push_gives_back_the_servers_memory_and_no_other():
    core = core_of(2, key(0))
    pushed(core, 0, [1, 2])
    waiting, lent = core.buffer(1, 0, 0, 8, 0), core.lend(1, 0, 0, np.zeros(8, np.uint8), 0)
    completing = core.completing_buffer(1, 0, 0, 8, 0, 1, lambda size: np.zeros(size, np.uint8))
    core.views.enter([(0,), (1,)])
    for late in (waiting, lent, completing):
        late.give_back()
    assert sorted(offsets_of(core.slices()[0, 0])) == core.keys.memory.allocate.offsets


# -- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(closed_at_the_end):
    def begin(view=FIRST, **options):
        server = closed_at_the_end(Server(environment=ELASTIC, **options))
        server.service.enter(view)
        return server

    return begin


@pytest.mark.parametrize("shared", [False, True])
def test_frames_of_an_older_view_have_no_effect_and_no_answer(serve, shared):
    server = serve(shared=shared)
    first, second = server.peer(0), server.peer(1)
    push(first, [1] * 4, 1, shared)
    assert heard(first) == []
    server.service.enter(SECOND)
    push(second, [2] * 4, 1, shared)
    second.send(FrameKind.PULL, view=1)
    for frame in (Declare("dist_sync", 0.0, (key(SUM, 4, weight=False),)), Declare("dist_async", 0.0, ())):
        second.link.send(message.encode(frame, view=1))
    second.send(FrameKind.INIT, bytes(16), view=1)
    second.send(FrameKind.INIT, bytes(3), key=7, view=1)
    second.send(FrameKind.READ_STATE, view=1)
    second.send(FrameKind.PUSH, bytes(1 << 20), key=SUM, clock=9, view=1)
    if shared:
        second.push_shared([1] * 4, key=SUM, clock=9, view=1)
    assert heard(second) == [] and list(server.core.slices()) == [(0, 0), (1, 0)]
    server.service.enter(FIRST)  # an older view does not come back
    push(second, [20] * 4, 2, shared)
    push(first, [10] * 4, 2, shared)
    expect_sum((first, second), 2, 30, shared)


def test_headers_that_came_together_are_of_two_views(serve):
    """The service reads them at once; the first worker was faster than this server."""
    server = serve(shared=True)
    first, second = server.peer(0), server.peer(1)
    places = [first.arena.take(16) for _ in range(4)]
    for number, (_, memory) in enumerate(places):
        memory.view(np.float32)[:] = 10**number
    pushes = [(0, 1), (1, 1), (0, 2), (1, 2)]  # key, view
    frames = [
        Header(FrameKind.PUSH, 16, view, number, clock=1, flags=Flag.SHARED | Flag.PULL, offset=offset).pack()
        for (number, view), (offset, _) in zip(pushes, places, strict=True)
    ]
    first.link.send(b"".join(frames))
    for number in (0, 1):
        push(second, [5] * 4, 1, True, key=number)
    assert heard(second) == []
    server.service.enter(SECOND)
    for number in (0, 1):
        push(second, [7] * 4, 2, True, key=number)
    found = [first.value() for _ in range(2)]
    assert sorted((header.view, header.key, value[0]) for header, value in found) == [(2, 0, 107), (2, 1, 1007)]


@pytest.mark.parametrize("number", [0, SUM])
@pytest.mark.parametrize("kind", [FrameKind.PUSH, FrameKind.INIT])
def test_what_is_received_while_the_view_changes_is_dropped(serve, kind, number):
    """Of a weight, and of a sum that is forgotten: its memory is used again."""
    server = serve(shared=True)
    first, second = server.peer(0), server.peer(1)
    answered(first, Declare("dist_sync", 0.0, (key(SUM, 4, weight=False),)), view=1)
    assert heard(first) == []
    slice_ = server.core.slices()[number, 0]
    (buffer,) = slice_.spare["value"]
    frame = Header(kind, 16, 1, number, clock=1, flags=Flag.PULL).pack() + bytes(16)
    first.link.send(frame[:-5])
    wait_for(lambda: not slice_.spare["value"], "a buffer is taken")
    server.service.enter(SECOND)
    first.link.send(frame[-5:])
    assert heard(first) == []
    if number == SUM:
        with server.service.shared.exclusive() as core:
            core.keys.declare(0, Declare("dist_sync", 0.0, (key(SUM, 4, weight=False),)))
            slice_ = core.slices()[SUM, 0]
    assert buffer.offset in offsets_of(slice_)
    push(first, [1] * 4, 2, key=number)
    push(second, [2] * 4, 2, key=number)
    expect_sum((first, second), 2, 3)


def test_a_view_begins_when_no_work_is_in_progress(serve, monkeypatch):
    working, may_go_on, run = threading.Event(), threading.Event(), Work.run

    def slowly(work):
        working.set()
        assert may_go_on.wait(SECONDS)
        run(work)

    server = serve()
    monkeypatch.setattr(Work, "run", slowly)
    peers = [server.peer(rank) for rank in range(3)]
    for peer in peers:
        push(peer, [1] * 4, 1)
    assert working.wait(SECONDS)
    entered = begun(server.service.enter, SECOND)
    push(peers[0], [5] * 4, 2)
    may_go_on.set()
    entered.result(SECONDS)
    expect_sum(peers[:2], 1, 3)  # read before the next round can end: another thread may send that one's values first
    push(peers[1], [6] * 4, 2)
    expect_sum(peers[:2], 2, 11)


def test_a_frame_that_comes_while_a_view_begins_without_its_worker_cuts_no_link():
    """The next view has its workers before it has its number."""
    asked, next_view = threading.Event(), SimpleNamespace(workers=SimpleNamespace(takes=lambda _: asked.set()))
    shared = SharedCore(next_view, elastic=True)
    shared.lock.acquire()
    shared.enter(1)
    checked = begun(shared.check_member, 2, 1)
    assert asked.wait(SECONDS)
    shared.enter(2)
    shared.lock.release()
    checked.result(SECONDS)
    with pytest.raises(Closed, match="view 2 is without this worker"):
        shared.check_member(2, 2)


def test_a_frame_of_a_newer_view_waits_for_it_or_for_the_end_of_the_job(serve):
    server = serve()
    first, second, third = (server.peer(rank) for rank in range(3))
    push(first, [10] * 4, 2)
    push(second, [1] * 4, 1)
    push(third, [1] * 4, 1)
    assert heard(second) == heard(third) == [], "the round of view 1 lacks the first worker's push"
    server.service.enter(SECOND)
    push(second, [20] * 4, 2)
    expect_sum((first, second), 2, 30)
    server = serve()
    server.peer(0).send(FrameKind.PULL, view=5)
    server.service.shared.end()
    with pytest.raises(Closed):
        server.peer(0).link.read_header()
    server.service.enter(SECOND)
    assert server.core.workers.ranks == [0, 1, 2], "a job that has ended enters nothing"


def test_answers_have_the_view_of_what_they_answer(serve):
    peer = serve().peer(0)
    peer.link.send(message.encode(Declare("dist_sync", 0.0, (key(SUM, 1, weight=False),)), view=1))
    peer.send(FrameKind.INIT, bytes(4), key=SUM, view=1)
    peer.link.send(message.encode(Hold(0), view=1))
    peer.send(FrameKind.PROBE, view=0)
    peer.link.send(message.encode(Leave(), view=1))
    found = [peer.answer()[0] for _ in range(5)]
    assert sorted((each.kind, each.view) for each in found) == [(FrameKind.DONE, 1)] * 4 + [(FrameKind.PROBE, 0)]


def test_a_value_that_is_read_outlives_its_view(serve):
    """Two workers read the value of a round in the server's memory, one to the end of the test."""
    server = serve(shared=True)
    peers = [server.peer(rank) for rank in range(3)]
    for peer in peers:
        push(peer, [1] * 4, 1, True)
    (offset,) = {peer.value()[0].offset for peer in peers}
    seen = peers[0].link.peer_arena.view(offset, 16).view(np.float32)
    buffer = server.core.slices()[0, 0].value
    server.service.enter(SECOND)
    assert buffer.readers == 2, "the lost worker reads nothing any more"
    peers[1].send(FrameKind.RELEASE, wire.release([(0, 0, offset)]), view=1)
    for clock in range(1, 5):
        for peer in peers[:2]:
            push(peer, [clock] * 4, 2, True, clock=clock)
        for peer in peers[:2]:
            header, value = peer.value()
            assert header.offset != offset and value == [2 * clock] * 4
            peer.send(FrameKind.RELEASE, wire.release([(0, 0, header.offset)]), view=2)
        assert seen.tolist() == [3] * 4
    peers[0].send(FrameKind.RELEASE, wire.release([(0, 0, offset)]), view=1)
    assert heard(peers[0]) == heard(peers[1]) == []
    offsets = offsets_of(server.core.slices()[0, 0])
    assert buffer.readers == 0 and offset in offsets and len(set(offsets)) == len(offsets)


@pytest.mark.parametrize("shared", [False, True])
def test_values_for_a_dead_worker_are_not_kept(serve, shared):
    """Its link has ended, and its last push completes a round: nobody will read that value."""
    server = serve(shared=shared)
    peers = [server.peer(rank) for rank in range(3)]
    push(peers[2], [1] * 4, 1, shared)
    assert heard(peers[2]) == []
    peers[2].link.close()
    assert server.lost.get(timeout=SECONDS).peer.index == 2
    for peer in peers[:2]:
        push(peer, [1] * 4, 1, shared)
    expect_sum(peers[:2], 1, 3, shared)
    assert [heard(peer) for peer in peers[:2]] == [[], []]
    server.service.enter(SECOND)
    wait_for(lambda: server.core.slices()[0, 0].value.readers == 0, "nobody reads the value")


@pytest.mark.parametrize("shared", [False, True])
def test_a_removed_worker_is_cut_off_and_not_missed(serve, shared):
    server = serve(shared=shared)
    first, third = server.peer(0), server.peer(2)
    assert heard(first) == heard(third) == []
    server.service.enter(SECOND)
    with pytest.raises(Closed):
        third.link.read_header()
    first.link.close()
    assert server.lost.get(timeout=SECONDS).peer.index == 0, "and not the removed one"


def test_a_worker_that_is_let_go_leaves_in_good_order(serve):
    """In a replay: the view has it no more, but it was not lost. It may still read, and is no straggler."""
    server = serve(shared=True)
    first, second, third = (server.peer(rank) for rank in range(3))
    third.send(FrameKind.PULL, view=1)
    header, _ = third.value()
    server.service.enter(FIRST.without([2], base=1))
    buffer = server.core.slices()[0, 0].value
    assert buffer.readers == 1
    third.send(FrameKind.RELEASE, wire.release([(0, 0, header.offset)]), view=1)
    answered(third, Leave(), view=1)
    assert heard(third) == [] and buffer.readers == 0
    push(first, [1] * 4, 2, True)
    assert heard(first) == []
    assert server.service.overdue() == server.service.overdue() == ""
    third.link.close()
    assert heard(second) == []
    second.link.close()
    assert server.lost.get(timeout=SECONDS).peer.index == 1, "and nobody before"


def test_a_job_that_is_not_elastic_has_no_views(closed_at_the_end):
    peer = closed_at_the_end(Server()).peer(0)
    peer.send(FrameKind.PULL, view=1)
    assert peer.error() == "a frame of view 1 in a job that is not elastic"


# -- the process ------------------------------------------------------------------------------------------------------


def test_a_replacement_that_is_slow_to_start_has_the_workers_of_its_view(monkeypatch):
    wait_for_start, enter, entered = Control.wait_for_start, Service.enter, threading.Event()

    def begin(service, view):
        enter(service, view)
        entered.set()

    def slowly(control):
        found = wait_for_start(control)
        assert entered.wait(SECONDS)
        return found

    monkeypatch.setattr(Service, "enter", begin)
    monkeypatch.setattr(Control, "wait_for_start", slowly)
    process = Process()
    process.send(Enter(View(4, 7, ((0,), (2,)), (0,), joined_servers=(0,))))
    peers = Peer(process.address, 0), Peer(process.address, 2)
    for peer in peers:
        answered(peer, Declare("dist_sync", 0.0, (key(0, 4),)), view=4)
        push(peer, [1] * 4, 4)
    expect_sum(peers, 4, 2)
    for peer in peers:
        leave(peer, view=4)
    process.close()


HOSTS = [(0,), (1,)]


class Momentum:
    """value += momentum, in place as torch's."""

    def __init__(self, spec, key, value):
        self.momentum = None

    def __call__(self, value, gradient, rate):
        if self.momentum is None:
            self.momentum = np.zeros_like(value)
        self.momentum *= 10
        self.momentum += gradient
        value += self.momentum

    def state(self):
        return {} if self.momentum is None else {"momentum": self.momentum}

    def load(self, state):
        self.momentum = np.array(state["momentum"]) if state else None


def core_with_momentum(*numbers, first=0.0):
    core = ServerCore(2, make_step=Momentum, allocate=Arena())
    core.workers.on_hosts(HOSTS)
    for worker in (0, 1):
        core.keys.declare(worker, Declare("dist_sync", 0.0, tuple(map(key, numbers))))
    for number in numbers:
        core.keys.initialise(0, number, 0, np.full(2, first, np.float32))
    core.keys.optimize({"name": "momentum"})
    core.views.enter(HOSTS)
    return core


def value_of(core):
    return core.slices()[0, 0].value.array.tolist()


def stepped(core, clock, number=0, workers=(0, 1)):
    """The value after a round in which each of them pushes its rank + 1."""
    for worker in workers:
        replies = carrying_out.push(core, worker, number, clock, [worker + 1.0] * 2)
        assert replies == []
    return core.slices()[number, 0].value.array.tolist()


def state(core, number=0):
    return core.slices()[number, 0].step.state()


def test_the_step_after_the_one_that_workers_hold_is_taken_back_and_no_other():
    core = core_with_momentum(0)
    assert stepped(core, 1) == [3, 3] and stepped(core, 2) == [36, 36]
    core.views.enter([(0,)])
    core.views.hold(0, 1)
    assert value_of(core) == [3, 3] and state(core)["momentum"].tolist() == [3, 3]
    assert stepped(core, 2, workers=[0]) == [34, 34]
    core = core_with_momentum(0, first=7.0)
    stepped(core, 1)
    core.views.enter(HOSTS)
    core.views.hold(0, 0)
    assert value_of(core) == [7, 7] and state(core) == {}
    assert stepped(core, 1) == [10, 10]
    core = core_with_momentum(0)
    stepped(core, 1), stepped(core, 2)
    core.views.enter(HOSTS)
    core.views.hold(0, 2)
    core.views.hold(0, 2)  # each worker says so
    assert value_of(core) == [36, 36]
    for step in (0, 3):
        with pytest.raises(Rejected, match=f"'k0' slice 0 has made 2 steps where the workers hold {step}"):
            core.views.hold(0, step)


def test_a_value_that_is_read_while_its_step_is_taken_back_stays_as_it_is():
    core = core_with_momentum(0)
    stepped(core, 1)
    (reply,) = core.pull(0, 0, 0, 1)
    core.views.enter(HOSTS)
    core.views.hold(0, 0)
    stepped(core, 1)
    stepped(core, 2)
    assert reply.buffer.array.tolist() == [3, 3]
    reply.release()


def test_memory_is_used_again_and_a_plain_server_keeps_nothing():
    core = core_with_momentum(0)
    for clock in range(1, 4):
        stepped(core, clock)
    allocated = len(core.keys.memory.allocate.offsets)
    for clock in range(4, 20):
        stepped(core, clock)
        core.views.enter(HOSTS)
        core.views.hold(0, clock - 1)
        stepped(core, clock)
    assert len(core.keys.memory.allocate.offsets) == allocated
    core = ServerCore(1, make_step=Momentum, allocate=Arena())
    core.keys.declare(0, Declare("dist_sync", 0.0, (key(0),)))
    core.keys.optimize({"name": "momentum"})
    carrying_out.push(core, 0, 0, 1, [1.0, 1.0])
    assert core.slices()[0, 0].former is None


# -- other servers ----------------------------------------------------------------------------------------------------


def test_states_are_named_by_their_steps_and_kept_before_slices_are_divided_anew():
    """Also those before the last step."""
    core = core_with_momentum(0, 1)
    stepped(core, 1), stepped(core, 2), stepped(core, 1, number=1)
    found = core.views.states()
    assert set(found) == {f"{step}/{kind}" for step in ("0/0/2", "1/0/1") for kind in ("steps", "state momentum")}
    assert found["0/0/2/state momentum"].tolist() == [33, 33]
    core.views.enter(HOSTS, other_servers=True)
    kept, expected = core.views.states(), {"0/0/1": [3, 3], "0/0/2": [36, 36], "1/0/0": [0, 0], "1/0/1": [3, 3]}
    assert {name: kept[f"{name}/value"].tolist() for name in expected} == expected
    core.views.enter(HOSTS, other_servers=True)  # before anything could be declared
    assert core.views.states().keys() == kept.keys()


def test_a_new_slice_counts_from_the_step_that_workers_hold_and_then_nothing_is_kept():
    core = core_with_momentum(0)
    stepped(core, 1)
    core.views.enter(HOSTS, other_servers=True)
    for worker in (0, 1):
        core.keys.declare(worker, Declare("dist_sync", 0.0, (key(0),)))
        core.views.hold(0, 1)
    assert [name for name in core.views.states() if name.startswith("0/0/1/")]
    packed = {"0/0/value": np.full(2, 5, np.float32), "0/0/momentum": np.full(2, 2, np.float32)}
    other = core_with_momentum(0)
    other.slices()[0, 0].value.array[:], other.slices()[0, 0].step.momentum = packed.values()
    optimizer_state.unpack(optimizer_state.pack(other.slices()), core.slices())
    assert stepped(core, 2) == [28, 28]
    assert set(core.views.states()) == {"0/0/2/steps", "0/0/2/state momentum"}
