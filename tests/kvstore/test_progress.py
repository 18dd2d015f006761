"""How far a worker is: what it may recognise while a view changes, what it answers, and how operations then end."""

import concurrent.futures
import contextlib
import functools
import threading
from dataclasses import replace

import pytest

from dmltrain.errors import JobLost
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import ViewChanged
from dmltrain.kvstore.transport.message import Flush, Flushed
from dmltrain.kvstore.view import NEVER, View
from dmltrain.kvstore.worker.progress import Progress
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS, wait_for


def view(number=1, base=0, until=NEVER):
    return View(number, base, ((0, 1),), (0,), until)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def progress(reports):
    """In view 1, with 3 ops."""
    made = Progress(0, reports.append)
    made.announce(view())
    made.wait_for_view()
    made.enter()
    for _ in range(3):
        made.begin()
        made.complete()
    return made


@pytest.fixture
def completing(progress):
    """`complete` on another thread: a function that says how it ended, or "waits"."""
    begin = functools.cache(lambda: begun(progress.complete))

    def result(limit=SECONDS):
        try:
            begin().result(limit)
            return "completed"
        except concurrent.futures.TimeoutError:
            return "waits"
        except (ViewChanged, JobLost) as error:
            return f"{type(error).__name__} {error}".strip()

    yield result
    progress.lose("the test has ended")


A_WHILE = 0.05  # s: that something waits can only be seen for a while


def test_a_frozen_worker_says_what_it_holds_and_recognises_nothing_new(progress, reports, completing):
    assert progress.done == 3 and reports == []
    progress.freeze(Flush(1, 1, -1))
    assert reports == [Flushed(1, 1, 3)]
    assert completing(A_WHILE) == "waits"
    progress.announce(view(2, 3))
    assert completing() == "ViewChanged" and progress.done == 3


def test_it_answers_when_it_reaches_what_is_permitted(progress, reports, completing):
    progress.freeze(Flush(1, 1, -1))
    assert completing(A_WHILE) == "waits"
    progress.freeze(Flush(1, 1, 4))
    assert completing() == "completed"
    assert reports == [Flushed(1, 1, 3), Flushed(1, 1, 4)]


def test_a_flush_takes_back_what_an_earlier_one_permitted_unless_it_is_of_an_older_view(progress, reports, completing):
    progress.freeze(Flush(1, 1, 4))
    progress.freeze(Flush(1, 2, -1))
    assert completing(A_WHILE) == "waits"
    assert reports == [Flushed(1, 2, 3)]
    progress.announce(view(2, 3))
    progress.freeze(Flush(1, 4, -1))
    assert reports == [Flushed(1, 2, 3)]
    progress.freeze(Flush(2, 1, -1))
    assert reports == [Flushed(1, 2, 3), Flushed(2, 1, 3)], "also before the training thread has entered the view"


def test_a_pending_view_comes_before_the_next_op_and_views_are_entered_one_by_one(progress):
    progress.announce(view(2, 3))
    progress.announce(view(3, 3))
    for call in (progress.begin, progress.complete):
        with pytest.raises(ViewChanged):
            call()
    assert progress.enter() == view(2, 3) and progress.view == view(2, 3)
    with pytest.raises(ViewChanged):
        progress.begin()
    assert progress.enter() == view(3, 3)
    progress.begin()
    progress.complete()
    assert progress.done == 4


def test_the_planned_end_of_a_view_is_reported_unasked(progress, reports, completing):
    progress.announce(view(2, 3, until=4))
    progress.enter()
    assert reports == []
    progress.complete()
    assert reports == [Flushed(2, 0, 4)]
    assert completing(A_WHILE) == "waits"
    progress.announce(view(3, 4, until=4))
    assert completing() == "ViewChanged"
    assert reports == [Flushed(2, 0, 4), Flushed(3, 0, 4)], "at once, if it ends where it begins"


@pytest.mark.parametrize("pending", [False, True])
def test_after_its_end_it_answers_and_no_view_comes(progress, reports, pending):
    if pending:
        progress.announce(view(2, 3))
    progress.finish()
    if not pending:
        progress.announce(view(2, 3))
    progress.begin()
    assert progress.pending is None and progress.view == view()
    progress.freeze(Flush(2, 1, -1))
    assert reports == [Flushed(2, 1, 3)]


def test_after_residuals_were_handed_over_there_is_nothing_to_do_until_the_next_view(progress):
    progress.announce(replace(view(2, 3, until=4), hands_over=(1,)))
    progress.enter()
    assert not progress.rests
    progress.complete()
    assert progress.rests and progress.held_back
    progress.announce(view(3, 4))
    assert not progress.rests
    progress.wait_if_held()
    progress.enter()
    assert not progress.rests


def test_a_lost_job_ends_the_wait(progress, completing):
    progress.freeze(Flush(1, 1, -1))
    assert completing(A_WHILE) == "waits"
    progress.lose("worker 0 was lost")
    assert completing() == "JobLost worker 0 was lost"
    with pytest.raises(JobLost, match="worker 0 was lost"):
        progress.wait_for_view()


def test_random_orders_never_pass_the_permission(reports):
    """Two threads: ops as fast as they can be completed, and flushes with permissions."""
    for turn in range(1, 40):
        made = Progress(0, reports.append)
        made.announce(view())
        made.enter()

        def run(made=made):
            with contextlib.suppress(JobLost):
                while True:
                    made.complete()

        running = begun(run)
        made.freeze(Flush(1, turn, -1))
        held = reports[-1].done
        assert made.done == held
        made.freeze(Flush(1, turn, held + 2))
        wait_for(lambda made=made, held=held: made.done == held + 2, "what is permitted is completed")
        made.lose("end")
        running.result(SECONDS)
        assert made.done <= held + 2


def made(count=1):
    """A handle, and what has followed its operation."""
    handle, followed = Handle(count, "pull of key 7", 5.0), []
    handle.then(lambda: followed.append("followed"))
    return handle, followed


def test_every_wait_of_an_interrupted_handle_raises_and_nothing_follows():
    handle, followed = made(2)
    handle.one_done()
    handle.interrupt()
    assert handle.done
    handle.one_done()  # a value that comes late completes nothing
    for _ in range(2):
        with pytest.raises(ViewChanged, match="^pull of key 7: .*members"):
            handle.wait()
    assert followed == []


def test_a_wait_in_progress_is_interrupted():
    class Announced(threading.Event):
        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    waiting, handle = threading.Event(), Handle(1, "pull", SECONDS)
    handle._done = Announced()
    found = begun(handle.wait)
    assert waiting.wait(SECONDS)
    handle.interrupt()
    with pytest.raises(ViewChanged):
        found.result(SECONDS)


def test_a_complete_handle_stays_complete():
    handle, followed = made()
    handle.one_done()
    handle.interrupt()
    handle.wait()
    assert followed == ["followed"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_lost_job_counts_more_than_a_change_of_members(order):
    handle, _ = made()
    ends = [lambda: handle.fail("server 0 was lost"), handle.interrupt]
    for number in order:
        ends[number]()
    with pytest.raises(JobLost, match="server 0 was lost"):
        handle.wait()


def test_in_a_store_that_is_not_elastic_nothing_is_repeated():
    store, (interrupted, _) = KVStore(), made()
    interrupted.interrupt()
    assert store.repeat(lambda: 7) == 7
    with pytest.raises(ViewChanged):
        store.repeat(interrupted.wait)
    store.rank = 3
    assert (store.member, store.elastic, store.keeps_gradients, store.is_alone) == (3, False, False, False)
