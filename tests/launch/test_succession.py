"""The scheduler of an elastic job is lost, and started again: on the bare state machine, and with real processes."""

import json
import os
import signal
from dataclasses import replace

import pytest

from dmltrain_launch.agent.commands import Bind, NoticeCommand, Scheduler, Stop
from dmltrain_launch.agent.events import Bound, Refused, Started
from dmltrain_launch.run.supervisor.action import Connect, Continue, Send
from dmltrain_launch.run.supervisor.event import Asked, Lost
from tests.launch.conftest import go, said
from tests.launch.test_losses import HOSTS, SCHEDULER, STOP, WORKER_0, WORKER_1, WORKER_2, Job3
from tests.waiting import wait_for

NEXT = 5  # the number of the first process that comes later
APART = [replace(HOSTS[0], roles=("server", "worker")), HOSTS[1], replace(HOSTS[2], roles=("scheduler", "worker"))]


class Succeeding(Job3):
    """A job of three hosts in which everything runs. The scheduler is on a with the server, or `apart` from it on c."""

    def __init__(self, most: int = 2, apart: bool = False, replaced: int = 0, **settings):
        hosts, scheduler = (APART, "c") if apart else (HOSTS, "a")
        more = {"restart_scheduler": most, **settings}
        super().__init__(replaced=replaced, hosts=hosts, scheduler=scheduler, more=more)

    def bound(self, host: str, port: int = 9500) -> list:
        return self.say(Bound(host, {"scheduler": port}))

    def succeed(self, code: int = -9) -> list:
        """The scheduler is lost, and the next one has started on a."""
        self.exit(SCHEDULER, code)
        actions = self.bound("a")
        self.say(Started("a", NEXT, 205))
        return actions


AGAIN = Send("a", Bind("10.0.0.1", scheduler=0))


@pytest.fixture
def job() -> Succeeding:
    return Succeeding()


def test_it_is_started_again_on_its_host_and_all_are_told_where(job):
    job.now += 8
    assert job.exit(SCHEDULER, -9) == [Continue(SCHEDULER), Send("a", Bind("10.0.0.1", scheduler=0))]
    (notice,) = job.notices
    assert "3 workers are left; starting the scheduler again on a, 1 of 2" in notice
    start, *told = job.bound("a")
    (spawn,) = start.command.tasks
    assert (start.host, spawn.task, spawn.listens, start.command.follows) == ("a", NEXT, True, True)
    environment = spawn.environment
    assert "DMLTRAIN_LOST" not in environment, "nobody else is lost"
    assert environment["DMLC_ROLE"] == "scheduler" and environment["DMLTRAIN_INCARNATION"] == "2"
    assert (environment["DMLC_PS_ROOT_URI"], environment["DMLC_PS_ROOT_PORT"]) == ("10.0.0.1", "9500")
    assert told == [Send(name, Scheduler(2, "10.0.0.1", 9500)) for name in "abc"]
    job.say(Started("a", NEXT, 205))
    row = job.record["processes"][SCHEDULER]
    assert row["pid"] == 205 and [each["pid"] for each in row["earlier"]] == [100]
    for task in (WORKER_0, WORKER_1, WORKER_2, 1, NEXT):
        job.exit(task, 0)
    job.end(0)
    assert job.failure == []
    assert job.last_line == "0 processes left on 3 hosts; lost: scheduler 0 after 8 s (replaced on a)"


def test_hosts_that_are_given_back_are_told_while_their_workers_run(job):
    assert job.say(Asked(1, "remove", "b")) == [Send("b", NoticeCommand((WORKER_1,)))]
    _, *told = job.succeed()
    assert [each.host for each in told] == ["a", "b", "c"], "the worker on b leaves through the next scheduler"
    assert job.exit(WORKER_1, 0)[0] == Send("b", Stop(5.0))
    job.exit(NEXT, -9)
    _, *told = job.bound("a")
    assert [each.host for each in told] == ["a", "c"], "nothing runs on b any more"


def test_a_fixed_port_is_used_again_unless_its_owner_is_only_stopped():
    job = Succeeding(port=9000)
    assert job.exit(SCHEDULER, 1)[1] == Send("a", Bind("10.0.0.1", scheduler=9000))
    assert job.say(Refused("a", "port 9000 of 10.0.0.1 on a is not available", 2)) == STOP
    assert job.failure[0].startswith("the scheduler cannot be started again: port 9000 of 10.0.0.1 on a is not")
    assert Succeeding(port=9000).freeze(SCHEDULER)[1] == AGAIN


