"""Planned changes of a running elastic job, on the bare state machine: workers and hosts come and leave."""

import math
import random
from collections.abc import Callable
from types import MappingProxyType

import pytest

from dmltrain_launch.agent.commands import Bind, JobCommand, NoticeCommand, Probe, Reach, Start, Stop
from dmltrain_launch.agent.events import Bound, Ended, Noticed, Probed, Reached, Ready, Refused, Started
from dmltrain_launch.agent.reports import Leaves, Viewed
from dmltrain_launch.commands.processes import lost
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.role import WORKER
from dmltrain_launch.run import report
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Connect, Open, Reply, Send
from dmltrain_launch.run.supervisor.event import Asked, Connected, Copied, Listed, Lost, Tick, Unlisted, Unreached
from dmltrain_launch.run.supervisor.limit import Limits
from dmltrain_launch.run.supervisor.policy import policy_of
from tests.launch.test_losses import HOSTS, SCHEDULER, SERVER, WORKER_0, WORKER_1, WORKER_2, Job3

LISTED = [*HOSTS, Host("e", port=2222, slots=2)]  # in the hosts file
INTERFACES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4", "e": "10.0.0.5"}


def facts(host: str, address: str = "", **more: object) -> dict:
    row = {"name": "eth0", "address": address or INTERFACES[host], "prefix": 24}
    return {"interfaces": [row], **more}


def inspected(version: str) -> dict:
    found = {"missing": [], "local": [], "executable": "python", "version": "3.11.7"}
    return {"inspection": {"packages": {"dmltrain": version}, **found}}


class Changing(Job3):
    """A job of three hosts in which everything runs, with 3 workers on a, b and c, and the server and the scheduler on
    a. `replies`: the answers so far, by the number of the request."""

    def __init__(
        self,
        elastic: int = 1,
        replaced: int = 0,
        local: bool = False,
        copy: str = "",
        more: dict = MappingProxyType({}),
        servers: int = 1,
        watched: bool = False,
        **limits: float,
    ):
        most = {**more, "elastic": elastic, "restart_workers": replaced, "over_network": not local, "copy_to": copy}
        job = Job("name", "mark", ("true",), 3, servers, "/", placement="pack", **most)
        hosts = [Host(name, slots=1) for name in "abc"] if servers > 1 else HOSTS
        self.supervisor = Supervisor(job, hosts, Limits(**limits), policy_of(job, LISTED, watched))
        self.replies: dict[int, Reply] = {}
        prepared = [Copied(name, "") for name in "abc" if copy]
        prepared += [Probed(name, facts(name, **inspected("0.5"))) for name in "abc" if not local]
        self.begin(4 + servers, *prepared)
        self.view(1, 0, 1, 2)

    def say(self, *events: object) -> list:
        actions = super().say(*events)
        for action in actions:
            if isinstance(action, Reply):
                assert action.number not in self.replies, "answered twice"
                self.replies[action.number] = action
        return [action for action in actions if not isinstance(action, Reply)]

    def view(self, number: int, *workers: int) -> None:
        assert self.say(Viewed(number, workers)) == []

    def ask(self, number: int, do: str, what: str) -> list:
        return self.say(Asked(number, do, what))

    def refuses(self, do: str, what: str) -> str:
        """The one note of the answer to a request that does nothing."""
        number = 1000 + len(self.replies)
        assert self.ask(number, do, what) == []
        reply = self.replies[number]
        assert reply.code == 2
        ((text, process),) = reply.notes
        assert process is None
        return text

    def texts(self, number: int) -> list[str]:
        return [text for text, _ in self.replies[number].notes]

    def add_to_b(self) -> None:
        """Worker 3, task 5, is started on b, and has not joined yet."""
        assert started(self.ask(1, "add", "b")) == [("worker-3", "b", 5)]
        self.say(Started("b", 5, 205))

    def gone(self, host: str) -> list:
        """All has ended on a host that was told to stop."""
        return self.say(Ended(host, ()), Lost(host, "exited with 0", ended=True))

    def reach(self, host: str, address: str = "", **more: object) -> list:
        """A new host comes up to the point at which it must reach the others."""
        begin = JobCommand("mark", host, 5.0, 10.0, "the key", "", "/logs", usage=0.0)
        assert self.say(Connected(host)) == [Send(host, begin)]
        (probe,) = self.say(Ready(host, 40, 4))
        assert probe.host == host and isinstance(probe.command, Probe)
        return self.say(Probed(host, facts(host, address, **more)))

    def meet(self, host: str, error: str = "") -> list:
        """It reaches the host of scheduler and server, or not."""
        (reach,) = self.say(Bound(host, {"reach": 9008}))
        assert reach == Send(host, Reach(reach.command.peers))
        assert [tuple(peer) for peer in reach.command.peers] == [("a", "10.0.0.1", 9007)]
        return self.say(Reached(host, {"a": {"error": error} if error else {"ms": 0.1}}))

    def come(self, host: str) -> list:
        """All of it, until its workers are started."""
        binds = [Send(host, Bind(INTERFACES[host], reach=True)), Send("a", Bind("10.0.0.1", reach=True))]
        assert self.reach(host) == binds
        assert self.say(Bound("a", {"reach": 9007})) == []
        return self.meet(host)


