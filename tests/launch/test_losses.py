"""An elastic job goes on without workers that it loses: on the bare state machine, and with real processes."""

import math
import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from dmltrain_launch.agent import commands
from dmltrain_launch.agent.commands import Stop
from dmltrain_launch.agent.events import Bound, Ended, Exited, Frozen, Reached, Ready, Refused, Started, Stopped
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.role import WORKER
from dmltrain_launch.run import record, report
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Connect, Continue, Send
from dmltrain_launch.run.supervisor.event import Connected, Lost, Quiet, Tick, Unreached
from dmltrain_launch.run.supervisor.limit import RECONNECT_LOST_SECONDS, RECONNECT_SECONDS, Limits
from dmltrain_launch.run.supervisor.policy import policy_of
from tests.launch.conftest import go

HOSTS = [Host("a", "10.0.0.1", roles=("scheduler", "server", "worker"), slots=1)]
HOSTS += [Host(name, f"10.0.0.{number}", roles=("worker",), slots=1) for number, name in enumerate("bc", 2)]
SCHEDULER, SERVER, WORKER_0, WORKER_1, WORKER_2 = range(5)  # workers 0, 1 and 2 are on a, b and c
STOPPED = 128 + signal.SIGSTOP


class Job3:
    """A job of three hosts in which everything runs, and the time."""

    def __init__(
        self,
        elastic: int = 1,
        started: int = 5,
        replaced: int = 0,
        hosts: list[Host] = HOSTS,
        servers: int = 1,
        servers_replaced: int = 0,
        scheduler: str = "a",
        more: Mapping[str, Any] = MappingProxyType({}),
        **limits: float,
    ):
        """`scheduler`: its host. `more`: of the job."""
        most = {"elastic": elastic, "restart_workers": replaced, "restart_servers": servers_replaced, **more}
        job = Job("name", "mark", ("true",), 3, servers, "/", placement="pack", **most)
        self.supervisor = Supervisor(job, hosts, Limits(**limits), policy_of(job))
        self.begin(started, scheduler=scheduler)

    def begin(self, started: int, *prepared: object, scheduler: str = "a") -> None:
        """All that happens until so many tasks have started. `prepared`: what agents say before they bind."""
        self.now = 100.0
        self.supervisor.begin("the key", "/logs", self.now)
        self.say(*map(Connected, "abc"), Ready("a", 10, 4), Ready("b", 20, 4), Ready("c", 30, 4), *prepared)
        ports = {"a": {"master": 9001, "reach": 9002}, "b": {"reach": 9003}, "c": {"reach": 9004}}
        ports[scheduler]["scheduler"] = 9000
        self.say(*(Bound(name, found) for name, found in ports.items()))
        for name in "abc":
            self.say(Reached(name, {peer: {"ms": 0.1} for peer in "abc" if peer != name}))
        for task in range(started):
            self.say(Started(self.host(task), task, 100 + task))

    def host(self, task: int) -> str:
        return self.supervisor.processes[task].task.host.name

    def say(self, *events: object) -> list:
        return [action for event in events for action in self.supervisor.handle(event, self.now)]

    def exit(self, task: int, code: int) -> list:
        return self.say(Exited(self.host(task), task, code))

    def freeze(self, task: int, seconds: int = 5) -> list:
        return self.say(Frozen(self.host(task), task, seconds))

    def started(self, actions: list) -> list[tuple[str, int, int]]:
        """Host, number and the number of the process before it, of each replacement that these actions start."""
        pairs = list(zip(actions[::2], actions[1::2], strict=True))
        assert all(isinstance(first, Continue) and isinstance(second, Send) for first, second in pairs), actions
        found = []
        for first, second in pairs:
            (row,) = second.command.tasks
            lost = self.supervisor.processes[first.task].task
            told = [row.environment[name] for name in ("DMLTRAIN_JOIN", "DMLC_ROLE", f"DMLC_{lost.role.upper()}_ID")]
            assert told == ["1", lost.role, str(lost.rank)]
            assert not row.listens and row.leaves is (lost.role == WORKER)
            self.say(Started(second.host, row.task, 200 + row.task))
            found.append((second.host, row.task, first.task))
        return found

    def tick(self) -> list:
        assert self.supervisor.deadline < math.inf, "nothing is due"
        self.now = self.supervisor.deadline
        return self.say(Tick())

    def finish(self, *workers: int, code: int = 0) -> None:
        """These workers, the server and the scheduler are done; nothing is left on hosts that have not said so."""
        for task in (*workers, SERVER, SCHEDULER):
            self.exit(task, 0)
        self.end(code)

    def end(self, code: int | None = None) -> None:
        """`code`: the job's, if it is known."""
        assert self.supervisor.ending.begun
        self.say(*(Ended(name, ()) for name in self.supervisor.ending.unanswered(self.supervisor.hosts)))
        assert self.supervisor.over and code in (None, self.supervisor.exit_code)

    @property
    def notices(self) -> list[str]:
        return [take_notice.text for take_notice in self.supervisor.take_announcements()]

    @property
    def failure(self) -> list[str]:
        return report.failure(self.supervisor, lambda task: [f"last of {task}"], "logs")

    @property
    def last_line(self) -> str:
        return report.last_line(self.supervisor)

    @property
    def record(self) -> dict:
        """As job.json has it."""
        return record.record(self.supervisor, "0", AllOptions(), 0.0, None)

    @property
    def lost(self) -> dict[int, float]:
        """After how many seconds each lost process was lost."""
        rows = enumerate(self.record["processes"])
        return {task: row["lost_after"] for task, row in rows if row["lost_after"] is not None}


