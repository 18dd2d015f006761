"""A large elastic job for hours of simulated time, with a fault in each minute; see simulation/world.py."""

import random
from collections import Counter

import pytest

from tests.kvstore.simulation.job import Job
from tests.kvstore.simulation.world import World

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
        pytest.param(20, 20, 8, 25, marks=pytest.mark.thorough),
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
