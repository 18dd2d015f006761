"""The rules of a job's end, on the bare state machine: events and the time in, actions out."""

import math
import signal
from dataclasses import replace

import pytest

from dmltrain_launch.agent import KILL_SECONDS, commands
from dmltrain_launch.agent.commands import Bind, Peer, Reach, Stop
from dmltrain_launch.agent.events import Bound, Ended, Exited, Frozen, Reached, Ready, Refused, Started, Stopped
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import OWNED, Job
from dmltrain_launch.run import record, report
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Connect, Copy, Send
from dmltrain_launch.run.supervisor.event import (
    Connected,
    Copied,
    Interrupted,
    Lost,
    OutputFailed,
    Quiet,
    Tick,
    Unreached,
)
from dmltrain_launch.run.supervisor.limit import RECONNECT_LOST_SECONDS, RECONNECT_SECONDS, Limits
from tests.launch.test_losses import Job3

HOSTS = [Host("a", "10.0.0.1", "python3"), Host("b", "10.0.0.2", "python3")]
SCHEDULER, SERVER_0, SERVER_1, WORKER_0, WORKER_1 = range(5)  # workers 0 and 1 are on a and b, as the servers are

JOB = Job("name", "mark", ("true",), 2, 2, "/", ())


def begun(*events, job: Job = JOB, hosts: list[Host] = HOSTS, check: bool = False, **limits: float) -> Supervisor:
    """A supervisor at the time 0 that has heard of these events."""
    supervisor = Supervisor(job, hosts, Limits(**limits), check=check)
    supervisor.begin("key", None, 0.0)
    for event in events:
        supervisor.handle(event, 0.0)
    return supervisor


class Clock(Job3):
    """A supervisor in the middle of its job, and the time."""

    def __init__(self, started: int = 5, **limits: float):
        self.supervisor = Supervisor(JOB, HOSTS, Limits(**limits))
        self.now = 0.0
        self.connect = self.supervisor.begin("the key", "/logs", self.now, "the certificate")
        self.first = self.say(Connected("a"), Connected("b"))
        self.say(Ready("a", 10, 4))
        self.bind = self.say(Ready("b", 20, 2))
        self.say(Bound("a", {"scheduler": 9000, "master": 9001, "reach": 9002}))
        self.reach = self.say(Bound("b", {"reach": 9003}))
        self.say(Reached("a", {"b": {"ms": 0.1}}))
        self.start = self.say(Reached("b", {"a": {"ms": 0.1}}))
        self.say(*(Started("a", task, 100 + task) for task in range(started)))

    def done(self, *tasks: int) -> list:
        """What the last of these successful ends leads to: the others lead to nothing."""
        *others, last = [self.exit(task, 0) for task in tasks]
        assert not any(others)
        return last

    def tick_at(self, seconds: float) -> list:
        """The launcher wakes at that time, asked for or not."""
        self.now = seconds
        return self.say(Tick())

    def end(self, code: int) -> Supervisor:
        self.say(Ended("a", ()), Ended("b", ()))
        assert self.supervisor.over and self.supervisor.exit_code == code
        return self.supervisor


@pytest.fixture
def clock() -> Clock:
    return Clock()


STOP = [Send("a", Stop(5.0)), Send("b", Stop(5.0))]


def test_the_ports_are_known_before_anything_starts(clock):
    assert clock.connect == [Connect("a"), Connect("b")]
    assert [type(each.command) for each in clock.first] == [commands.JobCommand, commands.JobCommand]
    binds = [Bind("10.0.0.1", reach=True, scheduler=0, master=0), Bind("10.0.0.2", reach=True)]
    assert [each.command for each in clock.bind] == binds
    assert clock.reach[0].command == Reach((Peer("b", "10.0.0.2", 9003),))
    assert [each.host for each in clock.start] == ["a", "b"]
    rows = [row for each in clock.start for row in each.command.tasks]
    assert {row.environment["DMLC_PS_ROOT_PORT"] for row in rows} == {"9000"}
    assert {row.environment.get("MASTER_PORT", "9001") for row in rows} == {"9001"}
    assert "MASTER_PORT" in rows[-1].environment
    assert [row.task for row in rows if row.listens] == [SCHEDULER]
    assert sorted(row.task for row in rows) == list(range(5))


