"""Lost workers of an elastic job are replaced: on the bare state machine, and with real processes."""

from __future__ import annotations

import math
import os
import random
import signal
from dataclasses import replace

import pytest

from launch.agent.events import Refused, Started
from launch.cli import launch
from launch.commands.processes import lost
from launch.job.host import Host
from launch.job.job import Job, Ports
from launch.job.options import Options
from launch.job.role import WORKER
from launch.run import report
from launch.run.action import Connect, Continue, Send
from launch.run.event import Interrupted, Lost, Tick
from launch.run.limit import FINISH_SECONDS, LATE_SECONDS
from launch.run.process import Processes
from launch.run.replace import Replacer
from tests.launch.conftest import go, said
from tests.launch.test_losses import HOSTS, SCHEDULER, SERVER, STOP, WORKER_0, WORKER_1, WORKER_2, Job3
from tests.waiting import wait_for

FIRST = 5  # the number of the first replacement
ROOMY = [HOSTS[0], HOSTS[1], replace(HOSTS[2], slots=2)]  # c has room for one more


def started(job: Job3, actions: list) -> list[tuple[str, int, int]]:
    """Host, number and the number of the process before it, of each process that these actions start."""
    pairs = list(zip(actions[::2], actions[1::2], strict=True))
    assert all(isinstance(first, Continue) and isinstance(second, Send) for first, second in pairs), actions
    found = []
    for first, second in pairs:
        (row,) = second.command.tasks
        assert row.environment["DMLTRAIN_JOIN"] == "1" and not row.listens
        assert row.environment["DMLC_WORKER_ID"] == str(job.supervisor.processes[first.task].task.rank)
        job.say(Started(second.host, row.task, 200 + row.task))
        found.append((second.host, row.task, first.task))
    return found


def rows(job: Job3) -> list[dict]:
    return report.record(job.supervisor, "0", Options(), 0.0, None)["processes"]


def test_a_lost_worker_is_replaced_on_its_host():
    job = Job3(replaced=3)
    job.now += 8
    assert job.exit(WORKER_1, -9) == []
    (notice,) = job.notices
    assert notice.startswith("worker 1 (pid 103 on b) was killed by SIGKILL; 2 workers are left; starting the ")
    assert notice.endswith("replacement of worker 1 on b in 1 s, 1 of 3")
    assert job.supervisor.deadline == job.now + 1
    assert started(job, job.tick()) == [("b", FIRST, WORKER_1)]
    assert job.supervisor.deadline == math.inf and job.notices == []
    found = rows(job)
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
        numbers.append(started(job, job.tick())[0][1])
    assert waits == [1, 2, 4, 8] and numbers == [WORKER_1, 5, 6, 7, 8]
    assert job.notices[-1].endswith("; starting the replacement of worker 1 on b in 8 s, 4 of 4")
    job.exit(8, 1)
    (notice,) = job.notices
    assert notice.startswith("worker 1 (pid 208 on b) exited with code 1; 2 workers are left; ")
    assert notice.endswith("worker 1 is not replaced: this would be more than --restart-workers 4")
    assert job.supervisor.deadline == math.inf
    assert [each["pid"] for each in rows(job)[WORKER_1]["earlier"]] == [103, 205, 206, 207]
    job.finish(WORKER_0, WORKER_2)
    without = Job3()
    without.exit(WORKER_1, -9)
    assert without.supervisor.deadline == math.inf, "nobody is replaced without the option"


@pytest.mark.parametrize("code", [2, 75, 1, -11])
def test_a_replacement_that_fails_is_a_loss_and_shows_its_last_lines(code):
    job = Job3(replaced=1)
    job.exit(WORKER_1, 3)
    job.tick()
    job.supervisor.take_notices()
    assert job.exit(FIRST, code) == []
    lines = report.notices(job.supervisor, lambda task: [f"last of {task}"], "logs")
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
    job.supervisor.take_notices()
    assert job.say(Refused("b", "program train not found on b", 127)) == []
    (notice,) = job.notices
    assert notice.startswith("program train not found on b; 2 workers are left; ") and notice.endswith("2 s, 2 of 2")
    assert started(job, job.tick()) == [("b", 6, FIRST)]
    job.finish(WORKER_0, WORKER_2, 6)


def test_another_worker_may_be_lost_while_a_replacement_starts():
    job = Job3(replaced=2)
    job.exit(WORKER_1, 3)
    (_, sent) = job.tick()
    assert job.exit(WORKER_2, 3) == [] and not job.supervisor.ending.begun
    job.say(Started("b", FIRST, 205))
    assert started(job, job.tick()) == [("c", 6, WORKER_2)]


