"""Another incarnation of the scheduler finds out how far the job is: no sockets, no clocks."""

import json
import socket
import threading
from dataclasses import replace

import pytest

from dmltrain.base.env import Environment
from dmltrain.kvstore.scheduler.actions import Cut, Finish, Log, Send
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.following import Following, Incarnation, Standing, newest
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message.handshake import Refuse
from dmltrain.kvstore.transport.message.job import (
    Abort,
    Bye,
    Heartbeat,
    LinkEnd,
    LinkLost,
    Register,
    Release,
    ServerAddress,
    Shutdown,
    Start,
    WorkerAddress,
)
from dmltrain.kvstore.transport.message.views import Enter, Finished, Flush, Flushed, Left, Ready, Rejoin, Superseded
from dmltrain.kvstore.view import Lost, View, barrier_of
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS

WORKERS = tuple(WorkerAddress("", f"i{worker}", f"h{worker}") for worker in range(3))
START = Start((ServerAddress("10.0.0.9", 9, "", "s", "hs"),), WORKERS)
FIRST = View(1, 0, ((0,), (1,), (2,)), (0,))
SECOND = FIRST.without([2], 7, (Lost(2, "end"),))
SERVER = ("server", 0)
MEMBERS = [("worker", member) for member in range(3)]


def registration(node):
    return Register("10.0.0.1", 9, f"h{node[1]}", "", f"i{node[1]}")


def rejoin(node, view=FIRST, finished=(), replay=()):
    ready = (Ready({"network": "mlp"}, replay),) if node[0] == "worker" else ()
    return Rejoin(registration(node), START, (Enter(view),) if view else (), ready, finished)


def core(**settings):
    found = SchedulerCore(3, 1, **{"elastic": 1, **settings}, incarnation=2, place="the scheduler")
    found.tick(0.0)
    return found


ALL = [SERVER, *MEMBERS]
BUT_2, BUT_0 = [SERVER, *MEMBERS[:2]], [*MEMBERS[1:], SERVER]


def back(found, views, finished=(), now=1.0):
    """These come back, in this order: node -> its view, or nodes with the first view. Returns what the last one leads
    to."""
    actions = []
    for node, view in (views if isinstance(views, dict) else dict.fromkeys(views, FIRST)).items():
        assert not actions, "it decides only when all are back"
        actions = found.handle(node, rejoin(node, view, finished if node == SERVER else ()), now)
    return actions


def hold(found, view=1, turn=1, now=1.0, **ops):
    """Members say what they hold, `w0=7`. Returns what the last one leads to."""
    for name, op in ops.items():
        actions = found.handle(("worker", int(name[1:])), Flushed(view, turn, op), now)
    return actions


def sent(actions, kind):
    return {
        action.to: action.message for action in actions if isinstance(action, Send) and type(action.message) is kind
    }


def reason(actions):
    return next(action.reason for action in actions if isinstance(action, Finish))


def test_when_all_are_back_it_asks_what_they_hold_and_the_next_view_begins_although_nobody_was_lost():
    found = core()
    actions = back(found, ALL)
    assert sent(actions, Flush) == dict.fromkeys(MEMBERS, Flush(1, 1, -1)) and not sent(actions, Enter)
    assert sent(hold(found, w0=7, w1=7, w2=7), Enter)[SERVER].view == View(2, 7, FIRST.hosts, (0,))


def lost_with_the_server(met):
    """Worker 1 does not hold the op that worker 0 holds, and a server is lost as well."""
    found = SchedulerCore(2, 2, elastic=1, incarnation=2, place="the scheduler")
    found.tick(0.0)
    view, servers = View(1, 0, ((0,), (1,)), (0, 1)), [("server", 0), ("server", 1)]
    for node in [*servers, *MEMBERS[:2]]:
        found.handle(node, rejoin(node, view), 1.0)
    found.lost(servers[1], "end of stream", 1.0)
    found.handle(MEMBERS[0], Flushed(1, 2, 8), 1.0)
    return found.handle(MEMBERS[1], Flushed(1, 2, 7, met), 1.0)