def two_servers(**settings) -> Job3:
    """Server 0 (task 1) on a, server 1 (2) on b; workers 0, 1 and 2 (3, 4, 5) on a, b and c."""
    hosts = [HOSTS[0], Host("b", "10.0.0.2", roles=("server", "worker"), slots=1), HOSTS[2]]
    return Job3(started=6, hosts=hosts, servers=2, **settings)


STOP = [Send(name, Stop(5.0)) for name in "abc"]


@pytest.fixture
def job() -> Job3:
    return Job3()


FATES = [(3, "exited with code 3"), (-9, "was killed by SIGKILL")]
LOST_PEER = (75, "exited with code 75 (it lost another process of the job)")


@pytest.mark.parametrize(("code", "fate"), [*FATES, LOST_PEER])
def test_the_job_goes_on_without_a_worker_that_ends_in_any_way(job, code, fate):
    job.now += 12.25
    assert job.exit(WORKER_1, code) == []
    assert job.notices == [f"worker 1 (pid 103 on b) {fate}; 2 workers are left"]
    assert job.supervisor.deadline == math.inf, "nobody has to end for it"
    assert job.lost == {WORKER_1: 12.25}
    job.finish(WORKER_0, WORKER_2)
    assert not job.supervisor.restartable and job.failure == []
    assert job.last_line == "0 processes left on 3 hosts; lost: worker 1 after 12 s"


ENDS = [  # of an elastic job with this least number: which tasks end with which codes, its own code, and who is why
    (1, ((WORKER_1, 1), (WORKER_0, 0), (WORKER_2, 0)), 0, ""),
    (1, ((WORKER_0, 0), (WORKER_2, 0), (WORKER_1, -11)), 0, ""),
    (1, ((WORKER_1, 75), (WORKER_0, 75), (WORKER_2, 75)), 75, "worker-1"),
    (3, ((WORKER_1, 75), (SCHEDULER, 75)), 75, "worker-1"),
]
AT_ONCE = [
    (1, ((WORKER_1, 2),), 2, "worker-1"),  # wrong usage
    (1, ((WORKER_1, 3), (SCHEDULER, -9)), 137, "scheduler-0"),
    (1, ((WORKER_1, 3), (SERVER, -9)), 137, "server-0"),
    (3, ((WORKER_0, 75), (WORKER_1, 3), (SCHEDULER, 75)), 3, "worker-1"),
    (3, ((SCHEDULER, 75), (SERVER, 75), (WORKER_1, 3)), 3, "worker-1"),
]


