"""Dealing an epoch to workers that make steps of their own; test_async_schedules.py has it with servers."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.data.async_deal import AsyncDealing
from dmltrain.data.deal import Dealing
from dmltrain.data.parts import Epoch, Shared


def steps(dealing, member, clock):
    return [(number, positions.tolist()) for number, positions in dealing.steps_between(member, clock, dealing.end)]


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 4))
def test_without_a_change_each_worker_has_the_samples_of_a_plain_job(samples, each, members):
    dealing, plain = AsyncDealing(samples, each, each * members, range(members), 7), []
    rounds = Dealing(samples, each * members, range(members))
    while not rounds.finished:
        plain.append([rounds.positions_of(member).tolist() for member in range(members)])
        rounds.committed(range(members))
    assert dealing.end == 7 + len(plain)
    for member in range(members):
        own = [(8 + number, row[member]) for number, row in enumerate(plain) if row[member]]
        assert steps(dealing, member, 7) == own


def test_who_is_in_the_middle_of_a_step_keeps_it_and_the_rest_is_divided_anew():
    before = AsyncDealing(20, 2, 6, [0, 1, 2])
    assert steps(before, 1, 0) == [(1, [1, 4]), (2, [7, 10]), (3, [13, 16]), (4, [19])]
    after = before.after([0, 2], {0: 2, 1: 1, 2: 0}, begun=[2], start=2)
    assert after.done == 6 and after.step == 1
    assert after.carried[2][0] == 1 and after.carried[2][1].tolist() == [2, 5]
    assert after.left.tolist() == [7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert steps(after, 0, 2) == [(3, [7, 10]), (4, [12, 14]), (5, [16, 18])]
    assert steps(after, 2, 0) == [(1, [2, 5]), (3, [8, 11]), (4, [13, 15]), (5, [17, 19])]
    assert after.step_at(0) == 1 and after.step_at(4) == 3


def test_of_whom_nothing_is_known_all_samples_come_again_and_a_finished_epoch_has_none():
    after = AsyncDealing(12, 2, 4, [0, 1]).after([0], {0: 1}, begun=[], start=1)
    assert after.left.tolist() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    dealing = AsyncDealing(10, 2, 4, [0, 1], clock=3, done=4)
    assert not dealing.finished and dealing.left.tolist() == [4, 5, 6, 7, 8, 9]
    dealing.finish()
    assert dealing.finished and dealing.next_of(0, 3) is None and dealing.end == 3
    assert np.array_equal(dealing.part(1, 3, Epoch(Shared(10, 2, 2, 10), 3, 0)).order, [])


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_newcomer_goes_on_from_the_state(samples, each, first, second, begun):
    before = AsyncDealing(samples, each, 2 * each, [0, 1])
    before = before.after([0, 1, 4], {0: first, 1: second}, [0] if begun else [], start=max(first + begun, second))
    taken = AsyncDealing.of_state(json.loads(json.dumps(before.state())))
    for member in (0, 1, 4):
        clock = before.before(member)
        assert steps(taken, member, clock) == steps(before, member, clock)
    assert (taken.done, taken.end, taken.batch) == (before.done, before.end, before.batch)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_what_a_worker_trains_is_what_its_steps_have(samples, each, clock, begun):
    dealing = AsyncDealing(samples, each, 2 * each, [0, 1]).after(
        [1], {0: 0, 1: clock}, [1] if begun else [], clock + 1
    )
    epoch = Epoch(Shared(samples, 2, each, samples), 3, 0)
    part = dealing.part(1, clock, epoch)
    own = [positions for _, positions in dealing.steps_between(1, clock, dealing.end)]
    assert part.steps == len(own)
    for step, positions in enumerate(own):
        start, stop = part.bounds(step)
        assert part.order[start:stop].tolist() == epoch.samples_at(positions).tolist()
        assert part.words(start, stop).tolist() == epoch.words_at(positions).tolist()