TOO_FEW = "1 worker would be left, and --min-workers is 2"
CLOSED = Send("a", Start((), ()))  # nobody comes any more, so a stops listening


def started(actions: list) -> list[tuple[str, str, int]]:
    """Log, host and number of each process that these actions start."""
    pairs = list(zip(actions[::2], actions[1::2], strict=True))
    assert all(isinstance(first, Open) and isinstance(second, Send) for first, second in pairs), actions
    found = []
    for first, second in pairs:
        (row,) = second.command.tasks
        assert row.environment["DMLTRAIN_JOIN"] == "1" and row.leaves and not row.listens
        assert (row.environment["DMLC_NUM_WORKER"], row.environment["DMLTRAIN_MAX_WORKERS"]) == ("3", "1027")
        assert first.name == f"worker-{row.environment['DMLC_WORKER_ID']}"
        found.append((first.name, second.host, row.task))
    return found


@pytest.fixture
def job() -> Changing:
    return Changing()


# -- workers come ------------------------------------------------------------------------------------------------------


def test_workers_are_added_to_a_host_of_the_job_and_the_answer_waits_for_the_view(job):
    assert started(job.ask(1, "add", "b:2")) == [("worker-3", "b", 5), ("worker-4", "b", 6)]
    assert job.notices == ["starting worker 3 on b", "starting worker 4 on b"]
    job.say(Started("b", 5, 205), Started("b", 6, 206))
    job.view(2, 0, 1, 2, 3)
    assert job.replies == {}
    job.now += 7
    job.view(3, 0, 1, 2, 3, 4)
    said = [f"worker {rank} on b has joined the job in view {rank - 1}" for rank in (3, 4)]
    assert job.replies[1] == Reply(1, 0, tuple((text, None) for text in said))
    joined = [(row["rank"], row.get("joined_after")) for row in job.record["processes"] if row["role"] == WORKER]
    assert joined == [(0, None), (1, None), (2, None), (3, 0.0), (4, 7.0)]
    job.finish(WORKER_0, WORKER_1, WORKER_2, 5, 6)
    assert job.last_line == "0 processes left on 3 hosts; joined: worker 3 on b after 0 s, worker 4 on b after 7 s"


def test_a_number_goes_to_the_hosts_with_the_fewest_workers_that_have_room():
    job = Changing(local=True)
    job.exit(WORKER_1, 1)
    assert started(job.ask(1, "add", "1")) == [("worker-3", "b", 5)]
    assert "no host of the job has room for one more worker" in job.refuses("add", "1")
    assert job.refuses("add", "1" * 5000).startswith("a number of 5000 digits")


def test_who_is_being_added_cannot_be_added_again(job):
    job.ask(1, "add", "d")
    assert job.refuses("add", "d").startswith("d is being added already")


def test_a_new_host_is_prepared_as_at_the_start_and_reaches_scheduler_and_servers(job):
    assert job.ask(1, "add", "d") == [Connect("d")]
    assert "d" not in [host.name for host in job.supervisor.usable], "nothing else is started there meanwhile"
    *begun, closed = job.come("d")
    assert started(begun) == [("worker-3", "d", 5)] and closed == CLOSED
    assert begun[1].command.tasks[0].environment["DMLC_NODE_HOST"] == "10.0.0.4"
    job.say(Started("d", 5, 205))
    job.view(2, 0, 1, 2, 3)
    assert job.texts(1) == ["worker 3 on d has joined the job in view 2"]
    job.finish(WORKER_0, WORKER_1, WORKER_2, 5)
    assert job.last_line == "0 processes left on 4 hosts; joined: worker 3 on d after 0 s"


def test_two_hosts_come_at_once_and_those_that_they_reach_are_asked_once(job):
    assert job.ask(1, "add", "d") == [Connect("d")] and job.ask(2, "add", "e:2") == [Connect("e")]
    assert job.supervisor.hosts["e"].port == 2222, "as the hosts file describes it"
    assert Send("a", Bind("10.0.0.1", reach=True)) in job.reach("d")
    assert job.reach("e") == [Send("e", Bind("10.0.0.5", reach=True))]
    assert job.say(Bound("a", {"reach": 9007})) == []
    assert started(job.meet("d")) == [("worker-3", "d", 5)]
    *begun, closed = job.meet("e")
    assert started(begun) == [("worker-4", "e", 6), ("worker-5", "e", 7)] and closed == CLOSED


