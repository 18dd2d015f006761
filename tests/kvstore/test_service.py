"""Which callers a server accepts, and how it receives pushes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dmltrain.env import Environment
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.service import Service
from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.data_links import DataLinks, Watch
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.message import Declare, Key
from dmltrain.kvstore.transport.wire import Flag, Header, Kind
from dmltrain.kvstore.view import View
from tests.kvstore.made import declaration, plain_sgd
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS, wait_for

ENVIRONMENT = Environment(role="server", num_workers=3, num_servers=1, job="job", key=b"key")


@pytest.fixture
def reaches():
    """Whether a caller of this role and index is served; workers 0 and 2 share a host."""
    core, listening, links = ServerCore(3), link.listen("127.0.0.1"), []
    core.on_hosts([(0, 2), (1,)])
    Service("server 0", ENVIRONMENT, core, None, pytest.fail, pytest.fail).accept(listening)

    def served(role, index):
        links.append(link.connect(listening.getsockname(), Caller.new("job", b"key", role, index, "server 0"), SECONDS))
        try:
            links[-1].send(Header(Kind.PROBE).pack())
            return links[-1].read_header().kind == Kind.PROBE
        except Closed:
            return False

    yield served
    for each in links:
        each.close()
    listening.close()


@pytest.mark.parametrize(
    "role, index, expected",
    [
        ("worker", 2, [True, False]),  # each role and index connects once
        ("relay", 0, [True, False]),
        ("worker", 3, [False]),  # the number that stands for the relay of worker 0
        ("relay", 2, [False]),
        ("relay", 1, [False]),
        ("relay", 3, [False]),
        ("server", 0, [False]),
    ],
)
def test_workers_are_accepted_and_relays_only_from_the_first_worker_of_a_host(reaches, logged, role, index, expected):
    assert [reaches(role, index) for _ in expected] == expected
    logged.wait_for(f"server 0: cut off {role} {index}: not a worker of this job, or already connected")


def service_of(core, *hosts, servers=1):
    core.on_hosts(hosts or [(0,)])
    return Service("server 0", replace(ENVIRONMENT, num_servers=servers), core, None, pytest.fail, pytest.fail)


def test_a_state_is_not_read_while_it_changes():
    core = ServerCore(1)
    service = service_of(core)
    core.declare(0, declaration(sizes=(4,)))
    (work,) = core.push(0, 0, 0, 1, -1.0, core.buffer(0, 0, 0, 16, 0))
    with pytest.raises(Rejected, match="busy with optimizer steps for 0.05 s"), service.quiescent(0.05):
        pass
    core.done(work)
    with service.quiescent(0.05) as found:
        assert found is core


def test_the_first_view_that_a_server_enters_may_have_fewer_servers_than_the_start():
    """The scheduler was lost before this server had heard of view 1."""
    core = ServerCore(1)
    service = service_of(core, servers=2)
    both = declaration(sizes=(4, 4))
    core.declare(0, replace(both, keys=both.keys[1:]))
    service.enter(View(2, 0, ((0,),), (1,)))
    core.declare(0, both)
    assert sorted(core.slices()) == [(0, 0), (1, 0)]


def test_where_each_push_is_a_step_new_ones_wait_while_a_state_is_read():
    """Else a busy server of an elastic job would never be quiescent."""
    core = ServerCore(1, make_step=plain_sgd)
    service = service_of(core)
    core.declare(0, declaration("dist_async", math.inf, sizes=(4,)))
    core.optimize({})
    core.enter([(0,)])
    (slice_,) = core.slices().values()

    def pushed(clock):
        buffer = core.buffer(0, 0, 0, 16, 0)
        buffer.array[:] = 1
        return core.push(0, 0, 0, clock, -1.0, buffer)

    def made(steps):
        wait_for(lambda: slice_.steps == steps, f"{steps} steps are made")
        assert slice_.value.array.tolist() == [float(steps)] * 4

    (work,) = pushed(1)
    assert pushed(2) == []
    with service.exclusive():
        assert core.pause()
        work.run()
        assert core.done(work) == [] and core.quiescent  # the second push waits
        (second,) = core.resume()
        second.run()
        core.done(second)
    with service.quiescent(1.0) as found:
        assert found is core and pushed(3) == []
    made(3)
    (work,) = pushed(4)
    assert pushed(5) == []
    service._view = 1  # the view is an old one, which another scheduler repeats
    entering = begun(service.enter, View(1, 0, ((0,),), (0,)))
    wait_for(lambda: core._pauses, "steps pause")
    work.run()
    with service._progress:
        assert core.done(work) == []
        service._progress.notify_all()
    entering.result(SECONDS)
    made(5)


class Sender:
    """A link by which `values` come, in shared memory or behind the header."""

    own_arena = None

    def __init__(self, values):
        self.values, self.peer_arena = values, self

    def view(self, offset, length):
        return self.values.view(np.uint8)

    def read_into(self, target):
        target[:] = self.values.tobytes()


def test_a_push_that_completes_a_round_is_summed_before_the_next_is_received():
    """Worker 0 shares its memory, worker 1's pushes follow their headers: the second into the memory of the first."""
    length = 1 << 16  # more than is added up at once where all share
    core = ServerCore(2)
    key = Key(0, "w", "float32", True, {"type": "none"}, ((0, length), (1, length)))
    core.declare(0, Declare("dist_sync", 0.0, (key,)))
    service = service_of(core, (0,), (1,))
    service._pool.submit = lambda work: None  # no thread runs it
    for worker, flags in ((0, Flag.SHARED), (1, 0)):
        for index in (0, 1):
            header = Header(Kind.PUSH, 4 * length, 0, 0, index, 1, -1.0, 0, flags)
            sender = Sender(np.full(length, 10 * worker + index + 1, np.float32))
            service._take(sender, None, worker, header)
    for index, total in ((0, 1 + 11), (1, 2 + 12)):
        (reply,) = core.pull(0, 0, index, 1)
        assert set(reply.buffer.array.tolist()) == {total}


def echo(connection):
    connection.send(Header(Kind.PROBE).pack())
    return connection.read_header().kind


def test_a_caller_that_missed_its_accept_connects_again():
    """Its time for the handshake ended, and the service takes the link without a frame for its own."""
    core, lost = ServerCore(1), []
    core.on_hosts([(0,)])
    environment = replace(ENVIRONMENT, num_workers=1)
    links = DataLinks("server", environment, {}, Watch.earlier_than(8.5), lost.append)
    with link.listen("127.0.0.1") as listening:
        Service("server 0", environment, core, None, pytest.fail, pytest.fail).accept(listening, links)
        address, caller = listening.getsockname(), Caller.new("job", b"key", "worker", 0, "server 0")
        for _ in range(3):
            link.connect(address, caller.again(), SECONDS).close()
        last = link.connect(address, caller.again(), SECONDS)
        assert echo(last) == Kind.PROBE
        second = link.connect(address, caller.again(), SECONDS)
        with pytest.raises(Closed):
            echo(second)
        second.close()
        assert not lost and echo(last) == Kind.PROBE
        last.close()
        wait_for(lambda: lost, "the end of the link is reported")
        assert [(each.peer.role, each.peer.index) for each in lost] == [("worker", 0)], (
            "it had a frame, and did not leave"
        )
