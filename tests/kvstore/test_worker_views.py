"""Workers that go on without lost ones, over TCP and through shared memory, all in this process: how far they are, what
they may recognise, and their pushes and pulls. The tests play the scheduler."""

import concurrent.futures
import contextlib
import functools
import itertools
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore import Handle, KVStore
from dmltrain.kvstore.base import READ, ViewChanged
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.message.views import Flush, Flushed
from dmltrain.kvstore.view import NEVER, Lost, View
from dmltrain.kvstore.worker.entry import cut
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.routes import Routes, Sharing
from dmltrain.kvstore.worker.progress import Progress
from dmltrain.kvstore.worker.transfers import Transfers
from tests.kvstore import served
from tests.kvstore.made import SYNC, start
from tests.kvstore.whole_job import begun
from tests.waiting import SECONDS, wait_for

WORKERS = 3
ENVIRONMENT = Environment(role="worker", num_workers=WORKERS, num_servers=2, job="job", key=b"key", elastic=1)
LARGE, SMALL = 200_000, 9  # elements; a large key is cut into slices on both servers
WEIGHTS = {"w": LARGE, "v": SMALL, "u": SMALL}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))]


def serve(number, shared):
    """A server without keys, and its address."""
    environment = replace(ENVIRONMENT, role="server", index=number)
    server = served.Server(sizes=(), shared=shared, environment=environment)
    socket_name = server.met[1] if shared else ""
    server.address = (*server.listening.getsockname(), socket_name, host.identity())
    return server


class Worker:
    """A worker below its store. `pending`: whether a view was announced that it has not entered."""

    def __init__(self, rank, servers, shared):
        self.rank, self.pending = rank, False
        environment = replace(ENVIRONMENT, index=rank, transport="shm" if shared else "tcp")
        self.sharing = Sharing(environment, sums=False)
        message = start([(host.identity(), "")] * WORKERS, [server.address for server in servers])
        self.routes = Routes(environment, message, self.sharing, lambda lost: None, pytest.fail)
        self.entries = KeyEntries(self.routes, WORKERS, SYNC, SECONDS)
        self.transfers = Transfers(self, self.entries, self.sharing.arena, SECONDS, flat_keys=False)

    def watched(self, handle):
        if self.pending:
            handle.interrupt()
        return handle

    def flush(self):
        for each in [link.last_request() for link in self.routes.links]:
            if each:
                self.watched(each).wait()

    def declare_weights(self, compression=None):
        if compression:
            self.entries.compress(compression)
        values = {name: np.zeros(size, np.float32) for name, size in WEIGHTS.items()}
        self.entries.declare(list(values), list(values.values()), is_weight=True)
        return values

    def init(self, compression=None):
        for name, value in self.declare_weights(compression).items():
            for server, slice_ in self.routes.direct(self.entries.find(name).slices):
                server.initialise(slice_, cut(value, slice_), SECONDS)
        self.flush()

    def announce(self, view):
        """As the thread of the control link does."""
        self.pending = True
        for link in self.routes.links:
            link.interrupt(view.number)

    def enter(self, view):
        self.pending = False
        self.transfers.enter(view.number, view.base, len(view.members))

    def close(self):
        for link in self.routes.links:
            link.link.cut()
            link.outbox.finish(SECONDS)


class Job:
    def __init__(self, shared, compression=None):
        self.servers = [serve(number, shared) for number in range(2)]
        self.workers = [Worker(rank, self.servers, shared) for rank in range(WORKERS)]
        for worker in self.workers:
            worker.init(compression)
        self.view = View(1, 0, (tuple(range(WORKERS)),), (0, 1))
        self.enter_servers()
        for worker in self.workers:
            worker.enter(self.view)

    def change(self, *gone):
        """The next view, without these. The servers do not have it yet."""
        self.view = self.view.without(gone, base=0)
        for rank in self.view.members:
            self.workers[rank].announce(self.view)

    def replace(self, rank, at_once):
        """The next view, or the next two, after which another worker has the place of this one. Returns them."""
        whole, lost = (tuple(range(WORKERS)),), (Lost(rank, "frozen"),)
        number, servers = self.view.number, self.view.servers
        if at_once:
            views = [View(number + 1, 0, whole, servers, lost=lost)]
        else:
            views = [self.view.without([rank], 0, lost), View(number + 2, 0, whole, servers)]
        self.view = views[-1]
        return views

    def enter_servers(self, views=()):
        for server in self.servers:
            for view in views or [self.view]:
                server.service.enter(view)

    def read_by(self, rank):
        """How many values this worker reads in the servers' memory."""
        unread = [server.service.answers._unread._replies for server in self.servers]
        its = [values for each in unread for (worker, *_), values in each.items() if worker == rank]
        return sum(len(replies) for values in its for replies in values.values())

    def close(self):
        for each in (*self.workers, *self.servers):
            each.close()
        assert all(server.failed.empty() for server in self.servers)


