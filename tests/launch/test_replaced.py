"""Lost workers, servers and hosts of an elastic job come back: on the bare state machine, and with real processes."""

import math
import os
import signal
from dataclasses import replace

import pytest

from dmltrain_launch.agent.commands import NoticeCommand, Stop
from dmltrain_launch.agent.events import Ended, Refused, Started
from dmltrain_launch.cli import launch
from dmltrain_launch.commands.processes import lost
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.task import Ports
from dmltrain_launch.run import report
from dmltrain_launch.run.planned import returning
from dmltrain_launch.run.supervisor.action import Connect, Send
from dmltrain_launch.run.supervisor.event import Interrupted, Listed, Lost, Tick, Unreached
from dmltrain_launch.run.supervisor.limit import FINISH_SECONDS, LATE_SECONDS
from dmltrain_launch.run.supervisor.policy import policy_of
from dmltrain_launch.run.supervisor.replace import Replacer
from dmltrain_launch.run.supervisor.replacements import LIVED_SECONDS, HostSlots, Replacements
from dmltrain_launch.run.supervisor.starter import Starter
from tests.launch.conftest import go, said
from tests.launch.test_changes import LISTED, Changing, started
from tests.launch.test_losses import HOSTS, SCHEDULER, SERVER, STOP, WORKER_0, WORKER_1, WORKER_2, Job3, two_servers
from tests.waiting import wait_for

FIRST = 5  # the number of the first replacement
ROOMY = [HOSTS[0], HOSTS[1], replace(HOSTS[2], slots=2)]  # c has room for one more


def test_a_lost_worker_is_replaced_on_its_host():
    job = Job3(replaced=3)
    job.now += 8
    assert job.exit(WORKER_1, -9) == []
    (notice,) = job.notices
    assert notice.startswith("worker 1 (pid 103 on b) was killed by SIGKILL; 2 workers are left; starting the ")
    assert notice.endswith("replacement of worker 1 on b in 1 s, 1 of 3")
    assert job.supervisor.deadline == job.now + 1
    assert job.started(job.tick()) == [("b", FIRST, WORKER_1)]
    assert job.supervisor.deadline == math.inf and job.notices == []
    found = job.record["processes"]
    row = found[WORKER_1]
    assert (row["rank"], row["pid"], row["lost_after"]) == (1, 205, None)
    (earlier,) = row["earlier"]
    assert (earlier["pid"], earlier["signal"], earlier["lost_after"]) == (103, "SIGKILL", 8.0)
    assert [each for each in found if "earlier" in each] == [row] and len(found) == 5
    job.finish(WORKER_0, WORKER_2, FIRST)
    assert job.failure == []
    assert job.last_line == "0 processes left on 3 hosts; lost: worker 1 after 8 s (replaced on b)"


def test_each_loss_on_a_host_makes_the_next_one_wait_longer_until_they_are_used_up():
    job = Job3(replaced=4)
    numbers, waits = [WORKER_1], []
    for _ in range(4):
        job.exit(numbers[-1], 1)
        waits.append(job.supervisor.deadline - job.now)
        numbers.append(job.started(job.tick())[0][1])
    assert waits == [1, 2, 4, 8] and numbers == [WORKER_1, 5, 6, 7, 8]
    assert job.notices[-1].endswith("; starting the replacement of worker 1 on b in 8 s, 4 of 4")
    job.exit(8, 1)
    (notice,) = job.notices
    assert notice.startswith("worker 1 (pid 208 on b) exited with code 1; 2 workers are left; ")
    assert notice.endswith("worker 1 is not replaced: this would be more than --restart-workers 4")
    assert job.supervisor.deadline == math.inf
    assert [each["pid"] for each in job.record["processes"][WORKER_1]["earlier"]] == [103, 205, 206, 207]
    job.finish(WORKER_0, WORKER_2)
    without = Job3()
    without.exit(WORKER_1, -9)
    assert without.supervisor.deadline == math.inf, "nobody is replaced without the option"