def test_the_files_are_copied_first():
    job = Changing(copy="/job")
    job.ask(1, "add", "d")
    job.say(Connected("d"))
    (copy,) = job.say(Ready("d", 40, 4))
    assert (copy.host, copy.folder) == ("d", "/job")
    (probe,) = job.say(Copied("d", "12 files"))
    assert isinstance(probe.command, Probe)


def test_a_host_that_does_not_answer_is_named_and_nothing_else_changes(job):
    job.ask(1, "add", "d,b")
    assert job.say(Unreached("d", "cannot connect to d: timed out", 125)) == []
    assert 1 not in job.replies, "worker 3 is still to join, on b"
    job.view(2, 0, 1, 2, 3)
    said = ["d was not added: cannot connect to d: timed out", "worker 3 on b has joined the job in view 2"]
    assert (job.replies[1].code, job.texts(1)) == (125, said)
    job.finish(WORKER_0, WORKER_1, WORKER_2, 5)
    assert job.last_line.startswith("0 processes left on 3 hosts; ")


@pytest.mark.parametrize(
    ("address", "more", "said"),
    [
        ("", inspected("0.4"), "d has dmltrain 0.4, and the job 0.5: install the same version"),
        ("", {"workdir": {"exists": False, "path": "/x"}}, "d: the working directory /x does not exist"),
        ("10.0.0.1", {}, "a and d have the same address"),
    ],
)
def test_a_host_that_does_not_suit_is_given_back(job, address, more, said):
    job.ask(1, "add", "d")
    assert job.reach("d", address, **more) == [Send("d", Stop(5.0))]
    assert job.replies[1].code and said in job.texts(1)[0]
    job.gone("d")
    assert not job.supervisor.ending.begun
    assert job.ask(2, "add", "d") == [Connect("d")], "it can be tried again"


def test_a_host_without_a_way_to_the_scheduler_is_given_back(job):
    job.ask(1, "add", "d")
    job.reach("d", "192.168.7.7")
    job.say(Bound("a", {"reach": 9007}))
    assert job.meet("d", "no route to host") == [Send("d", Stop(5.0)), CLOSED]
    assert job.texts(1)[0].startswith("d was not added: d: cannot reach a at 10.0.0.1: no route to host; ")
    job.gone("d")
    job.ask(2, "add", "d")
    job.say(Connected("d"), Ready("d", 40, 4))
    rows = [{"name": f"eth{n}", "address": f"172.16.{n}.1", "prefix": 24} for n in range(2)]
    assert job.say(Probed("d", {"interfaces": rows})) == [Send("d", Stop(5.0))]
    assert "no common network" in job.texts(2)[0]


def test_a_host_that_takes_too_long_is_given_up_and_may_come_too_late():
    job = Changing(start=30.0)
    job.ask(1, "add", "d")
    assert job.supervisor.deadline == job.now + 30
    assert job.tick() == [] and job.supervisor.deadline == math.inf
    assert job.replies[1].code == 124
    assert job.texts(1) == ["d was not added: it was not ready within 30 s (--start-timeout)"]
    assert job.say(Connected("d")) == [Send("d", Stop(5.0))]
    assert job.say(Ready("d", 40, 4)) == job.gone("d") == []
    job.finish(WORKER_0, WORKER_1, WORKER_2)


def test_an_agent_that_is_lost_while_its_host_is_prepared(job):
    job.ask(1, "add", "d")
    job.say(Connected("d"))
    assert job.say(Lost("d", "was killed by SIGKILL")) == []
    assert job.texts(1) == ["d was not added: its agent was killed by SIGKILL"]
    assert not job.supervisor.ending.begun
    assert job.ask(2, "add", "d") == [Connect("d")]


@pytest.mark.parametrize("code", [75, 2, -9])
def test_a_newcomer_that_ends_before_it_joins_is_a_loss_and_not_replaced(code):
    job = Changing(replaced=3)
    job.add_to_b()
    assert job.exit(5, code) == []
    reply = job.replies[1]
    assert reply.code == (2 if code == 2 else 125)
    ((text, process),) = reply.notes
    assert process == 5 and text.startswith("worker 3 (pid 205 on b)") and text.endswith("before it had joined the job")
    lines = report.explained(job.supervisor, reply.notes, lambda task: ["did not join the job: data"], "logs")
    assert lines == [text, "its last lines (logs/worker-3.log):", "    did not join the job: data"]
    assert not any("replace" in notice for notice in job.notices) and job.supervisor.deadline == math.inf
    assert started(job.ask(2, "add", "b")) == [("worker-4", "b", 6)], "its number is not used again"


def test_a_newcomer_that_its_host_cannot_start_or_that_comes_too_late(job):
    job.ask(1, "add", "b")
    job.exit(5, 0)
    assert job.texts(1) == ["worker 3 on b did not join the job: it ended first"]
    job = Changing()
    job.ask(1, "add", "b")
    assert job.say(Refused("b", "program train not found on b", 127)) == []
    assert job.replies[1].code == 125 and not job.supervisor.ending.begun


