"""The kvstore changes between two steps of all workers: random schedules of one job without sockets and threads.

The machines of the scheduler and the workers, and the servers' cores, are the real ones. Gradients are whole numbers,
and steps add them, so all values are exact.
"""

import math
import random
import re
from collections import Counter, deque

import pytest

from dmltrain.kvstore import types
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.scheduler.actions import AGENT, Log, Send
from dmltrain.kvstore.scheduler.changes import ENDING, STARTING, AfterStep
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.peers import StepTimes
from dmltrain.kvstore.scheduler.reports import ASKED, MADE, REFUSED, Slowest, Told
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.reply import Reply
from dmltrain.kvstore.transport.message.changes import ASKS, CANCELLED, Change, Changed, Stops, Took
from dmltrain.kvstore.transport.message.job import Barrier, Bye, Register, Release
from dmltrain.kvstore.waiting import StepTimer
from dmltrain.kvstore.worker import changes
from dmltrain.kvstore.worker.changes import UNKNOWN
from tests.kvstore.made import declaration
from tests.kvstore.test_async_schedules import Add
from tests.tiers import seed_ranges

SIZE, FLOAT32 = 3, 0
KINDS = [("dist_sync", -1.0), ("dist_async", -1.0), ("dist_ssp", 0.0), ("dist_ssp", 2.0), ("dist_ssp", -1.0)]


def kind(name, staleness=-1.0):
    found = types.find(name)
    return KVStoreKind(found, found.bound(None if staleness < 0 else staleness))


def change(number=1, kv_store="dist_sync", staleness=-1.0, after=ASKS):
    return Change(number, kv_store, staleness, "a test", after)


class Server:
    """`works`: those that run now. `inbox`: what the scheduler has sent."""

    def __init__(self, workers, first):
        self.core, self.works, self.inbox = ServerCore(workers, make_step=Add), [], deque()
        for worker in range(workers):
            self.core.keys.declare(worker, declaration(first.type.name, first.staleness, sizes=(SIZE,)))
        self.core.keys.optimize({"name": "adds"})


def always():
    return True


class Worker:
    """Makes `steps` steps: in each it pushes one gradient to all servers, pulls, and waits for the values. Each `epoch`
    steps it waits for all others. `pulled`: the values after each step, by server. `can_go_on` says whether what it
    waits for has come."""

    def __init__(self, job, rank, first):
        self.job, self.rank, self.kind = job, rank, first
        self.inbox, self.missing, self.has_ended = deque(), 0, False
        self.made, self.pulled = 0, []
        self.released = set()  # barriers
        self.changed = []  # (after which step, of which kind then)
        self.changes = changes.WorkerChanges(job.to_scheduler[rank].append)
        self.changes.follow(lambda wanted: self.kind.refusal(wanted.kv_store, wanted.staleness, ""))
        self.thread, self.can_go_on = self.train(), always

    def gradient(self, step):
        return 1 + self.rank + 10 * step

    def hear(self, message):
        if isinstance(message, Release):
            self.released.add(message.id)
        else:
            self.changes.take(message)

    def go_on(self):
        self.can_go_on = next(self.thread, lambda: False)

    def train(self):
        """Yields what it waits for."""
        while self.made < self.job.steps:
            self.pulled.append([None] * len(self.job.servers))
            self.missing = len(self.job.servers)
            for number in range(self.missing):
                self.job.wires[self.rank, number] += [self.push_to, self.pull_from]
            yield lambda: not self.missing
            self.made += 1
            if self.changes.step_made():
                yield self.changes.decided
                if (due := self.changes.take_due()) is not None:
                    yield from self.change(due)
            yield always
            if self.made % self.job.epoch == 0:
                yield self.job.arrive(f"step {self.made}")
        yield self.job.arrive("end")
        self.has_ended = True
        self.job.to_scheduler[self.rank].append(Bye())

    def change(self, due):
        assert due.after == self.made
        self.kind = self.kind.changed(due.kv_store, due.staleness)
        self.changed.append((self.made, self.kind))
        self.job.to_scheduler[self.rank].append(Barrier(due.barrier))
        yield lambda: due.barrier in self.released

    def push_to(self, server):
        clock = self.made + 1
        buffer = server.core.buffer(self.rank, 0, 0, 4 * SIZE, FLOAT32)
        buffer.array[:] = self.gradient(clock)
        return server.core.push(self.rank, 0, 0, clock, 1.0, buffer)

    def pull_from(self, server):
        return server.core.pull(self.rank, 0, 0, self.made + 1)


