"""The scheduler's decisions, in milliseconds: no sockets, no clocks."""

import random

import pytest

from dmltrain.kvstore.scheduler.actions import ALL, Finish, Send
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.lost_links import WAIT_SECONDS
from dmltrain.kvstore.transport import message as say
from tests.tiers import seed_ranges

REGISTER = say.Register("127.0.0.1", 0, "h0", "", "")


NODES = [("server", 0), ("worker", 0), ("worker", 1)]


def started(workers=2, servers=1, boot="", **settings):
    """`boot`: with a name, processes of one index are on one host; else the scheduler does not know hosts."""
    core = SchedulerCore(workers, servers, **settings)
    core.tick(0.0)
    for node in [("server", i) for i in range(servers)] + [("worker", i) for i in range(workers)]:
        core.handle(node, say.Register("127.0.0.1", 9, f"h{node[1]}", "", boot and f"{boot} {node[1]}"), 0.0)
    return core


def released(name, *ranks):
    return [Send(("worker", rank), say.Release(name)) for rank in ranks]


def reason(actions):
    (finish,) = [action for action in actions if isinstance(action, Finish)]
    return finish.reason


def test_when_all_have_registered_every_process_gets_all_addresses_and_the_jobs_settings():
    core = SchedulerCore(2, 2, facts={"probe": True})
    core.tick(0.0)
    for node in (("worker", 1), ("server", 1), ("worker", 0), ("server", 0)):  # in any order
        role, index = node
        own = say.Register(f"10.0.0.{index}", 9 + index, f"h{index}", f"{role} {index}", f"host {index}")
        actions = core.handle(node, own, 0.0)
    servers = tuple(
        say.ServerAddress(f"10.0.0.{index}", 9 + index, f"server {index}", f"host {index}", f"h{index}")
        for index in (0, 1)
    )
    workers = tuple(say.WorkerAddress(f"worker {index}", f"host {index}", f"h{index}") for index in (0, 1))
    assert actions[0] == Send(ALL, say.Start(servers, workers, {"probe": True}))


def test_missing_processes_are_named_at_the_start():
    core = SchedulerCore(2, 1, start_seconds=60.0)
    core.tick(0.0)
    core.handle(("worker", 0), REGISTER, 0.0)
    logged = []
    for second in range(1, 61):
        logged += core.tick(float(second))
        core.handle(("worker", 0), say.Heartbeat(), float(second))
    assert [log.text for log in logged] == ["waiting for server 0, worker 1"] * 6
    assert "not registered after 61 s: server 0, worker 1" in reason(core.tick(61.0))


def test_a_barrier_is_a_set_of_workers_not_a_count_and_those_of_other_names_are_separate():
    core = started()
    assert core.handle(("worker", 0), say.Barrier("a"), 1.0) == []
    assert core.handle(("worker", 0), say.Barrier("a"), 1.0) == []  # repeated
    assert core.handle(("worker", 1), say.Barrier("b"), 1.0) == []
    for name, worker in (("a", 1), ("b", 0)):
        assert core.handle(("worker", worker), say.Barrier(name), 1.0) == released(name, 0, 1)
    assert core.handle(("worker", 0), say.Barrier("a"), 1.0) == []  # a name counts anew after its release


@pytest.mark.parametrize("silent", NODES)
def test_a_silent_process_is_named(silent):
    core = started()
    for tenth in range(1, 120):
        now = tenth / 10
        for node in NODES:
            if node != silent:
                assert core.handle(node, say.Heartbeat(), now) in ([Send(node, say.Heartbeat())], [])
        if actions := core.tick(now):
            break
    assert 8.5 < now < 9.0 and actions[0].to == ALL
    assert f"{silent[0]} {silent[1]} on h{silent[1]} missed heartbeats for 9 s" in reason(actions)


