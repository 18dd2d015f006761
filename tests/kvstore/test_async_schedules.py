"""Workers that make steps of their own come, go and are lost at random moments, as in an elastic job with dist_async or
dist_ssp: real servers and dealings, random orders of all messages. The kvstore may change to rounds of all, and back.

A step adds 1 at each position of its samples, so servers count how often each sample was used.
"""

import random
from collections import deque
from functools import partial

import numpy as np
import pytest

from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.sync_assignment import SyncAssignment
from dmltrain.kvstore import types
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.transport.message.data import Declare
from dmltrain.kvstore.worker import clocks as told
from tests.kvstore import carrying_out
from tests.kvstore.test_server_views import Arena, key
from tests.tiers import seed_ranges

RANKS, MOST_STEPS = 8, 20_000
TOGETHER = KVStoreKind(types.find("dist_sync"), 0.0)


class Add:
    def __init__(self, spec, key, value):
        pass

    def __call__(self, value, gradient, rate):
        value += gradient

    def state(self):
        return {}

    def load(self, state):
        pass


def kind_with(staleness):
    return KVStoreKind(types.find("dist_async" if staleness == np.inf else "dist_ssp"), staleness)


class Server:
    """A core with some keys, and what has come for it: from the scheduler, and from each worker, in order."""

    def __init__(self, keys, samples, members, staleness):
        self.keys, self.view = keys, 1
        self.core = ServerCore(RANKS, make_step=Add, allocate=Arena())
        self.core.workers.on_hosts([(member,) for member in members])
        declared = Declare(kind_with(staleness).type.name, staleness, tuple(key(each, samples) for each in keys))
        for member in members:
            self.core.keys.declare(member, declared)
        for number in keys:
            self.core.keys.initialise(members[0], number, 0, np.zeros(samples, np.float32))
        self.core.keys.optimize({"name": "add"})
        self.core.views.enter([(member,) for member in members])
        self.views, self.frames = deque(), {}

    def enter(self, number, members, lost, kind):
        self.core.views.enter([(member,) for member in members], lost)
        self.core.views.become(kind)
        self.view = number

    def take(self, worker, job):
        """The next frame of this worker."""
        view, what, *words = self.frames[worker].popleft()
        if view == self.view and self.core.workers.takes(worker):
            for reply in getattr(self, what)(worker, *words):
                job.reply(reply.worker, view, reply.key, reply.clock)
                reply.release()

    def push(self, worker, number, clock, values):
        return carrying_out.push(self.core, worker, number, clock, values)

    def pull(self, worker, number, clock):
        return carrying_out.run(self.core, self.core.pull(worker, number, 0, clock))

    def hold(self, worker, clock):
        return carrying_out.run(self.core, self.core.views.hold(worker, clock))


class Worker:
    def __init__(self, rank, is_new):
        self.rank, self.is_new = rank, is_new
        self.view, self.clock, self.assignment = 1, 0, None
        self.step = None  # (number, positions) that it is in the middle of
        self.unsent, self.awaited = [], set()  # keys
        self.rests = self.is_over = self.told = False
        self.used = []  # (epoch, number, positions) of its complete steps