def test_the_first_failure_decides(clock):
    assert clock.exit(SERVER_1, -11) == STOP
    assert clock.exit(WORKER_0, 1) == []
    assert clock.exit(WORKER_1, -15) == []
    assert clock.end(139).cause.text == "server 1 (pid 102 on b) was killed by SIGSEGV"


def test_a_lost_peer_yields_to_a_failure_soon_after(clock):
    assert clock.exit(WORKER_0, 75) == []
    assert clock.tick_at(0.5) == []
    assert clock.exit(SERVER_0, -9) == STOP
    lines = report.failure(clock.end(137), lambda task: ["last"], "logs")
    assert lines[0] == "server 0 (pid 101 on a) was killed by SIGKILL"
    assert lines[3].startswith("before that, worker 0 (pid 103 on a) exited with code 75")


def test_a_lost_peer_alone_is_the_cause():
    clock = Clock()
    clock.exit(WORKER_0, 75)
    assert clock.tick_at(0.5) == [], "the process that was lost may yet be reported"
    assert clock.exit(WORKER_1, 75) == []
    assert clock.tick_at(1.5) == [], "a process still runs, whose end may take time"
    assert clock.tick_at(6.5) == STOP
    assert clock.end(75).cause.process.task.rank == 0, "the first"
    clock = Clock()
    for task in range(4):
        assert clock.exit(task, 75) == []
    assert clock.exit(WORKER_1, 75) == STOP, "at once if it is true of all"


def test_after_the_workers_the_rest_has_a_moment(clock):
    clock.exit(WORKER_0, 0)
    assert clock.supervisor.deadline == math.inf
    clock.exit(WORKER_1, 0)
    assert clock.tick_at(0.25) == [], "a server that writes its state may take as long as this"
    assert clock.exit(SERVER_0, 75) == [], "it saw the workers go: nothing was lost"
    assert clock.exit(SERVER_1, 0) == []
    assert clock.tick_at(0.7) == STOP, "the ends of the servers give the scheduler no more time"
    clock.exit(SCHEDULER, -15)
    assert report.failure(clock.end(0), lambda task: [], "logs") == []


def test_a_process_that_fails_and_takes_long_to_end_is_the_cause_of_what_others_lost(clock):
    for task in (SERVER_0, SERVER_1, SCHEDULER, WORKER_0):
        assert clock.exit(task, 75) == []
    assert clock.tick_at(1.5) == []
    assert clock.tick_at(3.0) == []
    clock.exit(WORKER_1, 1)
    found = clock.end(1)
    assert found.cause.process.task.rank == 1 and not found.cause.process.ended_by_us


def test_servers_that_saw_workers_go_do_not_fail_a_job_whose_workers_have_all_ended_well(clock):
    """As with os._exit(0), which says no goodbye."""
    clock.exit(SERVER_0, 75)
    assert clock.done(WORKER_0, WORKER_1) == []
    assert clock.tick() == STOP
    clock.end(0)


def test_the_job_ends_at_once_if_all_are_done_or_one_fails_while_the_rest_finishes():
    clock = Clock()
    assert clock.done(WORKER_1, SERVER_0, WORKER_0, SCHEDULER, SERVER_1) == STOP
    clock.end(0)
    clock = Clock()
    clock.done(WORKER_0, WORKER_1)
    assert clock.exit(SERVER_0, 4) == STOP
    clock.end(4)


def test_stopped_processes_are_named(clock):
    clock.exit(WORKER_0, 3)
    clock.say(Stopped("b", ((104, WORKER_1), (999, WORKER_1), (998, None))))
    lines = report.failure(clock.end(3), lambda task: [], "logs")
    who = "worker 1 (pid 104 on b)"
    named = [who, f"a descendant (pid 999) of {who}", "a process (pid 998 on b)"]
    assert lines[-3:] == [f"{each} is stopped (SIGSTOP?)" for each in named]


def test_a_lost_agent_is_replaced_once(clock):
    assert clock.say(Lost("b", "was killed by SIGKILL")) == [Connect("b", RECONNECT_LOST_SECONDS), STOP[0]]
    assert clock.supervisor.cause.text == "the agent on b (pid 20) was killed by SIGKILL"
    job, stop = clock.say(Connected("b"))
    assert stop == STOP[1]
    given = commands.JobCommand("mark", "b", 5.0, Limits().agent_silence, "the key", "the certificate", "/logs")
    assert clock.first[1] == Send("b", given)
    assert job == Send("b", replace(given, key="", certificate="", log_folder=None)), "it starts nothing"
    clock.say(Ready("b", 21, 2), Ended("b", ()))
    clock.say(Ended("a", ()), Lost("b", "exited with 0"))
    assert clock.supervisor.over
    assert clock.supervisor.exit_code == 125
    assert report.last_line(clock.supervisor) == "0 processes left on 2 hosts"


