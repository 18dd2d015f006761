"""The scheduler's views of an elastic job that loses servers."""

from dataclasses import replace

from dmltrain.kvstore.scheduler.actions import ALL, Cut, Log, Send
from dmltrain.kvstore.transport.message import (
    Abort,
    Admit,
    Barrier,
    Bye,
    Enter,
    Flush,
    Flushed,
    Heartbeat,
    Invite,
    NewServer,
    Ready,
    Register,
    Release,
    ServerAddress,
    Start,
)
from dmltrain.kvstore.view import LostServer, View
from tests.kvstore.test_views import armed, finished, flushed, link_lost, messages, registered, views, worker

REASON = "server 1 on h1 was lost: end of stream"


def server(number):
    return ("server", number)


def without_server(core, number=1):
    return core.lost(server(number), "end of stream", 1.0)


def test_a_lost_server_is_told_and_the_members_are_asked():
    core = armed(3, 2)
    assert without_server(core) == [
        Log(f"{REASON}; the job goes on without it"),
        Send(server(1), Abort(f"removed from the job: {REASON}")),
        Cut(server(1)),
        *(Send(worker(rank), Flush(1, 1, -1)) for rank in range(3)),
    ]
    assert without_server(core) == []


def test_the_next_view_has_the_other_servers():
    core = armed(3, 3)
    without_server(core)
    actions = flushed(core, {0: 7, 1: 7, 2: 7})
    assert views(actions) == View(2, 7, ((0, 1), (2,)), (0, 2), lost_servers=(LostServer(1, REASON),))
    assert [to for to, _ in messages(actions)] == [server(0), server(2), worker(0), worker(1), worker(2)]
    without_server(core, 0)
    assert views(flushed(core, {0: 7, 1: 7, 2: 7}, view=2)).servers == (2,)


def test_who_lacks_the_results_of_a_lost_server_does_not_wait_for_them():
    core = armed(3, 2)
    without_server(core)
    actions = flushed(core, {0: 6, 1: 7, 2: 6})
    assert views(actions).base == 7 and views(actions).behind == (0, 2)
    assert not messages(actions, Flush)


def test_in_the_view_after_that_all_can_complete_again():
    core = armed(3, 2)
    without_server(core)
    flushed(core, {0: 7, 1: 7, 2: 7})
    core.lost(worker(1), "end of stream", 2.0)
    assert messages(flushed(core, {0: 8, 2: 9}, view=2)) == [(worker(0), Flush(2, 1, 9))]


def test_a_server_that_is_lost_before_all_have_completed_takes_the_permission_back():
    core = armed(4, 2)
    core.lost(worker(3), "end of stream", 1.0)
    assert messages(flushed(core, {0: 6, 1: 7, 2: 6})) == [(worker(0), Flush(1, 1, 7)), (worker(2), Flush(1, 1, 7))]
    flushed(core, {2: 7})
    assert messages(without_server(core), Flush) == [(worker(rank), Flush(1, 2, -1)) for rank in range(3)]
    assert views(flushed(core, {0: 6, 1: 7, 2: 7}, turn=2)).behind == (0,)


def test_if_the_last_holder_dies_too_all_make_the_op_again():
    core = armed(3, 2)
    without_server(core)
    flushed(core, {1: 7, 0: 6})
    core.lost(worker(1), "end of stream", 1.0)
    found = views(flushed(core, {0: 6, 2: 6}, turn=2))
    assert (found.base, found.behind, found.members) == (6, (), (0, 2))


def test_a_barrier_that_was_released_can_be_completed_without_the_server():
    core = armed(3, 2)
    for rank in range(3):
        actions = core.handle(worker(rank), Barrier("op 7", 1), 1.0)
    assert len(messages(actions, Release)) == 3
    without_server(core)
    assert messages(flushed(core, {0: 6, 1: 7, 2: 7})) == [(worker(0), Flush(1, 1, 7))]
    assert views(flushed(core, {0: 7})).behind == ()