class Job:
    """`at_rest`: so many are lost when all have used their samples. `changes` of the kvstore: so many are still to
    come. `drains`: the newest view does, until all hold round `until` if it is one of rounds. `entered`: views ->
    (members, together)."""

    def __init__(self, seed, at_rest=0, changes=False):
        self.random, self.at_rest = random.Random(seed), at_rest
        draw = self.random
        self.samples, self.each, self.epochs = draw.randint(1, 60), draw.randint(1, 5), draw.randint(1, 2)
        members = list(range(draw.randint(1, 4)))
        self.staleness = draw.choice([0.0, 0.0, 1.0, 3.0, np.inf])
        self.kind = kind_with(self.staleness)
        keys = [[0, 1], [2]] if draw.random() < 0.7 else [[0, 1]]
        self.servers = [Server(key, self.samples, members, self.staleness) for key in keys]
        self.workers = {member: Worker(member, False) for member in members}
        self.everyone = list(self.workers.values())
        self.batch = self.each * len(members)
        for worker in self.workers.values():
            worker.assignment = AsyncAssignment(self.samples, self.each, self.batch, members)
        self.view, self.members, self.epoch = 1, members, 0
        self.pending = {}  # rank -> views that it has not entered
        self.faults = draw.randint(0, 6)
        self.lost = set()
        self.changes, self.made = draw.randint(1, 6) if changes else 0, 0
        self.drains, self.until = False, 0
        self.entered = {self.view: (self.members, False)}

    @property
    def together(self):
        return self.kind is TOGETHER

    # -- what may happen next, each by chance -----------------------------------------------------------------------

    def run(self):
        for _ in range(MOST_STEPS):
            if not self.workers or self.epoch == self.epochs:
                return
            happen = self.random.choice(self.possible())
            happen()
        raise AssertionError("the job does not come to its end")

    def possible(self):
        found = []
        for server in self.servers:
            if server.views:
                found.append(lambda server=server: server.enter(*server.views.popleft()))
            ready = [rank for rank, frames in server.frames.items() if frames and frames[0][0] <= server.view]
            found += [partial(server.take, rank, self) for rank in ready]
        found += [action for worker in self.workers.values() if (action := self.next_of(worker))]
        if self.all_told:
            found.append(self.share)
        elif self.rest_together and self.at_rest and len(self.workers) > 1:
            self.at_rest -= 1
            found.append(partial(self.lose, max(self.workers)))
        elif self.rest_together and not self.drains:
            found.append(self.end_epoch)
        elif self.rest_together and not any(frames for server in self.servers for frames in server.frames.values()):
            found.append(self.flip)  # workers have waited for the answers
        if self.changes and not self.drains and self.leader_is_between_steps and self.random.random() < 0.5:
            found.append(self.drain)
        if self.faults and self.random.random() < 0.05:
            found.append(self.fault)
        assert found, "nothing can happen any more"
        return found

    @property
    def leader_is_between_steps(self):
        leader = min((worker for worker in self.workers.values() if not worker.is_new), key=lambda each: each.rank)
        return leader.view == self.view and leader.step is None and not leader.told and not leader.rests

    def next_of(self, worker):
        if self.pending.get(worker.rank):
            return partial(self.enter, worker)
        if worker.told or worker.rests or worker.view != self.view:
            return None
        if worker.step is None:
            return partial(self.begin, worker)
        if worker.unsent:
            return partial(self.push, worker)
        return None if worker.awaited else partial(self.complete, worker)

    # -- workers ----------------------------------------------------------------------------------------------------

    def send(self, worker, number, what, *words):
        server = next(server for server in self.servers if number in server.keys)
        server.frames.setdefault(worker.rank, deque()).append((worker.view, what, *words))

    def hold(self, worker):
        for server in self.servers:
            self.send(worker, server.keys[0], "hold", worker.clock)

    def keys(self):
        return [number for server in self.servers for number in server.keys]

    def begin(self, worker):
        if self.together and (worker.assignment.finished or (self.drains and worker.clock == self.until)):
            worker.rests = True
        elif self.together:
            worker.step = worker.clock + 1, worker.assignment.positions_of(worker.rank)
            self.again(worker)
        else:
            self.begin_own(worker)

    def begin_own(self, worker):
        worker.step = worker.assignment.next_of(worker.rank, worker.clock)
        if worker.step:
            worker.clock = worker.step[0] - 1
            self.again(worker)
        else:
            worker.clock, worker.rests = worker.assignment.end, True
            self.hold(worker)

    def again(self, worker):
        worker.unsent, worker.awaited = self.keys(), set(self.keys())
        self.random.shuffle(worker.unsent)

    def push(self, worker):
        number, (clock, positions) = worker.unsent.pop(), worker.step
        values = np.zeros(self.samples)
        values[positions] = 1
        self.send(worker, number, "push", number, clock, values)
        self.send(worker, number, "pull", number, clock)

    def reply(self, rank, view, number, clock):
        worker = self.workers.get(rank)
        if worker and worker.view == view and worker.step and worker.step[0] == clock:
            worker.awaited.discard(number)

    def complete(self, worker):
        worker.used.append((self.epoch, *worker.step))
        worker.clock, worker.step = worker.step[0], None
        if self.together:
            worker.assignment.committed(self.entered[worker.view][0])

    def enter(self, worker):
        before = self.entered[worker.view][1]
        worker.view = self.pending[worker.rank].popleft()
        worker.rests = False
        if not self.pending[worker.rank]:
            worker.told = True
            if not worker.is_new:
                self.hold(worker)
        members, together = self.entered[worker.view]
        if together and not before and not worker.is_new:
            assert worker.step is None and worker.clock == worker.assignment.end
            worker.assignment = SyncAssignment.of_rest(self.samples, self.batch, members, worker.assignment.held_back)
        elif before and not together:
            assert worker.step is None
            rest = worker.assignment.rest
            worker.assignment = AsyncAssignment.of_rest(
                self.samples, self.each, self.batch, members, worker.clock, rest
            )
        elif together:
            worker.assignment.enter(members)
        if together:
            worker.told = False
            if worker.step:
                self.again(worker)

    # -- views ------------------------------------------------------------------------------------------------------

    def fault(self):
        """A worker is lost, or one comes between two steps of another, but not while they make rounds."""
        self.faults -= 1
        free = [rank for rank in range(RANKS) if rank not in self.workers]
        sharing = any(worker.told for worker in self.workers.values())
        joins = free and not self.together and self.random.random() < 0.4 and not sharing
        if joins and any(worker.assignment and not worker.rests for worker in self.workers.values()):
            rank = self.random.choice(free)
            self.workers[rank] = Worker(rank, True)
            self.everyone.append(self.workers[rank])
            self.change(())
        else:
            self.lose(self.random.choice(sorted(self.workers)))

    def lose(self, rank):
        self.lost.add(id(self.workers.pop(rank)))
        self.pending.pop(rank, None)
        if self.workers and all(worker.is_new for worker in self.workers.values()):
            self.workers.clear()  # nobody has the state: the job ends
        self.change((rank,))

    def drain(self):
        self.change((), drains=True)
        self.until = max(worker.clock for worker in self.workers.values()) + 1

    def flip(self):
        self.changes, self.made = self.changes - 1, self.made + 1
        self.kind = kind_with(self.staleness) if self.together else TOGETHER
        self.change(())

    def change(self, lost, drains=False):
        if self.together:
            self.complete_late()
        self.drains = drains
        self.view, self.members = self.view + 1, sorted(self.workers)
        for worker in self.workers.values():
            worker.told = False
            self.pending.setdefault(worker.rank, deque()).append(self.view)
        for server in self.servers:
            server.views.append((self.view, self.members, lost, self.kind))
            for rank in lost:  # frames of its connection are gone with it
                server.frames.pop(rank, None)
        self.entered[self.view] = self.members, self.together

    def complete_late(self):
        """A round that one of those who are left holds is one of all."""
        last = max((worker.clock for worker in self.workers.values() if not worker.is_new), default=0)
        for worker in self.workers.values():
            if worker.step and worker.step[0] == last:
                self.complete(worker)

    @property
    def all_told(self):
        """Whether all have entered the newest view, and servers have read what they hold."""
        read = all(server.view == self.view and not any(server.frames.values()) for server in self.servers)
        return read and all(worker.told and worker.view == self.view for worker in self.workers.values())

    def share(self):
        table = told.table_of(RANKS)
        for worker in self.workers.values():
            if not worker.is_new:
                told.add_own(table, worker.rank, worker.clock, worker.step is not None, 0.0)
        rows = [[(rank, *least) for rank, least in server.core.views.gone.items()] for server in self.servers]
        told.add_gone(table, [np.array(row, np.int64).reshape(-1, 3) for row in rows])
        clocks = told.read(table)
        dealt = None
        for worker in self.workers.values():
            if not worker.is_new and not worker.assignment.finished:
                dealt = worker.assignment.after(self.members, clocks.counted, clocks.begun, clocks.start)
        for worker in self.workers.values():
            worker.assignment = AsyncAssignment.of_state(dealt.state()) if dealt else worker.assignment
            worker.told = False
            worker.is_new = False
            if worker.step is None:
                worker.clock = clocks.start
                self.hold(worker)
            else:
                assert np.array_equal(worker.assignment.next_of(worker.rank, worker.clock)[1], worker.step[1])
                self.again(worker)
            if self.drains:
                worker.assignment.hold_back()

    @property
    def rest_together(self):
        return all(worker.rests and worker.view == self.view for worker in self.workers.values())

    def end_epoch(self):
        self.epoch += 1
        for worker in self.workers.values():
            if self.together:
                worker.assignment = SyncAssignment(self.samples, self.batch, self.members)
            else:
                worker.assignment.finish()
                worker.assignment = AsyncAssignment(self.samples, self.each, self.batch, self.members, worker.clock)
            worker.rests = False
        assert self.together or len({worker.clock for worker in self.workers.values()}) == 1


