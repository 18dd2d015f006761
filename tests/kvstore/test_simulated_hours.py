"""A large elastic job for hours of simulated time, with a fault in each minute; see simulated.py."""

import random
from collections import Counter

import pytest

from tests.kvstore.simulated import Job, World

# What happens next, and how often: more replacements come than workers are lost, since some leave.
KINDS = {"faults": 6, "comings": 9, "server_faults": 1, "ends": 2, "leavings": 2}


class Minutes(World):
    """Each minute something happens, until `minutes` have passed."""

    def __init__(self, job, seed, minutes):
        super().__init__(job, seed)
        chance = random.Random(f"minutes {seed}")
        self.due = chance.choices(list(KINDS), list(KINDS.values()), k=minutes)
        self.happened = Counter()

    def pass_time(self):
        super().pass_time()
        while self.due and self.now >= 60.0 * (1 + self.happened.total()):
            kind = self.due.pop(0)
            getattr(self, kind).append(self.events)
            self.happened[kind] += 1


@pytest.mark.parametrize(
    ("minutes", "workers", "servers", "rounds"),
    [
        pytest.param(20, 20, 8, 25, marks=pytest.mark.thorough),
        pytest.param(240, 99, 20, 280, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
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
    assert world.happened.keys() == KINDS.keys() and len(world.views) > minutes / 2
