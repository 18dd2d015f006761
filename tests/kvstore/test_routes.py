"""A worker's links: what it says when the relay of its host cannot be had."""

import queue
import threading
from dataclasses import replace

import pytest

from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.service import Service
from dmltrain.kvstore.transport import host, link, rendezvous
from dmltrain.kvstore.worker.routes import Routes, Sharing
from tests.kvstore.made import start

ENVIRONMENT = Environment(role="worker", index=1, num_workers=2, num_servers=1, job="job", key=b"key")


@pytest.fixture
def server():
    """Address of a server that says that it is on another host."""
    listening = link.listen("127.0.0.1")
    Service("server 0", ENVIRONMENT, ServerCore(2), None, pytest.fail, pytest.fail).accept(listening)
    yield (*listening.getsockname(), "", "elsewhere")
    listening.close()


@pytest.mark.parametrize("another_job", [False, True])
def test_a_worker_that_does_not_reach_its_hosts_relay_says_what_to_do(server, another_job):
    sock, name = rendezvous.listen()
    stranger = Environment(role="worker", num_workers=2, job="another job", key=b"key")
    if another_job:
        Service("relay", stranger, ServerCore(2), None, pytest.fail, pytest.fail).accept(sock)
    else:
        sock.close()
    told = start([(host.identity(), name), (host.identity(), "own")], [server])
    with pytest.raises(JobLost) as raised:
        Routes(ENVIRONMENT, told, Sharing(ENVIRONMENT, sums=True), print, print)
    said = str(raised.value)
    assert "worker 1 shares no memory with worker 0 of its host" in said and "--host-sum off" in said
    assert ("another job" if another_job else "it is unreachable") in said
    sock.close()


@pytest.mark.parametrize("change", [{"transport": "tcp"}, {"host_sum": "off"}])
def test_a_worker_that_takes_no_part_cannot_be_met(change):
    assert Sharing(ENVIRONMENT, sums=True).socket_name != ""
    assert Sharing(Environment(**{**vars(ENVIRONMENT), **change}), sums=True).socket_name == ""
    assert Sharing(ENVIRONMENT, sums=False).socket_name == ""


def test_a_relay_without_its_server_ends_the_job_though_its_own_worker_has_finished(server):
    """Nobody else notices a connection that breaks between two processes that live on."""
    failures, over = queue.Queue(), threading.Event()
    environments = [replace(ENVIRONMENT, index=rank) for rank in range(2)]
    shares = [Sharing(environment, sums=True) for environment in environments]
    told = start([(host.identity(), sharing.socket_name) for sharing in shares], [server])
    first, second = (
        Routes(environment, told, sharing, lambda reason: None, failures.put)
        for environment, sharing in zip(environments, shares, strict=True)
    )
    leaving = threading.Thread(target=first.relay.leave, args=(over,))
    leaving.start()
    first.relay.links[0].link.cut()
    assert failures.get(timeout=10.0).startswith("server 0 at ")
    for each in (*first.links, *second.links):
        each.link.cut()
    leaving.join(10.0)
    assert not leaving.is_alive(), "all workers have left"
