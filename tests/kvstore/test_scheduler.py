"""The scheduler's decisions, in milliseconds: no sockets, no clocks. Its views, and how it divides a step by speeds."""

import itertools
import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.kvstore.scheduler.actions import ALL, Finish, Send
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.lost_links import WAIT_SECONDS
from dmltrain.kvstore.scheduler.membership.balance import GAIN, LEAST, PAUSE, Balance, divided, seconds
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.message.handshake import Refuse
from dmltrain.kvstore.transport.message.job import (
    Abort,
    Barrier,
    Bye,
    Heartbeat,
    LinkEnd,
    LinkLost,
    Overdue,
    Register,
    Release,
    ServerAddress,
    Shutdown,
    Start,
    WorkerAddress,
)
from dmltrain.kvstore.view import Balancing, Lost, View
from tests import handlers
from tests.tiers import seed_ranges

REGISTER = Register("127.0.0.1", 0, "h0", "", "")
NODES = [("server", 0), ("worker", 0), ("worker", 1)]


def started(workers=2, servers=1, boot="", **settings):
    """`boot`: with a name, processes of one index are on one host; else the scheduler does not know hosts."""
    core = SchedulerCore(workers, servers, **settings)
    core.tick(0.0)
    for node in [("server", i) for i in range(servers)] + [("worker", i) for i in range(workers)]:
        core.handle(node, Register("127.0.0.1", 9, f"h{node[1]}", "", boot and f"{boot} {node[1]}"), 0.0)
    return core


def released(name, *ranks):
    return [Send(("worker", rank), Release(name)) for rank in ranks]


def reason(actions):
    (finish,) = [action for action in actions if isinstance(action, Finish)]
    return finish.reason


def test_when_all_have_registered_every_process_gets_all_addresses_and_the_jobs_settings():
    core = SchedulerCore(2, 2, facts={"probe": True})
    core.tick(0.0)
    for node in (("worker", 1), ("server", 1), ("worker", 0), ("server", 0)):  # in any order
        role, index = node
        own = Register(f"10.0.0.{index}", 9 + index, f"h{index}", f"{role} {index}", f"host {index}")
        actions = core.handle(node, own, 0.0)
    servers = tuple(ServerAddress(f"10.0.0.{n}", 9 + n, f"server {n}", f"host {n}", f"h{n}") for n in (0, 1))
    workers = tuple(WorkerAddress(f"worker {index}", f"host {index}", f"h{index}") for index in (0, 1))
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


def test_a_barrier_is_a_set_of_workers_not_a_count_and_those_of_other_names_are_separate():
    core = started()
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []  # repeated
    assert core.handle(("worker", 1), Barrier("b"), 1.0) == []
    for name, worker in (("a", 1), ("b", 0)):
        assert core.handle(("worker", worker), Barrier(name), 1.0) == released(name, 0, 1)
    assert core.handle(("worker", 0), Barrier("a"), 1.0) == []  # a name counts anew after its release


@pytest.mark.parametrize("silent", NODES)
def test_a_silent_process_is_named(silent):
    core = started()
    for tenth in range(1, 120):
        now = tenth / 10
        for node in NODES:
            if node != silent:
                assert core.handle(node, Heartbeat(), now) in ([Send(node, Heartbeat())], [])
        if actions := core.tick(now):
            break
    assert 8.5 < now < 9.0 and actions[0].to == ALL
    assert f"{silent[0]} {silent[1]} on h{silent[1]} missed heartbeats for 9 s" in reason(actions)


def test_a_scheduler_that_was_stopped_itself_reports_no_loss():
    core = started()
    core.tick(1.0)
    assert core.tick(500.0) == []
    assert core.handle(("worker", 0), Heartbeat(), 900.0) != []  # one is heard before it looks at the clock
    assert core.tick(900.1) == []
    core = started(lost_seconds=8.0)
    assert core.tick(4.0) == core.tick(8.0) == [], "half the limit between two checks is no such pause: silence counts"
    assert "missed heartbeats for 12 s" in reason(core.tick(12.0))


def test_a_lost_connection_ends_the_job_but_not_after_bye_or_before_the_registration():
    core = started()
    core.handle(("worker", 0), Bye(), 1.0)
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    assert "worker 1 on h1 was lost: end of stream" in reason(core.lost(("worker", 1), "end of stream", 1.0))
    assert core.lost(("server", 0), "end of stream", 1.0) == []  # only the first loss is reported
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    core = SchedulerCore(2, 1)
    core.tick(0.0)
    assert core.lost(("worker", 0), "end of stream", 1.0) == []
    assert reason(started().handle(("server", 0), Abort("disk"), 1.0)) == "server 0 on h0: disk"