def test_a_scheduler_that_was_stopped_itself_reports_no_loss():
    core = started()
    core.tick(1.0)
    assert core.tick(500.0) == []
    assert core.handle(("worker", 0), say.Heartbeat(), 900.0) != []  # one is heard before it looks at the clock
    assert core.tick(900.1) == []
    core = started(lost_seconds=8.0)
    assert core.tick(4.0) == core.tick(8.0) == [], "half the limit between two checks is no such pause: silence counts"
    assert "missed heartbeats for 12 s" in reason(core.tick(12.0))


def test_a_lost_connection_ends_the_job_but_not_after_bye_or_before_the_registration():
    core = started()
    core.handle(("worker", 0), say.Bye(), 1.0)
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    assert "worker 1 on h1 was lost: end of stream" in reason(core.lost(("worker", 1), "end of stream", 1.0))
    assert core.lost(("server", 0), "end of stream", 1.0) == []  # only the first loss is reported
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    core = SchedulerCore(2, 1)
    core.tick(0.0)
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    assert reason(started().handle(("server", 0), say.Abort("disk"), 1.0)) == "server 0 on h0: disk"


@pytest.mark.parametrize("first", [0, 1])
def test_the_job_ends_after_the_last_bye_and_not_before(first):
    """A server's bye does not count, and nothing after the end has an effect."""
    core = started()
    assert core.handle(("worker", first), say.Bye(), 1.0) == []
    assert core.handle(("worker", first), say.Bye(), 1.0) == []  # repeated
    assert core.handle(("server", 0), say.Bye(), 1.0) == []
    for second in range(2, 60):  # who has finished may be silent
        assert core.tick(float(second)) == []
        for node in (("worker", 1 - first), ("server", 0)):
            core.handle(node, say.Heartbeat(), float(second))
    said = f"barrier 'x': worker {first} has finished and will not reach it"
    assert core.handle(("worker", 1 - first), say.Barrier("x"), 60.0)[-1] == Finish(said)

    core = started()
    core.handle(("worker", first), say.Bye(), 1.0)
    assert core.handle(("worker", 1 - first), say.Bye(), 1.0) == [Send(ALL, say.Shutdown()), Finish()]
    assert core.handle(("worker", first), say.Heartbeat(), 2.0) == core.tick(100.0) == []
    assert core.lost(("server", 0), "end of stream", 2.0) == []


def test_a_bye_ends_a_job_whose_others_wait_at_a_barrier_that_it_has_not_reached():
    core = started(3, 2)
    core.handle(("worker", 0), say.Barrier("a"), 1.0)
    assert [core.handle(("server", server), say.Bye(), 1.0) for server in (0, 1)] == [[], []]
    said = "barrier 'a': worker 2 has finished and will not reach it"
    assert reason(core.handle(("worker", 2), say.Bye(), 1.0)) == said
    core = started()
    core.handle(("worker", 0), say.Barrier("a"), 1.0)
    assert core.handle(("worker", 0), say.Bye(), 1.0) == []
    assert released("a", 1)[0] in core.handle(("worker", 1), say.Barrier("a"), 1.0)


@pytest.mark.parametrize(
    "node, message, expected",
    [
        (("worker", 0), REGISTER, "is already registered, from host h0"),
        (("worker", 7), REGISTER, "not part of this job"),
        (("worker", 7), say.Heartbeat(), "has not registered"),
        (("worker", 0), say.Shutdown(), "shutdown is not for the scheduler"),
        (("server", 0), say.Barrier("x"), "only workers"),
    ],
)
def test_invalid_messages_are_refused_with_their_sender(node, message, expected):
    (action,) = started().handle(node, message, 1.0)
    assert isinstance(action, say.Refuse) and expected in action.reason


def test_a_barrier_names_missing_workers_and_its_time_counts_from_its_first_worker():
    core = started(wait_seconds=30.0)
    core.tick(1.0)
    core.handle(("worker", 1), say.Barrier("a"), 4.0)
    for second in range(5, 35):
        assert core.tick(float(second)) == []
        for node in NODES:
            core.handle(node, say.Heartbeat(), float(second))
    assert "worker 0 did not reach it within 31 s" in reason(core.tick(35.0))