def test_a_slow_host_has_time_for_another_agent():
    clock = Clock()
    assert clock.say(Lost("b", "was killed by SIGKILL", ended=True)) == [Connect("b", RECONNECT_SECONDS, 3), STOP[0]]
    clock.say(Ended("a", ()))
    assert clock.tick_at(RECONNECT_SECONDS) == [] and not clock.supervisor.over
    assert clock.say(Connected("b"))
    assert clock.tick_at(RECONNECT_SECONDS + 5.0) == [] and not clock.supervisor.over, "its time begins now"
    clock.say(Ended("b", ()))
    assert report.last_line(clock.supervisor) == "0 processes left on 2 hosts"
    clock = Clock()
    clock.say(Lost("b", "said nothing"), Ended("a", ()), Lost("b", "said nothing"))
    assert clock.supervisor.over, "one that is lost twice is not known"
    assert report.last_line(clock.supervisor) == "0 processes left on 1 host: unknown for b"


def test_an_agent_that_does_not_end_is_replaced_in_time():
    clock = Clock(grace=30.0)
    clock.exit(WORKER_0, 1)
    clock.say(Ended("a", ()))
    killed = 30.0 + KILL_SECONDS  # when an agent that does as it was asked gives up
    assert clock.tick_at(killed) == [], "it may yet say so"
    assert clock.tick() == [Connect("b", RECONNECT_LOST_SECONDS)]
    assert clock.now <= killed + 5
    assert clock.tick_at(clock.now + killed) == [], "its successor has as long"
    assert not clock.supervisor.over
    assert clock.tick() == []
    assert clock.supervisor.over and clock.supervisor.ending.left["b"] is None
    assert clock.supervisor.exit_code == 1, "still the first failure's"


def test_an_agent_that_is_asked_to_hurry_is_waited_for_no_longer_than_that():
    clock = Clock(grace=30.0)
    clock.exit(WORKER_0, 1)
    clock.say(Ended("a", ()))
    clock.now = 2.0
    assert clock.say(Interrupted(2)) == [Send("b", Stop(0.0))], "a has ended"
    assert clock.tick_at(2.0 + KILL_SECONDS) == []
    assert clock.tick_at(2.0 + KILL_SECONDS + 5) == [Connect("b", RECONNECT_LOST_SECONDS)]


def test_once_the_end_has_begun_nothing_else_falls_due():
    clock = Clock(timeout=60.0)
    clock.now = 59.9
    clock.done(*range(5))
    assert clock.tick_at(61.0) == [], "the agents have some seconds to say that nothing is left"
    assert clock.say(OutputFailed("cannot write"), Refused("b", "no", 2)) == [], "they were asked already"
    assert clock.supervisor.deadline > 61.0
    clock.end(125)  # the log is not whole
    clock = Clock(timeout=60.0)
    clock.done(WORKER_0, WORKER_1)
    clock.tick_at(59.9)
    clock.tick_at(61.0)
    clock.end(0)


def test_a_process_that_was_stopped_and_kept_the_job_from_its_end_is_the_cause(clock):
    clock.done(WORKER_0, WORKER_1)
    clock.tick()
    clock.say(Stopped("a", ((102, SERVER_1),)))
    cause = clock.end(128 + signal.SIGSTOP).cause
    assert cause.text == "server 1 (pid 102 on b) did not end: it is stopped"


