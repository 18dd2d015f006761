"""The scheduler's views: who takes part from which op on, whatever is lost while a view changes."""

import copy

import pytest

from dmltrain.kvstore.scheduler.actions import AGENT, ALL, Cut, Finish, Log, Send
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.lost_links import WAIT_SECONDS
from dmltrain.kvstore.scheduler.membership.views import Views
from dmltrain.kvstore.scheduler.reports import Leaves, Viewed
from dmltrain.kvstore.transport.message.changes import Change
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
    Start,
)
from dmltrain.kvstore.transport.message.views import (
    Admit,
    Enter,
    Flush,
    Flushed,
    HasState,
    Invite,
    Leaving,
    Ready,
    Speed,
)
from dmltrain.kvstore.view import EQUAL, NEVER, Balancing, Lost, View

FACTS = {"network": "mlp", "data": "9c1f"}


def worker(rank):
    return ("worker", rank)


LOST = "worker 1 on h1 was lost: end of stream"


def registered(workers=3, servers=1, elastic=1, **settings):
    core = SchedulerCore(workers, servers, elastic=elastic, **settings)
    core.tick(0.0)
    for node in [("server", i) for i in range(servers)] + [worker(i) for i in range(workers)]:
        core.handle(node, Register("127.0.0.1", 9, f"h{node[1]}", "", f"id {node[1] // 2}"), 0.0)
    return core


def armed(workers=3, servers=1, elastic=1, replay=(), balance=EQUAL, **settings):
    """A core whose workers are ready: two on each host."""
    core = registered(workers, servers, elastic, **settings)
    for rank in range(workers):
        core.handle(worker(rank), Ready(FACTS, replay if rank == 0 else (), balance), 0.0)
    return core


def lose(core, rank, now=1.0):
    return core.lost(worker(rank), "end of stream", now)


def without(rank, *words, **settings):
    """Such an armed core, just after the loss of this worker."""
    core = armed(*words, **settings)
    lose(core, rank)
    return core


def bye(core, rank, now=1.0, done=9):
    return core.handle(worker(rank), Bye(done=done), now)


def messages(actions, kind=None):
    """(to, message) of what is sent, of one kind or all."""
    sent = [(action.to, action.message) for action in actions if isinstance(action, Send)]
    return [(to, message) for to, message in sent if isinstance(message, kind or object)]


def views(actions):
    found = {message.view for _, message in messages(actions, Enter)}
    assert len(found) <= 1
    said = [action for action in actions if isinstance(action, Log) and action.text.startswith("view ")]
    assert [line.report for line in said] in ([], [Viewed(view.number, view.members) for view in found])
    return found.pop() if found else None


def finished(actions):
    return [action.reason for action in actions if isinstance(action, Finish)]


def asked(*ranks, view=1, turn=1, op=-1):
    """To these members: say what you hold, and complete no more than this op."""
    return [(worker(rank), Flush(view, turn, op)) for rank in ranks]


def flushed(core, reports, view=1, turn=1, now=1.0):
    """The last actions after these members' answers, in this order."""
    actions = []
    for rank, done in reports.items():
        actions = core.handle(worker(rank), Flushed(view, turn, done), now)
    return actions


def all_hold(core, op, **more):
    return flushed(core, dict.fromkeys(range(3), op), **more)


def test_the_first_view_begins_when_all_workers_are_ready():
    core = registered(3, 2)
    assert core.handle(worker(1), Ready(), 0.0) == core.handle(worker(0), Ready(), 0.0) == []
    actions = core.handle(worker(2), Ready(), 0.0)
    assert views(actions) == View(1, 0, ((0, 1), (2,)), (0, 1))
    assert [to for to, _ in messages(actions)] == [("server", 0), ("server", 1), worker(0), worker(1), worker(2)]
    assert core.handle(worker(2), Ready(), 0.0) == []  # repeated


def test_a_loss_asks_the_others_and_tells_the_lost_one():
    core = armed()
    log, *actions = lose(core, 1)
    assert log.text.startswith(f"{LOST}; the job goes")
    told = [Send(worker(1), Abort(f"removed from the job: {LOST}")), Cut(worker(1))]
    assert actions == told + [Send(*each) for each in asked(0, 2)] and lose(core, 1) == []
    for message in (Abort("late"), Flushed(1, 1, 99), Barrier("a", 1), Bye(done=99), Heartbeat()):
        assert core.handle(worker(1), message, 1.0) == [], "nothing that a removed worker says counts"
    actions = flushed(core, {2: 7, 0: 7})
    assert views(actions) == View(2, 7, ((0,), (2,)), (0,), lost=(Lost(1, LOST),))
    assert [to for to, _ in messages(actions)] == [("server", 0), worker(0), worker(2)]


def test_each_laggard_is_let_finish_once_what_another_holds():
    core = without(1, 4)
    assert messages(flushed(core, {0: 7, 2: 6, 3: 6})) == asked(2, 3, op=7)
    assert flushed(core, {2: 7}) == []
    view = views(flushed(core, {3: 7}))
    assert (view.base, view.members) == (7, (0, 2, 3))


def test_a_holder_that_dies_between_turns_takes_its_op_with_it_unless_another_has_reached_it():
    core = without(1, 4)
    flushed(core, {0: 7, 2: 6, 3: 6})
    other = copy.deepcopy(core)
    assert messages(lose(core, 0), Flush) == asked(2, 3, turn=2)
    view = views(flushed(core, {2: 6, 3: 6}, turn=2))
    assert (view.base, view.members, [each.member for each in view.lost]) == (6, (2, 3), [1, 0])
    flushed(other, {2: 7})
    lose(other, 0)
    assert messages(flushed(other, {2: 7, 3: 6}, turn=2)) == asked(3, turn=2, op=7)
    assert views(flushed(other, {3: 7}, turn=2)).base == 7


@pytest.mark.parametrize("view, turn", [(1, 1), (1, 0), (2, 2), (0, 2)])
def test_a_report_of_an_earlier_turn_or_another_view_counts_for_nothing(view, turn):
    core = without(1, 4)
    lose(core, 0)
    flushed(core, {2: 6}, turn=2)
    assert flushed(core, {3: 6}, view=view, turn=turn) == []
    assert views(flushed(core, {3: 6}, turn=2))


