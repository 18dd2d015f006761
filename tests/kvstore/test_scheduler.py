"""The scheduler's decisions, in milliseconds: no sockets, no clocks."""

import pytest

from dmltrain.kvstore.scheduler.core import ALL, Finish, SchedulerCore, Send
from dmltrain.kvstore.transport.message import (
    Abort,
    Barrier,
    Bye,
    Heartbeat,
    Refuse,
    Register,
    Release,
    ServerAddress,
    Shutdown,
    Start,
    WorkerAddress,
)

REGISTER = Register("127.0.0.1", 0, "h0", "", "")


def started(workers=2, servers=1, **settings):
    core = SchedulerCore(workers, servers, **settings)
    core.tick(0.0)
    actions = []
    for node in [("server", i) for i in range(servers)] + [("worker", i) for i in range(workers)]:
        actions = core.handle(node, Register("127.0.0.1", 9, f"h{node[1]}", "", ""), 0.0)
    return core, actions


def reason(actions):
    (finish,) = [action for action in actions if isinstance(action, Finish)]
    return finish.reason


def test_the_job_starts_when_all_processes_have_registered():
    _, actions = started()
    assert actions[0] == Send(ALL, Start((ServerAddress("127.0.0.1", 9, "", ""),), (WorkerAddress("", ""),) * 2))


def test_every_process_gets_all_addresses_and_the_jobs_settings():
    core = SchedulerCore(2, 2, facts={"probe": True})
    core.tick(0.0)
    for node in (("worker", 1), ("server", 1), ("worker", 0), ("server", 0)):  # in any order
        role, index = node
        own = Register(f"10.0.0.{index}", 9 + index, "h", f"{role} {index}", f"host {index}")
        actions = core.handle(node, own, 0.0)
    servers = tuple(ServerAddress(f"10.0.0.{index}", 9 + index, f"server {index}", f"host {index}") for index in (0, 1))
    workers = tuple(WorkerAddress(f"worker {index}", f"host {index}") for index in (0, 1))
    assert actions[0] == Send(ALL, Start(servers, workers, {"probe": True}))


def test_missing_processes_are_named_at_the_start():
    core = SchedulerCore(2, 1, start_seconds=60.0)
    core.tick(0.0)
    core.handle(("worker", 0), REGISTER, 0.0)
    logged = []
    for second in range(1, 61):
        logged += core.tick(float(second))
        core.handle(("worker", 0), Heartbeat(), float(second))
    assert [log.text for log in logged] == ["waiting for server 0, worker 1"] * 6
    assert "not registered after 61 s: server 0, worker 1" in reason(core.tick(61.0))


def test_a_barrier_is_a_set_of_workers_not_a_count():
    core, _ = started()
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []  # repeated
    released = core.handle(("worker", 1), Barrier("a"), 1.0)
    assert released == [Send(("worker", w), Release("a")) for w in (0, 1)]


def test_a_barrier_names_missing_workers():
    core, _ = started(wait_seconds=30.0)
    core.handle(("worker", 1), Barrier("a"), 0.0)
    for second in range(1, 31):
        assert core.tick(float(second)) == []
        for node in (("worker", 0), ("worker", 1), ("server", 0)):
            core.handle(node, Heartbeat(), float(second))
    assert "worker 0 did not reach it within 31 s" in reason(core.tick(31.0))


def test_a_barrier_that_a_finished_worker_missed_ends_the_job():
    core, _ = started()
    core.handle(("worker", 1), Bye(), 1.0)
    assert "worker 1 has finished" in reason(core.handle(("worker", 0), Barrier("a"), 1.0))


@pytest.mark.parametrize("silent", [("worker", 0), ("worker", 1), ("server", 0)])
def test_a_silent_process_is_named(silent):
    core, _ = started()
    ended_at = None
    for tenth in range(1, 120):
        now = tenth / 10
        for node in (("worker", 0), ("worker", 1), ("server", 0)):
            if node != silent:
                assert core.handle(node, Heartbeat(), now) in ([Send(node, Heartbeat())], [])
        actions = core.tick(now)
        if actions:
            ended_at = now
            assert f"{silent[0]} {silent[1]} on h{silent[1]} missed heartbeats for 9 s" in reason(actions)
            assert actions[0].to == ALL
            break
    assert ended_at is not None and 8.5 < ended_at < 9.0


def test_a_scheduler_that_was_stopped_itself_reports_no_loss():
    core, _ = started()
    core.tick(1.0)
    assert core.tick(500.0) == []
    assert core.handle(("worker", 0), Heartbeat(), 900.0) != []  # one is heard before it looks at the clock
    assert core.tick(900.1) == []


def test_a_lost_connection_ends_the_job_but_not_after_bye():
    core, _ = started()
    core.handle(("worker", 0), Bye(), 1.0)
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    assert "worker 1 on h1 was lost: end of stream" in reason(core.lost(("worker", 1), "end of stream", 1.0))
    assert core.lost(("server", 0), "end of stream", 1.0) == []  # only the first loss is reported
    assert core.lost(("worker", 0), "end of stream", 1.0) == []