def test_a_member_that_came_later_is_replaced_like_others():
    job = Changing(replaced=1)
    job.add_to_b()
    job.view(2, 0, 1, 2, 3)
    job.supervisor.take_announcements()
    job.exit(5, -9)
    (notice,) = job.notices
    assert notice.startswith("worker 3 (pid 205 on b) was killed by SIGKILL; 3 workers are left; ")
    assert notice.endswith("replacement of worker 3 on b in 1 s, 1 of 1")


def test_the_end_of_the_job_answers_all(job):
    job.ask(1, "add", "b")
    job.ask(2, "add", "d")
    job.exit(SERVER, -9)
    text = "the job has ended: server 0 (pid 101 on a) was killed by SIGKILL"
    assert job.texts(1) == job.texts(2) == [text]
    job.ask(3, "remove", "b")
    assert job.texts(3) == ["the job is ending"]
    job.say(*(Ended(name, ()) for name in job.supervisor.hosts if name != "d"))
    assert job.supervisor.over
    job = Changing()
    job.exit(WORKER_0, 0)
    job.ask(1, "add", "b")
    assert (job.replies[1].code, job.texts(1)) == (125, ["the job is ending"]), "the first worker is done"


# -- workers leave -----------------------------------------------------------------------------------------------------


def test_a_host_leaves_when_its_worker_has_left():
    job = Changing(replaced=3)
    assert job.ask(1, "remove", "b") == [Send("b", NoticeCommand((WORKER_1,)))]
    assert job.notices == ["asked to leave the job: worker 1 (pid 103 on b)"]
    job.say(Leaves(1, "SIGTERM"))
    job.view(2, 0, 2)
    job.now += 30
    assert job.exit(WORKER_1, 0) == [Send("b", Stop(5.0))]
    assert job.notices == ["worker 1 (pid 103 on b) has left the job; 2 workers are left"] and job.replies == {}
    job.gone("b")
    assert job.replies[1].code == 0
    assert sorted(job.texts(1)) == ["b is not part of the job any more", "worker 1 has left the job"]
    assert job.supervisor.deadline == math.inf, "nobody has to end for it, and it is not replaced"
    assert job.refuses("remove", "b") == "'b' is not a host that the job uses: expected a, c, or worker:N"
    assert lost(job.record) == ["left: worker 1 on b, 30 s after the start"]
    job.finish(WORKER_0, WORKER_2)
    assert job.failure == [] and job.last_line == "0 processes left on 3 hosts; left: worker 1 after 30 s"


def test_a_worker_leaves_and_its_host_stays_and_all_who_asked_for_it_get_an_answer(job):
    asked = [Send("b", NoticeCommand((WORKER_1,))), Send("c", NoticeCommand((WORKER_2,)))]
    assert job.ask(1, "remove", "worker:1, worker-2") == asked and job.ask(2, "remove", "worker:1") == []
    assert job.exit(WORKER_1, 0) == job.exit(WORKER_2, 0) == []
    assert job.texts(1) == ["worker 1 has left the job", "worker 2 has left the job"]
    assert job.texts(2) == job.texts(1)[:1]
    assert started(job.ask(3, "add", "1")) == [("worker-3", "b", 5)]


def test_a_host_leaves_with_its_server_and_the_scheduler():
    job = Changing(servers=2, replaced=2, more={"restart_scheduler": 3, "restart_servers": 3})
    server, worker = 1, 3
    assert [job.host(number) for number in (SCHEDULER, server, worker)] == ["a", "a", "a"] and job.host(2) == "b"
    assert job.ask(1, "remove", "a") == [Send("a", NoticeCommand((worker,)))]
    assert job.exit(worker, 0) == [Send("a", NoticeCommand((SCHEDULER, server)))], "they end when its workers have"
    job.supervisor.take_announcements()
    job.now += 9
    assert job.exit(server, -15) == [], "it is not replaced"
    ended = "(pid {} on a) has ended, because its host leaves the job; 2 workers"
    assert job.notices == [f"server 0 {ended.format(101)} and 1 server are left"]
    moved = job.exit(SCHEDULER, -15)
    assert Send("b", Bind("10.0.0.2", scheduler=0)) in moved and Send("a", Stop(5.0)) in moved
    assert job.notices == [f"scheduler 0 {ended.format(100)} are left; starting the scheduler again on b, 1 of 3"]
    job.gone("a")
    assert sorted(job.texts(1)) == ["a is not part of the job any more", "worker 0 has left the job"]
    again = 6
    job.say(Bound("b", {"scheduler": 9100}), Started("b", again, 300))
    job.finish(4, 5, again, 2)
    assert job.failure == []
    assert job.last_line.endswith("left: worker 0 after 0 s, scheduler 0 after 9 s (replaced on b), server 0 after 9 s")


