"""Random schedules of a whole elastic job keep its invariants, also for simulated hours; see simulation/world.py."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.view import Balancing
from tests.kvstore.simulation.job import Job, Unlucky, Violated
from tests.kvstore.simulation.world import World
from tests.tiers import seed_ranges

SCHEDULES, FEWER_SCHEDULES = seed_ranges(50, 100, 1_000_000), seed_ranges(20, 40, 1_000_000)

unlucky = []


def job_of(seed):
    """A small job: its shape, by seed."""
    chance = random.Random(f"job {seed}")
    choices = {"workers": [2, 3, 3, 4, 5], "servers": [1, 2, 2, 3], "samples": [5, 7, 10, 16], "batch": [3, 4, 5]}
    choices |= {"epochs": [1, 2], "faults": [0, 1, 2, 3], "replacements": [0, 0, 1, 2]}
    shape = chosen(chance, **choices) | {"shared": chance.random() < 0.5}
    shape |= chosen(chance, newcomers=[0, 0, 1, 2], server_faults=[0, 0, 1, 2], notices=[0, 0, 1, 2])
    job = Job(**shape, residuals=random.Random(f"residuals {seed}").random() < 0.5)
    job = replace(job, balance=Balancing(job.batch)) if chance.random() < 0.3 else job
    return with_parts_of_each(job, 2) if chance.random() < 0.3 else job


def chosen(chance, **choices):
    """One of these for each field of a Job."""
    return {name: chance.choice(numbers) for name, numbers in choices.items()}


def with_parts_of_each(job, each):
    """The job with --batch per-worker."""
    batch = each * job.workers
    balance = Balancing(batch, each) if job.balance.batch else job.balance
    return replace(job, batch=batch, each=each, balance=balance)


def run(seed, job=None, mutations=()):
    world = World(job or job_of(seed), seed, frozenset(mutations))
    try:
        world.run()
        world.check()
    except Violated as error:
        raise Violated(f"seed {seed}, {world.job}: {error}") from error
    except Unlucky:
        unlucky.append(seed)
    return world


@pytest.mark.parametrize("seeds", SCHEDULES)
def test_random_schedules_keep_the_invariants(seeds):
    worlds = [run(seed) for seed in seeds]
    found = [world.views.values() for world in worlds]
    assert sum(map(len, found)) > 1.5 * len(seeds), "most jobs lose workers"
    assert sum(any(view.lost_servers for view in views) for views in found) > len(seeds) / 10
    added = [
        any(member >= world.job.workers for view in world.views.values() for member in view.joined) for world in worlds
    ]
    assert sum(added) > len(seeds) / 10, "workers come in addition"
    assert len(seeds) < 500 or sum(any(view.behind for view in views) for views in found) > len(seeds) / 100
    assert len(unlucky) <= len(seeds) / 100


def test_random_schedules_divide_samples_anew():
    """While workers are lost, and replaced."""
    divided = 0
    for seed in range(30):
        job = Job(workers=4, samples=40, batch=12, faults=seed % 3, replacements=seed % 2, balance=Balancing(12))
        job = with_parts_of_each(job, 3) if seed % 4 == 3 else job
        first = run(seed, job)
        views = tuple(first.views[number] for number in sorted(first.views))
        divided += len({view.shares for view in views}) > 1
        if seed < 10:
            told = replace(job, faults=0, replacements=0, notices=0, replay=views)
            assert run(seed + 1, told).check() == first.check(), "a replay divides as the job did, and not by itself"
    assert divided > 15


def loses_schedulers(seed):
    """Once or more, also while workers are lost and replaced, and servers lost; some of those that count as lost go on
    for a while."""
    return replace(job_of(seed), schedulers=random.Random(f"scheduler {seed}").choice([1, 1, 2, 3]))


def replaces_servers(seed, **more):
    """Also when no server is left for a while, and when one is lost again while it joins."""
    choices = {"server_faults": [1, 2, 3], "server_replacements": [1, 2, 3]}
    return replace(job_of(seed), **chosen(random.Random(f"servers {seed}"), **choices), **more)


def replaces_servers_and_scheduler(seed):
    """Not both at once; and another server is left, which knows who has finished."""
    job = replaces_servers(seed, schedulers=1 + seed % 2)
    return replace(job, servers=max(2, job.servers), server_faults=1)


def with_steps_on_servers(seed):
    """A lost server's state is that of its last step, as if it had been copied then."""
    job = (job_of, replaces_servers, replaces_servers_and_scheduler)[seed % 3](seed)
    return replace(job, on_servers=True)