@pytest.mark.parametrize(("elastic", "ends", "code", "why"), [*ENDS, *AT_ONCE])
def test_who_ends_the_job_and_when(elastic, ends, code, why):
    """The rest has a moment after the last worker; and who has lost a peer is why only if nobody else is. That may be a
    process that still runs, which has --grace to end."""
    job = Job3(elastic)
    for task, ended_with in ends:
        actions = job.exit(task, ended_with)
    at_once = (elastic, ends, code, why) in AT_ONCE
    assert actions == (STOP if at_once else []) and (at_once or (job.tick() or job.tick()) == STOP)
    job.end(code)
    assert (job.supervisor.cause.process.task.name if why else "") == why
    assert not job.supervisor.restartable or code not in (0, 2)


def test_a_server_whose_end_is_reported_after_that_of_all_workers_is_the_cause(job):
    """Though a worker was lost for a reason of its own, long ago."""
    job.exit(WORKER_1, 1)
    job.now += 3600
    assert job.exit(WORKER_0, 75) == job.exit(WORKER_2, 75) == []
    assert job.exit(SERVER, -9) == STOP
    job.end(137)
    assert job.supervisor.cause.text == "server 0 (pid 101 on a) was killed by SIGKILL"


def test_if_no_worker_is_left_the_first_one_is_the_cause(job):
    job.exit(WORKER_1, 3)
    job.now += 60
    job.exit(WORKER_0, -9)
    assert job.notices[-1].endswith("; 1 worker is left")
    job.now += 60
    assert job.exit(WORKER_2, 4) == STOP
    assert job.notices == ["worker 2 (pid 104 on c) exited with code 4; 0 workers are left"]
    job.end(3)
    first = "worker 1 (pid 103 on b) exited with code 3"
    assert job.supervisor.restartable and job.failure == [
        *(first, "its last lines (logs/worker-1.log):", "    last of 3", f"lost 0 s after the start: {first}"),
        "lost 60 s after the start: worker 0 (pid 102 on a) was killed by SIGKILL",
        "lost 120 s after the start: worker 2 (pid 104 on c) exited with code 4",
    ]
    assert job.last_line.endswith("; lost: worker 1 after 0 s, worker 0 after 60 s, worker 2 after 120 s")


@pytest.mark.parametrize("first", [WORKER_1, SCHEDULER], ids=["the worker first", "the scheduler first"])
def test_a_scheduler_that_gives_up_names_the_first_lost_worker(first):
    job = Job3(elastic=3)
    codes = {WORKER_1: -9, SCHEDULER: 75}
    assert job.exit(first, codes.pop(first)) == []
    ((last, code),) = codes.items()
    assert job.exit(last, code) == STOP, "at once: the worker has ended already"
    job.end(137)
    killed = "worker 1 (pid 103 on b) was killed by SIGKILL"
    assert job.supervisor.restartable and job.failure == [
        *(killed, "its last lines (logs/worker-1.log):", "    last of 3"),
        "after that, scheduler 0 (pid 100 on a) exited with code 75 (it lost another process of the job)",
        *("its last lines (logs/scheduler-0.log):", "    last of 0", f"lost 0 s after the start: {killed}"),
    ]


def test_before_all_have_started_any_loss_ends_the_job():
    for event in (Exited("b", WORKER_1, 1), Lost("b", "was killed")):
        job = Job3(started=4)
        job.say(event)
        assert job.supervisor.ending.begun and not job.lost