@pytest.fixture(params=[False, True], ids=["tcp", "shm"])
def job(request, closed_at_the_end):
    return closed_at_the_end(Job(request.param))


def numbers(seed, size=LARGE):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def pushed(worker, seed):
    """The worker's gradients of a round are on their way: the handle of the values."""
    values = [numbers(seed), numbers(seed, SMALL)]
    return worker.transfers.pushpull(["w", "v"], values, READ, 0, -1.0)


def all_pushed(workers, first=0):
    """They push the gradients of this seed and those after it, and get their sum."""
    handles = [pushed(worker, first + number) for number, worker in enumerate(workers)]
    expect_sum(handles, range(first, first + len(handles)))


def expect_sum(handles, seeds):
    """The values of each are the sums of these gradients, in this order."""
    totals = [sum((numbers(seed, size) for seed in seeds), np.float32(0)) for size in (LARGE, SMALL)]
    for handle in handles:
        handle.wait()
        assert [value.tobytes() for value in handle.values] == [total.tobytes() for total in totals]


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
def test_with_a_threshold_sums_have_the_levels_of_the_view_s_workers(closed_at_the_end, shared):
    """All push the threshold: with other levels the sum of two workers, 2 thresholds, would be 0 or 3 of them."""
    job = closed_at_the_end(Job(shared, {"type": "2bit", "threshold": 0.5}))
    for left in (3, 2):
        members = job.workers[:left]
        handles = [
            member.transfers.pushpull(["v"], [np.full(SMALL, 0.5, np.float32)], READ, 0, -1.0) for member in members
        ]
        for handle in handles:
            handle.wait()
            assert [*handle.values[0]] == [0.5 * left] * SMALL
        if left > 2:
            job.change(2)
            job.enter_servers()
            for member in job.workers[:2]:
                member.enter(job.view)


def reduce(name, worker, values):
    worker.transfers.all_reduce(name, values)


@pytest.mark.parametrize("first", ["workers", "servers"])
def test_a_round_is_pushed_again_without_a_lost_worker(job, first):
    """It has pushed one of two keys, whose values, with its own in them, count for nothing."""
    all_pushed(job.workers, 10)
    handles = [pushed(worker, worker.rank) for worker in job.workers[:2]]
    job.workers[2].transfers.push("v", numbers(2, SMALL), 0, -1.0)
    job.change(2)
    for handle in handles:
        with pytest.raises(ViewChanged):
            handle.wait()
    if first == "servers":
        job.enter_servers()
    for worker in job.workers[:2]:
        worker.enter(job.view)
    handles = [pushed(worker, worker.rank) for worker in job.workers[:2]]
    if first == "workers":
        job.enter_servers()
    expect_sum(handles, [0, 1])
    all_pushed(job.workers[:2], 20)


def test_sums_are_declared_again_in_each_view(job):
    """One worker has declared another's next sum already when the members change, and the next ones differ."""
    totals = [np.full(3, rank, np.float64) for rank in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(partial(reduce, "losses"), job.workers, totals))
        assert {tuple(total) for total in totals} == {(3.0, 3.0, 3.0)}
        ahead = pool.submit(job.workers[0].transfers.all_reduce, "of three workers", np.ones(3))
        wait_for(lambda: "sum of of three workers (3)" in job.workers[0].entries, "the sum is declared")
        job.change(2)
        with pytest.raises(ViewChanged):
            ahead.result()
        job.enter_servers()
        for worker in job.workers[:2]:
            worker.enter(job.view)
        for name, size in (("of two workers", 2), ("losses", 3), ("losses", LARGE)):
            totals = [np.full(size, rank + 1.0) for rank in range(2)]
            list(pool.map(partial(reduce, name), job.workers[:2], totals))
            assert {float(value) for total in totals for value in total} == {3.0}


