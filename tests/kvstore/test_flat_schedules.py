"""Flat slices against the same pushes and pulls one by one, in thousands of random orders."""

import random
from collections import Counter

import numpy as np
import pytest

from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.work import Work
from dmltrain.kvstore.transport import flat
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from tests.kvstore import carrying_out
from tests.kvstore.made import plain_sgd
from tests.kvstore.test_server_views import Arena
from tests.tiers import seed_ranges

NONE = {"type": "none"}
DTYPES = ("float32", "float64")


class Memory:
    """What a worker shares: every gradient that it has ever made."""

    def __init__(self):
        self.bytes = np.zeros(1 << 16, np.uint8)
        self.used = 0

    def keep(self, array):
        place, self.used = self.used, self.used + -(-array.nbytes // 8) * 8
        self.bytes[place : place + array.nbytes] = array.view(np.uint8)
        return place

    def view(self, place, size):
        return self.bytes[place : place + size]


class Schedule:
    """Two cores get the same pushes and pulls: `core` also as flat keys, `twin` one by one, its work done at once."""

    def __init__(self, seed):
        self.random = its = random.Random(seed)
        self.workers = its.choice([1, 2, 2, 2, 3])
        self.sizes = [its.choice([0, 1, 3, 5]) for _ in range(its.randint(2, 4))]
        self.type, self.keys = its.choice(DTYPES), range(len(self.sizes))
        mean, self.steps = its.random() < 0.3, its.random() < 0.3
        keys = [DeclaredKey(n, f"k{n}", self.type, True, NONE, ((0, self.sizes[n]),), mean) for n in self.keys]
        every = range(self.workers)
        alone, two = [(worker,) for worker in every], [tuple(every[::2]), tuple(every[1::2])]
        hosts = its.choice([alone, [tuple(every)], two[: self.workers]])
        self.core, self.twin = (ServerCore(self.workers, make_step=plain_sgd, allocate=Arena()) for _ in range(2))
        for core in (self.core, self.twin):
            core.workers.on_hosts(hosts)
            for worker in every:
                core.keys.declare(worker, Declare("dist_sync", 0.0, tuple(keys)))
            for number, size in enumerate(self.sizes):
                core.keys.initialise(0, number, 0, np.full(size, number))
            if self.steps:
                core.keys.optimize({"name": "sgd"})
        self.clocks = [[0] * len(keys) for _ in every]
        self.memories = [Memory() for _ in every]
        self.receiving = [None] * self.workers
        self.works, self.unread = [], []
        self.found, self.expected = Counter(), Counter()
        self.seen = Counter()  # what has happened
        order = list(range(len(keys)))
        its.shuffle(order)
        self.ahead = its.choice([0, 0, 1, 4])  # clocks that a worker may be ahead
        self.habitual = its.choice([0.6, 0.9, 0.97])  # how often
        self.habit = tuple(order[: its.randint(2, len(order))])  # most pushes are of these together

    # -- what happens ---------------------------------------------------------------------------------------------

    def run(self, events):
        for _ in range(events):
            every = [self.push, self.receive, self.work, self.release, self.pull, self.rest]
            self.random.choices(every, [5, 3, 5, 3, 1, 0.3])[0]()
        self.finish()

    def finish(self):
        for worker in range(self.workers):
            while self.receiving[worker]:
                self.arrive(worker)
        for key in range(len(self.sizes)):
            most = max(clocks[key] for clocks in self.clocks)
            for worker in range(self.workers):
                while self.clocks[worker][key] < most:
                    self.begin(worker, (key,), True)
                    self.arrive(worker)
        while self.works or self.unread:
            self.work()
            self.release()
        self.compare()
        assert self.found == self.expected
        every = [each for slice_ in self.core.slices().values() for each in (slice_.value, *slice_.spare["value"])]
        assert not any(each.readers for each in every) and not self.core.flats.together
        free = [place for places in self.core.keys.memory._free.values() for place, _ in places]
        places = [each.offset for each in every] + free
        assert len(set(places)) == len(places)
        assert 0 in self.sizes or len(places) == len(self.core.keys.memory.allocate.offsets), "no buffer is lost"

    def push(self):
        worker = self.random.randrange(self.workers)
        if self.receiving[worker]:
            return
        keys = self.usual(worker)
        if max(self.clocks[worker][key] - min(clock[key] for clock in self.clocks) for key in keys) > self.ahead:
            return
        self.begin(worker, keys, self.random.random() < 0.8)
        if self.random.random() < 0.7:
            self.arrive(worker)

    def usual(self, worker):
        """What the worker pushes next: mostly its habit, or those keys of it that are behind the others."""
        if self.random.random() > self.habitual:
            return self.some_keys()
        clocks = [self.clocks[worker][key] for key in self.habit]
        behind = [key for key, clock in zip(self.habit, clocks, strict=True) if clock < max(clocks)]
        return tuple(behind) or self.habit

    def some_keys(self):
        return tuple(self.random.sample(range(len(self.sizes)), self.random.randint(1, len(self.sizes))))

    def receive(self):
        self.arrive(self.random.randrange(self.workers))

    def begin(self, worker, keys, pulls):
        """The first bytes of a push have come: where they are received, or lie."""
        values = []
        for key in keys:
            self.clocks[worker][key] += 1
            values.append(self.gradient(worker, key))
        number = self.flat(worker, keys)
        if number is None:
            each = zip(keys, values, strict=True)
            self.receiving[worker] = [(self.place(worker, key, value), key, (key,), pulls) for key, value in each]
            return
        places = flat.layout([value.size for value in values], np.dtype(self.type).itemsize)
        whole = np.zeros(places[-1].stop, self.type)
        for value, place in zip(values, places, strict=True):
            whole[place] = value
        self.receiving[worker] = [(self.place(worker, number, whole), number, keys, pulls)]

    def gradient(self, worker, key):
        made = np.random.default_rng([worker, key, self.clocks[worker][key]])
        return made.standard_normal(self.sizes[key]).astype(self.type)

    def place(self, worker, key, value):
        number = DTYPES.index(self.type)
        if self.random.random() < 0.5:
            memory = self.memories[worker]
            return self.core.lend(worker, key, 0, memory.view(memory.keep(value), value.nbytes), number)
        push, (first, _) = (worker, key, 0, value.nbytes, number), self.core.keys.find(key, 0).named(key, 0)
        memory = self.core.completing_buffer(*push, self.clocks[worker][first], lambda size: np.empty(size, np.uint8))
        data = memory or self.core.buffer(*push)
        data.array[:] = value
        return data

    def flat(self, worker, keys):
        """The number of their flat key, if they can be pushed or pulled as one, and mostly are."""
        clocks = {self.clocks[worker][key] for key in keys}
        if len(keys) == 1 or len(clocks) > 1 or self.random.random() > self.habitual:
            return None
        self.core.flats.declare(worker, flat.number(keys), keys)
        return flat.number(keys)

    def arrive(self, worker):
        """A push has been received."""
        if not self.receiving[worker]:
            return
        data, key, keys, pulls = self.receiving[worker].pop(0)
        slice_, clock = self.core.keys.find(key, 0), self.clocks[worker][keys[0]]
        before = self.core.flats.together
        actions = self.core.push(worker, key, 0, clock, 0.5, data)
        actions += self.core.pull(worker, key, 0, clock, 0.0, worker) if pulls else []
        self.seen["ended"] += any(each.apart for each in before)
        self.seen["put off"] += any(each.later for each in before)
        works = self.act(actions)
        if data.kind == "completing":  # its memory is used again
            self.seen["completed"] += isinstance(slice_, FlatSlice)
            self.carry_out(works, data.array)
        else:
            self.works += works
        for key in keys:
            self.expect(worker, key, pulls)

    def expect(self, worker, key, pulls):
        value = self.gradient(worker, key)
        buffer = self.twin.buffer(worker, key, 0, value.nbytes, DTYPES.index(self.type))
        buffer.array[:] = value
        actions = self.twin.push(worker, key, 0, self.clocks[worker][key], 0.5, buffer)
        more = self.twin.pull(worker, key, 0, self.clocks[worker][key], 0.0, worker) if pulls else []
        self.note(actions + more)

    def note(self, actions):
        for reply in carrying_out.run(self.twin, actions):
            self.expected.update(self.described(reply, self.twin))
            reply.release()

    def described(self, reply, core):
        """What a reply says of each key."""
        slice_ = core.keys.find(reply.key, 0)
        places = zip(getattr(slice_, "ids", [(reply.key, 0)]), getattr(slice_, "places", [slice(None)]), strict=True)
        values = [(key, reply.buffer.array[place].tobytes()) for (key, _), place in places]
        return [(reply.worker, key, reply.clock, reply.dtype, value) for key, value in values]

    def pull(self):
        worker = self.random.randrange(self.workers)
        if self.receiving[worker]:
            return
        keys = self.habit if self.random.random() < self.habitual else self.some_keys()
        number = self.flat(worker, keys)
        for key in keys if number is None else [number]:
            clock = self.clocks[worker][keys[0] if number else key]
            self.works += self.act(self.core.pull(worker, key, 0, clock, 0.0, worker))
        for key in keys:
            self.note(self.twin.pull(worker, key, 0, self.clocks[worker][key], 0.0, worker))

    def work(self):
        if self.works:
            work = self.works.pop(self.random.randrange(len(self.works)))
            work.run()
            self.works += self.act(self.core.done(work))

    def carry_out(self, works, array):
        """All of it, before the next push is received into this."""
        for work in works:
            work.run()
        array.view(np.uint8)[:] = 255
        for work in works:
            self.works += self.act(self.core.done(work))

    def act(self, actions):
        works = []
        for action in actions:
            if isinstance(action, Work):
                works.append(action)
                continue
            texts = self.described(action, self.core)
            self.seen["together"] += action.buffer.kind == "value" and len(texts) > 1
            self.seen["gathered"] += action.buffer.kind == "gathered"
            self.found.update(texts)
            self.unread.append((action, texts))
        return works

    def release(self):
        if self.unread:
            reply, texts = self.unread.pop(self.random.randrange(len(self.unread)))
            assert self.described(reply, self.core) == texts, "a value changed while it was read"
            self.seen["read after the end"] += isinstance(reply.of, FlatSlice) and reply.of.apart
            reply.release()

    def rest(self):
        """Something that is done when no work is in progress."""
        while self.works:
            self.work()
        if self.random.random() < 0.3 and not self.steps:
            self.steps = True
            for core in (self.core, self.twin):
                core.keys.optimize({"name": "sgd"})
        self.compare()

    def compare(self):
        assert self.core.quiescent
        for id, slice_ in self.core.slices().items():
            assert np.array_equal(slice_.value.array, self.twin.slices()[id].value.array)


@pytest.mark.parametrize("seeds", seed_ranges(75, 150, 1_000_000))
def test_flat_slices_change_no_value(seeds):
    seen = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.run(60)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen += schedule.seen
    wanted = ("together", "gathered", "ended", "put off", "read after the end", "completed")
    assert all(seen[each] > len(seeds) / 6 for each in wanted), seen