def test_a_later_failure_is_not_blamed_on_a_host_that_has_left():
    job = Changing(servers=2, more={"restart_scheduler": 3})
    job.ask(1, "remove", "b")
    for task, code in ((4, 0), (2, -15), (3, -9), (5, -9)):
        job.exit(task, code)
    assert job.failure[0].startswith("worker 0 (pid 103 on a) was killed by SIGKILL")


def test_a_host_that_has_left_or_was_lost_can_come_again():
    busy = ["b cannot be used now: the job still ends what ran there; try again"]
    job = Changing()
    job.ask(1, "remove", "b")
    job.exit(WORKER_1, 0)
    job.ask(2, "add", "b")
    assert job.texts(2) == busy
    job.gone("b")
    assert job.ask(3, "add", "b") == [Connect("b")]
    *begun, closed = job.come("b")
    assert started(begun) == [("worker-3", "b", 5)]
    job = Changing()
    job.say(Lost("b", "was killed"))
    job.ask(1, "add", "b")
    assert job.texts(1) == busy
    job.say(Unreached("b", "timed out", 125))
    assert job.ask(2, "add", "b") == [Connect("b")]


TWO_SERVERS = {"servers": 2, "more": {"restart_scheduler": 3}}


@pytest.mark.parametrize(
    ("of_the_job", "asked", "said"),
    [
        ({}, "add 0", "0 workers: expected 1 to 1000"),
        ({}, "add 5000", "5000 workers: expected 1 to 1000"),
        ({}, "add 1111111", "a number of 7 digits: expected 1 to 1000 workers"),
        ({"local": True}, "add d", "d: this job runs on this machine only"),
        ({}, "add b,,c", "b,,c: a name is missing"),
        ({}, "add b,b", "b is given twice"),
        ({}, "remove a", "no server would be left without a: remove their workers alone (worker:0), or name"),
        ({}, "remove d", "'d' is not a host that the job uses: expected a, b, c, or worker:N"),
        ({}, "remove b,", "'' is not a host that the job uses"),
        ({}, "remove worker:7", "worker 7 does not run: expected one of worker:0, worker:1, worker:2, or a host"),
        ({}, "remove b,c,worker:0", "0 workers would be left, and --min-workers is 2"),
        ({}, "remove b,worker:2", TOO_FEW),
        ({"servers": 2}, "remove a", "started on another host, which is more than --restart-scheduler 0: remove"),
        (TWO_SERVERS, "remove a,b", "no server would be left without a and b: remove their workers alone (worker:0,"),
    ],
)
def test_what_cannot_come_or_leave_is_refused_and_nothing_changes(of_the_job, asked, said):
    job = Changing(elastic=2, **of_the_job)
    do, what = asked.split(" ")
    assert said in job.refuses(do, what)
    assert job.notices == [] and not any(process.leaving for process in job.supervisor.processes)
    assert len(job.supervisor.usable) == 3


def test_neither_those_who_leave_already_nor_those_whom_the_scheduler_has_removed_count_as_staying():
    job = Changing(elastic=2)
    job.ask(1, "remove", "b")
    assert job.refuses("remove", "c").startswith(TOO_FEW)
    job = Changing(elastic=2)
    job.freeze(WORKER_1)
    job.view(2, 0, 2)
    assert job.refuses("remove", "c").startswith(TOO_FEW)


def test_a_newcomer_counts_as_staying_and_can_leave_when_it_has_joined():
    job = Changing(elastic=3)
    job.add_to_b()
    assert job.refuses("remove", "c").startswith("2 workers would be left, and --min-workers is 3")
    assert job.refuses("remove", "worker:3").startswith("worker 3 (pid 205 on b) has not joined the job yet")
    job.view(2, 0, 1, 2, 3)
    assert job.ask(2, "remove", "c") == [Send("c", NoticeCommand((WORKER_2,)))]


def test_a_replacement_counts_as_staying_when_it_has_joined():
    job = Changing(elastic=2, replaced=1)
    job.exit(WORKER_1, -9)
    job.tick()
    job.say(Started("b", 5, 205))
    assert job.refuses("remove", "c").startswith(TOO_FEW)
    job.view(2, 0, 2)
    assert job.refuses("remove", "c").startswith(TOO_FEW)
    job.view(3, 0, 1, 2)
    ranks = "worker:0, worker:1, worker:2"  # in order, although worker 1 has started last
    assert job.refuses("remove", "worker:7") == f"worker 7 does not run: expected one of {ranks}, or a host"
    assert job.ask(1, "remove", "c") == [Send("c", NoticeCommand((WORKER_2,)))]


def test_a_worker_that_is_lost_while_it_leaves_is_a_loss_and_not_replaced():
    job = Changing(replaced=3)
    job.ask(1, "remove", "b")
    assert job.exit(WORKER_1, -9) == [Send("b", Stop(5.0))], "its host is given back all the same"
    job.say(Ended("b", ()))
    assert job.replies[1].code == 125
    assert "worker 1 (pid 103 on b) was killed by SIGKILL, before it had left" in job.texts(1)
    assert job.supervisor.deadline == math.inf and "; 2 workers are left" in job.notices[-1]