def test_what_a_finished_worker_holds_is_committed_whenever_it_finishes():
    """Before the change, after its answer, or as the last one to answer."""
    core = armed()
    bye(core, 0)
    lose(core, 1)
    assert messages(flushed(core, {2: 8})) == asked(2, op=9)
    view = views(flushed(core, {2: 9}))
    assert (view.base, view.members) == (9, (2,))
    core = without(1)
    assert flushed(core, {0: 9}) == bye(core, 0) == []
    assert messages(flushed(core, {2: 8})) == asked(2, op=9)
    core = without(1)
    flushed(core, {2: 8})
    assert messages(bye(core, 0)) == asked(2, op=9)


def test_a_loss_ends_a_job_that_is_not_elastic_or_whose_workers_are_not_all_ready():
    core = registered(servers=2)
    core.handle(worker(0), Ready(), 0.0)
    for lost, reason in ((worker(1), LOST), (("server", 1), LOST.replace("worker", "server"))):
        assert finished(copy.deepcopy(core).lost(lost, "end of stream", 1.0)) == [reason]
    core = registered(elastic=0)
    assert [each.reason for each in core.handle(worker(0), Ready(), 0.0)] == ["ready is not for the scheduler"]
    assert finished(lose(core, 1)) == [LOST]


def test_too_few_workers_end_the_job_but_it_has_ended_well_when_all_that_are_left_have_finished():
    core = armed(elastic=2)
    assert not finished(lose(core, 1))
    actions = lose(core, 2)
    said = "worker 2 on h2 was lost: end of stream; 1 worker is left, and --min-workers is 2"
    assert finished(actions) == [said] and (ALL, Abort(said)) in messages(actions)
    said = "worker 0 on h0 was lost: end of stream; no worker is left, and --min-workers is 1"
    assert finished(lose(without(1, 2), 0)) == [said]
    # The last loss may follow an end.
    core = without(1)
    flushed(core, {0: 7, 2: 7})
    assert not finished(bye(core, 0))
    last = armed(2)
    bye(last, 0)
    for actions in (bye(core, 2), lose(last, 1)):
        assert finished(actions) == [""] and (ALL, Shutdown()) in messages(actions)


def test_missed_heartbeats_remove_a_worker():
    core = armed()
    for second in range(1, 9):
        beat(core, second)
        assert core.tick(float(second)) == []
    actions = core.tick(8.6)
    assert messages(actions, Flush) == asked(0, 2)
    assert "worker 1 on h1 missed heartbeats for 9 s" in actions[0].text


def beat(core, now):
    """All but worker 1 are heard."""
    for node in (worker(0), worker(2), ("server", 0)):
        core.handle(node, Heartbeat(), float(now))


def test_barriers_need_the_members_of_their_view_and_are_waited_for_again_after_a_change():
    core = armed()
    core.handle(worker(0), Barrier("8", 1), 1.0)
    lose(core, 1)
    assert core.handle(worker(2), Barrier("8", 1), 1.0) == []
    flushed(core, {0: 7, 2: 7})
    assert core.handle(worker(2), Barrier("8", 1), 1.0) == []  # late
    assert core.handle(worker(2), Barrier("8", 2), 1.0) == []
    released = messages(core.handle(worker(0), Barrier("8", 2), 1.0))
    assert released == [(worker(0), Release("8", 2)), (worker(2), Release("8", 2))]
    core = armed()
    core.handle(worker(0), Barrier("8", 1), 1.0)
    said = "barrier '8': worker 1 has finished and will not reach it"
    assert finished(bye(core, 1)) == [said]


def test_a_change_that_does_not_end_names_who_is_silent():
    core = without(1, wait_seconds=5.0)
    flushed(core, {0: 7})
    for second in range(1, 8):
        beat(core, second)
        actions = core.tick(float(second))
    (said,) = finished(actions)
    assert "worker 2 did not answer" in said and "within 6 s" in said and "DMLTRAIN_WAIT_TIMEOUT" in said


# -- lost links -------------------------------------------------------------------------------------------------------


def link_lost(rank, server, own="worker"):
    ends = [LinkEnd("worker", rank, f"h{rank}", "a:1"), LinkEnd("server", server, f"h{server}", "b:2")]
    return LinkLost(*(ends if own == "worker" else ends[::-1]), "timed out", cut=True)


def judged(core, reports):
    for node, lost in reports:
        assert core.handle(node, lost, 1.0) == []
    assert core.tick(1.0) == []
    return core.tick(1.1 + WAIT_SECONDS)


def test_one_end_of_a_cut_pair_is_removed_and_a_server_that_is_cut_from_most_workers():
    core = armed(3, 2)
    actions = judged(core, [(worker(1), link_lost(1, 0)), (("server", 0), link_lost(1, 0, "server"))])
    assert messages(actions, Flush) == asked(0, 2)
    assert "the connection between worker 1 on h1 (a:1) and server 0" in actions[0].text
    assert core.handle(("server", 0), link_lost(1, 0, "server"), 4.0) == []
    assert core.tick(4.0 + 2 * WAIT_SECONDS) == []
    core = armed(3, 2)
    core.handle(("server", 0), link_lost(1, 0, "server"), 1.0)
    lose(core, 1, 1.5)
    assert not core.tick(1.1 + WAIT_SECONDS), "the worker was removed meanwhile"
    core = armed(3, 2)
    actions = judged(core, [(worker(1), link_lost(1, 1)), (worker(2), link_lost(2, 1))])
    assert actions[0].text.startswith("the connection between worker 1 on h1") and not finished(actions)
    assert views(flushed(core, {0: 7, 1: 7, 2: 7})).servers == (0,)
    (said,) = finished(judged(armed(3, 1), [(worker(1), link_lost(1, 0)), (worker(2), link_lost(2, 0))]))
    assert said.startswith("the connection between worker 1 on h1") and said.endswith("no server is left")


