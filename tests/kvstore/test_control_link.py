"""A process's control link to the scheduler."""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest

from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.scheduler import client
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.scheduler.process import SchedulerProcess
from dmltrain.kvstore.transport import message
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message import (
    Abort,
    Barrier,
    Bye,
    Enter,
    Flushed,
    Heartbeat,
    LinkEnd,
    LinkLost,
    Release,
)
from dmltrain.kvstore.view import View
from tests.kvstore.test_cut import Counted
from tests.kvstore.whole_job import NEVER, begun
from tests.waiting import SECONDS, wait_for

LOST_SECONDS = 1.0


def test_the_time_until_the_scheduler_starts_is_no_silence():
    """Processes may start long before the scheduler, on a slow machine or by hand."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    common = {"job": "job", "key": b"key", "num_workers": 2, "num_servers": 0, "root_port": port}
    environment = Environment(**common, lost_seconds=LOST_SECONDS, heartbeat_seconds=0.1)
    early = begun(Control, replace(environment, role="worker", index=0), 0, None, NEVER)
    time.sleep(1.5 * LOST_SECONDS)
    ended = begun(lambda: SchedulerProcess(replace(environment, role="scheduler")).run())
    first = early.result(SECONDS)  # it has registered, and hears nothing yet
    second = Control(replace(environment, role="worker", index=1), 0, None, NEVER)
    for control in (first, second):
        control.wait_for_start()
        control.bye()
    assert ended.result(SECONDS) == ""
    for control in (first, second):
        control.close()


class Scheduler:
    """Accepts one process, answers its heartbeats, and other messages with those that `answers` has for their class."""

    def __init__(self, answers, on_message):
        self._listening, self._answers, self.heard = socket.create_server(("127.0.0.1", 0)), answers, []
        self.environment = Environment(
            job="job", key=b"key", num_workers=1, root_port=self._listening.getsockname()[1], lost_seconds=LOST_SECONDS
        )
        own = replace(self.environment, role="scheduler", heartbeat_seconds=0.1)
        threading.Thread(target=accept_loop, args=(self._listening, own, "scheduler", self._serve), daemon=True).start()
        own = replace(self.environment, heartbeat_seconds=0.1)
        self.control = Control(own, 0, None, NEVER, on_message=on_message)

    def _serve(self, connection, role, index):
        with contextlib.suppress(Closed):
            while True:
                said = connection.read_message(connection.read_header())
                self.heard.append(said)
                for answer in [said] if isinstance(said, Heartbeat) else self._answers.get(type(said), ()):
                    connection.send(message.encode(answer))

    def close(self):
        self.control.close()
        self._listening.close()


@pytest.fixture
def scheduler(closed_at_the_end):
    return lambda answers=None, on_message=None: closed_at_the_end(Scheduler(answers or {}, on_message))


LOST = LinkLost(LinkEnd("worker", 0, "h1", "10.0.0.1:1"), LinkEnd("server", 0, "h2", "10.0.0.2:2"), "timed out", True)
ENTER = Enter(View(4, 12, ((0,), (2,)), (0,)))


def test_a_lost_link_fails_by_the_cause_that_the_scheduler_names_or_else_its_own_name(scheduler):
    control = scheduler({LinkLost: [Abort("server 0 on h2 was lost")]}).control
    control.link_lost(LOST, seconds=SECONDS)
    assert control.failure == "server 0 on h2 was lost"
    control, since, limit = scheduler().control, time.monotonic(), 0.3
    control.link_lost(LOST, seconds=limit)
    assert control.failure == str(LOST) and time.monotonic() - since >= limit


def test_a_barrier_is_released_in_its_own_view(scheduler):
    """The last message, which is for the owner, interrupts it, if none of those before has released it."""
    others, found = [Release("7", 2), Release("7", 0), Release("8", 3)], []
    served = scheduler({Barrier: [*others, ENTER], Flushed: [Release("7", 3)]}, {Enter: found.append})
    assert served.control.barrier("7", 3, interrupted=lambda: bool(found)) is False and found == [ENTER]
    served.control.flushed(Flushed(3, 1, 12))
    assert served.control.barrier("7", 3) is True
    assert Barrier("7", 3) in served.heard and Flushed(3, 1, 12) in served.heard


def test_who_was_suspended_waits_for_a_word_of_the_scheduler_before_it_acts_for_all(scheduler, monkeypatch):
    monkeypatch.setattr(client, "AFTER_WAKING", SECONDS)
    control, since = scheduler().control, time.monotonic()
    control.confirm()
    assert time.monotonic() - since < SECONDS, "it was not suspended"
    monkeypatch.setattr(client, "AFTER_WAKING", 0.3)
    control._woke = time.monotonic()
    control.confirm()
    assert time.monotonic() - control._woke >= 0.3
    monkeypatch.setattr(control, "_was_suspended", lambda now: False)
    monkeypatch.setattr(control, "_wait", pytest.fail)
    control.confirm()  # it is known


def test_who_was_suspended_and_is_removed_does_not_act_for_all(scheduler):
    control = scheduler({Flushed: [Abort("removed from the job")]}).control
    control._woke = time.monotonic()
    control.flushed(Flushed(3, 1, 12))
    with pytest.raises(JobLost, match="removed from the job"):
        control.confirm()


def test_what_a_member_reports_is_what_the_scheduler_hears(scheduler):
    """A reported link is no failure: the process goes on without it, and what the scheduler says later counts."""
    served = scheduler({Bye: [message.Shutdown()]})
    ready = message.Ready({"data": "9c1f"}, (ENTER.view,))
    served.control.report(LOST)
    served.control.ready(ready)
    served.control.admit(3)
    served.control.has_state(3)
    served.control.bye(done=12)
    assert served.control.shutdown.wait(SECONDS)
    heard = [each for each in served.heard if not isinstance(each, (message.Register, Heartbeat))]
    assert heard == [LOST, ready, message.Admit(3), message.HasState(3), Bye(done=12)]
    served.control.link_lost(LOST, seconds=SECONDS)
    assert served.control.failure == "", "it has finished"


def test_a_process_that_stays_sends_heartbeats_until_it_leaves(scheduler):
    assert len(message.encode(Heartbeat())) > 2048, "it does not fit into a packet"
    served = scheduler()
    served.control.bye(stays=True)
    before = len(served.heard)
    wait_for(lambda: sum(isinstance(each, Heartbeat) for each in served.heard[before:]) > 2, "three heartbeats")
    served.control.fail("lost")
    assert served.control.over.is_set(), "its relay must not wait for anybody"


def test_the_heartbeat_thread_looks_at_the_data_links(scheduler):
    link = Counted()
    scheduler().control.watch.add(link)
    assert link.was_cut.wait(SECONDS)