def test_sigterm_to_an_agent_lets_its_workers_leave_and_gives_its_host_back():
    job = Changing(replaced=3)
    assert job.say(Noticed("b", (WORKER_1,))) == []
    assert job.notices == ["the agent on b got a notice: asked to leave: worker 1 (pid 103 on b)"]
    assert job.exit(WORKER_1, 0) == [Send("b", Stop(5.0))]
    assert job.supervisor.deadline == math.inf and not job.supervisor.ending.begun
    job.say(Noticed("a", (WORKER_0,)))
    assert job.exit(WORKER_0, 0) == [], "a has the only server"


def test_a_worker_that_leaves_by_itself_is_known_from_the_scheduler():
    job = Changing(replaced=3)
    job.say(Leaves(1, "SIGTERM"))
    assert job.notices == ["worker 1 (pid 103 on b) leaves the job: SIGTERM"]
    assert job.exit(WORKER_1, 0) == []
    assert not job.supervisor.tasks.a_worker_done, "the job does not end through it"
    assert started(job.ask(1, "add", "b")) == [("worker-3", "b", 5)], "its host stays"


def test_what_waits_for_a_host_that_leaves_goes_elsewhere():
    job = Changing(replaced=2)
    job.exit(WORKER_1, -9)
    job.supervisor.take_announcements()
    job.ask(1, "remove", "b")
    assert "worker 1 is not replaced: no host that is left has room for it" in job.notices


@pytest.mark.parametrize("more", [{}, {"wait_for_hosts": 60.0}])
@pytest.mark.parametrize("worker_first", [True, False])
def test_a_job_whose_last_worker_got_its_notice_in_the_last_epoch_is_done(worker_first, more):
    job = Changing(more=more)
    job.exit(WORKER_1, -9)
    job.exit(WORKER_2, -9)
    job.say(Leaves(0, "SIGTERM"))
    for task in (WORKER_0, SCHEDULER) if worker_first else (SCHEDULER, WORKER_0):
        assert job.exit(task, 0) == []
    job.exit(SERVER, 0)
    job.end(0)
    assert job.failure == []


def test_a_job_whose_last_worker_has_left_before_its_end_has_failed(job):
    job.exit(WORKER_1, -9)
    job.exit(WORKER_2, -9)
    job.say(Leaves(0, "SIGTERM"))
    job.exit(WORKER_0, 0)
    assert not job.supervisor.ending.begun
    job.exit(SCHEDULER, 75)
    job.tick()
    assert job.supervisor.exit_code == 137
    assert job.failure[0].startswith("worker 1 (pid 103 on b) was killed by SIGKILL")


# -- the hosts file ----------------------------------------------------------------------------------------------------


def follow(job: Changing, *hosts: Host) -> list:
    return job.say(Listed(hosts))


def test_hosts_that_are_new_in_the_file_come_and_those_that_are_gone_leave(job):
    a, b, c, e = LISTED
    new = Host("d", slots=2)
    assert follow(job, new, a, c, e) == [Connect("d"), Send("b", NoticeCommand((WORKER_1,)))]
    assert "d is new in the hosts file" in job.notices
    *begun, _ = job.come("d")
    assert started(begun) == [("worker-3", "d", 5), ("worker-4", "d", 6)]
    assert job.exit(WORKER_1, 0) == [Send("b", Stop(5.0))]
    assert follow(job, new, a, c, e) == follow(job, new, a, c) == [], "nothing of what the job uses has changed"
    job.finish(WORKER_0, WORKER_2, 5, 6)


def test_a_host_of_the_file_is_exchanged_for_another_one():
    job = Changing(elastic=3)
    a, b, c, e = LISTED
    assert follow(job, a, c, e, Host("d")) == [Connect("d")], "b is still needed"
    assert job.notices[-1].startswith("b is not in the hosts file any more, but stays: 2 workers would be left, and ")
    job.come("d")
    job.say(Started("d", 5, 205))
    assert job.say(Viewed(2, (0, 1, 2, 3))) == [Send("b", NoticeCommand((WORKER_1,)))]
    assert not any("but stays" in notice for notice in job.notices)
    assert job.say(Viewed(3, (0, 2, 3))) == []


def test_a_broken_file_is_a_notice_and_one_that_changes_while_the_job_starts_is_followed_when_all_runs(job):
    assert job.say(Unlisted("hosts:3: slots=x: expected a number")) == []
    assert job.notices == ["hosts:3: slots=x: expected a number; the job goes on with the hosts that it has"]
    job.supervisor.processes[WORKER_2].pid = 0
    assert follow(job, *LISTED, Host("d")) == []
    assert job.say(Started("c", WORKER_2, 104)) == [Connect("d")]