@pytest.mark.parametrize("servers", [1, 2])
def test_a_finished_worker_shows_that_the_server_is_alive_and_holds_everything(servers):
    core = armed(2, servers)
    bye(core, 0)
    actions = judged(core, [(worker(1), link_lost(1, 0))])
    assert removed_by(actions) == [worker(1)] and finished(actions) == [""]


def test_a_lost_link_of_a_worker_that_has_finished_means_nothing():
    core = armed(3, 2)
    bye(core, 0)
    bye(core, 2)
    assert judged(core, [(("server", 1), link_lost(0, 1, "server"))]) == []
    core = armed(3, 2)
    core.handle(("server", 1), link_lost(0, 1, "server"), 1.0)
    bye(core, 0)
    assert core.tick(1.1 + WAIT_SECONDS) == []


def with_newcomers(servers):
    """Worker 0 has the state of training; workers 1 and 2, who have just joined, do not yet."""
    core = armed(1, servers, max_workers=3)
    come(core, 1)
    come(core, 2)
    core.handle(worker(0), Admit(1), 0.5)
    assert views(flushed(core, {0: 7})).joined == (1, 2)
    return core


def removed_by(actions):
    """Who was removed, by who is told to end."""
    return [to for to, _ in messages(actions, Abort)]


CUT = [(worker(0), link_lost(0, 1))]


def test_the_only_worker_with_the_state_is_not_removed_unless_no_server_is_left_to_it():
    cut = [*CUT, (("server", 1), link_lost(2, 1, "server"))]
    assert removed_by(judged(with_newcomers(2), cut)) == [("server", 1)], "2 of 3: as ever"
    assert removed_by(judged(with_newcomers(2), CUT)) == [("server", 1)]
    core = with_newcomers(3)
    cut = [*CUT, (worker(0), link_lost(0, 2)), (worker(1), link_lost(1, 0))]
    assert removed_by(judged(core, cut)) == [("server", 1), ("server", 2)]
    assert removed_by(core.tick(1.2 + WAIT_SECONDS)) == [worker(1)], "the link that is left is judged then"
    assert removed_by(judged(with_newcomers(1), [(worker(0), link_lost(0, 0))])) == [worker(0)]
    assert removed_by(judged(with_newcomers(2), [*CUT, (worker(0), link_lost(0, 0))])) == [worker(0)]
    assert removed_by(judged(with_newcomers(2), [(worker(2), link_lost(2, 1))])) == [worker(2)]


@pytest.mark.parametrize(("view", "done", "removed"), [(1, 7, ("server", 1)), (2, 7, worker(0)), (1, 8, worker(0))])
def test_newcomers_have_the_state_when_they_say_so_or_when_their_first_view_had_an_op(view, done, removed):
    core = with_newcomers(2)
    assert core.handle(worker(2), HasState(view), 1.0) == []
    if done == 8:
        lose(core, 2)
        assert views(flushed(core, {0: done, 1: done}, view=2)).joined == ()
    assert removed_by(judged(core, CUT)) == [removed]


@pytest.mark.parametrize(
    ("processes", "pairs", "server", "then"),  # pairs: worker, server
    [
        (2, [(0, 1), (1, 0)], 1, [1]),
        (4, [(0, 1), (0, 2), (1, 0), (2, 1), (2, 3), (3, 2), (3, 3)], 0, None),
        (4, [(0, 0), (0, 2), (1, 3), (2, 1), (3, 1)], 1, [0, 1]),  # saves workers 2 and 3
    ],
)
def test_if_all_are_cut_off_few_servers_are_removed_first_and_many_workers_saved(processes, pairs, server, then):
    core = armed(processes, processes)
    assert removed_by(judged(core, [(worker(pair[0]), link_lost(*pair)) for pair in pairs])) == [("server", server)]
    if then:
        assert removed_by(core.tick(1.2 + WAIT_SECONDS)) == [worker(rank) for rank in then]


def test_a_scheduler_that_takes_over_knows_who_may_lack_the_state():
    view = View(4, 7, ((0,), (1,), (2,)), (0, 1), joined=(1,), behind=(2,))
    views_ = Views(3, 2, 1)
    views_.resume(Enter(view), {}, {}, Ready(FACTS), (0, 1, 2))
    assert views_.roster.who_is_cut_off([link_lost(0, 1)]) == [("server", 1)]
    assert views_.roster.who_is_cut_off([link_lost(1, 1)]) == [worker(1)]


# -- replay -----------------------------------------------------------------------------------------------------------

REPLAY = (View(1, 0, ((1, 0), (2,)), (0, 1)), View(2, 5, ((0,), (2,)), (0, 1)), View(3, 5, ((2,),), (0, 1)))


def test_a_replay_goes_through_its_views_and_any_loss_ends_it():
    core = registered(3, 1)
    for rank in (2, 0):
        assert core.handle(worker(rank), Ready({}, REPLAY if rank == 0 else ()), 0.0) == []
    assert views(core.handle(worker(1), Ready(), 0.0)) == View(1, 0, ((1, 0), (2,)), (0,), until=5)
    actions = all_hold(core, 5, turn=0)
    assert views(actions) == View(2, 5, ((0,), (2,)), (0,), until=5)
    assert (worker(1), Enter(views(actions))) in messages(actions), "it learns that it is not in this view"
    assert lose(core, 1) == []
    assert views(flushed(core, {0: 5, 2: 5}, view=2, turn=0)) == View(3, 5, ((2,),), (0,))
    assert bye(core, 0, done=5) == [] and finished(bye(core, 2)) == [""]
    last = armed(replay=REPLAY[:2])
    assert views(flushed(last, {0: 5, 1: 5, 2: 5}, turn=0)).until == -1
    for actions in (lose(armed(replay=REPLAY), 1), lose(last, 2)):
        assert "a replay needs all workers" in finished(actions)[0]


# -- replacements -----------------------------------------------------------------------------------------------------


def replaced(rank=1, workers=3, facts=FACTS, **settings):
    """A job in view 2 after op 7, and a replacement of this worker that is ready; what followed from that."""
    core = without(rank, workers, **settings)
    flushed(core, {each: 7 for each in range(workers) if each != rank})
    (sent, log), ready = come(core, rank, facts=facts, host="id 0")
    assert sent.to == worker(rank) and isinstance(sent.message, Start)
    assert log.text == f"worker {rank} on h9 has come as a replacement"
    return core, ready