def check(job):
    """Servers have each sample once in each epoch. Besides, some slices may have the last steps of lost workers, whose
    samples came again."""
    times = np.zeros(job.samples)
    for worker in job.everyone:
        for _, _, positions in worker.used:
            times[positions] += 1
    values = [server.core.slices()[number, 0].value.array for server in job.servers for number in server.keys]
    for value in values:
        assert (value >= job.epoch).all(), "a sample is missing"
    if not job.lost:
        assert all((value == job.epochs).all() for value in values) and (times == job.epochs).all()
    extra = len(job.lost) * job.each
    for value in values:
        assert value.sum() <= job.epochs * job.samples + extra, "samples were used twice"


@pytest.mark.parametrize("at_rest", [0, 2])
def test_each_sample_is_used_once_whatever_happens(at_rest):
    """Also if workers are lost when all samples are used."""
    for seed in range(100):
        job = Job(seed, at_rest)
        job.run()
        if job.workers or at_rest:
            check(job)


@pytest.mark.parametrize("seeds", seed_ranges(40, 100, 1_000_000))
def test_each_sample_is_used_once_whatever_happens_while_the_kvstore_changes(seeds):
    made = 0
    for seed in seeds:
        job = Job(seed, changes=True)
        job.run()
        if job.workers:
            check(job)
        made += job.made
    assert made > len(seeds), "few changes were made"