def test_a_lost_unregistered_connection_is_not_a_loss():
    core = SchedulerCore(2, 1)
    core.tick(0.0)
    assert core.lost(("worker", 0), "end of stream", 1.0) == []


@pytest.mark.parametrize("first", [0, 1])
def test_the_job_ends_after_the_last_bye_and_not_before(first):
    """A server's bye does not count, and nothing after the end has an effect."""
    core, _ = started()
    assert core.handle(("worker", first), Bye(), 1.0) == []
    assert core.handle(("worker", first), Bye(), 1.0) == []  # repeated
    assert core.handle(("server", 0), Bye(), 1.0) == []
    assert core.handle(("worker", 1 - first), Barrier("x"), 1.0)[-1] == Finish(
        f"barrier 'x': worker {first} has finished and will not reach it"
    )

    core, _ = started()
    core.handle(("worker", first), Bye(), 1.0)
    assert core.handle(("worker", 1 - first), Bye(), 1.0) == [Send(ALL, Shutdown()), Finish()]
    assert core.handle(("worker", first), Heartbeat(), 2.0) == core.tick(100.0) == []
    assert core.lost(("server", 0), "end of stream", 2.0) == []


def test_a_worker_that_has_finished_may_be_silent():
    core, _ = started()
    core.handle(("worker", 0), Bye(), 0.0)
    for second in range(1, 60):
        assert core.tick(float(second)) == []
        for node in (("worker", 1), ("server", 0)):
            core.handle(node, Heartbeat(), float(second))


def test_a_bye_while_another_waits_at_a_barrier_ends_the_job():
    core, _ = started(3)
    core.handle(("worker", 0), Barrier("a"), 1.0)
    assert core.handle(("server", 0), Bye(), 1.0) == []
    assert reason(core.handle(("worker", 2), Bye(), 1.0)) == (
        "barrier 'a': worker 2 has finished and will not reach it"
    )


def test_a_worker_may_finish_before_others_reach_a_barrier_that_it_has_passed():
    """It has already reached the barrier, so the others do not need it."""
    core, _ = started()
    core.handle(("worker", 0), Barrier("a"), 1.0)
    assert core.handle(("worker", 0), Bye(), 1.0) == []
    released = core.handle(("worker", 1), Barrier("a"), 1.0)
    assert Send(("worker", 1), Release("a")) in released


def test_barriers_with_different_names_are_separate():
    core, _ = started()
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []
    assert core.handle(("worker", 1), Barrier("b"), 1.0) == []
    for name, worker in (("a", 1), ("b", 0)):
        released = core.handle(("worker", worker), Barrier(name), 1.0)
        assert released == [Send(("worker", w), Release(name)) for w in (0, 1)]
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []  # a name counts anew after its release


@pytest.mark.parametrize(
    "node, message, expected",
    [
        (("worker", 0), REGISTER, "is already registered, from host h0"),
        (("worker", 7), REGISTER, "not part of this job"),
        (("worker", 7), Heartbeat(), "has not registered"),
        (("worker", 0), Shutdown(), "shutdown is not for the scheduler"),
        (("server", 0), Barrier("x"), "only workers"),
    ],
)
def test_invalid_messages_are_refused_with_their_sender(node, message, expected):
    core, _ = started()
    (action,) = core.handle(node, message, 1.0)
    assert isinstance(action, Refuse) and expected in action.reason


def test_an_abort_names_its_author():
    core, _ = started()
    assert reason(core.handle(("server", 0), Abort("disk"), 1.0)) == "server 0 on h0: disk"


def test_the_time_of_a_barrier_counts_from_its_first_worker():
    core, _ = started(wait_seconds=30.0)
    core.tick(1.0)
    core.handle(("worker", 1), Barrier("a"), 4.0)
    for second in range(5, 35):
        assert core.tick(float(second)) == []
        for node in (("worker", 0), ("worker", 1), ("server", 0)):
            core.handle(node, Heartbeat(), float(second))
    assert "worker 0 did not reach it within 31 s" in reason(core.tick(35.0))


def test_a_scheduler_that_checks_twice_within_the_limit_was_not_stopped():
    """Half the limit between two checks is not a pause of the scheduler itself: silence counts."""
    core, _ = started(lost_seconds=8.0)
    assert core.tick(4.0) == core.tick(8.0) == []
    assert "missed heartbeats for 12 s" in reason(core.tick(12.0))


@pytest.mark.parametrize("others", [0, 1])
def test_a_servers_bye_does_not_affect_barriers(others):
    core, _ = started(2, 2)
    core.handle(("worker", others), Barrier("a"), 1.0)
    assert [core.handle(("server", server), Bye(), 1.0) for server in (0, 1)] == [[], []]
