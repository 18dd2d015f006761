"""Lost servers of an elastic job are replaced: on the bare state machine."""

from __future__ import annotations

import math
from dataclasses import replace

from launch.agent.events import Started
from launch.job.host import Host
from launch.run.action import Continue, Send
from launch.run.event import Lost
from tests.launch.test_losses import HOSTS, SERVER, Job3, job_with_two_servers


def started(job: Job3, actions: list) -> tuple[str, int]:
    """Where the one replacement starts, and its number."""
    (first, second) = actions
    assert isinstance(first, Continue) and isinstance(second, Send)
    (row,) = second.command.tasks
    assert (row.environment["DMLC_ROLE"], row.environment["DMLTRAIN_JOIN"]) == ("server", "1")
    assert row.environment["DMLC_SERVER_ID"] == str(job.supervisor.processes[first.task].task.rank)
    assert not row.leaves
    job.say(Started(second.host, row.task, 200 + row.task))
    return second.host, row.task


def test_a_lost_server_is_replaced_on_its_host():
    job = job_with_two_servers(servers_replaced=2)
    assert job.exit(2, -9) == []
    (notice,) = job.notices
    assert notice.startswith("server 1 (pid 102 on b) was killed by SIGKILL; 3 workers and 1 server are left; ")
    assert notice.endswith("starting the replacement of server 1 on b in 1 s, 1 of 2")
    assert started(job, job.tick()) == ("b", 6)
    assert job.supervisor.deadline == math.inf
    environment = job.supervisor.processes[6].task.environment
    assert environment["DMLTRAIN_RESTART_SERVERS"] == "2"
    for task in (3, 4, 5, 1, 6, 0):
        job.exit(task, 0)
    job.end(0)
    assert job.last_line == "0 processes left on 3 hosts; lost: server 1 after 0 s (replaced on b)"


def test_the_only_server_is_replaced():
    job = Job3(servers_replaced=1)
    job.exit(SERVER, -9)
    (notice,) = job.notices
    assert "3 workers and 0 servers are left; starting the replacement of server 0 on a in 1 s, 1 of 1" in notice
    assert job.supervisor.cause is None
    number = started(job, job.tick())[1]
    job.exit(number, -9)
    assert "server 0 (pid 205 on a) was killed by SIGKILL" in job.supervisor.cause.text


def test_workers_and_servers_are_counted_by_themselves():
    job = job_with_two_servers(servers_replaced=1, replaced=1)
    job.exit(2, -9)
    job.exit(4, -9)
    expected = [f"; starting the replacement of {role} 1 on b in 1 s, 1 of 1" for role in ("server", "worker")]
    assert all(notice.endswith(each) for notice, each in zip(job.notices, expected, strict=True))
    assert len(job.tick()) == 4


def test_each_loss_makes_the_next_wait_longer_until_they_are_used_up():
    job = job_with_two_servers(servers_replaced=2)
    number, waits = 2, []
    for _ in range(2):
        job.exit(number, 1)
        waits.append(job.supervisor.deadline - job.now)
        number = started(job, job.tick())[1]
    assert waits == [1, 2]
    job.supervisor.take_notices()
    job.exit(number, 1)
    assert job.notices[-1].endswith("; server 1 is not replaced: this would be more than --restart-servers 2")
    assert job.supervisor.cause is None, "server 0 is left"
    without = job_with_two_servers(replaced=3)
    without.exit(2, -9)
    assert without.supervisor.deadline == math.inf


def servers_on_b_and_c() -> Job3:
    hosts = [replace(HOSTS[0], roles=("scheduler", "worker")), Host("b", "10.0.0.2", roles=("server",), slots=1)]
    hosts.append(Host("c", "10.0.0.3", roles=("server", "worker"), slots=2))
    job = Job3(started=6, hosts=hosts, servers=2, servers_replaced=1)
    assert [each.task.host.name for each in job.supervisor.tasks.servers] == ["b", "c"]
    return job


def test_with_its_host_it_goes_to_another_that_takes_servers():
    job = job_with_two_servers(servers_replaced=1)
    job.say(Lost("b", "was killed by SIGKILL"))
    assert "server 1 is not replaced until a host comes that has room for it" in job.notices[0], "a has slots=1"
    job = servers_on_b_and_c()
    job.say(Lost("b", "was killed by SIGKILL"))
    assert job.notices[0].endswith("; starting the replacement of server 0 on c in 1 s, 1 of 1"), "a takes no servers"
    host, number = started(job, job.tick())
    assert host == "c"
    assert job.supervisor.processes[number].task.environment["DMLC_NODE_HOST"] == "10.0.0.3"


def test_what_waits_for_a_host_that_is_lost_goes_elsewhere():
    job = servers_on_b_and_c()
    job.exit(1, -9)
    assert job.notices[0].endswith("starting the replacement of server 0 on b in 1 s, 1 of 1")
    job.say(Lost("b", "was killed by SIGKILL"))
    assert job.notices[0].startswith("starting the replacement of server 0 on c")
    assert started(job, job.tick())[0] == "c"


def test_the_last_server_without_a_host_for_it_ends_the_job():
    job = Job3(servers_replaced=1)
    assert job.supervisor.tasks.servers[0].task.host.name == "a"
    job.say(Lost("a", "was killed by SIGKILL"))
    assert job.supervisor.cause is not None


def test_when_a_worker_is_done_no_server_is_replaced():
    job = job_with_two_servers(servers_replaced=1)
    job.exit(3, 0)
    job.exit(2, -9)
    assert "starting" not in job.notices[-1]


def test_a_server_that_leaves_with_its_host_is_not_replaced():
    job = job_with_two_servers(servers_replaced=1)
    job.supervisor.processes[2].leaving = "its host leaves"
    job.exit(2, 0)
    assert job.notices == []
    job.exit(1, -9)
    assert "starting the replacement of server 0 on a" in job.notices[-1]