# -- agents ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ended", "connect"), [(True, Connect("b", RECONNECT_SECONDS, 3)), (False, Connect("b", RECONNECT_LOST_SECONDS))]
)
def test_the_job_goes_on_without_a_host_of_workers_and_cleans_it_up(job, ended, connect):
    job.now += 9
    assert job.say(Lost("b", "was killed by SIGKILL", ended)) == [connect]
    told = "the agent on b (pid 20) was killed by SIGKILL; lost: worker 1 (pid 103 on b); 2 workers are left"
    assert job.notices == [told]
    given, stop = job.say(Connected("b"))
    assert isinstance(given.command, commands.JobCommand) and stop == STOP[1]
    assert job.say(Ready("b", 21, 4), Stopped("b", ((103, None),)), Ended("b", ()), Lost("b", "exited with 0")) == []
    assert job.supervisor.deadline == math.inf and job.notices == [], "the job has all the time in the world"
    job.now += 3600
    job.finish(WORKER_0, WORKER_2)
    assert job.last_line == "0 processes left on 3 hosts; lost: worker 1 after 9 s"
    assert job.supervisor.processes[WORKER_1].fate == "worker 1 (pid 103 on b) was lost"


@pytest.mark.parametrize("event", [Unreached("b", "no route", 125), Lost("b", "sent no heartbeat for 9.5 s")])
def test_a_host_that_is_off_stays_unknown_and_is_no_failure(job, event):
    job.say(Quiet("b", 7.0), Lost("b", "sent no heartbeat for 9.5 s"))
    assert job.say(event, Quiet("b", 7.0)) == []
    job.finish(WORKER_0, WORKER_2)
    assert job.last_line == "0 processes left on 2 hosts: unknown for b; lost: worker 1 after 0 s"


def test_an_agent_that_still_cleans_up_at_the_end_is_waited_for(job):
    job.say(Lost("b", "was killed by SIGKILL"), Connected("b"))
    for task in (WORKER_0, WORKER_2, SERVER):
        job.exit(task, 0)
    assert job.exit(SCHEDULER, 0) == [STOP[0], STOP[2]], "b was asked already"
    job.say(Ended("a", ()), Ended("c", ()))
    assert not job.supervisor.over and job.tick() == []
    assert job.supervisor.over and job.supervisor.exit_code == 0 and "unknown for b" in job.last_line


def test_what_is_left_on_a_lost_host_is_an_error(job):
    job.say(Lost("b", "was killed by SIGKILL"), Connected("b"), Ended("b", (103,)))
    job.finish(WORKER_0, WORKER_2, code=125)


def test_a_host_with_the_scheduler_or_a_server_ends_the_job(job):
    assert job.say(Lost("a", "was killed by SIGKILL")) == [Connect("a", RECONNECT_LOST_SECONDS), *STOP[1:]]
    assert job.supervisor.exit_code == 125 and not job.lost


@pytest.mark.parametrize(("code", "fate"), FATES)
def test_the_job_goes_on_without_a_server_while_another_is_left(code, fate):
    job = two_servers(replaced=3)
    assert [job.host(task) for task in range(6)] == ["a", "a", "b", "a", "b", "c"]
    assert job.freeze(2) == []
    assert job.notices == ["server 1 (pid 102 on b) has been stopped (SIGSTOP?) for 5 s"]
    job.now += 12.0
    assert job.exit(2, code) == []
    assert job.notices == [f"server 1 (pid 102 on b) {fate}; 3 workers and 1 server are left"]
    assert job.lost == {2: 12.0} and job.last_line.endswith("lost: server 1 after 12 s")
    assert not job.supervisor.ending.begun
    assert job.exit(1, -9) == STOP
    assert job.supervisor.cause.text == "server 0 (pid 101 on a) was killed by SIGKILL"
    assert job.failure[-1] == f"lost 12 s after the start: server 1 (pid 102 on b) {fate}"