class Job:
    """A schedule by `seed`."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.steps, self.epoch = self.chance.randint(3, 14), self.chance.randint(2, 6)
        count, first = self.chance.randint(1, 4), kind(*self.chance.choice(KINDS))
        self.first = first
        self.servers = [Server(count, first) for _ in range(self.chance.randint(1, 2))]
        self.scheduler, self.log = AfterStep(count, len(self.servers)), []
        self.to_scheduler = [deque() for _ in range(count)]
        self.workers = [Worker(self, rank, first) for rank in range(count)]
        self.arrived, self.ended = Counter(), []
        self.wires = {(worker, number): deque() for worker in range(count) for number in range(len(self.servers))}
        self.asked = 0

    def arrive(self, name):
        """One more is at this barrier. Returns whether all have come."""
        self.arrived[name] += 1
        return lambda: self.arrived[name] == len(self.workers)

    def act(self, server, actions):
        for action in actions:
            if isinstance(action, Reply):
                worker = self.workers[action.worker]
                worker.pulled[-1][self.servers.index(server)] = action.buffer.array.copy()
                worker.missing -= 1
                action.release()
            else:
                server.works.append(action)

    def deliver(self):
        """What the scheduler has decided: to the workers' inboxes."""
        for action in self.log:
            if isinstance(action, Send):
                role, index = action.to
                (self.workers if role == "worker" else self.servers)[index].inbox.append(action.message)
        self.log = [each for each in self.log if isinstance(each, Log)]

    def ask(self):
        self.asked += 1
        name, staleness = self.chance.choice([*KINDS, ("", 1.0), ("", -1.0), ("dist_local", -1.0), ("sync", -1.0)])
        self.log += self.scheduler.ask(change(self.asked, name, staleness), False, bool(self.ended))
        self.deliver()

    def events(self):
        found = [worker.go_on for worker in self.workers if worker.can_go_on()]
        found += [lambda each=each: each.hear(each.inbox.popleft()) for each in self.workers if each.inbox]
        found += [
            lambda each=each: self.server_hears(each, each.inbox.popleft()) for each in self.servers if each.inbox
        ]
        found += [lambda each=each: self.run_work(each) for each in self.servers if each.works]
        found += [lambda at=at: self.arrives_at(at[1], self.wires[at].popleft()) for at in self.wires if self.wires[at]]
        found += [lambda rank=rank: self.scheduler_reads(rank) for rank, said in enumerate(self.to_scheduler) if said]
        return found

    def arrives_at(self, number, request):
        self.act(self.servers[number], request(self.servers[number]))

    def scheduler_reads(self, worker):
        message = self.to_scheduler[worker].popleft()
        if isinstance(message, Bye):
            self.ended.append(worker)
            self.log += self.scheduler.left()
        elif isinstance(message, Stops):
            self.log += self.scheduler.stops(worker, message)
        elif self.arrive(message.id)():
            self.log += self.scheduler.met(message.id)
        self.deliver()

    def server_hears(self, server, wanted):
        now = server.core.keys.change(wanted.kv_store, wanted.staleness)
        self.log += self.scheduler.changed(self.servers.index(server), Changed(wanted.number, str(now)))
        self.deliver()

    def run_work(self, server):
        work = server.works.pop(self.chance.randrange(len(server.works)))
        work.run()
        self.act(server, server.core.done(work))

    def run(self):
        asks = sorted(self.chance.randint(0, 60 * len(self.workers)) for _ in range(self.chance.randint(1, 4)))
        number = 0
        while (events := self.events()) or asks:
            if asks and (asks[0] <= number or not events):
                asks.pop(0)
                self.ask()
            else:
                number += 1
                self.chance.choice(events)()
        return self

    def kinds(self):
        """Of each step."""
        found, changed = [self.first], dict(self.workers[0].changed)
        for step in range(1, self.steps):
            found.append(changed.get(step, found[-1]))
        return found

    def check(self):
        assert all(worker.has_ended for worker in self.workers)
        assert len({tuple(worker.changed) for worker in self.workers}) == 1
        everything = sum(worker.gradient(step) for worker in self.workers for step in range(1, self.steps + 1))
        for server in self.servers:
            slice_, last = server.core.slices()[0, 0], self.workers[0].kind
            assert (slice_.value.array == everything).all() and slice_.pushes.at_once == (not last.type.synchronous)
            assert server.core.keys.declared.staleness == last.staleness
        for step, now in enumerate(self.kinds(), 1):
            self.check_step(step, now)
        answers = [each.text.split()[1] for each in self.log if "is asked for" not in each.text]
        assert sorted(answers) == sorted({*answers}) and len(answers) == self.asked
        made = [each.text for each in self.log if " after step " in each.text]
        assert len(made) == len(self.workers[0].changed)

    def check_step(self, step, now):
        """What each worker has pulled after it."""
        for worker in self.workers:
            for value in worker.pulled[step - 1]:
                least = 0 if now.type.synchronous else now.staleness
                reached = max(0, step - (step if math.isinf(least) else int(least)))
                lowest = sum(worker.gradient(n) for worker in self.workers for n in range(1, reached + 1))
                lowest += sum(worker.gradient(n) for n in range(reached + 1, step + 1))
                assert (value >= lowest).all()
                if now.type.synchronous:
                    assert (value == sum(e.gradient(n) for e in self.workers for n in range(1, step + 1))).all()