def test_a_replacement_joins_between_two_rounds_and_is_summed_last_on_a_host_of_its_own():
    core, actions = replaced()
    assert messages(actions) == [(worker(0), Invite((1,)))]
    assert messages(core.handle(worker(0), Admit(2), 3.0)) == asked(0, 2, view=2)
    other = copy.deepcopy(core)
    view = views(flushed(core, {0: 9, 2: 9}, view=2))
    assert view == View(3, 9, ((0, 1), (2,)), (0,), joined=(1,))
    assert core.handle(worker(0), Admit(2), 3.0) == [], "late"
    assert messages(flushed(other, {0: 9, 2: 8}, view=2)) == asked(2, view=2, op=9)
    assert views(flushed(other, {2: 9}, view=2)).joined == (1,)
    core = without(0)
    flushed(core, {1: 7, 2: 7})
    assert messages(come(core, 0, host="another")[1]) == [(worker(1), Invite((0,)))]
    view = views(admitted(core, {1: 9, 2: 9}, view=2, leader=1))
    assert (view.hosts, view.joined, view.leader) == (((1,), (2,), (0,)), (0,), 1)


def test_losses_but_its_own_do_not_stop_the_admission_of_a_replacement():
    """With what it held, the next op of the others may not be a round."""
    core, _ = replaced()
    core.handle(worker(0), Admit(2), 3.0)
    lose(core, 0, 3.0)
    actions = flushed(core, {2: 8}, view=2, turn=2)
    assert (views(actions).members, views(actions).joined) == ((2,), ())
    assert messages(actions, Invite) == [(worker(2), Invite((1,)))]
    assert views(admitted(core, {2: 8}, view=3, leader=2)).joined == (1,)
    core, _ = replaced(workers=4)
    core.handle(worker(0), Admit(2), 3.0)
    lose(core, 3, 3.0)
    view = views(flushed(core, {0: 9, 2: 9}, view=2, turn=2))
    assert (view.members, view.joined) == ((0, 1, 2), (1,))
    core, _ = replaced()
    core.handle(worker(0), Admit(2), 3.0)
    assert lose(core, 1, 3.0)[0].text == "worker 1 on h9 was lost: end of stream, before it had joined"
    view = views(flushed(core, {0: 9, 2: 9}, view=2))
    assert (view.members, view.joined, view.number) == ((0, 2), (), 3)


def test_a_replacement_with_other_facts_or_an_error_of_its_own_ends_alone():
    core, actions = replaced(facts={"network": "mlp", "data": "77aa"})
    said = "did not join the job: worker 1 on h9 is not like the job's other workers: data 77aa (the job: 9c1f)"
    assert actions[1:] == [Send(worker(1), Abort(said)), Cut(worker(1))]
    assert core.lost(worker(1), "cut", 3.0) == []
    assert core.handle(worker(1), Register("127.0.0.1", 0, "h9", "", ""), 4.0), "another one may come"
    core, _ = replaced()
    actions = core.handle(worker(1), Abort("no such file"), 3.0)
    assert actions[0].text == "worker 1 on h9: no such file, before it had joined" and not finished(actions)


def test_who_is_not_wanted_as_a_newcomer_is_refused():
    for core, host in ((armed(), "h1"), (replaced()[0], "h9")):
        (refused,) = core.handle(worker(1), Register("127.0.0.1", 0, "h7", "", ""), 2.0)
        assert refused.reason == f"worker 1 is already registered, from host {host}"
    # Without a limit, that is each rank that was not there at the start.
    jobs = ((3, armed(max_workers=3)), (4, armed(max_workers=4)), (3, registered(elastic=0, max_workers=4)))
    for rank, core in jobs:
        (refused,) = core.handle(worker(rank), Register("127.0.0.1", 0, "h9", "", ""), 2.0)
        assert refused.reason == f"worker {rank} is not part of this job of 3 workers and 1 servers"


def test_a_replacement_that_has_lost_a_link_gives_up_but_not_for_links_of_the_one_before():
    core, _ = replaced(servers=2)
    core.handle(("server", 1), link_lost(1, 1, "server"), 2.0)
    assert core.tick(2.1 + WAIT_SECONDS) == []
    core, _ = replaced(servers=2)
    assert core.handle(worker(1), link_lost(1, 1), 2.0) == [], "the server may be lost"
    actions = core.tick(2.1 + WAIT_SECONDS)
    assert "the connection between worker 1 on h1 (a:1) and server 1" in actions[0].text
    assert messages(actions) == [(worker(1), Abort(f"did not join the job: {link_lost(1, 1)}"))]


def test_a_replay_keeps_workers_that_return():
    back = (*REPLAY[:2], View(3, 8, ((0, 1), (2,)), (0, 1), joined=(1,)))
    core = armed(replay=back)
    told = (worker(1), Enter(View(2, 5, ((0,), (2,)), (0,), until=8), returns=True))
    assert told in messages(all_hold(core, 5, turn=0))
    assert "a replay needs all workers" in finished(lose(copy.deepcopy(core), 1))[0]
    assert views(flushed(core, {0: 8, 2: 8}, view=2, turn=0)) == View(3, 8, ((0, 1), (2,)), (0,), joined=(1,))
    assert not finished(bye(core, 1, 3.0)), "it is a member again"


# -- workers that come in addition to those of the start


def come(core, rank, at=2.0, facts=FACTS, host="id 9"):
    """Worker `rank` has come, and is ready; what followed from each."""
    registering = core.handle(worker(rank), Register("127.0.0.1", 0, "h9", "", host), at)
    return registering, core.handle(worker(rank), Ready(facts), at)


