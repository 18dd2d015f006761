"""The kvstore changes at random moments between steps of one worker and rounds of all, while workers are lost and come:
real servers and dealings, random orders of all messages. test_async_schedules.py has the steps of one worker."""

import pytest

from dmltrain.data.async_deal import AsyncDealing
from dmltrain.data.deal import Dealing
from dmltrain.kvstore import types
from dmltrain.kvstore.kind import Kind
from tests.kvstore.test_async_schedules import Job, check, kind_with
from tests.tiers import seed_ranges

TOGETHER = Kind(types.find("dist_sync"), 0.0)


class ChangingJob(Job):
    """`changes`: so many are still to come. `drains`: the newest view does, until all hold round `until` if it is one
    of rounds. `entered`: views -> (members, together)."""

    def __init__(self, seed):
        super().__init__(seed)
        self.changes, self.made = self.random.randint(1, 6), 0
        self.drains, self.until = False, 0
        self.entered = {self.view: (self.members, False)}

    @property
    def together(self):
        return self.kind is TOGETHER

    def possible(self):
        found = super().possible()
        leader = min((each for each in self.workers.values() if not each.is_new), key=lambda each: each.rank)
        between = leader.view == self.view and leader.step is None and not leader.told and not leader.rests
        if self.changes and not self.drains and between and self.random.random() < 0.5:
            found.append(self.drain)
        if self.drains and self.rest_together:
            found.remove(self.end_epoch)
            if not any(frames for server in self.servers for frames in server.frames.values()):
                found.append(self.flip)  # workers have waited for the answers
        return found

    def drain(self):
        self.change((), drains=True)
        self.until = max(each.clock for each in self.workers.values()) + 1

    def flip(self):
        self.changes, self.made = self.changes - 1, self.made + 1
        self.kind = kind_with(self.staleness) if self.together else TOGETHER
        self.change(())

    def change(self, lost, drains=False):
        if self.together:
            self.complete_late()
        self.drains = drains
        super().change(lost)
        self.entered[self.view] = self.members, self.together

    def complete_late(self):
        """A round that one of those who are left holds is one of all."""
        last = max((each.clock for each in self.workers.values() if not each.is_new), default=0)
        for worker in self.workers.values():
            if worker.step and worker.step[0] == last:
                self.complete(worker)

    def fault(self):
        if self.together:  # here nobody joins
            self.faults -= 1
            self.lose(self.random.choice(sorted(self.workers)))
        else:
            super().fault()

    def enter(self, worker):
        before = self.entered[worker.view][1]
        super().enter(worker)
        members, together = self.entered[worker.view]
        if together and not before and not worker.is_new:
            assert worker.step is None and worker.clock == worker.dealing.end
            worker.dealing = Dealing.of_rest(self.samples, self.batch, members, worker.dealing.held)
        elif before and not together:
            assert worker.step is None
            rest = worker.dealing.rest
            worker.dealing = AsyncDealing.of_rest(self.samples, self.each, self.batch, members, worker.clock, rest)
        elif together:
            worker.dealing.enter(members)
        if together:
            worker.told = False
            if worker.step:
                self.again(worker)

    def share(self):
        super().share()
        if self.drains:
            for worker in self.workers.values():
                worker.dealing.hold_back()

    def begin(self, worker):
        if not self.together:
            return super().begin(worker)
        if worker.dealing.finished or (self.drains and worker.clock == self.until):
            worker.rests = True
            return None
        worker.step = worker.clock + 1, worker.dealing.positions_of(worker.rank)
        return self.again(worker)

    def complete(self, worker):
        super().complete(worker)
        if self.together:
            worker.dealing.committed(self.entered[worker.view][0])

    def end_epoch(self):
        if not self.together:
            return super().end_epoch()
        self.epoch += 1
        for worker in self.workers.values():
            worker.dealing, worker.rests = Dealing(self.samples, self.batch, self.members), False
        return None


@pytest.mark.parametrize("seeds", seed_ranges(150, 600, 100_000))
def test_each_sample_is_used_once_whatever_happens(seeds):
    made = 0
    for seed in seeds:
        job = ChangingJob(seed)
        job.run()
        if job.workers:
            check(job)
        made += job.made
    assert made > len(seeds), "few changes were made"