def test_a_host_with_a_server_and_a_worker_is_lost_with_both():
    job = two_servers()
    assert job.say(Lost("b", "was killed by SIGKILL")) == [Connect("b", RECONNECT_LOST_SECONDS)]
    (notice,) = job.notices
    assert notice.endswith("; lost: server 1 (pid 102 on b), worker 1 (pid 104 on b); 2 workers and 1 server are left")
    assert sorted(job.lost) == [2, 4]


def test_a_host_that_shuts_down_is_lost(job):
    """Its agent gets SIGTERM, says so, and ends its processes."""
    message = "the agent on b was ended by SIGTERM"
    assert job.say(Refused("b", message, 125)) == [STOP[1]]
    assert job.notices == [f"{message}; lost: worker 1 (pid 103 on b); 2 workers are left"]
    assert job.say(Refused("b", message, 125), Stopped("b", ((103, WORKER_1),))) == []
    assert job.exit(WORKER_1, -15) == []
    assert job.say(Lost("b", "said nothing")) == [Connect("b", RECONNECT_LOST_SECONDS)]
    assert job.say(Connected("b"), Refused("b", "no space", 125), Ended("b", ()))[2:] == []
    job.finish(WORKER_0, WORKER_2)
    assert job.notices == []
    row = job.record["processes"][WORKER_1]
    assert (row["signal"], row["ended_by_launcher"], row["lost_after"]) == ("SIGTERM", True, 0.0)


def test_a_host_that_shuts_down_at_the_jobs_end_and_says_no_more_is_no_failure():
    job = Job3(grace=0.0)
    job.say(Refused("b", "the agent on b was ended by SIGTERM", 125))
    for task in (WORKER_0, WORKER_2, SERVER, SCHEDULER):
        job.exit(task, 0)
    assert job.say(Ended("a", ()), Ended("c", ()), Lost("b", "said nothing"))
    job.say(Unreached("b", "no route", 125))
    assert job.supervisor.over and job.supervisor.exit_code == 0


def test_a_job_that_loses_all_hosts_of_workers_ends_and_one_on_which_all_were_done_loses_no_worker(job):
    job.exit(WORKER_0, -9)
    job.say(Lost("b", "said nothing"))
    assert job.say(Lost("c", "said nothing"))[1:] == [STOP[0]]
    assert job.supervisor.exit_code == 137, "the first"
    job = Job3()
    job.exit(WORKER_1, 0)
    assert job.say(Lost("b", "said nothing")) == [Connect("b", RECONNECT_LOST_SECONDS)]
    job.finish(WORKER_0, WORKER_2)
    assert not job.lost


def test_a_host_that_was_silent_when_the_scheduler_gave_up_is_the_cause():
    job = Job3(elastic=3)
    job.say(Quiet("b", 8.5))
    job.exit(SCHEDULER, 75)
    job.tick()
    assert job.supervisor.cause.text.startswith("no heartbeat from b for 8 s")


def test_a_loss_of_long_ago_is_no_reason_to_wait_and_a_worker_that_has_not_joined_none_either(job):
    job = Job3(elastic=3)
    job.exit(WORKER_1, 3)
    job.now += 3600
    assert job.exit(SCHEDULER, 75) == [] and job.tick() == STOP
    job = Job3(elastic=3)
    for task in (WORKER_0, WORKER_2, SERVER):
        job.exit(task, 75)
    job.supervisor.processes[WORKER_1].newcomer = True
    assert job.exit(SCHEDULER, 75) == [] and job.tick() == STOP


def test_the_time_limit_ends_an_elastic_job():
    job = Job3(timeout=60.0)
    job.exit(WORKER_1, 1)
    job.now = 160.0
    job.say(Tick())
    job.end(124)
    assert "worker 1" not in job.supervisor.cause.text


# -- stopped workers ---------------------------------------------------------------------------------------------------