@pytest.mark.parametrize("first", [0, 1])
def test_the_job_ends_after_the_last_bye_and_not_before(first):
    """A server's bye does not count, and nothing after the end has an effect."""
    core = started()
    assert core.handle(("worker", first), Bye(), 1.0) == []
    assert core.handle(("worker", first), Bye(), 1.0) == []  # repeated
    assert core.handle(("server", 0), Bye(), 1.0) == []
    for second in range(2, 60):  # who has finished may be silent
        assert core.tick(float(second)) == []
        for node in (("worker", 1 - first), ("server", 0)):
            core.handle(node, Heartbeat(), float(second))
    said = f"barrier 'x': worker {first} has finished and will not reach it"
    assert core.handle(("worker", 1 - first), Barrier("x"), 60.0)[-1] == Finish(said)

    core = started()
    core.handle(("worker", first), Bye(), 1.0)
    assert core.handle(("worker", 1 - first), Bye(), 1.0) == [Send(ALL, Shutdown()), Finish()]
    assert core.handle(("worker", first), Heartbeat(), 2.0) == core.tick(100.0) == []
    assert core.lost(("server", 0), "end of stream", 2.0) == []


def test_a_bye_ends_a_job_whose_others_wait_at_a_barrier_that_it_has_not_reached():
    core = started(3, 2)
    core.handle(("worker", 0), Barrier("a"), 1.0)
    assert [core.handle(("server", server), Bye(), 1.0) for server in (0, 1)] == [[], []]
    said = "barrier 'a': worker 2 has finished and will not reach it"
    assert reason(core.handle(("worker", 2), Bye(), 1.0)) == said
    core = started()
    core.handle(("worker", 0), Barrier("a"), 1.0)
    assert core.handle(("worker", 0), Bye(), 1.0) == []
    assert released("a", 1)[0] in core.handle(("worker", 1), Barrier("a"), 1.0)


@pytest.mark.parametrize(
    "node, message, expected",
    [
        (("worker", 0), REGISTER, "is already registered, from host h0"),
        (("worker", 7), REGISTER, "not part of this job"),
        (("worker", 7), Heartbeat(), "has not registered"),
        (("worker", 0), Shutdown(), "shutdown is not for the scheduler"),
        (("server", 0), Barrier("x"), "barrier is not for the scheduler"),
    ],
)
def test_invalid_messages_are_refused_with_their_sender(node, message, expected):
    (action,) = started().handle(node, message, 1.0)
    assert isinstance(action, Refuse) and expected in action.reason


def test_the_page_of_the_protocol_has_the_tables_of_today():
    page = handlers.PAGE.read_text()
    assert f"| version ({wire.VERSION}) |" in page
    assert page == handlers.with_tables(page), "write them anew: python -m tests.handlers"


def test_a_barrier_names_missing_workers_and_its_time_counts_from_its_first_worker():
    core = started(wait_seconds=30.0)
    core.tick(1.0)
    core.handle(("worker", 1), Barrier("a"), 4.0)
    for second in range(5, 35):
        assert core.tick(float(second)) == []
        for node in NODES:
            core.handle(node, Heartbeat(), float(second))
    assert "worker 0 did not reach it within 31 s" in reason(core.tick(35.0))


# -- lost links -------------------------------------------------------------------------------------------------------


def lost(own, peer, error="it is cut", cut=True):
    """The report of `own` that its link to `peer` is lost; both are (role, index), and on hosts of their indices."""
    ends = [LinkEnd(role, index, f"h{index}", f"10.0.0.{index}:{len(role)}") for role, index in (own, peer)]
    return LinkLost(*ends, error, cut)


def beats(core, now, without=()):
    for node in [("server", 0), ("server", 1), *(("worker", worker) for worker in range(core.num_workers))]:
        if node not in without and node in core._peers:
            core.handle(node, Heartbeat(), now)


LOST = lost(("worker", 2), ("server", 1))


def after_the_link(report=LOST, boot=""):
    """A core that has been told of this lost link by its end."""
    core = started(3, 2, boot)
    assert core.handle(("worker", 2), report, 1.0) == []
    return core


# Of LOST.
NAMED = "the connection between worker 2 on h2 (10.0.0.2:6) and server 1 on h1 (10.0.0.1:6) was lost: it is cut"


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
    assert reason(after_the_link().handle(end, Abort("disk"), 1.5)) == f"{name}: disk"
    core = after_the_link()
    beats(core, 1.5, without=[end])
    core._peers[end].heard = -7.0
    assert reason(core.tick(1.9)).startswith(f"{name} missed heartbeats for 9 s")


