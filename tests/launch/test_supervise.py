"""The rules of a job's end, on the bare state machine: events and the time in, actions out."""

from __future__ import annotations

import math

from launch.job.host import Host
from launch.job.job import Job
from launch.run.action import Connect, Send
from launch.run.event import (
    Bound,
    Connected,
    Ended,
    Exited,
    Interrupted,
    Lost,
    OutputFailed,
    Quiet,
    Reached,
    Ready,
    Refused,
    Started,
    Stopped,
    Tick,
    Unreached,
)
from launch.run.supervise import FINISH_SECONDS, SUSPECT_SECONDS, TOGETHER_SECONDS, Limits, Supervisor
from launch.terminal import report

HOSTS = [Host("a", "10.0.0.1", "python3"), Host("b", "10.0.0.2", "python3")]
SCHEDULER, SERVER_0, SERVER_1, WORKER_0, WORKER_1 = range(5)  # workers 0 and 1 are on a and b, as the servers are


class Clock:
    """A supervisor in the middle of its job, and the time."""

    def __init__(self, timeout: float = math.inf):
        self.job = Job("name", "mark", ("true",), 2, 2, "/", ())
        self.supervisor = Supervisor(self.job, HOSTS, Limits(grace=5.0, timeout=timeout))
        self.now = 0.0
        self.connect = self.supervisor.begin("the key", "/logs", self.now)
        self.first = self.say(Connected("a"), Connected("b"))
        self.say(Ready("a", 10, 4))
        self.bind = self.say(Ready("b", 20, 2))
        self.say(Bound("a", {"scheduler": 9000, "master": 9001, "reach": 9002}))
        self.reach = self.say(Bound("b", {"reach": 9003}))
        self.say(Reached("a", {"b": {"ms": 0.1}}))
        self.start = self.say(Reached("b", {"a": {"ms": 0.1}}))
        for task in range(5):
            self.say(Started("a", task, 100 + task))

    def say(self, *events) -> list:
        actions = []
        for event in events:
            actions += self.supervisor.handle(event, self.now)
        return actions

    def exit(self, task: int, code: int) -> list:
        return self.say(Exited("a", task, code))

    def tick(self) -> list:
        """The time that the supervisor asked for has come."""
        assert self.supervisor.deadline < math.inf, "nothing is due"
        self.now = self.supervisor.deadline
        return self.say(Tick())

    def end(self) -> Supervisor:
        self.say(Ended("a", ()), Ended("b", ()))
        assert self.supervisor.over
        return self.supervisor


STOP = [Send("a", {"do": "stop", "grace": 5.0}), Send("b", {"do": "stop", "grace": 5.0})]


def test_the_ports_are_known_before_anything_starts():
    clock = Clock()
    assert clock.connect == [Connect("a"), Connect("b")]
    assert [each.message["do"] for each in clock.first] == ["job", "job"]
    assert [each.message for each in clock.bind] == [
        {"do": "bind", "address": "10.0.0.1", "reach": True, "scheduler": 0, "master": 0},
        {"do": "bind", "address": "10.0.0.2", "reach": True},
    ]
    assert clock.reach[0].message == {"do": "reach", "peers": [["b", "10.0.0.2", 9003]]}
    assert [each.host for each in clock.start] == ["a", "b"]
    rows = [row for each in clock.start for row in each.message["tasks"]]
    assert {row["environment"]["DMLC_PS_ROOT_PORT"] for row in rows} == {"9000"}
    assert [row["task"] for row in rows if row["listens"]] == [SCHEDULER]
    assert sorted(row["task"] for row in rows) == list(range(5))


def test_the_first_failure_decides():
    clock = Clock()
    assert clock.exit(SERVER_1, -11) == STOP
    assert clock.exit(WORKER_0, 1) == []
    assert clock.exit(WORKER_1, -15) == []
    supervisor = clock.end()
    assert supervisor.exit_code == 139
    assert supervisor.cause.text == "server 1 (pid 102 on b) was killed by SIGSEGV"