def test_who_waits_in_an_ops_barrier_completes_it_without_the_server_and_others_get_the_step_from_another():
    told = [Send(MEMBERS[1], Release(barrier_of(8), 1)), Send(MEMBERS[1], Flush(1, 2, 8))]
    assert lost_with_the_server(met=True) == told
    view = sent(lost_with_the_server(met=False), Enter)[MEMBERS[1]].view
    assert (view.base, view.servers, view.behind) == (8, (0,), (1,))


def waiting(now=1.0):
    """The two members that are left wait for a third; the scheduler before told only the server."""
    found = core(elastic=3, wait_for_hosts=60.0)
    for node in BUT_2:
        told = Enter(SECOND, holds=True) if node == SERVER else Enter(FIRST)
        actions = found.handle(node, replace(rejoin(node), entered=(told,)), now)
    assert sent(actions, Enter) == dict.fromkeys(MEMBERS[:2], Enter(SECOND, holds=True))
    return found


def flushed(found, view, done, now=1.0):
    return sent(hold(found, view, now=now, w0=done, w1=done), Enter)


def test_those_who_wait_for_hosts_go_on_waiting_for_as_long_again_and_train_when_there_are_enough():
    found = waiting()
    assert flushed(found, 2, 7) == dict.fromkeys([SERVER, *MEMBERS[:2]], Enter(SECOND.without([], 7), holds=True))
    found.handle(MEMBERS[2], registration(MEMBERS[2]), 2.0)
    found.handle(MEMBERS[2], Ready({"network": "mlp"}), 2.0)
    entered = flushed(found, 3, 7, 2.0)
    assert set(entered) == {SERVER, *MEMBERS}
    assert all(each.view.joined == (2,) and not each.holds for each in entered.values())
    found = waiting()
    flushed(found, 2, 7)
    for now in (5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.9):
        for node in BUT_2:
            found.handle(node, Heartbeat(), now)
        assert not found.tick(now)
    asked = found.tick(61.1)
    assert sent(asked, Flush) == dict.fromkeys(MEMBERS[:2], Flush(3, 1, -1))
    (ends,) = {each.ends for each in flushed(found, 3, 7, 61.1).values()}
    assert "2 workers are left, and --min-workers is 3" in ends and "60 s" in ends


def test_a_job_that_was_ending_ends():
    found = core(elastic=3)
    come_back(found, Enter(SECOND, ends="two are left"))
    assert {each.ends for each in flushed(found, 2, 8).values()} == {"two are left"}
    for node in MEMBERS[:2]:
        actions = found.handle(node, Bye(), 1.0)
    assert "two are left" in reason(actions)


def test_who_is_behind_gets_the_highest_view_and_the_release_that_may_not_have_been_sent():
    actions = back(core(), {MEMBERS[0]: FIRST, SERVER: FIRST, MEMBERS[1]: SECOND})
    assert sent(actions, Enter) == dict.fromkeys([MEMBERS[0], SERVER], Enter(SECOND))
    assert sent(actions, Flush) == dict.fromkeys(MEMBERS[:2], Flush(2, 1, -1))
    found = core()
    back(found, ALL)
    actions = hold(found, w0=8, w1=7, w2=8)
    assert actions == [Send(MEMBERS[1], Release(barrier_of(8), 1)), Send(MEMBERS[1], Flush(1, 1, 8))]


def test_who_does_not_come_back_is_lost_and_refused_if_it_comes_too_late():
    found = core()
    back(found, BUT_2)
    assert found.tick(9.0) == []
    actions = found.tick(9.6)
    assert sent(actions, Flush) == dict.fromkeys(MEMBERS[:2], Flush(1, 1, -1))
    (lost,) = sent(hold(found, now=9.7, w0=7, w1=7), Enter)[SERVER].view.lost
    assert lost == Lost(2, "worker 2 on h2 has not come back to the next scheduler within 8.5 s")
    (refuse,) = found.handle(MEMBERS[2], rejoin(MEMBERS[2]), 9.7)
    assert isinstance(refuse, Refuse) and "removed from the job: worker 2" in refuse.reason


def come_back(found, entered):
    """All but worker 2 were told this view. Returns what the last one leads to."""
    return [found.handle(node, replace(rejoin(node), entered=(entered,)), 1.0) for node in BUT_2][-1]