def test_one_that_is_stopped_is_replaced_and_its_end_means_nothing(job):
    assert job.freeze(SCHEDULER) == [Continue(SCHEDULER), AGAIN]
    assert job.freeze(SCHEDULER, 6) == []
    job.bound("a")
    job.say(Started("a", NEXT, 205))
    assert job.exit(SCHEDULER, 75) == []
    assert not job.supervisor.ending.begun


def test_when_its_host_is_lost_it_is_started_on_another():
    job = Succeeding(apart=True)
    assert job.say(Lost("c", "was lost", False)) == [Connect("c", 3.5), Continue(SCHEDULER), AGAIN]
    assert sorted(job.lost) == [WORKER_2]
    assert "starting the scheduler again on a, 1 of 2" in job.notices[0]
    start, *told = job.bound("a")
    environment = start.command.tasks[0].environment
    assert (environment["DMLTRAIN_HOST_NAME"], environment["DMLTRAIN_LOST"]) == ("a", "worker:2")
    assert told == [Send(name, Scheduler(2, "10.0.0.1", 9500)) for name in "ab"]
    job = Succeeding()
    assert [each for each in job.say(Lost("a", "was lost", True)) if each in STOP], "it had the server as well"
    assert job.supervisor.ending.begun


def test_if_the_new_one_is_lost_there_is_another(job):
    job.succeed()
    assert job.exit(NEXT, 1) == [Continue(NEXT), AGAIN]
    start, *told = job.bound("a", 9600)
    assert start.command.tasks[0].environment["DMLTRAIN_INCARNATION"] == "3"
    assert told[0].command == Scheduler(3, "10.0.0.1", 9600)


def test_at_last_the_job_ends_and_says_why():
    job = Succeeding(most=1)
    job.succeed()
    assert job.exit(NEXT, -9) == STOP
    assert job.failure[0].startswith("scheduler 0 (pid 205 on a) was killed by SIGKILL; the scheduler is not started ")
    assert job.failure[0].endswith("this would be more than --restart-scheduler 1")
    assert job.supervisor.exit_code == 137
    job = Succeeding(most=0)
    assert job.exit(SCHEDULER, -9) == STOP
    assert not job.supervisor.starter.start(WORKER_0).command.follows


@pytest.mark.parametrize(("done", "code"), [((), 0), ((), 75), ((), 2), ((WORKER_0, WORKER_1, WORKER_2), -9)])
def test_a_scheduler_that_has_ended_the_job_or_is_not_needed_is_not_started_again(done, code, job):
    for task in done:
        job.exit(task, 0)
    assert all(not isinstance(action, Continue) for action in job.exit(SCHEDULER, code))


def test_workers_are_replaced_while_the_scheduler_is_away_and_find_the_new_one():
    job = Succeeding(replaced=1)
    job.exit(SCHEDULER, -9)
    job.exit(WORKER_1, -9)
    job.bound("a")
    job.say(Started("a", NEXT, 205))
    assert any("starting the replacement of worker 1 on b" in notice for notice in job.notices)
    (_, start) = job.tick()
    assert start.command.tasks[0].environment["DMLTRAIN_JOIN"] == "1" and start.command.follows


PROGRAM = """
import json, os, time
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.01)
role, file = os.environ["DMLC_ROLE"], os.environ["DMLTRAIN_SCHEDULER_FILE"]
print("ready", os.environ.get("DMLTRAIN_INCARNATION"), os.environ["DMLC_PS_ROOT_PORT"], flush=True)
if role == "worker":
    wait(file)
    print("found", open(file).read(), flush=True)
wait("done")
"""


def test_real_processes_learn_where_the_next_one_is(launcher):
    launched = launcher.ready(2, 1, "--elastic", launcher.script(PROGRAM))
    os.kill(launched.pid("scheduler"), signal.SIGKILL)
    said(launched, "was killed by SIGKILL; 2 workers are left; starting the scheduler again on ")
    for name in ("worker-0", "worker-1"):
        wait_for(lambda name=name: b"}" in launched.log(name), f"{name} has found the next scheduler")
    wait_for(lambda: b"ready 2" in launched.log("scheduler-0"), "the next scheduler runs")
    go(launched, "done")
    result = launched.ends()
    assert "; lost: scheduler 0 after " in result.err
    found = {json.loads(launched.log(name).partition(b"found ")[2])["port"] for name in ("worker-0", "worker-1")}
    assert found == {int(launched.log("scheduler-0").split()[-1])}
    row = launched.record["processes"][0]
    assert (row["role"], row["earlier"][0]["signal"]) == ("scheduler", "SIGKILL")