@pytest.mark.parametrize("seeds", seed_ranges(40, 100, 1_000_000))
def test_random_schedules_change_all_workers_at_once_and_use_each_gradient_once(seeds):
    made = refused = 0
    for seed in seeds:
        job = Job(seed).run()
        try:
            job.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {[each.text for each in job.log]}") from error
        made += len(job.workers[0].changed)
        refused += job.asked - len(job.workers[0].changed)
    assert made > len(seeds) / 3 and refused > len(seeds)


def test_a_server_that_is_in_use_changes_nothing():
    core = ServerCore(2, make_step=Add)
    for worker in range(2):
        core.keys.declare(worker, declaration("dist_ssp", 3.0, sizes=(SIZE,)))
    core.keys.optimize({"name": "adds"})
    buffer = core.buffer(0, 0, 0, 4 * SIZE, FLOAT32)
    [work] = core.push(0, 0, 0, 1, 1.0, buffer)
    work.run()
    core.done(work)
    with pytest.raises(Rejected, match=r"dist_sync while key 'k0' slice 0 is in use: .*\{0: 1, 1: 0\}"):
        core.keys.change("dist_sync", -1.0)
    assert core.keys.declared.staleness == 3.0


# -- refusals ---------------------------------------------------------------------------------------------------------


SSP, SYNC = kind("dist_ssp", 4.0), kind("dist_sync")


