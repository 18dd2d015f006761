"""A worker's links, errors if the relay of its host is unavailable, and the sums of two workers who share a relay."""

import queue
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.service import Service
from dmltrain.kvstore.transport import host, link, message, rendezvous
from dmltrain.kvstore.transport.data_links import DataLinks, Watch
from dmltrain.kvstore.transport.wire import Flag, Header, Kind
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.keys import Entries
from dmltrain.kvstore.worker.routes import Routes, Sharing
from dmltrain.kvstore.worker.worker_slice import Landing
from tests.kvstore.made import start
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

ENVIRONMENT = Environment(role="worker", index=1, num_workers=2, num_servers=1, job="job", key=b"key")


@pytest.fixture
def server(closed_at_the_end):
    """The address of a server that claims to be on another host."""
    listening = closed_at_the_end(link.listen("127.0.0.1"))
    its_own = replace(ENVIRONMENT, role="server", index=0)
    Service("server 0", its_own, ServerCore(2), None, pytest.fail, pytest.fail).accept(listening)
    return (*listening.getsockname(), "", "elsewhere")


@pytest.mark.parametrize("another_job", [False, True])
def test_the_error_for_an_unreachable_relay_has_a_fix(server, another_job):
    sock, name = rendezvous.listen()
    other_environment = Environment(role="worker", num_workers=2, job="another job", key=b"key")
    if another_job:
        Service("relay", other_environment, ServerCore(2), None, pytest.fail, pytest.fail).accept(sock)
    else:
        sock.close()
    start_message = start([(host.identity(), name), (host.identity(), "own")], [server])
    with pytest.raises(JobLost) as raised:
        Routes(ENVIRONMENT, start_message, Sharing(ENVIRONMENT, sums=True), print, print)
    said = str(raised.value)
    assert "worker 1 shares no memory with worker 0 of its host" in said and "--host-sum off" in said
    assert ("another job" if another_job else "it is unreachable") in said
    sock.close()


@pytest.mark.parametrize("change", [{"transport": "tcp"}, {"host_sum": "off"}])
def test_a_worker_that_does_not_take_part_cannot_be_connected_to(change):
    assert Sharing(ENVIRONMENT, sums=True).socket_name != ""
    assert Sharing(Environment(**{**vars(ENVIRONMENT), **change}), sums=True).socket_name == ""
    assert Sharing(ENVIRONMENT, sums=False).socket_name == ""


def test_a_relay_that_loses_its_server_reports_it_even_after_its_own_worker_finished(server):
    """No other process notices a broken connection between two processes that still run."""
    lost, over = queue.Queue(), threading.Event()
    environments = [replace(ENVIRONMENT, index=rank) for rank in range(2)]
    shares = [Sharing(environment, sums=True) for environment in environments]
    start_message = start([(host.identity(), sharing.socket_name) for sharing in shares], [server])
    first, second = (
        Routes(environment, start_message, sharing, lost.put, pytest.fail)
        for environment, sharing in zip(environments, shares, strict=True)
    )
    leaving = begun(first.relay.leave, over)
    first.relay.links[0].link.cut()
    found = lost.get(timeout=SECONDS)
    assert (found.own.role, found.own.index, found.peer.role, found.peer.index) == ("relay", 0, "server", 0)
    over.set()
    leaving.result(SECONDS)  # the job is over
    for each in (*first.links, *second.links):
        each.link.cut()


def test_a_lost_link_to_a_replacement_names_the_host_of_the_replacement(server):
    lost = queue.Queue()
    its = replace(ENVIRONMENT, transport="tcp", elastic=1)
    address = message.ServerAddress(*server, host_name="h1")
    start_message = replace(start([("a", ""), ("b", "")], [server]), servers=(address,))
    routes = Routes(its, start_message, Sharing(its, sums=False), lost.put, pytest.fail)
    view = View(2, 5, ((0,), (1,)), (0,), joined_servers=(0,))
    routes.announce(view, [message.NewServer(0, replace(address, host_name="h9"))])
    routes.enter(view, connects=True)
    routes.servers[0].link.cut()
    assert lost.get(timeout=SECONDS).peer.host == "h9"