def test_a_lost_process_on_the_host_of_a_lost_link_is_the_better_cause_but_no_complaint_is():
    """A host without power loses all its processes, and the scheduler may miss any of them first."""
    assert reason(after_the_link(boot="boot").lost(("worker", 1), "reset", 1.5)) == "worker 1 on h1 was lost: reset"
    assert reason(after_the_link(boot="boot").lost(("worker", 0), "reset", 1.5)) == NAMED
    assert reason(after_the_link(boot="boot").handle(("worker", 1), Abort("bad"), 1.5)) == NAMED
    assert reason(after_the_link(boot="boot").handle(("server", 1), Overdue("round 3"), 1.5)) == NAMED
    assert reason(started(3, 2).handle(("server", 1), Overdue("round 3"), 1.0)) == "server 1 on h1: round 3"


def test_a_worker_whose_relay_stays_is_watched_until_that_has_left():
    def stays():
        core = started()
        core.handle(("worker", 0), Bye(stays=True), 1.0)
        return core

    said = "worker 0 has finished and will not reach it"
    assert reason(stays().handle(("worker", 1), Barrier("a"), 1.0)).endswith(said)
    core = stays()
    for second in range(2, 10):
        assert core.tick(float(second)) == []
        beats(core, float(second), without=[("worker", 0)])
    assert "worker 0 on h0 missed heartbeats for 9 s" in reason(core.tick(10.0))
    assert "worker 0 on h0 was lost" in reason(stays().lost(("worker", 0), "end of stream", 1.5))
    core = stays()
    core.handle(("worker", 0), Bye(), 1.0)
    assert core.lost(("worker", 0), "end of stream", 1.5) == []
    assert stays().handle(("worker", 1), Bye(), 1.0)[-1] == Finish(), "its own worker has finished"


@pytest.mark.parametrize("seeds", seed_ranges(1_000, 2_000, 1_000_000))
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
            actions = core.handle(chance.choice([third, end]), Overdue("worker 2 has finished already"), now)
        elif event == 1:
            actions = core.handle(third, Abort("a consequence"), now)
        elif event == 2:
            actions = core.lost(third, "a consequence", now)
        elif event == 3:  # another link, or the same one from the other end
            known = chance.choice([("worker", 0), ("relay", 3), end]), chance.choice([("server", 0), peer])
            actions = core.handle(third, lost(*known, "end of stream", cut=False), now)
        elif event == 4 and chance.random() < 0.2:
            core.allowed = (f"{end[0]} {end[1]} on h{end[1]} was lost",)
            actions = core.lost(end, "end of stream", now)
        elif event == 5 and third[0] == "worker":
            actions = core.handle(third, chance.choice([Barrier("a"), Bye(), Bye(stays=True)]), now)
        else:
            beats(core, now)
            actions = core.tick(now)
        if said := [(action.reason, now - 1.0) for action in actions if isinstance(action, Finish)]:
            return core, said[0]
    return core, None


FOUR = View(1, 0, ((2, 0), (3, 1)), (0, 1))