@pytest.mark.parametrize("first", [True, False])
def test_who_has_missed_the_view_with_which_it_left_and_those_after_it_leaves(first):
    """Whether it comes back before the others, or late."""
    third = Enter(View(3, 9, ((0,), (1,)), (0,)), departed=(2,))
    found = core()
    before = found.handle(MEMBERS[2], rejoin(MEMBERS[2]), 1.0) if first else []
    actions = come_back(found, third)
    late = [] if first else found.handle(MEMBERS[2], rejoin(MEMBERS[2]), 2.0)
    told = [*before, *actions, *late]
    assert Send(MEMBERS[2], third) in told and not sent(told, Abort) and Cut(MEMBERS[2]) not in told
    assert sent(actions, Flush).keys() == {*MEMBERS[:2]}, "nobody waits for it"
    later = sent(hold(found, view=3, w0=9, w1=9), Enter).values()
    assert {(each.view.number, each.departed) for each in later} == {(4, (2,))}, "later views say it, too"


def leaves_in_peace(found):
    """Worker 2, of which everybody knows that it has left."""
    assert found.handle(MEMBERS[2], Heartbeat(), 3.0) == [Send(MEMBERS[2], Heartbeat())]
    assert found.handle(MEMBERS[2], Bye(done=7), 3.0) == found.lost(MEMBERS[2], "end of stream", 3.0) == []


@pytest.mark.parametrize("knows", [True, False])
def test_who_has_left_on_purpose_and_comes_late_leaves(knows):
    """The scheduler before may not have told it that it could. Nobody waits for it."""
    second = Enter(FIRST.without([2], 7, left=(Lost(2, "SIGTERM"),)), departed=(2,))
    found = core()
    assert sent(come_back(found, second), Flush)
    own = replace(rejoin(MEMBERS[2]), entered=(second if knows else Enter(FIRST),))
    assert found.handle(MEMBERS[2], own, 2.0) == ([] if knows else [Send(MEMBERS[2], second)])
    leaves_in_peace(found)


def test_who_has_finished_and_comes_late_is_not_refused():
    """The servers have said that it has finished, so nobody has waited for it."""
    found = core()
    assert sent(back(found, [*MEMBERS[:2], SERVER], (Finished(2, 7),)), Flush)
    assert found.handle(MEMBERS[2], rejoin(MEMBERS[2]), 2.0) == []
    leaves_in_peace(found)
    assert found.tick(3.0) == []


def test_who_is_not_in_the_highest_view_is_removed_also_if_it_had_joined_in_addition():
    actions = back(core(), {MEMBERS[2]: FIRST, MEMBERS[0]: FIRST, SERVER: FIRST, MEMBERS[1]: SECOND})
    assert sent(actions, Abort) == {MEMBERS[2]: Abort("removed from the job")} and Cut(MEMBERS[2]) in actions
    # Worker 4 was removed two views ago, and has not heard of it.
    added = ("worker", 4)
    found = core(max_workers=5)
    actions = back(found, {added: View(2, 3, (*FIRST.hosts, (4,)), (0,), joined=(4,)), SERVER: FIRST})
    assert not actions
    fourth = View(4, 9, FIRST.hosts, (0,))
    actions = back(found, dict.fromkeys(MEMBERS, fourth))
    assert sent(actions, Abort).keys() == {added} and Cut(added) in actions
    assert sent(actions, Enter) == {SERVER: Enter(fourth)}


def test_the_only_server_or_too_many_workers_that_do_not_come_back_end_the_job():
    found = core()
    back(found, MEMBERS)
    said = "server 0 on hs has not come back to the next scheduler within 8.5 s; no server is left"
    assert reason(found.tick(9.6)) == said
    found = core(elastic=3)
    back(found, BUT_2)
    assert reason(found.tick(9.6)).endswith("2 workers are left, and --min-workers is 3")
    found = core(start_seconds=20.0)
    assert found.tick(19.0) == [] and "no process of the job has come back" in reason(found.tick(20.5))