# -- lost links -------------------------------------------------------------------------------------------------------


def lost(own, peer, error="it is cut", cut=True):
    """The report of `own` that its link to `peer` is lost; both are (role, index), and on hosts of their indices."""
    ends = [say.LinkEnd(role, index, f"h{index}", f"10.0.0.{index}:{len(role)}") for role, index in (own, peer)]
    return say.LinkLost(*ends, error, cut)


def beats(core, now, without=()):
    for node in [("server", 0), ("server", 1), *(("worker", worker) for worker in range(core.num_workers))]:
        if node not in without and node in core._peers:
            core.handle(node, say.Heartbeat(), now)


LOST = lost(("worker", 2), ("server", 1))


def after_the_link(report=LOST, boot=""):
    """A core that has been told of this lost link by its end."""
    core = started(3, 2, boot)
    assert core.handle(("worker", 2), report, 1.0) == []
    return core


NAMED = (
    "the connection between worker 2 on h2 (10.0.0.2:6) and server 1 on h1 (10.0.0.1:6) was lost: it is cut"  # of LOST
)


def test_a_lost_link_is_named_by_both_its_ends_and_the_end_that_found_the_cut_says_why():
    core = after_the_link()
    beats(core, 1.5)
    assert core.tick(2.9) == []
    assert reason(core.tick(3.0)) == NAMED, "two seconds later"
    core = started(3, 2)
    core.handle(("server", 1), lost(("server", 1), ("worker", 2), "end of stream", cut=False), 1.0)
    core.handle(("worker", 2), LOST, 2.0)
    core.handle(("server", 1), lost(("server", 1), ("worker", 2), "again", cut=False), 2.5)
    assert reason(core.tick(1.0 + WAIT_SECONDS)) == NAMED, "the wait counts from the first report"


def test_of_several_lost_links_the_first_that_is_known_to_be_cut_is_named():
    core = started(3, 2)
    core.handle(("worker", 0), lost(("worker", 0), ("server", 1), "end of stream", cut=False), 1.0)
    core.handle(("worker", 2), LOST, 1.5)
    core.handle(("worker", 1), lost(("worker", 1), ("server", 1)), 1.6)
    assert reason(core.tick(1.0 + WAIT_SECONDS)) == NAMED


def test_a_relay_is_named_and_stands_for_its_workers_process():
    report = lost(("relay", 2), ("server", 1))
    assert "between the relay of worker 2 on h2 (" in reason(after_the_link(report).tick(9.0))
    actions = after_the_link(report).lost(("worker", 2), "end of stream", 1.5)
    assert reason(actions) == "worker 2 on h2 was lost: end of stream"


@pytest.mark.parametrize("end", [("worker", 2), ("server", 1)])
def test_the_end_of_a_process_at_a_lost_link_is_the_better_cause(end):
    name = f"{end[0]} {end[1]} on h{end[1]}"
    assert reason(after_the_link().lost(end, "end of stream", 1.5)) == f"{name} was lost: end of stream"
    assert reason(after_the_link().handle(end, say.Abort("disk"), 1.5)) == f"{name}: disk"
    core = after_the_link()
    beats(core, 1.5, without=[end])
    core._peers[end].heard = -7.0
    assert reason(core.tick(1.9)).startswith(f"{name} missed heartbeats for 9 s")


