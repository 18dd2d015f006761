"""Links that the network has cut, by the kernel's counters, and a process's control link to the scheduler."""

import contextlib
import errno
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore.scheduler import heartbeats
from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.scheduler.process import SchedulerProcess
from dmltrain.kvstore.transport import cut, message
from dmltrain.kvstore.transport.cut import Sample, Stall
from dmltrain.kvstore.transport.data_links import DataLinks, Watch, host_names
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message.job import (
    Abort,
    Barrier,
    Bye,
    Heartbeat,
    LinkEnd,
    LinkLost,
    Register,
    Release,
    Shutdown,
)
from dmltrain.kvstore.transport.message.views import Admit, Enter, Flushed, HasState, Ready
from dmltrain.kvstore.view import View
from tests.kvstore.made import start
from tests.kvstore.whole_job import NEVER, begun
from tests.readable import writable
from tests.waiting import SECONDS, wait_for

IDLE = Sample(0, 1000, 65536, 0, True)
SENT = replace(IDLE, unacknowledged=3)
CLOSED = replace(IDLE, window=0)


@pytest.mark.parametrize(
    "samples, expected",
    [
        ([SENT] * 9, 8.0),
        ([IDLE] * 100 + [SENT] * 3, 2.0),  # it was idle for long, and then sends
        ([CLOSED] * 20, 0.0),  # a peer that is alive and does not read
        ([replace(CLOSED, probes=1)] * 20, 0.0),  # it may be on its way
        ([replace(CLOSED, probes=2)] * 9, 8.0),
        ([replace(SENT, window=0)] * 20, 0.0),  # what is sent again is answered
        ([replace(SENT, window=0, answered=False)] * 9, 8.0),
        ([replace(SENT, answered=True)] * 9, 8.0),  # small packets pass, large ones do not
    ],
)
def test_how_long_a_link_has_stalled(samples, expected):
    """With a sample each second."""
    stall = Stall()
    assert [stall.seconds(sample, float(second)) for second, sample in enumerate(samples)][-1] == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.floats(0.1, 3.0)), min_size=1))
def test_a_stall_lasts_as_long_as_something_waits_and_nothing_more_is_acknowledged(steps):
    stall, now, acknowledged, since = Stall(), 0.0, 0, None
    for waits, more, seconds in steps:
        now, acknowledged = now + seconds, acknowledged + more
        since = None if not waits else now if since is None or more else since
        found = Sample(int(waits), acknowledged, 1000, 0, True)
        assert stall.seconds(found, now) == (0.0 if since is None else now - since)


# -- real sockets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(closed_at_the_end):
    """A link and its peer's socket, with small buffers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return closed_at_the_end(Link(near)), closed_at_the_end(far)


def fill(sock):
    while writable(sock, 0.3):
        sock.send(bytes(4096), socket.MSG_DONTWAIT)


def quick():
    """A clock that goes 60 times as fast: the kernel sends several probes in a minute of it, the first after 12 s."""
    return 60.0 * time.monotonic()


@pytest.mark.parametrize(
    "clock, seconds, pause",
    [(quick, 60.0, 0.05), pytest.param(time.monotonic, 12.0, 0.5, marks=pytest.mark.thorough)],
    ids=["quick", "real"],
)
def test_a_peer_that_has_stopped_reading_is_not_cut_off(pair, clock, seconds, pause):
    link, far = pair
    watch = Watch(8.0, clock)
    watch.add(link)
    fill(link.sock)
    assert cut.sample(link.sock).window == 0, "it does not read"
    until = clock() + seconds
    while clock() < until:
        watch.check()
        time.sleep(pause)
    assert cut.sample(link.sock).window == 0
    assert watch.reason(link) == ""
    received = begun(far.recv, 1 << 20, socket.MSG_WAITALL)
    link.send(b"it still carries data")
    far.shutdown(socket.SHUT_RDWR)
    received.result(SECONDS)


def test_the_kernels_counters_of_a_socket(pair):
    link, far = pair
    before = cut.sample(link.sock).acknowledged  # the handshake counts as one byte
    link.send(b"abc")
    far.recv(3, socket.MSG_WAITALL)
    found = cut.sample(link.sock)
    assert (found.unacknowledged, found.acknowledged - before, found.probes, found.waits) == (0, 3, 0, False)
    assert found.window > 0


class Counted:
    """A link, and its socket, with these counters of the kernel: by default it has sent what nobody acknowledges."""

    family = socket.AF_INET

    def __init__(self, *counters):
        self.sock, self.was_cut, self.counters = self, threading.Event(), counters or (0, 3, 0, 5, 1000, 65536)
        self.cut = self.was_cut.set

    def setsockopt(self, *words):
        pass

    def getsockopt(self, *words):
        return cut._INFO.pack(*self.counters)

    def getsockname(self):
        return ("10.0.0.2", 40000)

    def getpeername(self):
        return ("10.0.0.3", 9)


@pytest.mark.parametrize("sent, received, answered", [(5, 4, True), (5, 5, True), (5, 6, False)])
def test_what_is_older_than_the_last_packet_is_no_answer_to_it(sent, received, answered):
    """Both are in milliseconds before now. An old kernel has fewer counters, and no sample."""
    assert cut.sample(SimpleNamespace(getsockopt=lambda *words: bytes(cut._INFO.size - 1))) is None
    assert cut.sample(Counted(1, 2, sent, received, 1000, 500)) == Sample(2, 1000, 500, 1, answered)


@pytest.mark.parametrize(
    "seconds, idle, interval, count",
    [(8.0, 2, 1, 6), (2.5, 1, 1, 2), (59.5, 15, 7, 6), (0.5, 1, 1, 1), (1e9, 32767, 16384, 6)],
)
def test_an_idle_link_is_probed_for_so_long(pair, seconds, idle, interval, count):
    link, _ = pair
    Watch(seconds).add(link)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [link.sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [idle, interval, count]
    assert link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


# -- the watch, and the report ----------------------------------------------------------------------------------------


class ClosedLink(Counted):
    def getsockopt(self, *words):
        raise OSError("closed")


def reported(links, link, error):
    """What is reported of the end of `link`."""
    links.lost(link, error)
    return links.reports.pop()


@pytest.fixture
def links():
    """Those of worker 2 on h2; server 1 is on h3. `reports` and `watch` are its, and `now` is its clock's."""
    names = host_names(start([("", "")] * 3, [("", 1, "", ""), ("10.0.0.3", 9, "", "", "h3")]))
    reports = []
    environment = Environment(role="worker", index=2, host_name="h2")
    watch = Watch(8.0, lambda: made.now)
    made = DataLinks("worker", environment, names, watch, reports.append)
    made.reports, made.watch, made.now = reports, watch, 0.0
    return made