@pytest.mark.parametrize("meanwhile", [False, True])
def test_servers_say_who_has_finished(meanwhile):
    """What these hold is committed; nobody waits for them. Their Bye went to the scheduler before."""
    found = core()
    actions = back(found, BUT_0, [] if meanwhile else [Finished(0, 24)])
    if meanwhile:
        assert not actions
        actions = found.handle(SERVER, Left(1, 0, 24), 1.0)
    assert sent(actions, Flush) == dict.fromkeys(MEMBERS[1:], Flush(1, 1, -1))
    assert sent(hold(found, w1=24, w2=23), Flush) == {MEMBERS[2]: Flush(1, 1, 24)}


REPLACED = View(2, 7, FIRST.hosts, FIRST.servers, joined=(0,))
REMOVED = View(2, 7, ((1,), (2,)), FIRST.servers, lost=(Lost(0, "end of stream"),))


def test_who_has_finished_before_its_replacement_joined_does_not_count():
    found = core()
    assert not back(found, dict.fromkeys(BUT_0, REPLACED))
    assert found.handle(SERVER, Left(1, 0, 24), 1.0) == []
    assert sent(found.handle(SERVER, Left(2, 0, 24), 1.0), Flush).keys() == set(MEMBERS[1:])


@pytest.mark.parametrize("finished", [(), (Finished(0, 8),)], ids=["meanwhile", "before"])
@pytest.mark.parametrize("view", [REPLACED, REMOVED], ids=["replaced", "removed"])
def test_a_server_that_does_not_know_the_view_says_nothing_of_whom_it_replaces_or_removes(view, finished):
    """What worker 0 has done does not count: others hold what they say, and it is waited for if it has come back."""
    found = core()
    assert not back(found, {MEMBERS[1]: view, SERVER: FIRST}, finished)
    if not finished:
        assert not found.handle(SERVER, Left(1, 0, 8), 1.0)
    assert bool(found.handle(MEMBERS[2], rejoin(MEMBERS[2], view), 1.0)) == (view is REMOVED)
    if view is REPLACED:
        assert sent(found.handle(MEMBERS[0], rejoin(MEMBERS[0], view), 1.0), Flush).keys() == set(MEMBERS)
    found.handle(MEMBERS[1], Flushed(2, 1, 7), 2.0)
    actions = found.handle(MEMBERS[2], Flushed(2, 1, 7), 2.0)
    actions += found.handle(MEMBERS[0], Flushed(2, 1, 7), 2.0) if view is REPLACED else []
    assert not sent(actions, Flush) and {each.view.base for each in sent(actions, Enter).values()} == {7}


def test_if_all_have_finished_the_job_has_ended_and_others_may_still_come_to_their_end():
    found = core()
    assert sent(back(found, ALL), Flush)
    assert found.handle(SERVER, Left(1, 0, 24), 1.0) == []
    assert found.lost(MEMBERS[0], "end of stream", 1.0), "it has not said Bye"
    actions = back(core(), [SERVER], [Finished(member, 24) for member in range(3)])
    assert isinstance(actions[-2].message, Shutdown) and reason(actions) == ""
    found = core()
    actions = back(found, [*MEMBERS, SERVER], [Finished(0, 24)])
    assert MEMBERS[0] not in sent(actions, Flush) and not sent(actions, Abort)
    assert found.handle(MEMBERS[0], Bye(done=24), 1.1) == []
    assert found.lost(MEMBERS[0], "end of stream", 1.2) == []