def test_a_lost_process_on_the_host_of_a_lost_link_is_the_better_cause_but_no_complaint_is():
    """A host without power loses all its processes, and the scheduler may miss any of them first."""
    assert reason(after_the_link(boot="boot").lost(("worker", 1), "reset", 1.5)) == "worker 1 on h1 was lost: reset"
    assert reason(after_the_link(boot="boot").lost(("worker", 0), "reset", 1.5)) == NAMED
    assert reason(after_the_link(boot="boot").handle(("worker", 1), say.Abort("bad"), 1.5)) == NAMED
    assert reason(after_the_link(boot="boot").handle(("server", 1), say.Overdue("round 3"), 1.5)) == NAMED
    assert reason(started(3, 2).handle(("server", 1), say.Overdue("round 3"), 1.0)) == "server 1 on h1: round 3"


def test_a_worker_whose_relay_stays_is_watched_until_that_has_left():
    def stays():
        core = started()
        core.handle(("worker", 0), say.Bye(stays=True), 1.0)
        return core

    said = "worker 0 has finished and will not reach it"
    assert reason(stays().handle(("worker", 1), say.Barrier("a"), 1.0)).endswith(said)
    core = stays()
    for second in range(2, 10):
        assert core.tick(float(second)) == []
        beats(core, float(second), without=[("worker", 0)])
    assert "worker 0 on h0 missed heartbeats for 9 s" in reason(core.tick(10.0))
    assert "worker 0 on h0 was lost" in reason(stays().lost(("worker", 0), "end of stream", 1.5))
    core = stays()
    core.handle(("worker", 0), say.Bye(), 1.0)
    assert core.lost(("worker", 0), "end of stream", 1.5) == []
    assert stays().handle(("worker", 1), say.Bye(), 1.0)[-1] == Finish(), "its own worker has finished"


@pytest.mark.parametrize("seeds", seed_ranges(3_000, 20_000, 200_000))
def test_the_first_lost_link_or_the_end_of_its_process_is_named_whatever_follows_from_it(seeds):
    """Random events after a cut between worker 2 and server 1: consequences, other links, other processes, and in some
    schedules the true end of one of the two. Each process is alone on its host."""
    for seed in seeds:
        core, said = after_a_cut(random.Random(seed))
        assert said, f"seed {seed}: the job goes on"
        assert said[1] <= 3.3, f"seed {seed}: named after {said[1]} s"
        assert said[0].startswith(core.allowed), f"seed {seed}: {said[0]}"


def after_a_cut(chance):
    """The core, with `allowed`, what it may say, and what it says: (reason, seconds after the report)."""
    core = started(4, 2)
    core.tick(1.0)
    ends, now = [("worker", 2), ("server", 1)], 1.0
    own, peer = chance.sample(ends, 2)
    core.handle(own, lost(own, peer), now)
    core.allowed = ("the connection between worker 2 ", "the connection between server 1 ")
    while now < 10.0:
        now += chance.choice([0.0, 0.1, 0.25])
        third, end = chance.choice([("worker", 0), ("worker", 1), ("worker", 3), ("server", 0)]), chance.choice(ends)
        event = chance.randrange(9)
        if event == 0:
            actions = core.handle(chance.choice([third, end]), say.Overdue("worker 2 has finished already"), now)
        elif event == 1:
            actions = core.handle(third, say.Abort("a consequence"), now)
        elif event == 2:
            actions = core.lost(third, "a consequence", now)
        elif event == 3:  # another link, or the same one from the other end
            known = chance.choice([("worker", 0), ("relay", 3), end]), chance.choice([("server", 0), peer])
            actions = core.handle(third, lost(*known, "end of stream", cut=False), now)
        elif event == 4 and chance.random() < 0.2:
            core.allowed = (f"{end[0]} {end[1]} on h{end[1]} was lost",)
            actions = core.lost(end, "end of stream", now)
        elif event == 5 and third[0] == "worker":
            actions = core.handle(third, chance.choice([say.Barrier("a"), say.Bye(), say.Bye(stays=True)]), now)
        else:
            beats(core, now)
            actions = core.tick(now)
        if said := [(action.reason, now - 1.0) for action in actions if isinstance(action, Finish)]:
            return core, said[0]
    return core, None