def test_record_and_report_have_how_each_process_ended_and_whether_the_launcher_ended_it():
    clock = Clock(started=4)
    clock.exit(SERVER_0, 75)
    clock.exit(SERVER_1, 0)
    clock.exit(WORKER_0, -signal.SIGSEGV)
    clock.exit(SCHEDULER, -signal.SIGTERM)
    rows = clock.record["processes"]
    told = [(row["exit_code"], row["signal"], row["ended_by_launcher"]) for row in rows]
    still, segv = (None, None, False), (139, "SIGSEGV", False)
    assert told == [(143, "SIGTERM", True), (75, None, False), (0, None, False), segv, still]
    assert [process.fate for process in clock.supervisor.processes] == [
        "scheduler 0 (pid 100 on a) was killed by SIGTERM",
        "server 0 (pid 101 on a) exited with code 75 (it lost another process of the job)",
        "server 1 (pid 102 on b) exited with code 0",
        "worker 0 (pid 103 on a) was killed by SIGSEGV",
        "worker 1 (on b) has not ended",
    ]
    lines = report.failure(clock.supervisor, lambda task: ["short", "x" * 10_000], "logs")
    assert lines[1:3] == ["its last lines (logs/worker-0.log):", "    short"]
    assert lines[3].startswith("    xxx") and 100 < len(lines[3]) < 1000, "a long line is cut"


def test_what_is_left_is_an_error(clock):
    clock.done(*range(5))
    clock.say(Ended("a", (7, 8)), Ended("b", ()))
    assert clock.supervisor.exit_code == 125
    assert report.last_line(clock.supervisor) == "2 processes left on 2 hosts: pid 7 on a, pid 8 on a"


def test_interruptions_a_refusal_and_a_full_disk():
    clock = Clock()
    assert clock.say(Interrupted(2)) == STOP
    assert clock.say(Interrupted(15)) == [Send(host, Stop(0.0)) for host in "ab"]
    clock.end(130)
    for event, code in ((Refused("b", "program x not found", 127), 127), (OutputFailed("cannot write"), 125)):
        clock = Clock()
        assert clock.say(event) == STOP
        clock.end(code)


def test_the_time_is_up():
    clock = Clock(timeout=60.0)
    clock.exit(SERVER_0, 0)
    assert clock.tick_at(59.0) == []
    assert clock.tick() == [Send(host, Stop(5.0, dump=True)) for host in "ab"]
    ended = clock.end(124)
    text = ended.cause.text
    assert not ended.restartable
    assert "server 0" not in text and "worker 0 (pid 103 on a), worker 1 (pid 104 on b)" in text


HALF = (Connected("a"), Connected("b"), Ready("a", 10, 4))  # both hosts are connected, one of them is ready


def test_nothing_starts_once_the_end_has_begun_and_the_record_has_all_processes():
    supervisor = begun(*HALF)
    assert supervisor.handle(Interrupted(2), 0.0) == STOP
    assert supervisor.handle(Ready("b", 20, 2), 0.0) == []
    assert supervisor.handle(Refused("a", "a: no room", 2), 0.0) == []
    assert supervisor.deadline > 2.0, "nobody else is waited for but the agents"
    rows = record.record(supervisor, "0", AllOptions(), 0.0, None)["processes"]
    named = [f"{row['role']}-{row['rank']} {row['host']}" for row in rows]
    assert named == ["scheduler-0 a", "server-0 a", "server-1 b", "worker-0 a", "worker-1 b"]
    assert not any(row["pid"] or row["ended_by_launcher"] for row in rows)
    assert {row["exit_code"] for row in rows} == {None}


def test_a_late_start_names_the_hosts_waited_for():
    supervisor = begun(*HALF, start=30.0)
    assert supervisor.deadline == 30.0
    assert supervisor.handle(Tick(), 29.0) == []
    assert supervisor.handle(Tick(), 30.0) == STOP
    assert supervisor.exit_code == 124
    assert supervisor.cause.text.endswith("within 30 s (--start-timeout); waiting for b (connecting)")


def test_the_start_is_late_until_the_last_process_has_started():
    clock = Clock(started=4, start=30.0)
    assert clock.tick() == STOP
    assert clock.now == 30.0
    assert clock.supervisor.cause.text.endswith("waiting for worker 1 (on b)")
    clock = Clock(start=30.0)
    assert clock.tick_at(31.0) == []
    assert clock.supervisor.deadline == math.inf


def test_copying_may_take_as_long_as_it_does_and_the_start_has_its_time_afterwards():
    supervisor = begun(*HALF[:2], job=replace(JOB, copy_to="/copy"), start=30.0)
    copies = supervisor.handle(Ready("a", 10, 4), 1.0) + supervisor.handle(Ready("b", 20, 4), 1.0)
    assert copies == [Copy("a", "/copy"), Copy("b", "/copy")]
    assert supervisor.handle(Tick(), 30.0) == [] and not supervisor.ending.begun
    supervisor.handle(Copied("a", "all"), 99.0)
    supervisor.handle(Copied("b", "all"), 100.0)
    assert supervisor.deadline == 130.0
    assert supervisor.handle(Tick(), 130.0) == STOP


