"""Hosts that a job with --watch-hosts has lost are tried again, on the bare state machine."""

import math

import pytest

from launch.agent.commands import Notice, Stop
from launch.agent.events import Ended, Started
from launch.job.host import Host
from launch.run.action import Connect, Send
from launch.run.event import Listed, Lost, Unreached
from launch.run.returning import FIRST_SECONDS, LIVED_SECONDS, LONGEST_SECONDS
from tests.launch.test_changes import LISTED, Changing, started
from tests.launch.test_losses import WORKER_0, WORKER_2

AGAIN = f"b is in the hosts file: it is tried again in {FIRST_SECONDS:g} s (--watch-hosts)"


def losing(**more: object) -> Changing:
    """A job whose host is off, and its agent cannot be replaced."""
    job = Changing(**{"watched": True, **more})
    lose(job)
    return job


def lose(job: Changing) -> None:
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
    assert job.supervisor.deadline == job.now + FIRST_SECONDS
    assert come(job) == [("worker-3", "b", 5)]
    job.finish(WORKER_0, WORKER_2, 5)
    job = losing(watched=False)
    assert AGAIN not in job.notices and job.supervisor.deadline == math.inf


def test_the_wait_doubles_with_each_try(job):
    waits = [fail(job) for _ in range(9)]
    first = FIRST_SECONDS
    assert waits == pytest.approx([first, *(2.0**n * first - 3.0 for n in range(1, 6)), *3 * [LONGEST_SECONDS - 3.0]])
    assert come(job) == [("worker-3", "b", 5)]


@pytest.mark.parametrize("lived", [True, False])
def test_a_host_that_is_lost_again_soon_waits_longer(lived, job):
    come(job)
    job.now += LIVED_SECONDS if lived else LIVED_SECONDS - 1.0
    lose(job)
    assert job.supervisor.deadline == job.now + FIRST_SECONDS * (1 if lived else 2)


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
    lose(job)
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
    assert job.ask(1, "remove", "b") == [Send("b", Notice((5,)))], job.replies
    assert job.exit(5, 0) == [Send("b", Stop(5.0))]
    job.say(Ended("b", ()), Lost("b", "exited with 0", ended=True))
    assert job.supervisor.deadline == math.inf