def test_values_of_a_round_without_result_are_released_with_the_next(job):
    """Else servers would take more memory with every change."""
    survivor, *others = job.workers
    for number in range(20):
        for worker in (survivor, *others):
            pushed(worker, number)
        job.change(*[worker.rank for worker in others])
        job.enter_servers()
        survivor.enter(job.view)
        others = []
    for seed in (3, 4):
        all_pushed([survivor], seed)
    slices = sum(len(entry.slices) for entry in survivor.entries if entry.clock)
    assert job.read_by(0) in ((slices,) if survivor.sharing.arena else (0,))


def test_values_of_forgotten_keys_are_released(job):
    handles = []
    for worker in job.workers:
        worker.entries.declare(["read in place"], [np.zeros(5)], is_weight=False)
        worker.flush()
        handles.append(worker.transfers.pushpull("read in place", np.ones(5), READ, 0, -1.0))
    for handle in handles:
        handle.wait()
        assert handle.values[0].tolist() == [3.0] * 5
    job.change()
    job.enter_servers()
    for worker in job.workers:
        worker.enter(job.view)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(partial(reduce, "others"), job.workers, [np.ones(LARGE) for _ in job.workers]))
    all_pushed(job.workers)
    slices = sum(len(entry.slices) for entry in job.workers[0].entries if entry.is_weight and entry.clock)
    assert [job.read_by(rank) for rank in range(WORKERS)] == [slices if job.servers[0].arena else 0] * WORKERS


@pytest.mark.parametrize("seed", SEEDS)
def test_replacements_at_any_moment_leave_no_trace(job, seed):
    """Each round's sum has exactly the gradients that were pushed in the last view, whenever servers and workers enter
    it. (Those of each try differ, so that others would be seen.) Also if the earlier process is only frozen, and wakes
    up to go on as if nothing had happened."""
    draw, seeds = random.Random(seed), itertools.count(step=WORKERS)
    shared, frozen = bool(job.servers[0].arena), []
    for _ in range(12):
        base = next(seeds)
        handles = [pushed(worker, base + worker.rank) for worker in job.workers]
        if draw.random() < 0.5:
            expect_sum(handles[:1], [base, base + 1, base + 2])
        time.sleep(draw.random() * 0.004)
        gone, base = draw.choice(job.workers), next(seeds)
        if draw.random() < 0.4:
            gone.close()
        else:
            frozen.append(gone)
        views = job.replace(gone.rank, at_once=draw.random() < 0.5)
        with ThreadPoolExecutor(2) as pool:
            beginning = [
                partial(pool.submit, job.enter_servers, views),
                partial(pool.submit, joining, gone.rank, job, shared, base),
                *(partial(going_on, worker, job.view, base) for worker in job.workers if worker is not gone),
            ]
            draw.shuffle(beginning)
            begun = [begin() for begin in beginning]
            for each in frozen:
                pushed(each, 10**6)
        late = [each.result() for each in begun if isinstance(each, Future)]
        job.workers[gone.rank], last = next(each for each in late if each)
        handles = [last, *(each for each in begun if not isinstance(each, Future))]
        expect_sum(handles, [base, base + 1, base + 2])
    for each in frozen:
        each.close()


def joining(rank, job, shared, base):
    """The replacement, which declares the weights again, and has pushed; and the handle of its values."""
    late = Worker(rank, job.servers, shared)
    assert {bool(link.link.own_arena) for link in late.routes.links} == {shared}
    late.enter(job.view)
    late.declare_weights()
    late.flush()
    return late, pushed(late, base + rank)


def going_on(worker, view, base):
    worker.announce(view)
    worker.enter(view)
    return pushed(worker, base + worker.rank)


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
    assert (store.member, store.elastic, store.is_alone) == (3, False, False)