def test_memory_is_limited_by_role():
    job = Job("name", "mark", ("true",), 1, 1, "/", memory={"server": 100, "worker": 200})
    supervisor = begun(Connected("a"), Ready("a", 10, 4), job=job, hosts=HOSTS[:1])
    (start,) = supervisor.handle(Bound("a", {"scheduler": 1, "master": 2}), 0.0)
    assert [row.memory for row in start.command.tasks] == [0, 100, 200]


def test_every_host_that_cannot_be_reached_is_named_in_the_order_of_the_hosts():
    supervisor = begun(Connected("a"))
    assert supervisor.handle(Unreached("b", "b: no route to host", 2), 0.0) == []
    assert supervisor.handle(Ready("a", 10, 4), 0.0) == STOP[:1]
    supervisor.handle(Ended("a", ()), 0.0)
    assert supervisor.over and supervisor.exit_code == 2
    assert report.last_line(supervisor) == "0 processes left on 1 host: never reached: b"
    supervisor = begun(Unreached("b", "b: no such name", 2))
    assert not supervisor.ending.begun, "a is still being connected to"
    supervisor.handle(Unreached("a", "a: no route to host", 125), 3.0)
    assert supervisor.over and supervisor.exit_code == 125
    assert supervisor.cause.text == "a: no route to host\nb: no such name"
    supervisor = begun(Unreached("b", "b: no such name", 2))
    supervisor.handle(Interrupted(2), 1.0)
    assert supervisor.exit_code == 130
    assert supervisor.cause.text == "the launcher got SIGINT\nb: no such name", "what comes in between hides nothing"


@pytest.mark.parametrize("all_refuse", [True, False])
def test_the_first_refusal_gives_the_others_a_moment_and_the_second_no_more(all_refuse):
    """All are reported together, and at once if no host is left."""
    hosts = [Host(name, "10.0.0.1", "python3") for name in "abc"]
    supervisor = begun(*map(Connected, "abc"), hosts=hosts)
    assert supervisor.handle(Refused("b", "b: no room", 2), 5.0) == []
    assert supervisor.handle(Tick(), 5.5) == []
    assert supervisor.handle(Refused("a", "a: no room", 2), 5.9) == []
    assert supervisor.deadline < 6.5, "what c is at may take long"
    last = Refused("c", "c: no room", 2) if all_refuse else Tick()
    assert len(supervisor.handle(last, 5.95 if all_refuse else 6.5)) == 3
    assert supervisor.cause.text == "a: no room\nb: no room" + "\nc: no room" * all_refuse


def test_an_interrupted_start_does_not_wait_for_a_connection():
    supervisor = begun(Connected("a"), Interrupted(2))
    assert supervisor.handle(Connected("b"), 0.0) == [], "too late: it gets no job"
    assert supervisor.handle(Lost("b", "exited with 0"), 0.0) == [], "as it had nothing to do"
    supervisor.handle(Ended("a", ()), 0.0)
    assert supervisor.over and supervisor.exit_code == 130


def test_a_path_that_is_cut_ends_the_start():
    bound = (Bound("a", {"scheduler": 1, "master": 2, "reach": 3}), Bound("b", {"reach": 4}))
    supervisor = begun(*HALF, Ready("b", 20, 2), *bound, Reached("a", {"b": {"error": "timed out"}}))
    assert supervisor.handle(Reached("b", {"a": {"ms": 1.0}}), 0.0) == STOP
    assert supervisor.exit_code == 2
    assert supervisor.cause.text.startswith("a: cannot reach b at 10.0.0.2: timed out; ")


def test_a_silent_host_is_the_cause_before_a_process_that_lost_a_peer(clock):
    clock.say(Quiet("b", 7.0))
    clock.exit(WORKER_0, 75)
    assert clock.tick() == STOP
    assert clock.supervisor.cause.text == "no heartbeat from b for 7 s: is the host down, or its network cut?"
    clock.say(Lost("b", "sent no heartbeat for 9.5 s"), Ended("a", ()), Unreached("b", "no route", 125))
    assert clock.supervisor.over and clock.supervisor.exit_code == 125
    assert report.last_line(clock.supervisor) == "0 processes left on 1 host: unknown for b"