def test_a_member_that_has_left_cannot_give_its_step_to_others():
    core = armed(2, 2)
    core.handle(worker(1), Bye(done=7), 1.0)
    without_server(core)
    (said,) = finished(flushed(core, {0: 6}))
    assert said == (
        "a server was lost: only workers that have finished have its results of op 7: start the job again from its "
        "last checkpoint"
    )


def test_a_loss_of_a_server_before_all_are_ready_ends_the_job():
    core = registered(3, 2)
    core.handle(worker(0), Ready(), 0.0)
    assert finished(without_server(core)) == [REASON]


def test_a_replay_needs_its_servers():
    core = armed(3, 2, replay=(View(1, 0, ((0, 1), (2,)), (0, 1)),))
    assert finished(without_server(core)) == [f"{REASON}; a replay needs all of its servers: start it again"]


def test_a_replay_goes_through_the_views_with_the_servers_that_it_has():
    recorded = (View(1, 0, ((0, 1), (2,)), (0, 1)), View(2, 5, ((0, 1), (2,)), (1,), behind=(2,)))
    core = armed(3, 1, replay=recorded)
    found = views(flushed(core, {0: 5, 1: 5, 2: 5}, turn=0))
    assert found == View(2, 5, ((0, 1), (2,)), (0,), behind=(2,))


def test_nothing_that_a_removed_server_says_counts_and_nobody_waits_for_its_links():
    core = armed(3, 2)
    without_server(core)
    assert core.handle(server(1), Heartbeat(), 1.0) == []
    assert core.handle(server(1), Abort("late"), 1.0) == []
    assert core.handle(worker(0), link_lost(0, 1), 1.0) == []
    flushed(core, {0: 7, 1: 7, 2: 7})
    assert core.tick(8.0) == []


def test_the_only_server_takes_the_job_with_it():
    core = armed(3, 1)
    actions = core.lost(server(0), "end of stream", 1.0)
    said = "server 0 on h0 was lost: end of stream; no server is left"
    assert finished(actions) == [said] and (ALL, Abort(said)) in messages(actions)


def test_a_replacement_of_a_worker_is_told_which_servers_are_left():
    core = armed(3, 2)
    without_server(core)
    flushed(core, {0: 7, 1: 7, 2: 7})
    core.lost(worker(1), "end of stream", 2.0)
    flushed(core, {0: 9, 2: 9}, view=2)
    ((to, start),) = messages(core.handle(worker(1), Register("127.0.0.1", 0, "h9", "", ""), 3.0), Start)
    assert to == worker(1) and start.lost == (1,) and len(start.servers) == 2


def test_a_server_that_is_lost_while_a_replacement_waits_is_no_fault_of_the_replacement():
    core = armed(3, 2)
    core.lost(worker(1), "end of stream", 1.0)
    flushed(core, {0: 7, 2: 7})
    core.handle(worker(1), Register("127.0.0.1", 0, "h9", "", ""), 2.0)
    assert core.handle(worker(1), link_lost(1, 1), 2.0) == []
    assert not finished(core.lost(server(1), "end of stream", 2.5))
    assert core.tick(8.0) == [] and not messages(core.handle(worker(1), Flushed(2, 0, 0), 8.0))


WHERE = ServerAddress("10.0.0.9", 77, "", "other", "h9")
NEW = (NewServer(1, WHERE),)


def comes(core, number=1):
    """A replacement registers."""
    return core.handle(server(number), Register(WHERE.host, WHERE.port, "h9", "", "other"), 2.0)


def without_it(restarts=1):
    """3 workers and 2 servers, of which server 1 was lost."""
    core = armed(3, 2, restart_servers=restarts)
    without_server(core)
    flushed(core, {0: 7, 1: 7, 2: 7})
    return core