def test_a_lost_peer_yields_to_a_failure_soon_after():
    clock = Clock()
    assert clock.exit(WORKER_0, 75) == []
    clock.now += SUSPECT_SECONDS / 2
    assert clock.exit(SERVER_0, -9) == STOP
    supervisor = clock.end()
    assert supervisor.exit_code == 137
    lines = report.failure(supervisor, lambda task: ["last"], "logs")
    assert lines[0] == "server 0 (pid 101 on a) was killed by SIGKILL"
    assert lines[3].startswith("before that, worker 0 (pid 103 on a) exited with code 75")


def test_a_lost_peer_alone_is_the_cause():
    clock = Clock()
    clock.exit(WORKER_0, 75)
    assert clock.supervisor.deadline == SUSPECT_SECONDS
    assert clock.exit(WORKER_1, 75) == []
    assert clock.tick() == STOP
    assert clock.end().exit_code == 75
    assert clock.supervisor.cause.process.task.rank == 0, "the first"


def test_when_all_have_lost_a_peer_nobody_is_waited_for():
    clock = Clock()
    for task in range(4):
        assert clock.exit(task, 75) == []
    assert clock.exit(WORKER_1, 75) == STOP


def test_after_the_workers_the_rest_has_a_moment():
    clock = Clock()
    clock.exit(WORKER_0, 0)
    assert clock.supervisor.deadline == math.inf
    clock.exit(WORKER_1, 0)
    assert clock.supervisor.deadline == FINISH_SECONDS
    clock.exit(SERVER_0, 75)  # it saw the workers go: nothing was lost
    clock.exit(SERVER_1, 0)
    assert clock.tick() == STOP
    clock.exit(SCHEDULER, -15)
    assert clock.end().exit_code == 0
    assert report.failure(clock.supervisor, lambda task: [], "logs") == []


def test_when_all_are_done_nobody_is_waited_for():
    clock = Clock()
    for task in (WORKER_1, SERVER_0, WORKER_0, SCHEDULER):
        assert clock.exit(task, 0) == []
    assert clock.exit(SERVER_1, 0) == STOP
    assert clock.end().exit_code == 0


def test_a_failure_while_the_rest_finishes_counts():
    clock = Clock()
    clock.exit(WORKER_0, 0)
    clock.exit(WORKER_1, 0)
    assert clock.exit(SERVER_0, 4) == STOP
    assert clock.end().exit_code == 4


def test_stopped_processes_are_named():
    clock = Clock()
    clock.exit(WORKER_0, 3)
    clock.say(Stopped("b", ((104, WORKER_1), (999, WORKER_1), (998, None))))
    lines = report.failure(clock.end(), lambda task: [], "logs")
    assert lines[-3:] == [
        "worker 1 (pid 104 on b) is stopped (SIGSTOP?)",
        "a descendant (pid 999) of worker 1 (pid 104 on b) is stopped (SIGSTOP?)",
        "a process (pid 998 on b) is stopped (SIGSTOP?)",
    ]
    assert clock.supervisor.exit_code == 3


def test_a_lost_agent_is_replaced_once():
    clock = Clock()
    assert clock.say(Lost("b", "was killed by SIGKILL")) == [Connect("b", again=True), STOP[0]]
    assert clock.supervisor.cause.text == "the agent on b (pid 20) was killed by SIGKILL"
    clock.say(Ready("b", 21, 2), Ended("b", ()))
    clock.say(Ended("a", ()), Lost("b", "exited with 0"))
    assert clock.supervisor.over
    assert clock.supervisor.exit_code == 125
    assert report.last_line(clock.supervisor) == "0 processes left on 2 hosts"


def test_a_host_that_is_lost_twice_is_not_known():
    clock = Clock()
    clock.say(Lost("b", "said nothing"), Ended("a", ()), Lost("b", "said nothing"))
    assert clock.supervisor.over
    assert report.last_line(clock.supervisor) == "0 processes left on 1 host: not known for b"