def test_members_are_in_ascending_order_whatever_the_order_of_summing_and_the_first_leads():
    assert FOUR.members == (0, 1, 2, 3)
    assert [FOUR.place(member) for member in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert FOUR.without([0, 2], 5).place(3) == 1
    with pytest.raises(ValueError):
        FOUR.without([0], 5).place(0)
    assert [view.leader for view in (FOUR, FOUR.without([0], 5), FOUR.without([0, 1], 5))] == [0, 1, 2]


def test_a_removal_keeps_the_order_of_summing_and_leaves_out_hosts_without_members():
    lost = (Lost(0, "end of stream"),)
    assert FOUR.without([0], 7, lost) == View(2, 7, ((2,), (3, 1)), (0, 1), lost=lost)
    assert FOUR.without([2, 0], 7).hosts == ((3, 1),)
    with pytest.raises(ValueError, match="with hosts"):
        FOUR.without([0, 1, 2, 3], 7)


def test_residuals_go_to_the_first_that_stays_and_has_been_there():
    view = View(2, 7, ((0, 1), (2, 3)), (0,), joined=(1,), hands_over=(0, 3))
    assert view.receiver == 2 and view.shares_state
    assert View(2, 7, ((0, 1), (2, 3)), (0,), joined=(1,), hands_over=(0, 2, 3)).receiver == 1


def test_a_view_that_drains_has_no_other_change():
    view = View(2, 7, ((0, 1),), (0,), until=8, drains=True)
    assert view.is_passing and not view.without([1], 8).drains
    for more in ({"joined": (1,)}, {"behind": (1,)}, {"hands_over": (1,)}):
        with pytest.raises(ValueError, match="view 2 drains"):
            replace(view, **more)


ONE, TWO = ((0,),), ((0, 1),)


@pytest.mark.parametrize(
    "number, base, hosts, servers, more, said",
    [
        (0, 0, ONE, (0,), {}, "view 0 with base 0, expected 1 or more"),
        (1, -1, ONE, (0,), {}, "base -1, expected 1 or more and 0 or more"),
        (1, 5, ONE, (0,), {"until": 4}, "view 1 until op 4, expected 5 or more, or -1"),
        (1, 0, (), (0,), {}, "expected each member once"),
        (1, 0, ((0,), ()), (0,), {}, "and no empty host"),
        (1, 0, ((0, 1), (1,)), (0,), {}, "expected each member once"),
        (1, 0, ((-1,),), (0,), {}, "expected each member once"),
        (1, 0, ONE, (), {}, "with servers (), expected one or more"),
        (1, 0, ONE, (0, 0), {}, "with servers (0, 0), expected one or more, each once"),
        (1, 0, ONE, (-1,), {}, "expected one or more"),
        (1, 0, TWO, (0,), {"shares": (4,)}, "view 1 with shares (4,), expected 1 or more for each member"),
        (1, 0, TWO, (0,), {"shares": (4, 0)}, "with shares (4, 0), expected 1 or more"),
        (1, 0, TWO, (0,), {"hands_over": (0, 1)}, "workers (0, 1) that hand over, expected some members, each once"),
        (1, 0, TWO, (0,), {"hands_over": (2,)}, "workers (2,) that hand over"),
        (1, 0, ((0, 1, 2),), (0,), {"hands_over": (0, 0)}, "workers (0, 0) that hand over"),
    ],
)
def test_invalid_views_are_refused(number, base, hosts, servers, more, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        View(number, base, hosts, servers, **more)


SETTINGS = Balancing(160)


def view_of(members, shares=(), number=1, joined=()):
    return View(number, 0, (tuple(members),), (0,), joined=tuple(joined), shares=tuple(shares))


def reported(balance, view, speeds, now=0.0):
    """Whether one of these reports makes a proposal."""
    return any([balance.report(view, member, speed, now) for member, speed in zip(view.members, speeds, strict=True)])


speed_lists = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=7)


@given(speed_lists, st.integers(0, 500), st.floats(1.0, 9.0))
def test_parts_are_whole_bounded_and_the_total(speeds, more, limit):
    total = len(speeds) + more
    shares, equal = divided(speeds, total, limit), total / len(speeds)
    assert sum(shares) == total
    assert min(shares) >= max(1, int(LEAST * equal)) and max(shares) <= max(math.ceil(equal), limit * equal)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=3), st.integers(3, 12))
def test_no_other_division_is_quicker(speeds, total):
    found = divided(speeds, total, limit=9.0)
    others = itertools.product(range(1, total), repeat=len(speeds))
    best = min(seconds(other, speeds) for other in others if sum(other) == total)
    assert seconds(found, speeds) == pytest.approx(best)


def test_a_slow_host_slows_a_job_by_its_share():
    speeds = [1.0, 1.0, 1.0, 1.0, 0.5]
    shares = divided(speeds, 160, 2.0)
    assert shares == (36, 36, 36, 35, 17)
    assert seconds([32] * 5, speeds) / seconds(shares, speeds) == pytest.approx(64 / 36)
    assert divided([3.0] * 5, 160, 2.0) == (32,) * 5 and divided([3.0] * 3, 64, 1.0) == (22, 21, 21)


def test_a_decision_needs_the_speed_of_every_member():
    balance, view = Balance(SETTINGS), view_of(range(5))
    for member in (0, 1, 2, 4, 4, 4):
        assert not balance.report(view, member, 10.0 if member < 4 else 5.0, 0.0)
    assert balance.report(view, 3, 10.0, 0.0)
    assert balance.proposal == (36, 36, 36, 35, 17)
    assert not balance.report(view, 3, 1.0, 100.0), "it waits for the next view"


def test_nothing_is_divided_without_the_option_or_between_more_members_than_samples():
    balance, view = Balance(Balancing()), view_of(range(2))
    assert not reported(balance, view, [1.0, 9.0])
    assert balance.next_view(view, view_of([0], number=2)).shares == ()
    assert not reported(Balance(Balancing(2)), view_of(range(3)), [1.0, 9.0, 9.0])