@pytest.mark.parametrize(
    "now, wanted, without, said",
    [
        (SSP, change(kv_store="dist_async"), "", "^$"),
        (SSP, change(kv_store="dist_async"), "compressed relays", "^$"),
        (SSP, change(kv_store="", staleness=2.0), "", "^$"),
        (SSP, change(kv_store="", staleness=4.0), "", "dist_ssp staleness=4 .* already"),
        (SSP, change(kv_store="dist_sinc"), "", "unknown kvstore 'dist_sinc'"),
        (SSP, change(kv_store="dist_async", staleness=1.0), "", "staleness is an option of kvstore dist_ssp"),
        (SSP, change(kv_store="dist_local"), "", "dist_sync or dist_async or dist_ssp"),
        (SSP, change(kv_store="local"), "", "dist_sync or dist_async or dist_ssp"),
        # rounds come and go only without compression and relays
        *(
            (now, change(kv_store=to), without, said)
            for now, to in ((SSP, "dist_sync"), (SYNC, "dist_ssp"))
            for without, said in (("", "^$"), ("compressed", "--gc-type"), ("relays", "--host-sum off"))
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(now, wanted, without, said):
    fixed = changes.why_fixed("compressed" in without, "relays" in without)
    assert re.search(said, now.refusal(wanted.kv_store, wanted.staleness, fixed))


def test_a_change_without_a_bound_has_that_of_the_type():
    assert str(kind("dist_async").changed("dist_ssp", -1.0)) == "kv_store=dist_ssp staleness=3"
    assert str(kind("dist_ssp", 7.0).changed("dist_ssp", -1.0)) == "kv_store=dist_ssp staleness=7"


def test_a_program_that_makes_no_steps_on_servers_is_refused():
    said = []
    found = changes.WorkerChanges(said.append)
    found.take(change())
    assert said == [Stops(1, 1, UNKNOWN)]
    assert not found.step_made()


@pytest.mark.parametrize("why, arguments", [(STARTING, (True, False)), (ENDING, (False, True))])
def test_what_is_asked_while_nothing_can_change_is_refused_at_once(why, arguments):
    found = AfterStep(2, 1).ask(change(3), *arguments)
    refused = Log(f"change 3 is refused: {why}", Told(3, REFUSED, why))
    assert found == [Log("change 3 is asked for by a test", Told(3, ASKED)), refused]


def test_one_change_at_a_time():
    scheduler = AfterStep(1, 1)
    scheduler.ask(change(1), False, False)
    assert "change 2 is refused: change 1 is not made yet" in scheduler.ask(change(2), False, False)[1].text
    scheduler.stops(0, Stops(1, 5))
    assert scheduler.met("1") == [Send(("worker", 0), Release("1"))], "of the program"
    assert scheduler.met("change 1") == [Send(("server", 0), change(1, after=5))]
    released, made = scheduler.changed(0, Changed(1, "kv_store=dist_async"))
    told = Told(1, MADE, "kv_store=dist_async", "after step 5")
    assert released == Send(("worker", 0), Release("change 1"))
    assert made == Log("change 1 after step 5 of all workers: kv_store=dist_async", told)
    assert len(scheduler.ask(change(3), False, False)) == 2


def registered(workers):
    """A scheduler of so many workers and a server, which have all come."""
    core = SchedulerCore(workers, 1)
    for node in (("server", 0), *(("worker", rank) for rank in range(workers))):
        core.handle(node, Register("h", 1, "h", "", "h"), 0.0)
    return core


def test_a_worker_that_finishes_ends_the_change():
    core = registered(2)
    core.handle(AGENT, change(1), 0.0)
    core.handle(("worker", 0), Stops(1, 9), 0.0)
    found = core.handle(("worker", 1), Bye(), 0.0)
    assert Send(("worker", 0), change(1, after=CANCELLED)) in found
    assert Log(f"change 1 is refused: {ENDING}", Told(1, REFUSED, ENDING)) in found
    assert core.handle(("server", 0), Changed(1, "late"), 0.0) == []


# -- stragglers --------------------------------------------------------------------------------------------------------


def test_a_report_is_the_median_of_steps_without_waits():
    own, reports, now, waited = StepTimer(), [], 0.0, 0.0
    for step in range(12):
        found = own.made(now, waited)
        reports += [(step, found)] if found else []
        validation = 60.0 if step == 3 else 0.0
        now, waited = now + 1.0 + 0.5 + validation, waited + 0.5
    assert reports == [(5, 1.0), (10, 1.0)]


@pytest.mark.parametrize("steps, share", [(5, 0.0), (9, 1.0)], ids=["few steps", "steps without computing"])
def test_what_is_no_report(steps, share):
    own = StepTimer()
    assert [own.made(10.0 * step, share * 10.0 * step) for step in range(steps)] == [None] * steps


def test_the_slowest_worker_is_compared_when_all_have_reported():
    core = registered(3)
    for _ in range(2):
        assert core.handle(("worker", 0), Took(0.2), 0.0) == core.handle(("worker", 2), Took(0.31), 0.0) == []
        (line,) = core.handle(("worker", 1), Took(0.1), 0.0)
        assert line.text.startswith("worker 2 computes 55.0 % longer") and "0.2 s" in line.text
        assert line.report == Slowest(2, 55.0)


def test_only_the_workers_that_the_job_has_now_are_compared():
    stragglers = StepTimes()
    for worker, seconds, workers in ((0, 0.2, (0, 1, 2)), (2, 0.9, (0, 1, 2)), (3, 0.2, (0, 1, 3))):
        assert stragglers.take(worker, seconds, workers) == [], "at last, worker 2 has left"
    (line,) = stragglers.take(1, 0.3, (0, 1, 3))
    assert line.text.startswith("worker 1 computes 50.0 % longer") and "0.2 s" in line.text
    assert stragglers.take(2, 0.9, ()) == [], "its last report comes when it has been removed"