def test_who_is_lost_again_meanwhile_or_known_to_be_lost_is_not_waited_for():
    found = core()
    back(found, BUT_2)
    assert found.lost(MEMBERS[1], "end of stream", 2.0) == []
    assert found.handle(SERVER, Heartbeat(), 2.0) == [Send(SERVER, Heartbeat())], "they are answered"
    actions = found.handle(MEMBERS[2], rejoin(MEMBERS[2]), 2.0)
    assert sent(actions, Flush).keys() == {MEMBERS[0], MEMBERS[2]}
    found = core()
    back(found, BUT_2)
    ends = LinkEnd("server", 0, "s", "b"), LinkEnd("worker", 2, "h2", "a")
    actions = found.handle(SERVER, LinkLost(*ends, "end of stream", False), 1.0)
    assert sent(actions, Flush).keys() == set(MEMBERS[:2])
    assert Log("worker 2 on h2 was lost: no server has a connection to it; the job goes on without it") in actions
    found = core(lost_before=frozenset({MEMBERS[2], ("server", 7)}))
    assert back(found, [SERVER, MEMBERS[0]]) == [], "worker 1 is to come"
    actions = found.handle(MEMBERS[1], rejoin(MEMBERS[1]), 1.0)
    (_, said) = [action.text for action in actions if isinstance(action, Log)]
    assert said == "worker 2 on h2 was lost before this scheduler began; the job goes on without it"
    assert sent(actions, Flush) == dict.fromkeys(MEMBERS[:2], Flush(1, 1, -1))
    actions = back(core(lost_before=frozenset({MEMBERS[1]})), [MEMBERS[1], SERVER, MEMBERS[0], MEMBERS[2]])
    assert sent(actions, Flush) == dict.fromkeys(MEMBERS, Flush(1, 1, -1)), "it came back in time"
    view, servers = View(1, 0, ((0,), (1,)), (0, 1)), [("server", 0), ("server", 1)]
    found = SchedulerCore(2, 2, elastic=1, incarnation=2, lost_before=frozenset(servers[1:]))
    found.tick(0.0)
    for node in [servers[0], *MEMBERS[:2]]:
        actions = found.handle(node, rejoin(node, view), 1.0)
    assert "server 1" in " ".join(action.text for action in actions if isinstance(action, Log))
    assert sent(actions, Flush)


def test_replacements_of_those_that_have_not_come_back_or_did_not_know_that_they_had_joined():
    found = core()
    assert found.handle(MEMBERS[2], registration(MEMBERS[2]), 0.5) == []
    actions = back(found, BUT_2)
    assert sent(actions, Flush).keys() == set(MEMBERS[:2])
    assert sent(actions, Start) == {MEMBERS[2]: START}
    joined = replace(FIRST.joined_by({5: ()}), number=2)
    found, worker = core(max_workers=6), ("worker", 5)
    assert found.handle(worker, registration(worker), 0.5) == []
    actions = back(found, {SERVER: joined, **dict.fromkeys(MEMBERS, joined)})
    assert sent(actions, Flush).keys() == set(MEMBERS) and sent(actions, Start) == {worker: START}
    assert worker not in sent(actions, Abort) and Cut(worker) not in actions
    views = [each for member in MEMBERS for each in found.handle(member, Flushed(2, 1, 0), 2.0)]
    (lost,) = sent(views, Enter)[MEMBERS[0]].view.lost
    assert lost == Lost(5, "worker 5 was not told that it had joined, or was lost: it joins again")


def test_a_second_process_of_a_member_that_is_back_is_not_refused_in_the_place_of_another():
    """A refusal goes to the process whose message was handled last."""
    found = core()
    back(found, BUT_2)
    assert found.handle(MEMBERS[0], registration(MEMBERS[0]), 1.0) == []
    actions = found.handle(MEMBERS[2], rejoin(MEMBERS[2]), 1.0)
    assert not [action for action in actions if isinstance(action, Refuse)]
    (refuse,) = found.handle(MEMBERS[0], registration(MEMBERS[0]), 2.0)
    assert isinstance(refuse, Refuse)


def test_before_the_first_view_or_with_two_views_of_one_number_or_in_a_replay_the_job_ends():
    assert "before all workers were ready" in reason(back(core(), dict.fromkeys(ALL)))
    other = FIRST.without([1], 7, (Lost(1, "end"),))
    actions = back(core(), {MEMBERS[2]: other, MEMBERS[1]: SECOND, MEMBERS[0]: FIRST, SERVER: FIRST})
    assert "two schedulers" in reason(actions)
    found = core()
    back(found, BUT_0)
    assert "a replay cannot go on" in reason(found.handle(MEMBERS[0], rejoin(MEMBERS[0], replay=(FIRST,)), 1.0))


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_later_incarnation_ends_an_earlier_one_without_a_word(incarnation):
    found = SchedulerCore(3, 1, elastic=1, incarnation=incarnation)
    found.tick(0.0)
    assert found.handle(SERVER, Superseded(incarnation), 1.0) == []
    (finish,) = found.handle(SERVER, Superseded(incarnation + 1), 1.0)
    assert finish.reason == f"incarnation {incarnation + 1} of the scheduler has taken over"


