"""Groups of slices against the same pushes and pulls one by one, in thousands of random orders."""

import random
from collections import Counter

import numpy as np
import pytest

from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.lockstep import GROUP, Lockstep
from dmltrain.kvstore.server.slice import Work
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.message import Declare, DeclaredKey
from tests.kvstore import carrying_out
from tests.kvstore.made import plain_sgd
from tests.kvstore.test_server_views import Arena
from tests.tiers import seed_ranges

NONE = {"type": "none"}
DTYPES = {"float32": np.float32, "float64": np.float64}


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
    """Two cores get the same pushes and pulls: `core` also in groups, `twin` one by one, with its work done at once."""

    def __init__(self, seed):
        self.random = its = random.Random(seed)
        self.workers = its.choice([1, 2, 2, 2, 3])
        self.sizes = [its.choice([0, 1, 3, 5]) for _ in range(its.randint(2, 4))]
        self.types = [its.choice(["float32", "float32", "float64"]) for _ in self.sizes]
        mean, self.steps = its.random() < 0.3, its.random() < 0.3
        pairs = enumerate(zip(self.sizes, self.types, strict=True))
        keys = tuple(DeclaredKey(n, f"k{n}", dtype, True, NONE, ((0, size),), mean) for n, (size, dtype) in pairs)
        every = range(self.workers)
        alone, two = [(worker,) for worker in every], [tuple(every[::2]), tuple(every[1::2])]
        hosts = its.choice([alone, [tuple(every)], two[: self.workers]])
        self.core, self.twin = (ServerCore(self.workers, make_step=plain_sgd, allocate=Arena()) for _ in range(2))
        for core in (self.core, self.twin):
            core.on_hosts(hosts)
            for worker in every:
                core.declare(worker, Declare("dist_sync", 0.0, keys))
            if self.steps:
                core.optimize({"name": "sgd"})
        self.clocks = [[0] * len(keys) for _ in every]
        self.numbers = [{} for _ in every]
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
        for slice_ in self.core.slices().values():
            slice_.leave_group()
            assert not slice_.loose
        every = [each for slice_ in self.core.slices().values() for each in (slice_.value, *slice_.spare["value"])]
        assert not any(each.readers for each in every)
        assert len({id(each) for each in every}) == len(every) == len(self.core.allocate.offsets), "no buffer is lost"

    def push(self):
        worker = self.random.randrange(self.workers)
        if self.receiving[worker]:
            return
        keys = self.habit if self.random.random() < self.habitual else self.some_keys()
        if max(self.clocks[worker][key] - min(clock[key] for clock in self.clocks) for key in keys) > self.ahead:
            return
        self.begin(worker, keys, self.random.random() < 0.8)
        if self.random.random() < 0.7:
            self.arrive(worker)

    def some_keys(self):
        return tuple(self.random.sample(range(len(self.sizes)), self.random.randint(1, len(self.sizes))))

    def receive(self):
        self.arrive(self.random.randrange(self.workers))

    def begin(self, worker, keys, pulls):
        """The first bytes of a push have come: where they are received, or lie."""
        together = len(keys) > 1 and self.random.random() < self.habitual
        values = []
        for key in keys:
            self.clocks[worker][key] += 1
            made = np.random.default_rng([worker, key, self.clocks[worker][key]]).standard_normal(self.sizes[key])
            values.append(made.astype(DTYPES[self.types[key]]))
        if not together:
            each = zip(keys, values, strict=True)
            self.receiving[worker] = [(self.place(worker, key, value), (key,), pulls, False) for key, value in each]
            return
        number, clock = self.group(worker, keys), self.clocks[worker][keys[0]]
        if self.random.random() < 0.5:
            memory = self.memories[worker]
            payload = wire.offsets([memory.keep(value) for value in values])
            data = self.core.groups.lend(worker, number, payload, memory.view)
        else:
            nbytes = sum(value.nbytes for value in values)
            data = self.core.groups.buffer(worker, number, nbytes, clock, lambda size: np.empty(size, np.uint8))
            for array, value in zip(data.arrays, values, strict=True):
                array[:] = value
        self.receiving[worker] = [(data, keys, pulls, True)]

    def place(self, worker, key, value):
        self.seen["dissolved"] += self.core.slices()[key, 0].lockstep is not None
        clock, push = self.clocks[worker][key], (worker, key, 0, value.nbytes, int(value.dtype == np.float64))
        if self.random.random() < 0.5:
            return self.core.lend(worker, key, 0, value.view(np.uint8), push[-1])
        memory = self.core.completing_buffer(*push, clock, lambda size: np.empty(size, np.uint8))
        data = memory or self.core.buffer(*push)
        data.array[:] = value
        return data

    def group(self, worker, keys):
        clocks = [self.clocks[worker][key] for key in keys]
        content = tuple((key, 0, clock - clocks[0]) for key, clock in zip(keys, clocks, strict=True))
        numbers = self.numbers[worker]
        if content not in numbers:
            numbers[content] = len(numbers)
            self.core.groups.declare(worker, numbers[content], wire.parse_group(wire.group(content)))
        return numbers[content]

    def arrive(self, worker):
        """A push has been received."""
        if not self.receiving[worker]:
            return
        data, keys, pulls, together = self.receiving[worker].pop(0)
        clock = self.clocks[worker][keys[0]]
        if together:
            number = self.group(worker, keys)
            actions = self.core.groups.push(worker, number, clock, 0.5, data, 0.0, 0.0)
            actions += self.core.groups.pull(worker, number, clock, 0.0, worker) if pulls else []
        else:
            actions = self.core.push(worker, keys[0], 0, clock, 0.5, data)
            actions += self.core.pull(worker, keys[0], 0, clock, 0.0, worker) if pulls else []
        works = self.act(actions)
        if data.kind == "completing":  # its memory is used again
            self.seen["completed"] += together
            self.carry_out(works, getattr(data, "arrays", [data.array]))
        else:
            self.works += works
        for key in keys:
            self.expect(worker, key, pulls)

    def expect(self, worker, key, pulls):
        clock = self.clocks[worker][key]
        value = np.random.default_rng([worker, key, clock]).standard_normal(self.sizes[key])
        dtype = np.dtype(self.types[key])
        buffer = self.twin.buffer(worker, key, 0, value.size * dtype.itemsize, int(dtype == np.float64))
        buffer.array[:] = value
        actions = self.twin.push(worker, key, 0, clock, 0.5, buffer)
        self.note(actions + (self.twin.pull(worker, key, 0, clock, 0.0, worker) if pulls else []))

    def note(self, actions):
        for reply in carrying_out.run(self.twin, actions):
            self.expected[self.described(reply, reply.key, reply.clock, reply.buffer)] += 1
            reply.release()

    def described(self, reply, key, clock, buffer):
        return reply.worker, key, clock, reply.staleness, str(buffer.array.dtype), buffer.array.tobytes()

    def pull(self):
        worker = self.random.randrange(self.workers)
        if self.receiving[worker]:
            return
        keys = self.habit if self.random.random() < self.habitual else self.some_keys()
        if len(keys) > 1:
            actions = self.core.groups.pull(worker, self.group(worker, keys), self.clocks[worker][keys[0]], 0.0, worker)
        else:
            actions = self.core.pull(worker, keys[0], 0, self.clocks[worker][keys[0]], 0.0, worker)
        self.works += self.act(actions)
        for key in keys:
            self.note(self.twin.pull(worker, key, 0, self.clocks[worker][key], 0.0, worker))

    def work(self):
        if self.works:
            work = self.works.pop(self.random.randrange(len(self.works)))
            work.run()
            self.seen["dissolved in work"] += work.parts is not None
            self.works += self.act(self.core.done(work))

    def carry_out(self, works, arrays):
        """All of it, before the next push is received into these."""
        for work in works:
            work.run()
        for array in arrays:
            array.view(np.uint8)[:] = 255
        for work in works:
            self.works += self.act(self.core.done(work))

    def act(self, actions):
        works = []
        for action in actions:
            if isinstance(action, Work):
                works.append(action)
                continue
            parts = self.parts(action)
            texts = [self.described(action, *part) for part in parts]
            self.found.update(texts)
            self.unread.append((action, parts, texts))
        return works

    def parts(self, reply):
        if reply.key != GROUP:
            return [(reply.key, reply.clock, reply.buffer)]
        self.seen["together"] += 1
        group = self.core.groups.find(reply.worker, reply.slice)
        each = zip(group.ids, group.differences, reply.buffer.parts, strict=True)
        return [(key, reply.clock + further, part) for (key, _), further, part in each]

    def release(self):
        if self.unread:
            reply, parts, texts = self.unread.pop(self.random.randrange(len(self.unread)))
            assert [self.described(reply, *part) for part in parts] == texts, "a value changed while it was read"
            self.seen["loosely read"] += isinstance(reply.of, Lockstep) and reply.of.dissolved
            reply.release()

    def rest(self):
        """Something that is done when no work is in progress."""
        while self.works:
            self.work()
        if self.random.random() < 0.3 and not self.steps:
            self.steps = True
            for core in (self.core, self.twin):
                core.optimize({"name": "sgd"})
        self.compare()

    def compare(self):
        assert self.core.quiescent
        for id, slice_ in self.core.slices().items():
            assert np.array_equal(slice_.value.array, self.twin.slices()[id].value.array)


@pytest.mark.parametrize("seeds", seed_ranges(300, 1_000, 60_000))
def test_groups_change_no_value(seeds):
    seen = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.run(60)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen += schedule.seen
    wanted = ("together", "dissolved", "dissolved in work", "loosely read", "completed")
    assert all(seen[each] > len(seeds) / 6 for each in wanted), seen
