"""How often, where and when lost workers are replaced: the rules alone, also for random losses."""

from __future__ import annotations

import math
import random

import pytest

from launch.run.replacements import FIRST_SECONDS, LIVED_SECONDS, LONGEST_SECONDS, Replacement, Replacements, Seat

OWN = [Seat("a", 1, 0.0), Seat("b", 1, 0.0)]  # full hosts


def lose(replacements: Replacements, task: int, host: str, now: float, seats=OWN) -> float | None:
    """A worker is lost there: for how long its replacement waits."""
    replacements.lost(task, host, now)
    planned = replacements.plan(task, host, seats, now)
    return planned and planned.at - now


def test_the_wait_doubles_with_each_loss_on_the_host():
    replacements, waits = Replacements(20), []
    for task in range(9):
        waits.append(lose(replacements, task, "a", now=100.0 * task))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert lose(replacements, 9, "b", 900.0) == 1, "each host has its own"


def test_the_wait_begins_again_once_for_each_replacement_that_lives_long_on_its_own_host():
    replacements = Replacements(20)
    for task in range(3):
        lose(replacements, task, "a", 0.0)
    lose(replacements, 20, "b", 0.0)
    replacements.due(4.0)
    replacements.started(10, "a", 4.0)
    assert lose(replacements, 3, "a", 4.0 + LIVED_SECONDS - 0.125) == 8
    assert lose(replacements, 4, "a", 4.0 + LIVED_SECONDS) == 1
    assert lose(replacements, 5, "a", 5.0 + LIVED_SECONDS) == 2, "it has lived long for once"
    replacements.started(11, "a", 100.0)
    assert lose(replacements, 11, "a", 100.0 + LIVED_SECONDS) == 1, "it was lost after it had lived long"
    replacements.started(12, "a", 200.0)
    assert lose(replacements, 12, "a", 201.0) == 2
    assert lose(replacements, 21, "b", 1000.0) == 2, "nothing has lived there"


def test_the_own_host_comes_first_then_the_one_with_the_fewest_workers_that_has_room():
    def host(own, *seats):
        planned = Replacements(1).plan(7, own, seats, 0.0)
        return planned and planned.host

    free = [Seat("b", 3, 1.0), Seat("c", 1, 2.0), Seat("d", 1, math.inf), Seat("e", 0, 0.0)]
    assert host("a", *free, Seat("a", 9, -4.0)) == "a", "the lost worker's place is free, though it has more than fit"
    assert host("a", *free) == "c"
    assert host("a", Seat("e", 0, 0.0)) is None
    assert host("a") is None


def test_no_more_than_the_most_and_those_that_are_dropped_do_not_count():
    replacements = Replacements(2)
    assert replacements.plan(0, "a", OWN, 0.0) == Replacement(0, "a", 1, FIRST_SECONDS)
    assert replacements.plan(1, "b", OWN, 0.0) == Replacement(1, "b", 2, FIRST_SECONDS)
    assert replacements.used_up and replacements.plan(2, "b", OWN, 0.0) is None
    assert [each.task for each in replacements.drop("a")] == [0]
    assert not replacements.used_up and [each.task for each in replacements.waiting] == [1]
    assert replacements.due(0.5) == [] and replacements.next_at == FIRST_SECONDS
    assert [each.task for each in replacements.due(1.0)] == [1]
    assert replacements.drop() == [] and replacements.next_at == math.inf
    assert replacements.plan(2, "b", OWN, 0.0) and replacements.used_up
    assert Replacements(0).used_up


class Hosts:
    """Hosts with workers that are lost at random, and a second opinion on each wait."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.most = self.random.randrange(12)
        self.replacements = Replacements(self.most)
        self.slots = {name: self.random.choice([1, 2, 3, math.inf]) for name in "abcd"}
        first = "aabbccd"
        self.workers = {n: name for n, name in enumerate(first) if first[:n].count(name) < self.slots[name]}
        self.now, self.dead = 0.0, set()
        self.begun: dict[int, float] = {}  # by task of each replacement: its start
        self.events: list[tuple[float, str, str]] = []  # time, "loss" or "long", host

    def seats(self) -> list[Seat]:
        there = [*self.workers.values(), *(each.host for each in self.replacements.waiting)]
        living = [name for name in self.slots if name not in self.dead]
        return [Seat(name, there.count(name), self.slots[name] - there.count(name)) for name in living]

    def expected_wait(self, host: str) -> float:
        """From the whole history: the losses there since a replacement was there for long."""
        found = 0
        for time, what, where in sorted(self.events):
            if where == host and time <= self.now:
                found = 0 if what == "long" else found + 1
        return min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** max(0, found - 1))

    def lose(self, task: int) -> None:
        host = self.workers.pop(task)
        if task in self.begun and self.now - self.begun[task] < LIVED_SECONDS:
            self.events.remove((self.begun[task] + LIVED_SECONDS, "long", host))
        self.replacements.lost(task, host, self.now)
        self.events.append((self.now, "loss", host))
        self.plan(task, host)

    def plan(self, task: int, host: str) -> None:
        usable, seats = host not in self.dead, self.seats()
        planned = self.replacements.plan(task, host, seats, self.now)
        if planned is None:
            assert self.replacements.used_up or (not usable and not any(each.free >= 1 for each in seats))
            return
        assert planned.host == host if usable else planned.host not in self.dead
        assert planned.at - self.now == pytest.approx(self.expected_wait(planned.host))

    def kill_host(self, host: str) -> None:
        self.dead.add(host)
        for each in self.replacements.drop(host):
            self.plan(each.task, host)
        for task in [task for task, name in self.workers.items() if name == host]:
            self.lose(task)

    def step(self) -> None:
        self.now += self.random.choice([0.25, 1.0, 7.0, 65.0])
        for each in self.replacements.due(self.now):
            task = 100 + len(self.begun)
            self.workers[task], self.begun[task] = each.host, self.now
            self.events.append((self.now + LIVED_SECONDS, "long", each.host))
            self.replacements.started(task, each.host, self.now)
        what = self.random.random()
        if what < 0.6 and self.workers:
            self.lose(self.random.choice(sorted(self.workers)))
        elif what < 0.65:
            self.kill_host(self.random.choice("abcd"))
        assert len(self.begun) + len(self.replacements.waiting) <= self.most
        assert not any(name in self.dead for name in self.workers.values())
        assert all(each.free >= 0 for each in self.seats()), "never more workers than fit"


def test_random_losses_keep_the_rules():
    started = 0
    for seed in range(500):
        hosts = Hosts(seed)
        for _ in range(40):
            hosts.step()
        started += len(hosts.begun)
    assert started > 1000, "most of them were replaced"