def small(seed):
    """Of all the kinds above: one to three steps of two or three workers, with as many faults as in the other jobs, so
    that they meet."""
    kinds = (job_of, loses_schedulers, replaces_servers, replaces_servers_and_scheduler, with_steps_on_servers)
    job, chance = kinds[seed % len(kinds)](seed), random.Random(f"small {seed}")
    job = replace(job, workers=min(job.workers, 3), servers=min(job.servers, 2), epochs=1)
    job = replace(job, span=chance.choice([150, 300]), samples=chance.choice([3, 5, 8]))
    return with_parts_of_each(job, job.each) if job.each else job


@pytest.mark.parametrize("seed", [8007278, 8052903, 8066298, 8127462, 8131778])
def test_a_server_is_removed_in_place_of_the_only_worker_with_the_state(seed):
    """Which was cut off from it by chance."""
    removed = [lost_server for view in run(seed, small(seed)).views.values() for lost_server in view.lost_servers]
    assert any("connection between" in each.reason for each in removed)


def cuts_off_who_has_the_state(seed):
    """As others have just joined, or not."""
    chance = random.Random(f"cuts {seed}")
    choices = {"workers": [1, 1, 2], "servers": [2, 3], "newcomers": [1, 2, 3], "replacements": [0, 1]}
    shape = chosen(chance, **choices, faults=[0, 1], cuts=[1, 2])
    return Job(**shape, span=150, samples=20, on_servers=seed % 3 == 2)


def ever(name, said=""):
    """Whether a view of a job has some of these, such as lost servers; `said`: and what was said of one of them."""
    return lambda views: any(said in getattr(each, "reason", "") for view in views for each in getattr(view, name))


def loses_all_servers(views):
    return any(view.servers == view.joined_servers for view in views)


def loses_both(views):
    return ever("lost")(views) and ever("lost_servers")(views)


KINDS_OF_JOBS = {  # kind -> what happens in at least so large a share of its jobs
    replaces_servers: {ever("joined_servers"): 1 / 3, loses_all_servers: 1 / 12},
    replaces_servers_and_scheduler: {ever("joined_servers"): 1 / 4},
    with_steps_on_servers: {ever("lost_servers"): 1 / 4},
    small: {ever("lost"): 1 / 3, ever("lost_servers"): 1 / 3, loses_both: 1 / 6},
    cuts_off_who_has_the_state: {ever("lost", "connection"): 1 / 6, ever("lost_servers", "connection"): 1 / 6},
}


@pytest.mark.parametrize("seeds", FEWER_SCHEDULES)
@pytest.mark.parametrize("job", [loses_schedulers, *KINDS_OF_JOBS], ids=lambda job: job.__name__)
def test_random_schedules_of_each_kind_keep_the_invariants(job, seeds):
    worlds = [run(seed, job(seed)) for seed in seeds]
    for happens, share in KINDS_OF_JOBS.get(job, {}).items():
        assert sum(happens(list(world.views.values())) for world in worlds) > share * len(seeds)
    lost = sum(world.newest - 1 for world in worlds)
    assert job != loses_schedulers or lost > len(seeds) / 2, "most jobs lose their scheduler"


# Rules without which the jobs of some kind violate an invariant, and the seed of a schedule that notices: the search
# begins there. After a change of the machines or of the simulation another one may be the first, and it takes longer.
RULES = {
    job_of: {
        "check under the lock": 0,
        "late values": 43,
        "carried": 0,
        "receipt": 0,
        "forget weights": 0,
        "barrier after sums": 167,
        "behind": 0,
        "late frames": 31,
        "turns": 83,
        "finished": 2212,
        "hand over early": 54,
    },
    loses_schedulers: {
        "released again": 112,
        "who leaves meanwhile": 2011736,
        "who has finished": 0,
        "superseded": 93,
        "who waits in a barrier": 439,
    },
    replaces_servers: {"retired links": 0, "declare to new servers": 0, "dated links": 110},
    with_steps_on_servers: {"take back": 0, "kept": 0},
    cuts_off_who_has_the_state: {"who has the state": 0},
}
SLOWLY_NOTICED = {"behind", "late frames", "turns", "finished", "hand over early"}
SLOWLY_NOTICED |= {"who has finished", "superseded", "who waits in a barrier", "dated links"}