OF_THREE = Environment(role="worker", num_workers=3, num_servers=1, job="job", key=b"key")
HOSTS = ("shared", "shared", "own")
SIZE = 1000


class Told(Handle):
    """A handle that keeps the times of its value."""

    def one_done(self, trip=None):
        self.trip = trip
        super().one_done(trip)


class Worker:
    """One worker's links and keys."""

    def __init__(self, rank, start_message, sharing):
        self.routes = Routes(replace(OF_THREE, index=rank), start_message, sharing, lambda reason: None, pytest.fail)
        self.entries = Entries(self.routes, 3, "dist_sync", 0.0, SECONDS)
        self.entries.declare(["w"], [np.zeros(SIZE, np.float32)], is_weight=True)
        for asked in [each.last_request() for each in self.routes.links]:
            if asked:
                asked.wait()
        self.value = np.zeros(SIZE, np.float32)

    def pushpull(self, values, ready_for):
        """Push a gradient that was ready so many seconds ago; returns the handle of the value."""
        (way,) = self.entries.find("w").ways
        ready = time.perf_counter() - ready_for
        handle = Told(1, "w", SECONDS)
        way.link.expect(Landing(way.slice, self.value, handle, asked=ready), 1)
        way.link.outbox.put_all([way.link.push(way.slice, values, 1, -1.0, 0, Flag.PULL, ready)])
        return handle

    def cut(self):
        for each in self.routes.links:
            each.link.cut()


@pytest.fixture
def workers():
    """Both workers of the host, the first with the relay, and the third worker."""
    core, listening = ServerCore(3), link.listen("127.0.0.1")
    core.on_hosts([(0, 1), (2,)])
    own, lost = replace(OF_THREE, role="server"), queue.Queue()
    links = DataLinks("server", own, {}, Watch(8.0), lost.put)
    Service("server 0", own, core, None, pytest.fail, pytest.fail).accept(listening, links)
    shares = [Sharing(replace(OF_THREE, index=rank), sums=True) for rank in range(3)]
    start_message = start(
        [(name, sharing.socket_name) for name, sharing in zip(HOSTS, shares, strict=True)],
        [(*listening.getsockname(), "", "the server's")],
    )
    made = [Worker(rank, start_message, sharing) for rank, sharing in enumerate(shares)]
    made[0].lost = lost  # by the server
    yield made
    for each in made:
        each.cut()
    listening.close()


def round_of(workers, ready_for):
    """All push their number and wait for the sum. Returns the times of each."""
    handles = [
        worker.pushpull(np.full(SIZE, rank + 1.0, np.float32), ago)
        for rank, (worker, ago) in enumerate(zip(workers, ready_for, strict=True))
    ]
    for handle in handles:
        handle.wait()
    return [handle.trip for handle in handles]


@pytest.mark.parametrize(
    "ready_for", [(0, 0, 0), (1000, 0, 0), (0, 1000, 0), (1000, 1000, 0), (0, 1000, 2000), (2000, 1000, 0)]
)
def test_a_hosts_sum_is_ready_when_its_last_gradient_is_ready(workers, ready_for):
    """Each has waited since its own gradient was ready for the last of all, not for its host's first one."""
    trips = round_of(workers, ready_for)
    assert [trip.waited for trip in trips] == [pytest.approx(each, abs=SECONDS) for each in ready_for]
    assert [set(worker.value.tolist()) for worker in workers] == [{6.0}] * 3


def test_the_relay_does_not_outlive_the_job(workers):
    over, echoed = threading.Event(), threading.Event()
    (upstream,) = workers[0].routes.relay.links.values()
    upstream.echoed = lambda size: echoed.set()
    upstream.outbox.put(Header(Kind.PROBE).pack())
    assert echoed.wait(SECONDS), "a link without a frame is not missed"
    leaving = begun(workers[0].routes.relay.leave, over)
    over.set()
    leaving.result(SECONDS)
    assert workers[0].lost.get(timeout=SECONDS).peer.role == "relay", "it does not say that no push is missing"