def test_workers_come_in_addition():
    core = armed(max_workers=5)
    registering, ready = come(core, 4)
    assert isinstance(core._first_start, Start) and registering[0].message == core._first_start
    assert registering[1].text == "worker 4 on h9 has come to join"
    assert messages(ready) == [(worker(0), Invite((4,)))]
    come(core, 3, host="id 0")
    view = views(admitted(core, {0: 7, 1: 7, 2: 7}))
    assert view == View(2, 7, ((0, 1, 3), (2,), (4,)), (0,), joined=(3, 4))
    assert not finished(lose(core, 4, 4.0))
    assert views(flushed(core, {0: 8, 1: 8, 2: 8, 3: 8}, view=2)).members == (0, 1, 2, 3)
    assert come(core, 4)[0][1].text == "worker 4 on h9 has come as a replacement"


def test_one_that_comes_before_the_first_view_joins_it_later_and_may_start_with_the_others():
    """Its options are compared when those of the others are known."""
    core = registered(max_workers=5)
    assert come(core, 3)[1] == come(core, 4, facts={"network": "lenet"})[1] == []
    actions = [core.handle(worker(rank), Ready(FACTS), 3.0) for rank in range(3)][-1]
    assert [entered.view.members for _, entered in messages(actions, Enter)][0] == (0, 1, 2)
    assert (worker(0), Invite((3,))) in messages(actions) and removed_by(actions) == [worker(4)]
    core = registered(max_workers=4)
    come(core, 3)
    assert not finished(lose(core, 3, 2.0))
    actions = [core.handle(worker(rank), Ready(FACTS), 3.0) for rank in range(3)][-1]
    assert not messages(actions, Invite) and messages(actions, Enter), "the loss has changed nothing"
    assert come(core, 3)[0][1].text == "worker 3 on h9 has come as a replacement"
    core = SchedulerCore(1, 1, elastic=1, max_workers=2)
    core.handle(worker(1), Register("127.0.0.1", 0, "h9", "", ""), 0.0)
    core.handle(("server", 0), Register("127.0.0.1", 9, "h0", "", ""), 0.0)
    start = messages(core.handle(worker(0), Register("127.0.0.1", 0, "h0", "", ""), 0.0), Start)
    assert [to for to, _ in start] == [ALL] and len(start[0][1].workers) == 1


MORE = (View(1, 0, ((0, 1), (2,)), (0,)), View(2, 5, ((0, 1), (2,), (3,)), (0,), joined=(3,)))


def test_a_replay_waits_for_who_joined_invites_nobody_and_lets_nobody_join_before_its_time():
    core = armed(replay=MORE, max_workers=5)
    (log,) = flushed(core, {0: 5, 1: 5, 2: 5}, turn=0)
    assert log == Log("the replay waits for worker 3 to join, as in the replayed job")
    come(core, 4)
    view = views(come(core, 3)[1])
    assert (view.members, view.base) == ((0, 1, 2, 3), 5), "and not for another"
    early = armed(replay=MORE, max_workers=4)
    assert come(early, 3)[1] == []
    for each in (core, copy.deepcopy(early)):
        assert "a replay needs all workers" in finished(lose(each, 3, 3.0))[0]
    assert views(flushed(early, {0: 5, 1: 5, 2: 5}, turn=0)).members == (0, 1, 2, 3)
    fewer = (MORE[0], View(2, 3, ((0,), (2,)), (0,)), View(3, 5, ((0,), (2,), (3,)), (0,), joined=(3,)))
    core = armed(replay=fewer, max_workers=4)
    come(core, 3)
    actions = all_hold(core, 3, turn=0)
    assert views(actions).members == (0, 2) and not messages(actions, Invite)


# -- members that leave on purpose, and too few members


def notice(core, rank, at=2.0, residuals=False):
    return core.handle(worker(rank), Leaving("SIGTERM", residuals), at)


def noticed(*ranks, **settings):
    """A core of which these want to leave, and whose leader knows."""
    core = armed(**settings)
    log, *invited = notice(core, ranks[0])
    assert log == Log(f"worker {ranks[0]} on h{ranks[0]} leaves on purpose: SIGTERM", Leaves(ranks[0], "SIGTERM"))
    assert messages(invited) == [(worker(0), Invite(()))]
    for rank in ranks[1:]:
        notice(core, rank)
    return core


def admitted(core, held, view=1, leader=0, turn=1):
    """What follows when the leader lets the change come; `held`: worker -> the last op that it holds."""
    assert messages(core.handle(worker(leader), Admit(view), 3.0), Flush)
    return flushed(core, held, view=view, turn=turn)


def entered(actions):
    """The message to the members."""
    return next(message for to, message in messages(actions, Enter) if to == worker(0))


def test_a_notice_is_for_the_next_round_of_the_leader_and_who_has_left_is_not_missed():
    core = noticed(1)
    assert notice(core, 1) == [], "once"
    actions = admitted(core, {0: 7, 1: 6, 2: 7})
    assert messages(actions) == asked(1, op=7), "it finishes its step"
    view = View(2, 7, ((0,), (2,)), (0,), left=(Lost(1, "SIGTERM"),))
    told = messages(flushed(core, {1: 7}), Enter)
    assert [to for to, _ in told] == [("server", 0), worker(0), worker(2), worker(1)]
    assert all(message == Enter(view, departed=(1,)) for _, message in told)
    assert core.handle(worker(1), Heartbeat(), 4.0) == [Send(worker(1), Heartbeat())]
    assert bye(core, 1, 4.0, done=7) == lose(core, 1, 4.0) == []
    assert come(core, 1)[0][1].text == "worker 1 on h9 has come as a replacement"
    # Nor if it dies before it has said goodbye; its number is free only then.
    core = noticed(1)
    admitted(core, {0: 7, 1: 7, 2: 7})
    (refused,) = core.handle(worker(1), Register("127.0.0.1", 0, "h9", "", ""), 4.0)
    assert "already registered" in refused.reason
    assert core.handle(worker(1), Abort("too late"), 4.0) == []
    assert core.handle(("server", 0), link_lost(1, 0, "server"), 4.0) == lose(core, 1, 4.0) == []
    assert core.handle(worker(1), Register("127.0.0.1", 0, "h9", "", ""), 5.0)