def test_a_host_that_comes_and_is_gone_from_the_file_again(job):
    assert follow(job, *LISTED, Host("d")) == [Connect("d")]
    assert follow(job, *LISTED) == []
    assert job.notices[-1] == "d was not added: the hosts file does not list it any more"
    assert job.say(Unreached("d", "timed out", 125)) == []
    assert follow(job, *LISTED, Host("d")) == [Connect("d")]
    assert follow(job, *LISTED) == []
    assert job.say(Connected("d")) == [Send("d", Stop(5.0))]
    job.exit(SERVER, -9)
    assert job.say(Ended("d", ()), Lost("d", "exited with 0", ended=True)) == []
    job.end()


@pytest.fixture
def listed_again() -> Changing:
    """A job whose host d was listed, gone, and is listed again, before the first agent has come."""
    job = Changing()
    follow(job, *LISTED, Host("d"))
    follow(job, *LISTED)
    assert follow(job, *LISTED, Host("d")) == [], "two agents of one host cannot be told apart"
    return job


@pytest.mark.parametrize("connected", [True, False])
def test_a_host_that_is_listed_again_is_connected_when_its_first_agent_has_gone(listed_again, connected):
    job = listed_again
    gone = Unreached("d", "timed out", 125)
    if connected:
        assert job.say(Connected("d")) == [Send("d", Stop(5.0))]
        assert job.say(Ended("d", ())) == []
        gone = Lost("d", "exited with 0", ended=True)
    assert job.say(gone) == [Connect("d")]
    *begun, _ = job.come("d")
    assert started(begun) == [("worker-3", "d", 5)]
    job.finish(WORKER_0, WORKER_1, WORKER_2, 5)


def test_a_host_that_waits_for_its_first_agent_to_go_does_not_hold_up_the_end(listed_again):
    job = listed_again
    job.exit(SERVER, -9)
    assert job.say(Connected("d")) == [Send("d", Stop(5.0))]
    assert job.say(Lost("d", "exited with 0", ended=True)) == []
    job.say(*(Ended(name, ()) for name in "abc"))
    assert job.supervisor.over


def test_hosts_added_by_hand_are_none_of_the_files(job):
    job.ask(1, "add", "d")
    job.come("d")
    assert follow(job, *LISTED, Host("f", roles=("server",))) == []
    assert job.notices[-1] == "f is new in the hosts file and gets no worker: its line allows none"


def test_no_more_workers_than_the_user_has_allowed():
    job = Changing(more={"most_workers": 5})
    assert follow(job, *LISTED, Host("d", gpus=("0", "1", "2"))) == [Connect("d")]
    assert job.refuses("add", "b").startswith("1 workers more: the job has 5 of the 5 that -n N:M allows")
    *begun, _ = job.come("d")
    assert [name for name, _, _ in started(begun)] == ["worker-3", "worker-4"]
    assert follow(job, *LISTED, Host("d"), Host("f")) == []
    assert job.notices[-1] == "f is new in the hosts file and gets no worker: -n N:M allows no more"
    job.view(2, 0, 1, 2, 3, 4)
    job.ask(1, "remove", "b")
    assert len(started(job.ask(2, "add", "c"))) == 1, "the one that leaves makes room"


def test_replacements_that_wait_for_their_time_take_room():
    job = Changing(replaced=1, more={"most_workers": 3})
    job.exit(WORKER_1, -9)
    assert job.refuses("add", "b").startswith("1 workers more: the job has 3 of the 3 ")
    job.tick()
    assert job.refuses("add", "b").startswith("1 workers more: the job has 3 of the 3 ")
    job.say(Started("b", 5, 205))
    job.exit(5, -9)
    assert started(job.ask(1, "add", "b")) == [("worker-3", "b", 6)], "this one is not replaced"


# -- below the minimum -------------------------------------------------------------------------------------------------


@pytest.fixture
def without_workers() -> Changing:
    """A job that waits for hosts after the loss of all of its workers."""
    job = Changing(more={"wait_for_hosts": 60.0})
    for worker in (WORKER_0, WORKER_1, WORKER_2):
        assert job.exit(worker, -9) == []
    assert job.supervisor.deadline == math.inf and not job.supervisor.ending.begun
    return job


def test_the_job_waits_for_hosts_as_long_as_its_scheduler_does(without_workers):
    without_workers.add_to_b()
    without_workers.view(2, 3)
    assert without_workers.replies[1].code == 0
    without_workers.finish(5)


def test_the_end_of_the_wait_is_the_end_of_the_job_with_the_first_loss_as_the_cause(without_workers):
    without_workers.exit(SCHEDULER, 75)
    without_workers.tick()
    assert without_workers.supervisor.exit_code == 137
    assert without_workers.failure[0].startswith("worker 0 (pid 102 on a) was killed by SIGKILL")


# -- any order ---------------------------------------------------------------------------------------------------------