def test_a_replacement_waits_for_a_moment_between_two_rounds_of_the_leader():
    core = without_it()
    actions = comes(core)
    ((to, start),) = messages(actions, Start)
    assert (to, start.lost) == (server(1), (1,))
    assert messages(actions, Invite) == [(worker(0), Invite(()))]
    core.handle(worker(0), Admit(2), 3.0)
    actions = flushed(core, {0: 8, 1: 8, 2: 8}, view=2)
    assert views(actions) == View(3, 8, ((0, 1), (2,)), (0, 1), joined_servers=(1,))
    assert {message.new_servers for _, message in messages(actions, Enter)} == {NEW}
    assert messages(actions, Enter)[1][0] == server(1)


def test_the_next_view_has_a_replacement_whatever_it_is_for():
    core = without_it()
    comes(core)
    core.lost(worker(2), "end of stream", 3.0)
    actions = flushed(core, {0: 7, 1: 7}, view=2)
    assert views(actions).servers == (0, 1) and views(actions).joined_servers == (1,)


def test_a_worker_that_comes_later_learns_where_it_is():
    core = without_it()
    comes(core)
    core.lost(worker(2), "end of stream", 3.0)
    flushed(core, {0: 7, 1: 7}, view=2)
    actions = core.handle(worker(2), Register("10.0.0.1", 0, "h0", "", "h0"), 4.0)
    ((_, start),) = messages(actions, Start)
    assert (start.lost, start.new_servers) == ((), NEW)
    assert start.servers[1] != WHERE, "keys are divided as at the start"


def test_without_any_server_the_members_wait_for_a_replacement():
    core = armed(3, 1, restart_servers=1)
    actions = without_server(core, 0)
    assert "no server is left, and the job waits for a replacement" in actions[0].text
    assert messages(flushed(core, {0: 7, 1: 6, 2: 7})) == []
    actions = comes(core, 0)
    view = views(actions)
    assert (view.servers, view.joined_servers, view.behind) == ((0,), (0,), (1,))
    actions = without_server(core, 0)
    assert messages(actions, Abort)[-1] == (ALL, Abort("server 0 on h9 was lost: end of stream; no server is left"))


def test_a_replacement_that_does_not_come_ends_the_job_after_a_while():
    core = armed(3, 1, restart_servers=1)
    without_server(core, 0)
    flushed(core, {0: 7, 1: 7, 2: 7})
    core.tick(2.0)
    for rank in range(3):
        core.handle(worker(rank), Heartbeat(), 602.0)
    ((_, abort),) = messages(core.tick(603.0), Abort)
    assert abort.reason == "no server is left, and no replacement has come within 601 s (DMLTRAIN_WAIT_TIMEOUT)"


def test_a_replacement_that_is_lost_before_it_is_in_a_view():
    core = without_it()
    comes(core)
    actions = core.lost(server(1), "end of stream", 3.0)
    assert actions[0] == Log("server 1 on h9 was lost: end of stream, before it had joined")
    assert [type(each) for each in actions] == [Log, Send, Cut]
    assert messages(comes(core), Start), "another one can come"


def test_the_last_replacement_that_is_lost_before_it_is_in_a_view_ends_the_job():
    core = armed(3, 1, restart_servers=1)
    without_server(core, 0)
    comes(core, 0)
    actions = core.lost(server(0), "end of stream", 3.0)
    assert messages(actions, Abort) == [(ALL, Abort("a server was lost: no server is left"))]


def test_a_server_that_is_there_is_not_replaced():
    (refusal,) = comes(armed(3, 2, restart_servers=1))
    assert "server 1 is already registered" in refusal.reason


def test_late_reports_about_the_server_before_mean_nothing():
    core = without_it()
    comes(core)
    core.handle(worker(0), replace(link_lost(0, 1), view=1), 3.0)
    core.handle(worker(0), Admit(2), 3.0)
    flushed(core, {0: 8, 1: 8, 2: 8}, view=2)
    core.handle(worker(0), replace(link_lost(0, 1), view=2), 3.0)
    assert core.tick(8.0) == []
    core.handle(worker(0), replace(link_lost(0, 1), view=3), 8.0)
    assert messages(core.tick(11.0), Abort), "but those about the new one do"