@pytest.mark.parametrize(
    "mutation, job, first",
    [
        pytest.param(rule, job, first, id=rule, marks=pytest.mark.thorough if rule in SLOWLY_NOTICED else ())
        for job, rules in RULES.items()
        for rule, first in rules.items()
    ],
)
def test_each_rule_is_needed(mutation, job, first):
    """Without this rule some schedule of job(seed) violates an invariant, or the core rejects what it gets."""
    for seed in range(first, first + 3000):
        try:
            run(seed, job(seed), [mutation])
        except (Violated, Rejected):
            return
    pytest.fail(f"3,000 schedules pass without the rule {mutation!r}")


def test_members_leave_on_purpose():
    """Also several at once, with losses, with others that come, and all; with residuals, which they hand over."""
    left = ended = handed = 0
    for seed in range(48):
        job = Job(workers=1 + seed % 4, notices=1 + seed % 3, faults=seed // 4 % 2, newcomers=seed // 8 % 2, samples=30)
        job = replace(job, residuals=seed % 5 < 3)
        world = run(seed, job)
        left += sum(len(view.left) for view in world.views.values())
        handed += sum(len(view.hands_over) for view in world.views.values())
        ended += world.stops_at is not None
    assert left > 35 and 3 < ended < 24 and handed > 25


def test_a_job_with_too_few_members_waits_for_more():
    """After a loss or a notice; until they come, or until it has waited for long enough."""
    went_on = ended = 0
    for seed in range(40):
        coming = {"newcomers": seed % 3, "replacements": seed // 2 % 2, "residuals": seed % 5 < 3}
        job = Job(workers=3, minimum=3, patience=40.0, notices=seed % 2, faults=seed // 2 % 2, samples=30, **coming)
        world = run(seed, job)
        waited = any(len(view.members) < 3 for view in world.views.values())
        went_on += waited and world.stops_at is None
        ended += world.stops_at is not None
    assert went_on > 5 and ended > 5


def test_a_replayed_schedule_makes_the_same_weights():
    replayed = 0
    for seed in range(40):
        first = run(seed)
        views = tuple(first.views[number] for number in sorted(first.views))
        if len(views) > 1 and set(views[-1].members) and first.stops_at is None:
            no_more = dict.fromkeys(("faults", "server_faults", "notices", "replacements"), 0)
            job = replace(first.job, replay=views, **no_more)
            assert run(seed + 1, job).check() == first.check()
            replayed += 1
    assert replayed > 10


# What happens in a minute, and how often.
KINDS = {"faults": 6, "server_faults": 1, "ends": 2, "leavings": 2}
COMINGS = 9 / 11  # a replacement or another worker comes half a minute later, so often


class Minutes(World):
    """Each minute a process is lost, or a worker leaves, until `minutes` have passed; others come."""

    def __init__(self, job, seed, minutes):
        super().__init__(job, seed)
        chance = random.Random(f"minutes {seed}")
        kinds = chance.choices(list(KINDS), list(KINDS.values()), k=minutes)
        self.due = []  # (s, what), in the order of time
        for minute, kind in enumerate(kinds, 1):
            self.due.append((60.0 * minute, kind))
            if chance.random() < COMINGS:
                self.due.append((60.0 * minute + 30.0, "comings"))
        self.happened = Counter()

    def pass_time(self):
        super().pass_time()
        while self.due and self.now >= self.due[0][0]:
            _, kind = self.due.pop(0)
            getattr(self, kind).append(self.events)
            self.planned_at = self.events
            self.happened[kind] += 1


@pytest.mark.parametrize(
    ("minutes", "workers", "servers", "rounds"),
    [
        pytest.param(20, 8, 4, 50, marks=pytest.mark.thorough),
        pytest.param(240, 100, 20, 280, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_a_fault_in_each_minute(minutes, workers, servers, rounds):
    """`rounds`: of an epoch; they take longer than the minutes."""
    quiet = dict.fromkeys(("faults", "server_faults", "newcomers", "schedulers", "notices"), 0)
    job = Job(workers, servers, samples=rounds * 2 * workers, batch=2 * workers, epochs=10, residuals=True, **quiet)
    world = Minutes(job, 1, minutes)
    world.run(limit=50_000_000)
    world.check()
    assert not world.due, f"the job ended after {world.now / 60:.0f} minutes"
    assert world.happened.keys() == {*KINDS, "comings"} and len(world.views) > minutes
