"""How often, where and when lost workers are replaced: the rules alone."""

import math

from launch.run.replacements import LIVED_SECONDS, Replacements, Seat

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