def test_a_link_that_one_has_lost_before_it_left_means_nothing_and_is_not_the_cause_of_the_jobs_end():
    """Of two members that are left, the other one is no majority against the server."""
    core = noticed(1, workers=2, servers=2)
    assert core.handle(worker(1), link_lost(1, 1), 3.5) == []
    assert views(admitted(core, {0: 7, 1: 7})).members == (0,)
    assert core.tick(3.6 + WAIT_SECONDS) == []
    core = noticed(1)
    assert core.handle(worker(1), link_lost(1, 0), 3.5) == []
    admitted(core, {0: 7, 1: 7, 2: 7})
    assert finished(core.handle(worker(0), Abort("a mistake"), 3.6)) == ["worker 0 on h0: a mistake"]


def test_a_member_that_dies_before_it_could_leave_is_lost_and_its_replacement_stays():
    core = noticed(1)
    lose(core, 1, 2.0)
    actions = flushed(core, {0: 7, 2: 7})
    view = views(actions)
    assert view.left == () and [each.member for each in view.lost] == [1] and not messages(actions, Invite)
    come(core, 1)
    actions = admitted(core, {0: 8, 2: 8}, view=2)
    assert views(actions).joined == (1,) and not messages(actions, Invite)


def test_after_a_loss_before_the_leader_is_between_two_rounds_or_its_own_nobody_leaves_yet():
    core = noticed(1, workers=4)
    lose(core, 2, 2.0)
    actions = flushed(core, {0: 7, 1: 7, 3: 7})
    assert views(actions).members == (0, 1, 3)
    assert messages(actions, Invite) == [(worker(0), Invite(()))], "it is asked again"
    core = noticed(1)
    core.handle(worker(0), Admit(1), 3.0)
    lose(core, 0, 3.0)
    assert views(flushed(core, {1: 7, 2: 7}, turn=2)).members == (1, 2)


def test_one_leaves_while_another_joins_or_one_view_later_if_it_alone_has_the_state_of_training():
    core = armed(max_workers=4)
    come(core, 3)
    notice(core, 0)
    view = views(admitted(core, {0: 7, 1: 7, 2: 7}))
    assert (view.members, view.joined, view.leader) == ((1, 2, 3), (3,), 1)
    core = armed(workers=1, max_workers=2)
    come(core, 1)
    notice(core, 0)
    actions = admitted(core, {0: 7})
    assert (views(actions).members, views(actions).joined) == ((0, 1), (1,))
    assert messages(actions, Invite) == [(worker(0), Invite(()))]
    assert views(admitted(core, {0: 8, 1: 8}, view=2)).members == (1,)


# -- residuals that those who leave hand over before


def handing(core, *ranks):
    """These leave with residuals, and hand them over in view 2 after op 7."""
    for rank in ranks:
        notice(core, rank, residuals=True)
    actions = admitted(core, dict.fromkeys(range(3), 7))
    assert views(actions) == View(2, 7, ((0, 1), (2,)), (0,), 8, hands_over=ranks)
    assert not messages(actions, Invite), "the next view comes by itself"
    return core


def test_who_has_residuals_leaves_one_view_later_and_hands_them_over_in_this_one():
    core = handing(armed(), 1)
    assert core.tick(4.0) == flushed(core, {0: 8, 2: 8}, view=2, turn=0) == []
    other, left = copy.deepcopy(core), (Lost(1, "SIGTERM"),)
    view = views(flushed(core, {1: 8}, view=2, turn=0))
    assert view == View(3, 8, ((0,), (2,)), (0,), left=left)
    assert messages(notice(other, 2, residuals=True)) == []
    view = views(flushed(other, {1: 8}, view=2, turn=0))
    assert view == View(3, 8, ((0,), (2,)), (0,), 9, left=left, hands_over=(2,)), "who gives notice meanwhile is next"
    assert views(flushed(other, {0: 9, 2: 9}, view=3, turn=0)).members == (0,)


def test_a_loss_during_the_handing_over_makes_it_begin_again_unless_it_was_made():
    """Whoever is lost but for the one that hands over, also the receiver."""
    core = handing(armed(), 1)
    dies = copy.deepcopy(core)
    assert messages(lose(core, 0, 4.0), Flush)
    made = copy.deepcopy(core)
    view = views(flushed(core, {1: 7, 2: 7}, view=2))
    assert (view.members, view.until, view.hands_over, view.receiver) == ((1, 2), 8, (1,), 2)
    assert views(flushed(core, {1: 8, 2: 8}, view=3, turn=0)).members == (2,)
    assert messages(flushed(made, {1: 8, 2: 7}, view=2)) == asked(2, view=2, op=8)
    view = views(flushed(made, {2: 8}, view=2))
    assert (view.members, view.hands_over, [each.member for each in view.left]) == ((2,), (), [1])
    lose(dies, 1, 4.0)
    view = views(flushed(dies, {0: 7, 2: 7}, view=2))
    assert (view.hands_over, view.left, view.until, [each.member for each in view.lost]) == ((), (), NEVER, [1])


def test_who_hands_over_joins_in_a_replay_until_the_next_view():
    first, last = View(1, 0, ((0, 1, 2),), (0,)), View(3, 6, ((0, 2),), (0,))
    core = armed(replay=(first, View(2, 5, ((0, 1, 2),), (0,), hands_over=(1,)), last))
    assert (views(flushed(core, dict.fromkeys(range(3), 5), turn=0))).until == 6
    assert views(flushed(core, dict.fromkeys(range(3), 6), view=2, turn=0)).members == (0, 2)


# -- another type of kvstore, after a view in which members complete their steps


def of_kind(kvstore, staleness=0.0, fixed="", replay=(), **settings):
    """A core of three workers with this kvstore, whose optimizer runs on the servers."""
    core = registered(3, 2, **settings)
    for rank in range(3):
        first = replay if rank == 0 else ()
        core.handle(worker(rank), Ready(FACTS, first, EQUAL, kvstore, staleness, fixed), 0.0)
    return core


def ask(core, kv_store, staleness=-1.0, number=1):
    return core.handle(AGENT, Change(number, kv_store, staleness, "me"), 2.0)


def logged(actions):
    return [action.text for action in actions if isinstance(action, Log)]