def test_reports_of_an_earlier_view_do_not_count():
    balance, view = Balance(SETTINGS), view_of(range(2))
    balance.report(view, 0, 9.0, 0.0)
    view = balance.next_view(view, view_of(range(2), number=2))
    assert not balance.report(view, 1, 1.0, 9.0) and view.shares == ()


def test_two_changes_have_a_pause_between_them():
    balance, view = Balance(SETTINGS), view_of(range(2))
    assert reported(balance, view, [1.0, 2.0], 100.0)
    view = balance.next_view(view, view_of(range(2), number=2))
    assert not reported(balance, view, [2.0, 1.0], 100.0 + PAUSE - 0.1)
    assert reported(balance, view, [2.0, 1.0], 100.0 + PAUSE)


@pytest.mark.parametrize(
    ("members", "joined", "each", "shares"),
    [
        ([0, 1, 2], [], 0, (81, 53, 26)),  # of 75, 50, 25, 10
        ([0, 1, 2, 3, 4], [4], 0, (60, 40, 20, 8, 32)),
        ([1, 2, 3], [], 40, (71, 35, 14)),
    ],
)
def test_those_who_stay_keep_their_proportions(members, joined, each, shares):
    balance = Balance(Balancing(160, each))
    before = view_of(range(4), (75, 50, 25, 10))
    assert balance.next_view(before, view_of(members, number=2, joined=joined)).shares == shares


def test_a_proposal_counts_for_those_who_are_left():
    balance, view = Balance(SETTINGS), view_of(range(4))
    assert balance.next_view(view, view_of([0, 3], number=2)).shares == (), "equal parts stay equal"
    assert reported(balance, view, [2.0, 1.0, 1.0, 1.0])
    assert balance.next_view(view, view_of([0, 1, 3], number=2)).shares == (80, 40, 40)
    assert balance.proposal == ()


@pytest.mark.parametrize("seed", range(20))
def test_it_ends_where_times_are_equal_and_stays_there(seed):
    """Each host has a fixed time of its own, a speed, and some noise."""
    chance = random.Random(seed)
    count = chance.randrange(2, 8)
    hosts = [(chance.uniform(0.0, 0.01), chance.uniform(0.0007, 0.002)) for _ in range(count)]
    balance, view = Balance(Balancing(64 * count)), view_of(range(count))
    changes, now = 0, 0.0
    for _ in range(40):
        now += PAUSE
        parts = view.shares or (64,) * count
        times = [a + b * part for (a, b), part in zip(hosts, parts, strict=True)]
        noisy = [part / time * chance.uniform(0.995, 1.005) for part, time in zip(parts, times, strict=True)]
        if reported(balance, view, noisy, now):
            view = balance.next_view(view, view_of(range(count), number=view.number + 1))
            changes += 1
    assert changes <= 4, "no flapping"
    assert max(times) < 1.12 * sum(times) / count


@given(st.data())
def test_any_history_keeps_shares_of_the_members(data):
    chance = random.Random(data.draw(st.integers(0, 10_000)))
    each = chance.choice([0, 5])
    settings = Balancing(chance.randrange(1, 60), each, chance.choice([1.0, 2.0, 5.0]))
    balance, view, now = Balance(settings), view_of(range(4)), 0.0
    for number in range(2, 12):
        now += chance.uniform(0, 2 * PAUSE)
        for member in view.members:
            balance.report(view, member, chance.choice([0.01, 1.0, 1.0, 3.0, 1e12]), now)
        gone = set(chance.sample(view.members, chance.randrange(len(view.members))))
        come = {each for each in range(6) if chance.random() < 0.3 and each not in set(view.members) - gone}
        members = sorted(set(view.members) - gone | come)
        before, view = view, balance.next_view(view, view_of(members, number=number, joined=come))
        assert not view.shares or sum(view.shares) == settings.size(len(members))
        assert view.shares or not before.shares or settings.size(len(members)) < len(members)


def test_a_gain_that_is_too_small_is_no_reason():
    balance, view = Balance(Balancing(2000)), view_of(range(2))
    assert not reported(balance, view, [1.0, 1.0 / (2 * GAIN - 1) + 0.001])
    assert reported(balance, view, [1.0, 1.0 / (2 * GAIN - 1) - 0.002])


@pytest.mark.parametrize("values", [(-1,), (1, -1), (1, 0, 0.5), (1, 0, math.inf), (1, 0, math.nan)], ids=str)
def test_impossible_settings_are_refused(values):
    with pytest.raises(ValueError, match="0 or more samples.* limit of 1"):
        Balancing(*values)