def look(links, times):
    for links.now in times:
        links.watch.check()


def test_a_link_without_progress_is_cut_and_named_by_both_ends(links):
    assert Watch.earlier_than(Environment().lost_seconds).seconds == 8.0, "before its process is lost"
    link = Counted()
    links.add(link, "server", 1)
    look(links, range(8))
    assert not link.was_cut.is_set()
    look(links, [8])
    assert link.was_cut.is_set()
    found = reported(links, link, Closed("end of stream"))
    ends = "between worker 2 on h2 (10.0.0.2:40000) and server 1 on h3 (10.0.0.3:9) was lost"
    assert found.cut and ends in str(found) and "acknowledged nothing for 8 s" in str(found)


def test_a_process_that_was_suspended_judges_its_links_anew(links):
    link = Counted()
    links.add(link, "server", 1)
    look(links, (0.0, 1.0, 20.0, 21.0, 27.5))
    assert not link.was_cut.is_set()


def test_a_closed_link_is_no_longer_watched(links):
    for link in (ClosedLink(), Counted()):
        links.add(link, "server", 1)
    look(links, range(9))
    assert link.was_cut.is_set() and not links.watch._stalls


@pytest.mark.parametrize(
    "number, found_cut",
    [(errno.ETIMEDOUT, True), (errno.EHOSTUNREACH, True), (errno.ECONNRESET, False), (errno.EPIPE, False), (0, False)],
)
def test_an_error_of_the_network_is_told_from_a_peer_that_has_closed(links, number, found_cut):
    link, error = Counted(), Closed("the kernel's words")
    links.add(link, "server", 1)
    error.__cause__ = OSError(number, "the kernel's words") if number else None
    found = reported(links, link, error)
    assert (found.error, found.cut) == ("the kernel's words", found_cut)


def test_sockets_without_addresses_are_named(links):
    """A unix socket, which needs no watch, and one that has ended before."""
    near, far = socket.socketpair()
    inside, ended = Link(near), Link(socket.socket())
    links.add(inside, "server", 1)
    assert not links.watch._stalls
    links.add(ended, "server", 1)
    for link, said in ((inside, "worker 2 on h2 (by shared memory) and server 1"), (ended, "already closed")):
        link.close()
        assert said in str(reported(links, link, Closed("end of stream")))
    far.close()


LOST_SECONDS = 2.0


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
        common = {"job": "job", "key": b"key", "num_workers": 1, "lost_seconds": SECONDS}
        self.environment = Environment(**common, root_port=self._listening.getsockname()[1])
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
    served.control.send(Flushed(3, 1, 12))
    assert served.control.barrier("7", 3) is True
    assert Barrier("7", 3) in served.heard and Flushed(3, 1, 12) in served.heard


def test_who_was_suspended_waits_for_a_word_of_the_scheduler_before_it_acts_for_all(scheduler, monkeypatch):
    monkeypatch.setattr(heartbeats, "AFTER_WAKING", SECONDS)
    control, since = scheduler().control, time.monotonic()
    control.confirm()
    assert time.monotonic() - since < SECONDS, "it was not suspended"
    monkeypatch.setattr(heartbeats, "AFTER_WAKING", 0.3)
    control.heartbeats.woke = time.monotonic()
    control.confirm()
    assert time.monotonic() - control.heartbeats.woke >= 0.3
    monkeypatch.setattr(control.job_end, "wait", pytest.fail)
    control.confirm()  # it is known


def test_who_was_suspended_and_is_removed_does_not_act_for_all(scheduler):
    control = scheduler({Flushed: [Abort("removed from the job")]}).control
    control.heartbeats.woke = time.monotonic()
    control.send(Flushed(3, 1, 12))
    with pytest.raises(JobLost, match="removed from the job"):
        control.confirm()


def test_what_a_member_reports_is_what_the_scheduler_hears(scheduler):
    """A reported link is no failure: the process goes on without it, and what the scheduler says later counts."""
    served = scheduler({Bye: [Shutdown()]})
    ready = Ready({"data": "9c1f"}, (ENTER.view,))
    served.control.report(LOST)
    served.control.report(ready)
    served.control.send(Admit(3))
    served.control.send(HasState(3))
    served.control.bye(done=12)
    assert served.control.job_end.shutdown.wait(SECONDS)
    heard = [each for each in served.heard if not isinstance(each, (Register, Heartbeat))]
    assert heard == [LOST, ready, Admit(3), HasState(3), Bye(done=12)]
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
    link, watch = Counted(), scheduler().control.watch
    watch.seconds = 0.0
    watch.add(link)
    assert link.was_cut.wait(SECONDS)