def test_an_agent_that_does_not_end_is_replaced_in_time():
    clock = Clock()
    clock.exit(WORKER_0, 1)
    clock.say(Ended("a", ()))
    assert clock.tick() == [Connect("b", again=True)]
    assert clock.tick() == []
    assert clock.supervisor.over and clock.supervisor.left["b"] is None
    assert clock.supervisor.exit_code == 1, "still the first failure's"


def test_what_is_left_is_an_error():
    clock = Clock()
    for task in range(5):
        clock.exit(task, 0)
    clock.say(Ended("a", (7, 8)), Ended("b", ()))
    assert clock.supervisor.exit_code == 125
    assert report.last_line(clock.supervisor) == "2 processes left on 2 hosts: pid 7 on a, pid 8 on a"


def test_interruptions():
    clock = Clock()
    assert clock.say(Interrupted(2)) == STOP
    assert clock.say(Interrupted(15)) == [Send(host, {"do": "stop", "grace": 0.0}) for host in "ab"]
    assert clock.end().exit_code == 130


def test_the_time_is_up():
    clock = Clock(timeout=60.0)
    clock.exit(SERVER_0, 0)
    assert clock.tick() == [Send(host, {"do": "stop", "grace": 5.0, "dump": True}) for host in "ab"]
    assert clock.end().exit_code == 124
    assert "server 0" not in clock.supervisor.cause.text
    assert "worker 0 (pid 103 on a), worker 1 (pid 104 on b)" in clock.supervisor.cause.text


def test_a_refusal_and_a_full_disk():
    for event, code in ((Refused("b", "program x not found", 127), 127), (OutputFailed("cannot write"), 125)):
        clock = Clock()
        assert clock.say(event) == STOP
        assert clock.end().exit_code == code


def before_the_start(**limits: float) -> Supervisor:
    """Both hosts connected, one of them ready."""
    supervisor = Supervisor(Clock().job, HOSTS, Limits(**limits))
    supervisor.begin("key", None, 0.0)
    for event in (Connected("a"), Connected("b"), Ready("a", 10, 4)):
        supervisor.handle(event, 0.0)
    return supervisor


def test_nothing_starts_once_the_end_has_begun():
    supervisor = before_the_start()
    assert supervisor.handle(Interrupted(2), 0.0) == STOP
    assert supervisor.handle(Ready("b", 20, 2), 0.0) == []


def test_a_late_start_names_who_is_waited_for():
    supervisor = before_the_start(start=30.0)
    assert supervisor.deadline == 30.0
    assert supervisor.handle(Tick(), 30.0) == STOP
    assert supervisor.exit_code == 124
    assert supervisor.cause.text.endswith("within 30 s (--start-timeout); waiting for b (connecting)")


def test_a_host_that_was_never_reached_has_nothing_left():
    supervisor = Supervisor(Clock().job, HOSTS)
    supervisor.begin("key", None, 0.0)
    supervisor.handle(Connected("a"), 0.0)
    assert supervisor.handle(Unreached("b", "b: no route to host", 2), 0.0) == []
    assert supervisor.handle(Ready("a", 10, 4), 0.0) == STOP[:1]
    supervisor.handle(Ended("a", ()), 0.0)
    assert supervisor.over and supervisor.exit_code == 2
    assert report.last_line(supervisor) == "0 processes left on 1 host: never reached: b"


def test_every_host_that_cannot_be_reached_is_named_in_the_order_of_the_hosts():
    supervisor = Supervisor(Clock().job, HOSTS)
    supervisor.begin("key", None, 0.0)
    assert supervisor.handle(Unreached("b", "b: no such name", 2), 0.0) == []
    assert not supervisor.ending, "a is still being connected to"
    supervisor.handle(Unreached("a", "a: no route to host", 125), 3.0)
    assert supervisor.over and supervisor.exit_code == 125
    assert supervisor.cause.text == "a: no route to host\nb: no such name"