def test_random_changes_and_losses():
    """Each request gets one answer, no number is used twice, and nothing runs where nothing may run."""
    joined = left = 0
    for seed in range(100):
        chance, job = random.Random(seed), Changing(replaced=2, start=30.0, watched=seed % 2 == 1)
        asked = view = 0
        for _ in range(40):
            if job.supervisor.ending.begun:
                break
            processes = job.supervisor.processes
            workers = [n for n, process in enumerate(processes) if process.task.role == WORKER and process.runs]
            what, actions = chance.random(), []
            if what < 0.25:
                asked += 1
                host = chance.choice("abcde")
                do, text = chance.choice([("add", host), ("add", f"{host}:2"), ("remove", host), ("add", "1")])
                actions = job.ask(asked, do, text)
            elif what < 0.5 and workers:
                task = chance.choice(workers)
                code = 0 if processes[task].leaving else chance.choice([1, -9, 75])
                actions = job.exit(task, code)
            elif what < 0.75:
                view += 1
                ranks = {processes[n].task.rank for n in workers if processes[n].pid or not processes[n].comes}
                actions = job.say(Viewed(view, tuple(sorted(ranks))))
            elif what < 0.8:
                host = chance.choice("bcde")
                if any(each.name == host for each in job.supervisor.usable):
                    actions = job.say(Lost(host, "was killed"))
                    actions += job.say(Unreached(host, "gone", 125))
            elif job.supervisor.deadline < math.inf:
                actions = job.tick()
            for each in actions:
                job.now += 0.1
                match each:
                    case Connect(host, None):
                        job.say(Connected(host), Ready(host, 1, 4), Probed(host, facts(host)))
                        job.say(Bound("a", {"reach": 9007}), Bound(host, {"reach": 9008}))
                        actions += job.say(Reached(host, {"a": {"ms": 1}}))
                    case Send(host, Start(_, tasks)):
                        for row in tasks:
                            job.say(Started(host, row.task, 500 + row.task))
                    case Send(host, Stop()):
                        job.say(Ended(host, ()), Lost(host, "exited", ended=True))
            running = [process for process in job.supervisor.processes if process.task.role == WORKER and process.runs]
            assert len({each.task.rank for each in running}) == len(running)
            ranks = [life[0].task.rank for life in job.supervisor.tasks.lineages if life[0].task.role == WORKER]
            assert ranks == [*range(len(ranks))], "each number once"
            gone = job.supervisor.ending.given_up | job.supervisor.ending.left.keys()
            assert job.supervisor.ending.begun or not any(each.task.host.name in gone for each in running), seed
        joined += sum(process.joined_after is not None for process in job.supervisor.processes)
        left += sum(process.left for process in job.supervisor.processes)
        if not job.supervisor.ending.begun:
            job.exit(SCHEDULER, -9)
        assert sorted(number for number in job.replies if number <= asked) == [*range(1, asked + 1)], seed
    assert joined > 100 and left > 33


# -- servers without a host --------------------------------------------------------------------------------------------


def come_to_two_servers(job: Changing, meanwhile: Callable[[], object] = lambda: None) -> None:
    job.ask(1, "add", "e:1")
    job.reach("e")
    meanwhile()
    job.say(Bound("a", {"reach": 9007}), Bound("b", {"reach": 9007}), Bound("e", {"reach": 9008}))
    job.say(Reached("e", {"a": {"ms": 0.1}, "b": {"ms": 0.1}}))
    assert any(process.task.host.name == "e" for process in job.supervisor.processes)


def test_a_server_without_a_host_starts_on_one_that_comes():
    job = Changing(servers=3, more={"restart_servers": 2})
    (server,) = [server for server in job.supervisor.tasks.servers if server.task.host.name == "c"]
    name = f"server {server.task.rank}"
    job.say(Lost("c", "was killed by SIGKILL"))
    assert f"{name} is not replaced until a host comes that has room for it" in job.notices[0]
    assert job.supervisor.replacer.next_at == math.inf
    come_to_two_servers(job)
    assert job.notices[-1] == f"starting the replacement of {name} on e in 1 s, 1 of 2"
    job.now = job.supervisor.replacer.next_at
    (start,) = [each for each in job.say(Tick()) if isinstance(each, Send)]
    (row,) = start.command.tasks
    assert (start.host, row.environment["DMLC_ROLE"]) == ("e", "server")
    assert job.supervisor.tasks.all[row.task].task.rank == server.task.rank
    job.supervisor.take_announcements()
    job.view(2, 0, 1)
    assert job.notices == [] and job.supervisor.replacer.next_at == math.inf, "it was placed once"


def test_a_server_without_a_host_is_not_placed_at_the_end_of_the_job():
    job = Changing(servers=3, more={"restart_servers": 2})
    job.say(Lost("c", "was killed by SIGKILL"))
    (first,) = [n for n, process in enumerate(job.supervisor.processes) if process.task.name == "worker-0"]
    come_to_two_servers(job, lambda: job.exit(first, 0))
    assert job.supervisor.replacer.next_at == math.inf