@pytest.mark.parametrize(
    ("quiet", "cause"),
    [
        ([Quiet("a", 3.0), Quiet("b", 7.0)], "no heartbeat from b for 7 s"),  # for the longest time
        ([Quiet("b", 7.0), Quiet("b", 0.0)], "worker 0 (pid 103 on a) exited with code 75"),  # it speaks again
    ],
)
def test_the_host_that_has_been_quiet_for_longest_is_to_blame(quiet, cause, clock):
    clock.say(*quiet)
    clock.exit(WORKER_0, 75)
    clock.tick()
    clock.tick()
    assert clock.supervisor.cause.text.startswith(cause)


def test_a_check_continues_without_unreachable_hosts_and_ends_when_it_is_interrupted():
    supervisor = begun(Unreached("b", "b: no route to host", 2), check=True)
    (first,) = supervisor.handle(Connected("a"), 0.0)
    assert isinstance(first.command, commands.JobCommand)
    (probe,) = supervisor.handle(Ready("a", 10, 4), 0.0)
    assert isinstance(probe.command, commands.Probe)
    assert [(problem.host, problem.code) for problem in supervisor.preparation.problems] == [("b", 2)]
    supervisor = begun(Interrupted(2), check=True)
    assert supervisor.handle(Unreached("b", "b: no route to host", 2), 0.0) == []
    assert supervisor.over and supervisor.exit_code == 130
    assert report.last_line(supervisor) == "0 processes left on 0 hosts: never reached: a, b"


FAILED, KILLED = Exited("a", WORKER_0, 1), Lost("b", "was killed")


@pytest.mark.parametrize(
    ("events", "started", "worth"),
    [
        ([FAILED], 5, True),
        ([Exited("a", WORKER_0, -9)], 5, True),
        ([Exited("a", SERVER_0, 1), KILLED], 5, True),
        ([KILLED], 5, True),
        ([Frozen("a", WORKER_0, 5)], 5, True),
        ([Exited("a", WORKER_0, 2)], 5, False),
        ([Exited("a", WORKER_0, 124)], 5, False),
        ([Interrupted(2)], 5, False),
        ([FAILED, Interrupted(2)], 5, False),
        ([Refused("b", "no", 2)], 5, False),
        ([FAILED], 4, False),  # it has not started
        ([KILLED], 4, False),
    ],
)
def test_only_lost_processes_and_hosts_are_worth_a_restart(events, started, worth):
    """Neither a wrong option (2), nor a time limit (124), nor a user who has asked for the end."""
    clock = Clock(started)
    clock.say(*events)
    assert clock.end(clock.supervisor.exit_code).restartable is worth


def test_a_launcher_and_an_agent_that_lose_each_other_both_know_within_ten_seconds():
    """The launcher first: who comes after a lost agent finds its processes, or that it has ended them."""
    assert 0 < Limits().silence < Limits().agent_silence <= 10


def test_hosts_run_the_program_by_their_own_python_or_by_their_agents():
    hosts = [Host("a", "10.0.0.1", "/opt/python"), Host("b", "10.0.0.2", "")]
    ready = [Ready(name, 10, 4, "/usr/bin/python3") for name in "ab"]
    bound = [Bound("a", {"master": 1, "reach": 2}), Bound("b", {"reach": 3})]
    events = [*map(Connected, "ab"), *ready, *bound, Reached("a", {"b": {"ms": 0.1}})]
    supervisor = begun(*events, job=Job("name", "mark", ("train.py",), 2, 0, "/"), hosts=hosts)
    starts = supervisor.handle(Reached("b", {"a": {"ms": 0.1}}), 0.0)
    programs = [("/opt/python", "train.py"), ("/usr/bin/python3", "train.py")]
    assert [process.task.argv for process in supervisor.processes] == programs
    rows = [
        (start.host, row.task, row.argv, row.workdir, row.script) for start in starts for row in start.command.tasks
    ]
    assert rows == [("a", 0, programs[0], "/", "train.py"), ("b", 1, programs[1], "/", "train.py")]
    assert {start.command.unset for start in starts} == {OWNED}