@pytest.mark.parametrize("code", [2, 75, 1, -11])
def test_a_replacement_that_fails_is_a_loss_and_shows_its_last_lines(code):
    job = Job3(replaced=1)
    job.exit(WORKER_1, 3)
    job.tick()
    job.supervisor.take_announcements()
    assert job.exit(FIRST, code) == []
    lines = report.announcements(job.supervisor, lambda task: [f"last of {task}"], "logs")
    assert lines[0].startswith("worker 1 (on b) ") and lines[0].endswith("more than --restart-workers 1")
    assert lines[1:] == ["its last lines (logs/worker-1.log):", "    last of 5"]
    job.finish(WORKER_0, WORKER_2)
    assert job.last_line.endswith("; lost: worker 1 after 0 s (replaced on b), worker 1 after 1 s")
    if code == 2:
        job = Job3(replaced=1)
        assert job.exit(WORKER_1, 2) == STOP, "wrong usage at the first start ends the job as ever"
        assert job.supervisor.exit_code == 2


def test_a_replacement_that_its_host_cannot_start_is_a_loss():
    job = Job3(replaced=2)
    job.exit(WORKER_1, 3)
    job.tick()
    job.supervisor.take_announcements()
    assert job.say(Refused("b", "program train not found on b", 127)) == []
    (notice,) = job.notices
    assert notice.startswith("program train not found on b; 2 workers are left; ") and notice.endswith("2 s, 2 of 2")
    assert job.started(job.tick()) == [("b", 6, FIRST)]
    job.finish(WORKER_0, WORKER_2, 6)


def test_another_worker_may_be_lost_while_a_replacement_starts():
    job = Job3(replaced=2)
    job.exit(WORKER_1, 3)
    (_, sent) = job.tick()
    assert job.exit(WORKER_2, 3) == [] and not job.supervisor.ending.begun
    job.say(Started("b", FIRST, 205))
    assert job.started(job.tick()) == [("c", 6, WORKER_2)]


LOST_B = Lost("b", "was killed by SIGKILL")
SHUT_DOWN_B = Refused("b", "the agent on b was ended by SIGTERM", 125)  # which still ends its processes


def test_the_worker_of_a_lost_host_goes_to_another_one_with_room():
    job = Job3(replaced=2, hosts=ROOMY)
    assert job.say(LOST_B)[0].host == "b"
    assert job.notices[0].endswith("; starting the replacement of worker 1 on c in 1 s, 1 of 2")
    assert job.started(job.tick()) == [("c", FIRST, WORKER_1)]
    assert job.exit(WORKER_1, 0) == [] and job.notices == [], "of the process that is lost already"
    job.now += 1000
    job.exit(FIRST, -9)
    assert job.started(job.tick()) == [("c", 6, FIRST)], "not back to b"
    job.finish(WORKER_0, WORKER_2, 6)
    assert "lost: worker 1 after 0 s (replaced on c)" in job.last_line
    job = Job3(replaced=1, hosts=ROOMY)
    job.say(SHUT_DOWN_B)
    assert job.notices[0].endswith("; starting the replacement of worker 1 on c in 1 s, 1 of 1")