def test_steps_that_were_begun_are_completed_before_the_kvstore_is_another():
    core = of_kind("dist_sync")
    assert messages(ask(core, "dist_ssp", 4.0)) == [(worker(0), Invite(()))]
    actions = admitted(core, dict.fromkeys(range(3), 7))
    assert views(actions) == View(2, 7, ((0, 1), (2,)), (0, 1), 8, kvstore="dist_sync", drains=True)
    assert not messages(actions, Invite), "the next view comes by itself"
    assert flushed(core, {0: 8, 2: 8}, view=2, turn=0) == []
    actions = flushed(core, {1: 8}, view=2, turn=0)
    assert views(actions) == View(3, 8, ((0, 1), (2,)), (0, 1), kvstore="dist_ssp", staleness=4.0)
    assert "change 1 from view 3 on: kv_store=dist_ssp staleness=4" in logged(actions)
    core = of_kind("dist_ssp", 2.0)
    ask(core, "dist_sync")
    view = views(admitted(core, dict.fromkeys(range(3), 10)))
    assert (view.base, view.until, view.drains, view.kvstore, view.staleness) == (10, 14, True, "dist_ssp", 2.0)
    view = views(flushed(core, dict.fromkeys(range(3), 14), view=2, turn=0))
    assert view == View(3, 14, ((0, 1), (2,)), (0, 1), kvstore="dist_sync")


@pytest.mark.parametrize("lost", [("worker", 1), ("worker", 0), ("server", 1)])
@pytest.mark.parametrize("done", [7, 8])
def test_if_somebody_is_lost_meanwhile_nothing_has_changed_and_it_begins_again(lost, done):
    core = of_kind("dist_sync", max_workers=4)
    ask(core, "dist_async")
    admitted(core, dict.fromkeys(range(3), 7))
    core.lost(lost, "end of stream", 4.0)
    left = [rank for rank in range(3) if lost != worker(rank)]
    actions = flushed(core, dict.fromkeys(left, done), view=2)
    view = views(actions)
    assert (view.number, view.base, view.drains, view.until, view.kvstore) == (3, done, False, NEVER, "dist_sync")
    assert messages(actions, Invite) == [(worker(left[0]), Invite(()))]
    view = views(admitted(core, dict.fromkeys(left, done + 1), view=3, leader=left[0]))
    assert (view.number, view.drains, view.until) == (4, True, done + 2)
    view = views(flushed(core, dict.fromkeys(left, done + 2), view=4, turn=0))
    assert view.kvstore == "dist_async" and view.members == tuple(left)


def test_if_the_leader_is_lost_after_it_has_asked_the_others_may_be_anywhere():
    core = of_kind("dist_sync")
    ask(core, "dist_async")
    core.handle(worker(0), Admit(1), 3.0)
    lose(core, 0, 3.0)
    view = views(flushed(core, {1: 7, 2: 7}, turn=2))
    assert (view.members, view.drains) == ((1, 2), False)
    assert views(admitted(core, {1: 8, 2: 8}, view=2, leader=1)).drains


def test_who_joins_or_leaves_meanwhile_does_it_before_or_after_and_servers_come_before():
    core = of_kind("dist_sync", max_workers=4)
    come(core, 3)
    ask(core, "dist_async")
    view = views(admitted(core, dict.fromkeys(range(3), 7)))
    assert (view.joined, view.drains) == ((3,), False)
    assert views(admitted(core, dict.fromkeys(range(4), 9), view=2)).drains
    assert messages(notice(core, 2)) == [], "the leader is not to wait in this view"
    actions = flushed(core, dict.fromkeys(range(4), 10), view=3, turn=0)
    assert (views(actions).members, views(actions).kvstore) == ((0, 1, 2, 3), "dist_async")
    assert messages(actions, Invite) == [(worker(0), Invite(()))]
    ask(core, "dist_sync", number=2)
    view = views(admitted(core, dict.fromkeys(range(4), 12), view=4))
    assert (view.members, view.drains) == ((0, 1, 3), False)
    assert views(admitted(core, dict.fromkeys((0, 1, 3), 13), view=5)).drains
    core = of_kind("dist_ssp", 2.0, restart_servers=1)
    core.lost(("server", 1), "end of stream", 1.0)
    assert views(flushed(core, dict.fromkeys(range(3), 3))).servers == (0,)
    ask(core, "dist_sync")
    assert views(admitted(core, dict.fromkeys(range(3), 7), view=2)).drains
    core.handle(("server", 1), Register("127.0.0.1", 9, "h1", "", "id 0"), 5.0)
    view = views(flushed(core, dict.fromkeys(range(3), 11), view=3, turn=0))
    assert (view.joined_servers, view.kvstore, view.drains) == ((1,), "dist_ssp", False)
    assert views(admitted(core, dict.fromkeys(range(3), 13), view=4)).drains


def test_a_job_that_cannot_change_says_why():
    for now, other in (("dist_sync", "dist_async"), ("dist_ssp", "dist_sync")):
        core = of_kind(now, fixed="the workers run the optimizer")
        assert logged(ask(core, other))[-1] == "change 1 is refused: the workers run the optimizer"
    assert len(logged(ask(core, "dist_async", number=2))) == 1, "these differ in their bound alone"
    core = of_kind("dist_sync", replay=(View(1, 0, ((0, 1), (2,)), (0, 1), kvstore="dist_sync"),))
    assert "change 1 is refused: a replay goes through the views" in logged(ask(core, "dist_async"))[-1]


def test_when_all_leave_the_job_ends_with_a_last_view_and_nothing_is_handed_over():
    """The checkpoint has the residuals."""
    core = noticed(0, 1, workers=2)
    actions = admitted(core, {0: 7, 1: 7})
    reason = "worker 0 leaves on purpose: SIGTERM; worker 1 leaves on purpose: SIGTERM; no worker is left"
    assert entered(actions) == Enter(View(2, 7, ((0, 1),), (0,)), ends=reason)
    assert Log(f"the job ends: {reason}") in actions and not messages(actions, Invite)
    assert not finished(bye(core, 0, 4.0)) and finished(bye(core, 1, 4.0)) == [reason]
    core = armed(workers=2)
    for rank in (0, 1):
        notice(core, rank, residuals=True)
    actions = admitted(core, {0: 7, 1: 7})
    assert entered(actions).ends and not entered(actions).view.hands_over
    assert notice(armed(replay=REPLAY), 1) == [], "a replay knows no notices"


