"""How far a worker is: what it may recognise while a view changes, and what it answers."""

import contextlib
import threading
from dataclasses import replace

import pytest

from dmltrain.errors import JobLost
from dmltrain.kvstore.base import ViewChanged
from dmltrain.kvstore.transport.message import Flush, Flushed
from dmltrain.kvstore.view import NEVER, View
from dmltrain.kvstore.worker.progress import Progress


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
    ended = []

    def run():
        try:
            progress.complete()
            ended.append("completed")
        except (ViewChanged, JobLost) as error:
            ended.append(f"{type(error).__name__} {error}".strip())

    thread = threading.Thread(target=run, daemon=True)

    def result(wait=0.05):
        if thread.ident is None:
            thread.start()
        thread.join(wait)
        return ended[0] if ended else "waits"

    yield result
    progress.lose("the test has ended")
    thread.join(10)


def test_ops_are_thread(progress, reports):
    assert progress.done == 3 and reports == []


def test_a_frozen_worker_says_what_it_holds_and_recognises_nothing_new(progress, reports, completing):
    progress.freeze(Flush(1, 1, -1))
    assert reports == [Flushed(1, 1, 3)]
    assert completing() == "waits"
    progress.announce(view(2, 3))
    assert completing(10) == "ViewChanged" and progress.done == 3


def test_it_answers_when_it_reaches_what_is_permitted(progress, reports, completing):
    progress.freeze(Flush(1, 1, -1))
    assert completing() == "waits"
    progress.freeze(Flush(1, 1, 4))
    assert completing(10) == "completed"
    assert reports == [Flushed(1, 1, 3), Flushed(1, 1, 4)]


def test_a_flush_takes_back_what_an_earlier_turn_permitted(progress, reports, completing):
    progress.freeze(Flush(1, 1, 4))
    progress.freeze(Flush(1, 2, -1))
    assert completing() == "waits"
    assert reports == [Flushed(1, 2, 3)]


def test_a_flush_of_an_older_view_is_void(progress, reports):
    progress.announce(view(2, 3))
    progress.freeze(Flush(1, 4, -1))
    assert reports == []
    progress.freeze(Flush(2, 1, -1))
    assert reports == [Flushed(2, 1, 3)], "also before the training thread has entered the view"


def test_a_pending_view_comes_before_the_next_op(progress):
    progress.announce(view(2, 3))
    with pytest.raises(ViewChanged):
        progress.begin()
    with pytest.raises(ViewChanged):
        progress.complete()
    assert progress.enter() == view(2, 3) and progress.view == view(2, 3)
    progress.begin()
    progress.complete()
    assert progress.done == 4


def test_views_are_entered_one_by_one(progress):
    progress.announce(view(2, 3))
    progress.announce(view(3, 3))
    assert progress.enter() == view(2, 3)
    with pytest.raises(ViewChanged):
        progress.begin()
    assert progress.enter() == view(3, 3)
    progress.begin()


def test_the_planned_end_of_a_view_is_reported_unasked(progress, reports, completing):
    progress.announce(view(2, 3, until=4))
    progress.enter()
    assert reports == []
    progress.complete()
    assert reports == [Flushed(2, 0, 4)]
    assert completing() == "waits"
    progress.announce(view(3, 4))
    assert completing(10) == "ViewChanged"


def test_a_view_that_ends_where_it_begins_is_reported_at_once(progress, reports):
    progress.announce(view(2, 3, until=3))
    assert reports == [Flushed(2, 0, 3)]


def test_after_its_end_it_answers_and_no_view_comes(progress, reports):
    progress.finish()
    progress.announce(view(2, 3))
    assert progress.pending is None
    progress.freeze(Flush(2, 1, -1))
    assert reports == [Flushed(2, 1, 3)]


def test_a_view_that_is_pending_at_its_end_is_not_entered(progress):
    progress.announce(view(2, 3))
    progress.finish()
    progress.begin()
    assert progress.pending is None and progress.view == view()


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
    assert completing() == "waits"
    progress.lose("worker 0 was lost")
    assert completing(10) == "JobLost worker 0 was lost"
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

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        made.freeze(Flush(1, turn, -1))
        held = reports[-1].done
        assert made.done == held
        made.freeze(Flush(1, turn, held + 2))
        thread.join(0.001)
        assert made.done <= held + 2
        made.lose("end")
        thread.join(10)
        assert not thread.is_alive() and made.done <= held + 2
