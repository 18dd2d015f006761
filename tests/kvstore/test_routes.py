"""A worker's links: what it says when the relay of its host cannot be had."""

import pytest

from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore import host, link, meeting
from dmltrain.kvstore.routes import Place, Routes
from dmltrain.kvstore.server import ServerCore
from dmltrain.kvstore.service import Service

ENVIRONMENT = Environment(role="worker", index=1, num_workers=2, num_servers=1, job="job", key=b"key")


@pytest.fixture
def server():
    """Address of a server that says that it is on another host."""
    listening = link.listen("127.0.0.1")
    Service("server 0", ENVIRONMENT, ServerCore(2), None, pytest.fail, pytest.fail).accept(listening)
    yield [*listening.getsockname(), "", "elsewhere"]
    listening.close()


@pytest.mark.parametrize("another_job", [False, True])
def test_a_worker_that_does_not_reach_its_hosts_relay_says_what_to_do(server, another_job):
    sock, name = meeting.listen()
    stranger = Environment(role="worker", num_workers=2, job="another job", key=b"key")
    if another_job:
        Service("relay", stranger, ServerCore(2), None, pytest.fail, pytest.fail).accept(sock)
    else:
        sock.close()
    table = {"servers": [server], "workers": [[host.identity(), name], [host.identity(), "own"]]}
    with pytest.raises(JobLost) as raised:
        Routes(ENVIRONMENT, table, Place(ENVIRONMENT, sums=True), print, print)
    said = str(raised.value)
    assert "worker 1 shares no memory with worker 0 of its host" in said and "--host-sum off" in said
    assert ("another job" if another_job else "it cannot be reached") in said
    sock.close()


@pytest.mark.parametrize("change", [{"transport": "tcp"}, {"host_sum": "off"}])
def test_a_worker_that_takes_no_part_cannot_be_met(change):
    assert Place(ENVIRONMENT, sums=True).meeting != ""
    assert Place(Environment(**{**vars(ENVIRONMENT), **change}), sums=True).meeting == ""
    assert Place(ENVIRONMENT, sums=False).meeting == ""