def test_a_notice_below_the_minimum_ends_the_job_and_a_loss_then_does_not_keep_the_others_from_saving():
    core = noticed(1, elastic=3)
    actions = admitted(core, {0: 7, 1: 7, 2: 7})
    assert entered(actions).view.members == (0, 1, 2)
    assert entered(actions).ends == "worker 1 leaves on purpose: SIGTERM; 2 workers are left, and --min-workers is 3"
    assert not finished(lose(core, 1, 4.0))
    actions = flushed(core, {0: 7, 2: 7}, view=2)
    assert views(actions).members == (0, 2) and entered(actions).ends


FEW = "2 workers are left, and --min-workers is 3"


def waiting(**settings):
    """A job that had to have 3 workers, waits for more in view 3, and has lost worker 1."""
    core = armed(elastic=3, wait_for_hosts=60.0, max_workers=5, **settings)
    assert not finished(lose(core, 1, 2.0))
    actions = flushed(core, {0: 7, 2: 7})
    assert Log(f"{FEW}: the job waits up to 60 s for more (--wait-for-hosts)") in actions
    assert messages(actions, Invite) == [(worker(0), Invite(()))]
    actions = admitted(core, {0: 9, 2: 9}, view=2)
    assert entered(actions) == Enter(View(3, 9, ((0,), (2,)), (0,)), holds=True)
    assert not messages(actions, Invite)
    return core


def test_a_job_with_too_few_members_goes_on_when_there_are_enough_and_lets_others_leave_at_once():
    core = waiting()
    other = copy.deepcopy(core)
    assert messages(come(core, 3)[1], Flush) and messages(notice(other, 2), Flush)
    actions, own = (flushed(each, {0: 9, 2: 9}, view=3) for each in (core, other))
    assert entered(actions) == Enter(View(4, 9, ((0,), (2,), (3,)), (0,), joined=(3,)))
    assert not messages(actions, Invite)
    assert (entered(own).view.members, entered(own).holds) == ((0,), True)


def test_losses_while_the_job_waits_change_nothing_and_their_replacements_join_one_view_later():
    core = waiting()
    lose(core, 2, 4.0)
    actions = flushed(core, {0: 9}, view=3)
    lost = (Lost(2, "worker 2 on h2 was lost: end of stream"),)
    assert entered(actions) == Enter(View(4, 9, ((0,),), (0,), lost=lost), holds=True)
    other = copy.deepcopy(core)
    assert not messages(come(core, 3)[1], Flush)
    assert messages(come(core, 4)[1], Flush)
    assert views(flushed(core, {0: 9}, view=4)).members == (0, 3, 4)
    assert finished(lose(other, 0, 4.0))
    # One that comes before the loss has ended joins later, so no view has a worker both as lost and as joined.
    core = waiting()
    lose(core, 2, 4.0)
    come(core, 2)
    come(core, 1)
    actions = flushed(core, {0: 9}, view=3)
    view = views(actions)
    assert (view.members, view.joined, [each.member for each in view.lost]) == ((0,), (), [2])
    assert entered(actions).holds and messages(actions, Flush)
    view = views(flushed(core, {0: 9}, view=4))
    assert (view.members, view.joined) == ((0, 1, 2), (1, 2))


def test_a_job_that_has_waited_in_vain_ends():
    core = waiting()
    since = core._views.roster.departures.since
    for second in range(4, 64):
        beat(core, second)
        actions = core.tick(float(second))
        assert bool(messages(actions, Flush)) == (second - since >= 60.0), second
        if actions:
            break
    actions = flushed(core, {0: 9, 2: 9}, view=3, now=float(second))
    assert entered(actions).ends == f"{FEW}: no more have come within 60 s (--wait-for-hosts)"


# -- samples are divided by speed


def measured(core, speeds, view=1, now=1.0):
    """What follows from these reports."""
    found = [core.handle(worker(rank), Speed(view, speed), now) for rank, speed in speeds.items()]
    return messages([action for actions in found for action in actions])


SLOW = {0: 10.0, 1: 5.0, 2: 10.0}


def test_samples_are_divided_anew_by_the_speeds_of_this_views_members():
    core = armed(balance=Balancing(60))
    assert measured(core, SLOW) == [(worker(0), Invite(()))]
    assert measured(core, SLOW) == [], "it waits"
    view = views(admitted(core, {0: 9, 1: 9, 2: 9}))
    assert view == View(2, 9, ((0, 1), (2,)), (0,), shares=(24, 12, 24))
    assert measured(armed(), SLOW) == []
    core = without(3, workers=4, balance=Balancing(60))
    flushed(core, {0: 7, 1: 7, 2: 7})
    assert measured(core, SLOW, view=1) == []
    assert measured(core, {0: 10.0, 1: 5.0, 3: 1.0}, view=2) == []
    assert measured(core, {2: 10.0}, view=2) == [(worker(0), Invite(()))]


def test_a_loss_divides_samples_at_once_and_a_replay_does_as_the_recorded_job():
    core = armed(balance=Balancing(60))
    measured(core, SLOW)
    lose(core, 0)
    actions = flushed(core, {1: 7, 2: 7})
    assert views(actions).shares == (20, 40) and not messages(actions, Invite)
    come(core, 0, host="id 0")
    shares = views(admitted(core, {1: 9, 2: 9}, view=2, leader=1)).shares
    assert shares == (20, 13, 27), "a newcomer gets an equal part"
    replay = (View(1, 0, ((0, 1), (2,)), (0,)), View(2, 7, ((0, 1), (2,)), (0,), shares=(20, 15, 25)))
    core = armed(replay=replay, balance=Balancing(60))
    assert measured(core, SLOW) == []
    assert views(all_hold(core, 7, turn=0)).shares == (20, 15, 25)
    assert measured(core, SLOW, view=2) == []