def test_what_hosts_refuse_in_the_same_second_is_told_together():
    supervisor = before_the_start()
    assert supervisor.handle(Refused("a", "a: no room", 2), 5.0) == []
    assert supervisor.handle(Refused("b", "b: no room", 2), 5.5) == STOP
    assert supervisor.cause.text == "a: no room\nb: no room"
    supervisor = before_the_start()
    supervisor.handle(Refused("a", "a: no room", 2), 5.0)
    assert supervisor.deadline == 5.0 + TOGETHER_SECONDS
    assert supervisor.handle(Tick(), 6.0) == STOP, "what b is at may take long"
    assert supervisor.cause.text == "a: no room"


def test_a_cause_that_comes_in_between_hides_no_fault():
    supervisor = Supervisor(Clock().job, HOSTS)
    supervisor.begin("key", None, 0.0)
    supervisor.handle(Unreached("b", "b: no such name", 2), 0.0)
    supervisor.handle(Interrupted(2), 1.0)
    assert supervisor.exit_code == 130
    assert supervisor.cause.text == "the launcher got SIGINT\nb: no such name"


def test_an_interrupted_start_does_not_wait_for_a_connection():
    supervisor = Supervisor(Clock().job, HOSTS)
    supervisor.begin("key", None, 0.0)
    supervisor.handle(Connected("a"), 0.0)
    supervisor.handle(Interrupted(2), 0.0)
    supervisor.handle(Ended("a", ()), 0.0)
    assert supervisor.over
    assert supervisor.handle(Connected("b"), 0.0) == [], "too late: it gets no job"


def test_a_path_that_is_cut_ends_the_start():
    clock = Clock()
    supervisor = before_the_start()
    supervisor.handle(Ready("b", 20, 2), 0.0)
    supervisor.handle(Bound("a", {"scheduler": 1, "master": 2, "reach": 3}), 0.0)
    supervisor.handle(Bound("b", {"reach": 4}), 0.0)
    supervisor.handle(Reached("a", {"b": {"error": "timed out"}}), 0.0)
    assert supervisor.handle(Reached("b", {"a": {"ms": 1.0}}), 0.0) == STOP
    assert supervisor.exit_code == 2
    assert supervisor.cause.text.startswith("a: cannot reach b at 10.0.0.2: timed out; ")
    assert clock.supervisor.cause is None


def test_whoever_lost_a_peer_yields_to_a_host_that_has_gone_quiet():
    clock = Clock()
    clock.say(Quiet("b", 7.0))
    clock.exit(WORKER_0, 75)
    assert clock.tick() == STOP
    assert clock.supervisor.cause.text == "nothing has come from b for 7 s: is the host down, or its network cut?"
    clock.say(Lost("b", "said nothing for 9.5 s"), Ended("a", ()), Unreached("b", "no route", 125))
    assert clock.supervisor.over and clock.supervisor.exit_code == 125
    assert report.last_line(clock.supervisor) == "0 processes left on 1 host: not known for b"


def test_a_host_that_speaks_again_is_not_to_blame():
    clock = Clock()
    clock.say(Quiet("b", 7.0), Quiet("b", 0.0))
    clock.exit(WORKER_0, 75)
    clock.tick()
    assert clock.supervisor.cause.process.task.name == "worker-0"


def test_a_check_goes_on_without_the_hosts_it_cannot_reach():
    supervisor = Supervisor(Clock().job, HOSTS, check=True)
    supervisor.begin("key", None, 0.0)
    supervisor.handle(Unreached("b", "b: no route to host", 2), 0.0)
    (first,) = supervisor.handle(Connected("a"), 0.0)
    assert first.message["do"] == "job"
    (probe,) = supervisor.handle(Ready("a", 10, 4), 0.0)
    assert probe.message["do"] == "probe"
    assert [(each.host, each.code) for each in supervisor.preparation.problems] == [("b", 2)]


def test_only_lost_processes_and_hosts_are_worth_a_restart():
    for event, worth in ((Exited("a", WORKER_0, 1), True), (Lost("b", "x"), True), (Exited("a", WORKER_0, 2), False),
                         (Interrupted(2), False), (Refused("b", "no", 2), False)):  # fmt: skip
        clock = Clock()
        clock.say(event)
        assert clock.supervisor.restartable is worth, event
