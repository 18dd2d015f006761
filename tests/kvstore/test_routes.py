"""A worker's links, and its errors if the relay of its host is unavailable."""

import queue
import threading
from dataclasses import replace

import pytest

from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.service import Service
from dmltrain.kvstore.transport import host, link, message, rendezvous
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.routes import Routes, Sharing
from tests.kvstore.made import start
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

ENVIRONMENT = Environment(role="worker", index=1, num_workers=2, num_servers=1, job="job", key=b"key")


@pytest.fixture
def server():
    """The address of a server that claims to be on another host."""
    listening = link.listen("127.0.0.1")
    its_own = replace(ENVIRONMENT, role="server", index=0)
    Service("server 0", its_own, ServerCore(2), None, pytest.fail, pytest.fail).accept(listening)
    yield (*listening.getsockname(), "", "elsewhere")
    listening.close()


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