# -- a process that looks for the next one --------------------------------------------------------------------------


def test_the_file_names_the_newest_incarnation(tmp_path):
    file = tmp_path / "scheduler"
    its = Environment(root_host="10.0.0.1", root_port=9, scheduler_file=str(file))
    assert newest(its) == Incarnation(1, "10.0.0.1", 9)
    for text in ("", "{", "[]", '{"incarnation": 2}', json.dumps({"incarnation": 1, "host": "h", "port": 1})):
        file.write_text(text)
        assert newest(its) == Incarnation(1, "10.0.0.1", 9), text
    file.write_text(json.dumps({"incarnation": 2, "host": "10.0.0.3", "port": 40000}))
    assert newest(its) == Incarnation(2, "10.0.0.3", 40000)
    assert Following(its).current.number == 2


def following(role="worker", joins=False, file="/nowhere"):
    return Following(Environment(role=role, elastic=1, joins=joins, scheduler_file=file))


def test_what_one_that_follows_has_to_say_to_the_next_scheduler():
    words = (registration(MEMBERS[0]), START)
    assert following(file="").introduction(*words, Standing(Enter(FIRST))) == []
    assert following().introduction(*words, None) == []
    assert following().introduction(*words, Standing(None)) == [], "a worker that is not ready"
    assert following().introduction(words[0], None, Standing(None)) == []
    of_server = following("server").introduction(*words, Standing(None, {1: 24}))
    assert of_server == [Rejoin(*words, (), (), (Finished(1, 24),))]
    assert following().introduction(*words, Standing(Enter(FIRST))) == [Rejoin(*words, (Enter(FIRST),))]
    found = following(joins=True)
    assert found.introduction(registration(MEMBERS[0]), None, Standing(None)) == [registration(MEMBERS[0])]
    found.remember(Ready())
    assert found.introduction(registration(MEMBERS[0]), START, Standing(None)) == [
        registration(MEMBERS[0]),
        Ready(),
    ]
    (word,) = found.introduction(registration(MEMBERS[0]), START, Standing(Enter(FIRST)))
    assert word.ready == (Ready(),)


def test_one_whose_host_is_off_is_not_called_for_long(tmp_path, monkeypatch):
    for limit in ("scheduler.following.CALL_SECONDS", "transport.link.HANDSHAKE_SECONDS"):
        monkeypatch.setattr(f"dmltrain.kvstore.{limit}", 10 * SECONDS)
    file = tmp_path / "scheduler"
    with socket.create_server(("127.0.0.1", 0)) as off, socket.create_server(("127.0.0.1", 0)) as listening:
        its = Environment(role="worker", job="job", key=b"key", elastic=1, root_port=off.getsockname()[1])
        found = Following(replace(its, scheduler_file=str(file)))
        begun(accept_loop, listening, replace(its, role="scheduler"), "scheduler", lambda link, *who: link.close())
        finding = begun(found.find, threading.Event())
        with off.accept()[0]:  # it is called, and says nothing
            file.write_text(json.dumps({"incarnation": 2, "host": "127.0.0.1", "port": listening.getsockname()[1]}))
            finding.result(SECONDS).close()
        assert found.current.number == 2


def test_lost_links_are_reported_again_while_they_concern_the_view():
    """A worker's own also when it has joined since."""
    server_0 = LinkEnd("server", 0, "s", "b")
    lost = [LinkLost(LinkEnd("worker", member, "h", "a"), server_0, "", True) for member in range(3)]
    full = Abort("disk full")
    for node, said, again in ((SERVER, [*lost, full], [lost[0], full]), (MEMBERS[1], [lost[1]], [lost[1]])):
        found = following(node[0])
        for each in said:
            found.remember(each)
        found.enter(View(2, 7, ((0,), (1,)), (0,), joined=(1,)))
        assert found.introduction(registration(node), START, Standing(Enter(FIRST)))[1:] == again