def test_a_worker_that_is_stopped_for_a_while_is_not_lost(job):
    said = ["worker 1 (pid 103 on b) has been stopped (SIGSTOP?) for 5 s"]
    assert job.freeze(WORKER_1) == job.freeze(WORKER_1, 6) == []
    assert job.notices == said, "once"
    job.now += 60
    job.freeze(WORKER_1)
    assert job.notices == said, "another time"
    job.now += 60
    for task in (WORKER_0, WORKER_2, SCHEDULER):
        job.exit(task, 0)
    assert job.supervisor.deadline == math.inf, "it goes on, and has all its time"
    job.exit(WORKER_1, 0)
    job.exit(SERVER, 0)
    job.end(0)
    assert not job.lost


def test_a_worker_that_was_removed_because_it_is_stopped_does_not_keep_the_job_from_its_end(job):
    job.freeze(WORKER_1)
    for task in (WORKER_0, WORKER_2):
        job.exit(task, 0)
    job.now += 1
    assert job.freeze(WORKER_1, 6) == [], "the scheduler may still wait for it"
    job.exit(SCHEDULER, 0)
    job.now += 1
    assert job.freeze(WORKER_1, 7) == [] and job.lost == {WORKER_1: 2.0}
    assert job.freeze(WORKER_1, 8) == [] and job.tick() == STOP
    assert job.say(Stopped("b", ((103, WORKER_1),))) == []
    job.exit(WORKER_1, -15)
    job.end(0)
    assert job.last_line.endswith("lost: worker 1 after 2 s")


@pytest.mark.parametrize(("later", "code"), [(1, STOPPED), (60, 75)], ids=["that it was stopped is why", "long ago"])
def test_a_removed_worker_that_runs_again_has_lost_the_job(later, code):
    job = Job3(elastic=3)
    job.freeze(WORKER_1)
    job.now += later
    job.exit(WORKER_1, 75)
    job.exit(SCHEDULER, 75)
    assert (job.tick() or job.tick()) == STOP
    job.end(code)


@pytest.mark.parametrize("task", [SCHEDULER, SERVER])
def test_a_stopped_server_or_scheduler_ends_the_job(task):
    assert Job3().freeze(task) == STOP


def test_a_scheduler_that_gives_up_names_the_worker_that_is_stopped():
    job = Job3(elastic=3)
    job.freeze(WORKER_1)
    job.now += 3
    job.exit(SCHEDULER, 75)
    assert (job.tick() or job.tick()) == STOP
    job.end(75)  # it may have run again: agents report each second
    job = Job3(elastic=3)
    job.freeze(WORKER_1, 8)
    job.exit(SCHEDULER, 75)
    job.tick()
    assert job.failure[0] == "worker 1 (pid 103 on b) has been stopped (SIGSTOP?) for 8 s"
    assert job.supervisor.exit_code == STOPPED


# -- real processes ----------------------------------------------------------------------------------------------------


def lost_ranks(launched) -> list[int]:
    return [row["rank"] for row in launched.record["processes"] if row["lost_after"] is not None]


def test_a_job_of_processes_that_ends_without_a_stopped_worker(elastic):
    launched = elastic("worker-1=stop")
    go(launched, "done")
    assert "; lost: worker 1 after " in launched.ends().err.splitlines()[-1]
    assert lost_ranks(launched) == [1]


def test_a_lost_worker_is_lost_in_its_attempt_only(launcher):
    script = """
wait_for() { while [ ! -e "$1" ]; do sleep 0.01; done; }
touch "$DMLTRAIN_RESTART-$DMLC_ROLE-$DMLC_TASK_ID"; wait_for $DMLTRAIN_RESTART-worker-1
wait_for $DMLTRAIN_RESTART-worker-0
[ $DMLTRAIN_RESTART$DMLC_ROLE = 0worker ] && exit 3
exit 0
"""
    launched = launcher.start("-n", 2, "-s", 1, "--elastic", "--max-restarts", 1, "sh", "-c", script)
    launched.ends()
    assert launched.record["restarts"][0]["exit_code"] == 3 and lost_ranks(launched) == []