LOST_B = Lost("b", "was killed by SIGKILL")
SHUT_DOWN_B = Refused("b", "the agent on b was ended by SIGTERM", 125)  # which still ends its processes


def test_the_worker_of_a_lost_host_goes_to_another_one_with_room():
    job = Job3(replaced=2, hosts=ROOMY)
    assert job.say(LOST_B)[0].host == "b"
    assert job.notices[0].endswith("; starting the replacement of worker 1 on c in 1 s, 1 of 2")
    assert started(job, job.tick()) == [("c", FIRST, WORKER_1)]
    assert job.exit(WORKER_1, 0) == [] and job.notices == [], "of the process that is lost already"
    job.now += 1000
    job.exit(FIRST, -9)
    assert started(job, job.tick()) == [("c", 6, FIRST)], "not back to b"
    job.finish(WORKER_0, WORKER_2, 6)
    assert "lost: worker 1 after 0 s (replaced on c)" in job.last_line
    job = Job3(replaced=1, hosts=ROOMY)
    job.say(SHUT_DOWN_B)
    assert job.notices[0].endswith("; starting the replacement of worker 1 on c in 1 s, 1 of 1")


def test_on_another_host_it_shares_the_devices_with_the_workers_that_run_there():
    job = Job3(replaced=1, hosts=[*HOSTS[:2], replace(ROOMY[2], gpus=("0", "1"))])
    assert job.supervisor.processes[WORKER_2].task.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    job.say(LOST_B)
    assert started(job, job.tick()) == [("c", FIRST, WORKER_1)]
    assert job.supervisor.processes[FIRST].task.environment["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(("placement", "room"), [("pack", True), ("dedicated", False)])
@pytest.mark.parametrize(("role", "host", "other"), [("worker", "a", "b"), ("server", "b", "a")])
def test_a_host_that_is_dedicated_to_the_other_role_takes_no_replacement(role, host, other, placement, room):
    hosts = {name: Host(name, f"10.0.0.{number}") for number, name in enumerate("ab", 1)}
    most = {"elastic": 1, "restart_workers": 1, "restart_servers": 1}
    job = Job("name", "mark", ("true",), 1, 1, "/", placement="dedicated", **most)
    tasks, replacer = Processes(job, list(hosts.values()), Ports()), Replacer(replace(job, placement=placement))
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
    assert started(job, job.exit(WORKER_2, 1) or job.tick()) == [("c", FIRST, WORKER_2)], "it is the first that counts"
    assert job.notices[0].endswith("1 of 2")


def test_what_waits_for_or_starts_on_a_host_that_is_lost_goes_elsewhere_and_counts():
    job = Job3(replaced=2, hosts=ROOMY)
    job.exit(WORKER_1, 1)
    assert isinstance(job.say(LOST_B)[0], Connect)
    _, again, lost_agent = job.notices
    assert again == "starting the replacement of worker 1 on c in 1 s, 1 of 2" and "2 workers are left" in lost_agent
    assert started(job, job.tick()) == [("c", FIRST, WORKER_1)]
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
    assert [number for _, number, _ in started(job, job.tick())] == [5, 6, 7]
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
    job.supervisor.take_notices()
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
    job.exit(SERVER, 75)
    job.supervisor.take_notices()
    job.exit(WORKER_2, 75)
    assert [each.rpartition("; ")[2] for each in job.notices] == ["1 worker is left"]
    assert job.tick() == STOP, "and not another worker"
    job = Job3(replaced=3)
    job.exit(SCHEDULER, 0)
    job.exit(WORKER_1, 1)
    assert job.notices == ["worker 1 (pid 103 on b) exited with code 1; 2 workers are left"]


def living(job: Job3) -> list[int]:
    """The numbers of the workers that run."""
    found = enumerate(job.supervisor.processes)
    return [number for number, each in found if each.task.role == WORKER and each.code is None and not each.lost]


def schedule(seed: int) -> Job3:
    """A job in which workers and hosts are lost at random, and then all that are left are done."""
    chance = random.Random(seed)
    most = chance.randrange(5)
    job = Job3(replaced=most, hosts=ROOMY)
    for _ in range(20):
        running = living(job)
        what = chance.random()
        if what < 0.4 and running:
            job.exit(chance.choice(running), chance.choice([1, 75, -9]))
        elif what < 0.45:
            job.say(Lost(chance.choice("bc"), "was killed"))
        elif job.supervisor.deadline < math.inf and not job.supervisor.ending.begun:
            for each in job.tick():
                if isinstance(each, Send) and hasattr(each.command, "tasks") and chance.random() < 0.8:
                    job.say(Started(each.host, each.command.tasks[0].task, 300))
        check(job, most)
        if job.supervisor.ending.begun:
            return job
    return job


def check(job: Job3, most: int) -> None:
    waiting = job.supervisor.replacer.replacements.waiting
    assert len(job.supervisor.processes) - 5 + len(waiting) <= most
    running = [job.supervisor.processes[number] for number in living(job)]
    assert len({each.task.rank for each in running}) == len(running), "one process of each rank"
    assert not any(each.task.host.name in job.supervisor.ending.given_up for each in running)
    for host in ROOMY:
        assert sum(each.task.host.name == host.name for each in running) <= host.slots
    assert job.supervisor.ending.begun or running or waiting or job.supervisor.verdict.suspect


def test_random_losses_of_workers_and_hosts():
    replaced = ended = 0
    for seed in range(400):
        job = schedule(seed)
        replaced += len(job.supervisor.processes) - 5
        if job.supervisor.ending.begun or job.supervisor.verdict.suspect:
            ended += 1
            continue
        while job.supervisor.replacer.waiting:
            job.tick()
        job.finish(*living(job))
        assert len({(row["role"], row["rank"]) for row in rows(job)}) == len(rows(job)) == 5
    assert replaced > 300 and 20 < ended < 380


# What a process does is the argument for its name, of a replacement that for its name and `+`. Else it waits for
# `done`.
PROGRAM = """
import os, sys, time
name = os.environ["DMLC_ROLE"] + "-" + os.environ["DMLC_TASK_ID"] + "+" * int(os.environ.get("DMLTRAIN_JOIN", 0))
what = dict(word.split("=") for word in sys.argv[1:]).get(name, "wait")
print("ready", name, flush=True)
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.01)
if what == "now":
    sys.exit(2)
wait("go" if what.isdigit() else "done")
if what.isdigit():
    print("end of", name, end="", flush=True)
    sys.exit(int(what))
"""


@pytest.fixture
def running(launcher):
    """Starts an elastic job of 2 workers and a server, and waits until all of it runs."""

    def start(most: int, *words: str):
        script = launcher.script(PROGRAM)
        launched = launcher.start("-n", 2, "-s", 1, "--elastic", "--restart-workers", most, script, *words)
        launched.wait_ready("scheduler-0", "server-0", "worker-0", "worker-1")
        launched.pid("worker", 1)
        return launched

    return start


def in_log(launched, name: str, text: bytes) -> None:
    wait_for(lambda: text in launched.log(name), f"{text!r} in the log of {name}")


def newest(launched, rank: int) -> dict:
    (row,) = [row for row in launched.record["processes"] if (row["role"], row["rank"]) == ("worker", rank)]
    return row


def test_a_worker_of_a_real_job_is_replaced_twice(running, monkeypatch, capsys):
    launched = running(3, "worker-1=3")
    go(launched, "go")
    said(launched, "; 1 worker is left; starting the replacement of worker 1 on localhost in 1 s, 1 of 3")
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
    result = launched.wait()
    assert result.code == 0, result
    assert result.err.splitlines()[-1].count("(replaced on localhost)") == 2
    assert [each["exit_code"] for each in (newest(launched, 1)["earlier"])] == [3, 137]
    assert newest(launched, 1)["exit_code"] == 0
    assert b"[worker-1] ready worker-1+" in result.out


def test_a_replacement_that_finds_other_data_does_not_end_the_job(running):
    launched = running(1, "worker-1=3", "worker-1+=now")
    go(launched, "go")
    said(launched, "exited with code 2; 1 worker is left; worker 1 is not replaced: this would be more than")
    said(launched, "    ready worker-1+")
    go(launched, "done")
    result = launched.wait()
    assert result.code == 0, result


def test_the_records_of_replaced_workers_by_anybody():
    row = {"role": "worker", "rank": 1, "host": "b\x1b", "lost_after": 1.0}
    newer = {**row, "host": "c", "lost_after": None, "earlier": [row, 7, {**row, "lost_after": "x"}]}
    assert lost({"processes": [newer]}) == ["lost: worker 1 on b\\x1b, 1 s after the start; replaced on b\\x1b"]
    for earlier in (7, None, [None], "text", {}):
        assert lost({"processes": [{**row, "earlier": earlier}]}) == ["lost: worker 1 on b\\x1b, 1 s after the start"]