def test_on_another_host_it_shares_the_devices_with_the_workers_that_run_there():
    job = Job3(replaced=1, hosts=[*HOSTS[:2], replace(ROOMY[2], gpus=("0", "1"))])
    assert job.supervisor.processes[WORKER_2].task.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    job.say(LOST_B)
    assert job.started(job.tick()) == [("c", FIRST, WORKER_1)]
    assert job.supervisor.processes[FIRST].task.environment["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(("placement", "room"), [("pack", True), ("dedicated", False)])
@pytest.mark.parametrize(("role", "host", "other"), [("worker", "a", "b"), ("server", "b", "a")])
def test_a_host_that_is_dedicated_to_the_other_role_takes_no_replacement(role, host, other, placement, room):
    hosts = {name: Host(name, f"10.0.0.{number}") for number, name in enumerate("ab", 1)}
    most = {"elastic": 1, "restart_workers": 1, "restart_servers": 1}
    job = Job("name", "mark", ("true",), 1, 1, "/", placement="dedicated", **most)
    tasks = Starter(job, list(hosts.values()), Ports()).processes
    replacer = Replacer(replace(job, placement=placement), policy_of(job))
    assert [each.task.host.name for each in tasks.all] == ["b", "b", "a"]
    lost = getattr(tasks, f"{role}s")[0]
    assert lost.task.host.name == host
    lost.lost = True
    (text,) = replacer.lost([lost], tasks, [hosts[other]], 0.0)
    assert text.startswith(f"starting the replacement of {role} 0 on {other}") is room


def test_if_no_host_has_room_the_job_goes_on_without():
    job = Job3(replaced=2)
    job.say(LOST_B)
    assert job.notices[0].endswith("; worker 1 is not replaced: no host that is left has room for it")
    assert job.started(job.exit(WORKER_2, 1) or job.tick()) == [("c", FIRST, WORKER_2)], "it is the first that counts"
    assert job.notices[0].endswith("1 of 2")


def test_a_place_is_given_to_one_replacement_only():
    hosts = [replace(HOSTS[0], roles=("scheduler", "server")), replace(HOSTS[1], slots=2), ROOMY[2]]
    job = Job3(replaced=3, hosts=hosts)
    assert [job.host(task) for task in (WORKER_0, WORKER_1, WORKER_2)] == ["b", "b", "c"]
    job.say(LOST_B)
    first, second = job.notices[0].split("; ")[-2:]
    assert first == "starting the replacement of worker 0 on c in 1 s, 1 of 3"
    assert second == "worker 1 is not replaced: no host that is left has room for it"
    assert job.started(job.tick()) == [("c", FIRST, WORKER_0)]
    job.exit(WORKER_2, -9)
    assert job.started(job.tick()) == [("c", 6, WORKER_2)], "its own place is free"
    job.finish(FIRST, 6)


def test_what_waits_for_or_starts_on_a_host_that_is_lost_goes_elsewhere_and_counts():
    job = Job3(replaced=2, hosts=ROOMY)
    job.exit(WORKER_1, 1)
    assert isinstance(job.say(LOST_B)[0], Connect)
    _, again, lost_agent = job.notices
    assert again == "starting the replacement of worker 1 on c in 1 s, 1 of 2" and "2 workers are left" in lost_agent
    assert job.started(job.tick()) == [("c", FIRST, WORKER_1)]
    job = Job3(replaced=1, hosts=ROOMY)
    job.exit(WORKER_1, 1)
    job.tick()
    job.say(SHUT_DOWN_B)
    assert job.notices[-1].endswith("; worker 1 is not replaced: this would be more than --restart-workers 1")
    job.finish(WORKER_0, WORKER_2)


def test_the_job_does_not_end_while_the_only_worker_is_to_start():
    job = Job3(replaced=3)
    for task in (WORKER_0, WORKER_1, WORKER_2):
        assert job.exit(task, 75) == []
    assert not job.supervisor.ending.begun
    assert [number for _, number, _ in job.started(job.tick())] == [5, 6, 7]
    assert job.supervisor.deadline == math.inf
    job.finish(5, 6, 7)


@pytest.mark.parametrize("code", [75, 0, -9])
def test_it_does_end_if_the_scheduler_does(code):
    job = Job3(replaced=3)
    for task in (WORKER_0, WORKER_1, WORKER_2):
        job.exit(task, 3)
    actions = job.exit(SCHEDULER, code)
    assert (actions or job.tick()) == STOP
    job.end(137 if code == -9 else 3)


def test_when_the_last_replacement_fails_the_first_loss_is_the_cause():
    job = Job3(replaced=1)
    for task in (WORKER_0, WORKER_1, WORKER_2):
        job.exit(task, 3 + task)
    job.tick()
    assert job.exit(FIRST, 9) == STOP
    job.end(3 + WORKER_0)


def test_once_a_worker_is_done_nobody_is_replaced():
    job = Job3(replaced=3)
    job.exit(WORKER_1, 1)
    job.exit(WORKER_0, 0)
    assert job.supervisor.deadline == math.inf, "the one that waited is not needed"
    job.supervisor.take_announcements()
    job.exit(WORKER_2, 1)
    assert job.notices == ["worker 2 (pid 104 on c) exited with code 1; 1 worker is left"]
    assert job.tick() == STOP
    job.end(0)


def test_a_replacement_that_still_waits_at_the_end_has_a_moment_to_notice():
    job = Job3(replaced=1)
    job.exit(WORKER_1, 1)
    job.tick()
    job.exit(WORKER_0, 0)
    job.exit(WORKER_2, 0)
    assert job.supervisor.deadline == math.inf, "it may take part"
    job.exit(SCHEDULER, 0)
    assert job.supervisor.deadline == job.now + LATE_SECONDS
    job.exit(FIRST, 0)
    assert job.supervisor.deadline == job.now + FINISH_SECONDS, "for the server"
    job.exit(SERVER, 0)
    job.end(0)


@pytest.mark.parametrize("code", [75, 0, -15])
def test_a_replacement_that_notices_nothing_is_no_failure(code):
    job = Job3(replaced=1)
    job.exit(WORKER_1, 1)
    job.tick()
    for task in (WORKER_0, WORKER_2, SERVER, SCHEDULER):
        job.exit(task, 0)
    assert code == 75 or job.tick() == STOP
    job.exit(FIRST, code)
    job.end(0)


def test_nothing_is_started_once_the_job_ends():
    job = Job3(replaced=3)
    job.exit(WORKER_1, 1)
    job.say(Interrupted(2))
    job.now += 2
    assert job.say(Tick()) == []
    job = Job3(replaced=3)
    job.exit(WORKER_1, 1)
    job.now += 0.5
    assert job.exit(SERVER, 75) == STOP, "and not another worker"
    job = Job3(replaced=3)
    job.exit(SCHEDULER, 0)
    job.exit(WORKER_1, 1)
    assert job.notices == ["worker 1 (pid 103 on b) exited with code 1; 2 workers are left"]


# -- servers ----------------------------------------------------------------------------------------------------------


def test_a_lost_server_is_replaced_on_its_host():
    job = two_servers(servers_replaced=2)
    assert job.exit(2, -9) == []
    (notice,) = job.notices
    assert notice.startswith("server 1 (pid 102 on b) was killed by SIGKILL; 3 workers and 1 server are left; ")
    assert notice.endswith("starting the replacement of server 1 on b in 1 s, 1 of 2")
    assert job.started(job.tick()) == [("b", 6, 2)]
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
    ((_, number, _),) = job.started(job.tick())
    job.exit(number, -9)
    assert "server 0 (pid 205 on a) was killed by SIGKILL" in job.supervisor.cause.text


def test_workers_and_servers_are_counted_by_themselves_until_they_are_used_up():
    job = two_servers(servers_replaced=1, replaced=1)
    job.exit(2, -9)
    job.exit(4, -9)
    expected = [f"; starting the replacement of {role} 1 on b in 1 s, 1 of 1" for role in ("server", "worker")]
    assert all(notice.endswith(each) for notice, each in zip(job.notices, expected, strict=True))
    assert job.started(job.tick()) == [("b", 6, 2), ("b", 7, 4)]
    job.exit(6, -9)
    assert job.notices[-1].endswith("; server 1 is not replaced: this would be more than --restart-servers 1")
    assert job.supervisor.cause is None, "server 0 is left"


def servers_on_b_and_c() -> Job3:
    hosts = [replace(HOSTS[0], roles=("scheduler", "worker")), Host("b", "10.0.0.2", roles=("server",), slots=1)]
    hosts.append(Host("c", "10.0.0.3", roles=("server", "worker"), slots=2))
    job = Job3(started=6, hosts=hosts, servers=2, servers_replaced=1)
    assert [server.task.host.name for server in job.supervisor.tasks.servers] == ["b", "c"]
    return job


def test_with_its_host_it_goes_to_another_that_takes_servers():
    job = two_servers(servers_replaced=1)
    job.say(Lost("b", "was killed by SIGKILL"))
    assert "server 1 is not replaced until a host comes that has room for it" in job.notices[0], "a has slots=1"
    job = servers_on_b_and_c()
    job.say(Lost("b", "was killed by SIGKILL"))
    assert job.notices[0].endswith("; starting the replacement of server 0 on c in 1 s, 1 of 1"), "a takes no servers"
    ((host, number, _),) = job.started(job.tick())
    assert host == "c"
    assert job.supervisor.processes[number].task.environment["DMLC_NODE_HOST"] == "10.0.0.3"


def test_the_last_server_without_a_host_for_it_ends_the_job():
    job = Job3(servers_replaced=1)
    assert job.supervisor.tasks.servers[0].task.host.name == "a"
    job.say(Lost("a", "was killed by SIGKILL"))
    assert job.supervisor.cause is not None


def test_when_a_worker_is_done_no_server_is_replaced():
    job = two_servers(servers_replaced=1)
    job.exit(3, 0)
    job.exit(2, -9)
    assert "starting" not in job.notices[-1]


# -- real processes ---------------------------------------------------------------------------------------------------


def in_log(launched, name: str, text: bytes) -> None:
    wait_for(lambda: text in launched.log(name), f"{text!r} in the log of {name}")


def newest(launched, rank: int) -> dict:
    (row,) = [row for row in launched.record["processes"] if (row["role"], row["rank"]) == ("worker", rank)]
    return row


def test_a_worker_of_a_real_job_is_replaced_twice(elastic, monkeypatch, capsys):
    launched = elastic("--restart-workers", 3, "worker-1=3")
    go(launched, "go")
    said(launched, "; 2 workers are left; starting the replacement of worker 1 on localhost in 1 s, 1 of 3")
    in_log(launched, "worker-1", b"ready worker-1\nend of worker-1\nready worker-1+\n")
    wait_for(lambda: newest(launched, 1)["pid"] and "earlier" in newest(launched, 1), "the record of the replacement")
    monkeypatch.chdir(launched.folder)
    assert launch(["--ps", str(launched.logs)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("lost: worker 1 on localhost, ")
    assert shown[-1].endswith(" s after the start; replaced on localhost")
    pid = newest(launched, 1)["pid"]
    assert ["worker", "1", str(pid)] in [line.split()[1:4] for line in shown]
    os.kill(pid, signal.SIGKILL)
    said(launched, "in 2 s, 2 of 3")
    wait_for(lambda: len(newest(launched, 1).get("earlier", ())) == 2 and newest(launched, 1)["pid"], "the next one")
    in_log(launched, "worker-1", b"ready worker-1+\nready worker-1+\n")
    go(launched, "done")
    result = launched.ends()
    assert result.err.splitlines()[-1].count("(replaced on localhost)") == 2
    assert [each["exit_code"] for each in (newest(launched, 1)["earlier"])] == [3, 137]
    assert newest(launched, 1)["exit_code"] == 0
    assert b"[worker-1] ready worker-1+" in result.out


def test_the_records_of_replaced_workers_by_anybody():
    row = {"role": "worker", "rank": 1, "host": "b\x1b", "lost_after": 1.0}
    newer = {**row, "host": "c", "lost_after": None, "earlier": [row, 7, {**row, "lost_after": "x"}]}
    assert lost({"processes": [newer]}) == ["lost: worker 1 on b\\x1b, 1 s after the start; replaced on b\\x1b"]
    for earlier in (7, None, [None], "text", {}):
        assert lost({"processes": [{**row, "earlier": earlier}]}) == ["lost: worker 1 on b\\x1b, 1 s after the start"]


# -- how often, where and when: the rules alone ------------------------------------------------------------------------

OWN = [HostSlots("a", 1, 0.0), HostSlots("b", 1, 0.0)]  # full hosts


def lose(replacements: Replacements, task: int, host: str, now: float, seats=OWN) -> float | None:
    """A worker is lost there: for how long its replacement waits."""
    replacements.lost(task, host, now)
    planned = replacements.plan(task, host, seats, now)
    return planned and planned.at - now


def test_the_wait_doubles_with_each_loss_on_the_host():
    replacements, waits = Replacements(20), []
    for task in range(9):
        waits.append(lose(replacements, task, "a", now=100.0 * task))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert lose(replacements, 9, "b", 900.0) == 1, "each host has its own"


def test_the_wait_begins_again_once_for_each_replacement_that_lives_long_on_its_own_host():
    replacements = Replacements(20)
    for task in range(3):
        lose(replacements, task, "a", 0.0)
    lose(replacements, 20, "b", 0.0)
    replacements.due(4.0)
    replacements.started(10, "a", 4.0)
    assert lose(replacements, 3, "a", 4.0 + LIVED_SECONDS - 0.125) == 8
    assert lose(replacements, 4, "a", 4.0 + LIVED_SECONDS) == 1
    assert lose(replacements, 5, "a", 5.0 + LIVED_SECONDS) == 2, "it has lived long for once"
    replacements.started(11, "a", 100.0)
    assert lose(replacements, 11, "a", 100.0 + LIVED_SECONDS) == 1, "it was lost after it had lived long"
    replacements.started(12, "a", 200.0)
    assert lose(replacements, 12, "a", 201.0) == 2
    assert lose(replacements, 21, "b", 1000.0) == 2, "nothing has lived there"


def test_the_own_host_comes_first_then_the_one_with_the_fewest_workers_that_has_room():
    def host(own, *seats):
        planned = Replacements(1).plan(7, own, seats, 0.0)
        return planned and planned.host

    free = [HostSlots("b", 3, 1.0), HostSlots("c", 1, 2.0), HostSlots("d", 1, math.inf), HostSlots("e", 0, 0.0)]
    assert host("a", *free, HostSlots("a", 9, -4.0)) == "a", (
        "the lost worker's place is free, though it has more than fit"
    )
    assert host("a", *free) == "c"
    assert host("a", HostSlots("e", 0, 0.0)) is None
    assert host("a") is None


# -- hosts that a job with --watch-hosts has lost are tried again ------------------------------------------------------

AGAIN = f"b is in the hosts file: it is tried again in {returning.FIRST_SECONDS:g} s (--watch-hosts)"


def losing(**more: object) -> Changing:
    """A job whose host is off, and its agent cannot be replaced."""
    job = Changing(**{"watched": True, **more})
    lose_host(job)
    return job


def lose_host(job: Changing) -> None:
    job.say(Lost("b", "was killed"), Unreached("b", "timed out", 125))


@pytest.fixture
def job() -> Changing:
    return losing()


def fail(job: Changing) -> float:
    """The host does not answer at its next try; the seconds until then."""
    since = job.now
    assert job.tick() == [Connect("b")]
    job.now += 3.0
    assert job.say(Unreached("b", "timed out", 125)) == []
    assert "b was not added: timed out" in job.notices
    return job.now - 3.0 - since


def come(job: Changing) -> list[tuple[str, str, int]]:
    """The host answers at its next try, and its workers are started."""
    assert job.tick() == [Connect("b")]
    *begun, _ = job.come("b")
    return started(begun)


def test_a_lost_host_of_the_file_returns_with_watch_hosts():
    job = losing()
    assert AGAIN in job.notices
    assert job.supervisor.deadline == job.now + returning.FIRST_SECONDS
    assert come(job) == [("worker-3", "b", 5)]
    job.finish(WORKER_0, WORKER_2, 5)
    job = losing(watched=False)
    assert AGAIN not in job.notices and job.supervisor.deadline == math.inf


def test_the_wait_doubles_with_each_try(job):
    waits = [fail(job) for _ in range(9)]
    first, longest = returning.FIRST_SECONDS, returning.LONGEST_SECONDS
    assert waits == pytest.approx([first, *(2.0**n * first - 3.0 for n in range(1, 6)), *3 * [longest - 3.0]])
    assert come(job) == [("worker-3", "b", 5)]


@pytest.mark.parametrize("lived", [True, False])
def test_a_host_that_is_lost_again_soon_waits_longer(lived, job):
    come(job)
    job.now += returning.LIVED_SECONDS if lived else returning.LIVED_SECONDS - 1.0
    lose_host(job)
    assert job.supervisor.deadline == job.now + returning.FIRST_SECONDS * (1 if lived else 2)


def test_a_host_whose_agent_still_ends_what_ran_there_waits():
    job = Changing(watched=True)
    job.say(Lost("b", "was killed"))
    assert job.tick() == [], "two agents of one host cannot be told apart"
    job.say(Ended("b", ()), Lost("b", "exited with 0", ended=True))
    assert come(job) == [("worker-3", "b", 5)]


def test_it_gets_no_more_workers_than_the_job_lacks():
    job = Changing(watched=True, replaced=1)
    a, b, c, _ = LISTED
    job.say(Listed((a, Host("b", "10.0.0.2", slots=2), Host("c", "10.0.0.3", slots=2))))
    lose_host(job)
    assert come(job) == [("worker-3", "b", 5)], "of its two slots one: the job began with three workers"


def test_a_host_that_the_job_does_not_lack_is_not_used(job):
    job.ask(1, "add", "c")
    assert job.tick() == []
    job.exit(WORKER_0, -9)
    assert come(job) == [("worker-4", "b", 6)]


def test_a_host_that_is_gone_from_the_file_is_not_tried_nor_does_one_hold_up_the_end():
    job = losing()
    a, b, c, e = LISTED
    job.say(Listed((a, c, e)))
    assert job.supervisor.deadline == math.inf
    job = losing()
    job.finish(WORKER_0, WORKER_2)
    assert job.supervisor.changes.returning.deadline == math.inf


def test_a_host_that_was_removed_on_purpose_stays_away(job):
    come(job)
    job.say(Started("b", 5, 205))
    job.view(2, 0, 2, 3)
    assert job.ask(1, "remove", "b") == [Send("b", NoticeCommand((5,)))], job.replies
    assert job.exit(5, 0) == [Send("b", Stop(5.0))]
    job.say(Ended("b", ()), Lost("b", "exited with 0", ended=True))
    assert job.supervisor.deadline == math.inf
