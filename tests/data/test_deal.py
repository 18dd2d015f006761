"""Dealing an epoch: a plain job's assignment without faults, and each position exactly once whatever happens."""

import copy
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.data.assignment import partition
from dmltrain.data.assignment.async_deal import AsyncDealing
from dmltrain.data.assignment.deal import Dealing
from dmltrain.data.assignment.parts import Epoch, Shared

shuffles = st.sampled_from(sorted(partition.SHUFFLES))


def commit(dealing, members, used):
    """Commit the present round in a view of these members; `used` counts how often each position was used."""
    for member in members:
        np.add.at(used, dealing.positions_of(member), 1)
    dealing.committed(members)
    assert dealing.done == used.sum()


@given(st.integers(1, 90), st.integers(1, 20), st.integers(1, 4), st.integers(0, 9))
def test_after_skipped_steps_comes_what_a_plain_job_has_left(samples, batch, members, steps):
    dealing, whole = (Dealing(samples, batch, range(members)) for _ in range(2))
    dealing.skip(steps)
    for _ in range(steps):
        if not whole.finished:
            whole.committed(range(members))
    assert dealing.step == whole.step if not whole.finished else dealing.finished
    while not whole.finished:
        assert dealing.round.positions.tolist() == whole.round.positions.tolist()
        assert dealing.positions_of(0).tolist() == whole.positions_of(0).tolist()
        for each in (dealing, whole):
            each.committed(range(members))
    assert dealing.finished


def finish(dealing, used):
    rounds = 0
    while not dealing.finished:
        commit(dealing, dealing.members, used)
        rounds += 1
    return rounds


# without faults


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 6), st.integers(1, 20), shuffles)
def test_without_faults_it_is_todays_assignment(count, samples, workers, batch, shuffle):
    shared = Shared(count, workers, batch, max(count, samples), shuffle)
    dealing, epoch = Dealing(shared.samples, batch * workers, range(workers)), Epoch(shared, 5, 2)
    parts = [shared.part(rank, 5, 2) for rank in range(workers)]
    whole = [dealing.part(rank, epoch) for rank in range(workers)]
    for step in range(shared.steps):
        assert not dealing.finished and dealing.step == dealing.rounds == step
        assert dealing.round.dealt == sum(shared.step_sizes(step))
        for rank, (part, same) in enumerate(zip(whole, parts, strict=True)):
            assert part.bounds(step) == same.bounds(step)
            expected = same.order[slice(*same.bounds(step))]
            assert np.array_equal(epoch.samples_at(dealing.positions_of(rank)), expected)
            assert np.array_equal(part.words(*part.bounds(step)), same.words(*same.bounds(step)))
        dealing.committed(range(workers))
    assert dealing.finished and dealing.done == shared.samples and not len(dealing.returned)
    for part, same in zip(whole, parts, strict=True):
        assert np.array_equal(part.order, same.order) and part.order.dtype == same.order.dtype
        assert (part.steps, part.batch_size, part.window) == (same.steps, same.batch_size, same.window)


# with faults


@st.composite
def histories(draw):
    """An epoch of 4 members at most, and when which members are lost: before a commit, between a commit and the next
    round's pushes, and several views in a row."""
    members = draw(st.integers(1, 4))
    samples, batch = draw(st.integers(1, 60)), draw(st.integers(1, 12))
    losses = draw(st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 3), min_size=1, max_size=2)))
    return samples, batch, members, losses


def drawn_shares(data, members, batch, each=0):
    """Of a round, perhaps none."""
    size = each * len(members) or batch
    if size < len(members) or data.draw(st.booleans()):
        return ()
    shares, rest = [], size - len(members)
    for _ in range(len(members) - 1):
        shares.append(1 + data.draw(st.integers(0, rest)))
        rest -= shares[-1] - 1
    return (*shares, 1 + rest)


@given(histories(), st.data())
def test_each_position_once_whatever_happens(history, data):
    """Members are lost and come back, and shares change, before a commit and with it."""
    samples, batch, members, losses = history
    each = data.draw(st.sampled_from([0, 3]))
    left, may_come_back = range(members), data.draw(st.booleans())
    shares = drawn_shares(data, left, batch, each)
    dealing, used, rounds = Dealing(samples, batch, left, shares, each), np.zeros(samples, int), 0
    while not dealing.finished:
        assert dealing.round.dealt == min(each * len(left) or batch, samples - dealing.done)
        if shares and dealing.round.dealt == sum(shares):
            assert tuple(len(dealing.positions_of(member)) for member in left) == shares
        for gone in losses.get(rounds, []):
            back = may_come_back and data.draw(st.booleans())
            left = [member for member in range(members) if member != gone and (back or member in left)] or [left[0]]
            shares = drawn_shares(data, left, batch, each)
            if data.draw(st.booleans()):  # it knows of the view before the round is complete, or learns it with it
                dealing.enter(left, shares)
        assert np.all(np.diff(dealing.returned) > 0), "these are in ascending order"
        np.add.at(used, np.concatenate([dealing.positions_of(member) for member in left]), 1)
        dealing.committed(left, shares)
        assert dealing.done == used.sum() and dealing.step == dealing.done // batch
        rounds += 1
    assert np.array_equal(used, np.ones(samples))
    assert dealing.rounds == rounds
    assert may_come_back or each or rounds <= -(-samples // batch) + 2 * members


def test_shares_are_spread_over_the_round_or_are_so_many_samples_for_each():
    dealing = Dealing(24, 8, [0, 2, 5], [4, 1, 3])
    assert [dealing.positions_of(member).tolist() for member in (0, 2, 5)] == [[0, 2, 5, 7], [3], [1, 4, 6]]
    assert dealing.part(0, Epoch(Shared(24, 1, 1, 24), 5, 2)).batch_size == 4
    short = Dealing(8, 32, [0, 1, 2], [16, 8, 8])  # is divided in the same proportions
    assert [len(short.positions_of(member)) for member in (0, 1, 2)] == [4, 2, 2]
    for shares in ([3, 2], [2, 2, 2, 2], [5, 5, 5]):
        with pytest.raises(ValueError, match=r"8 samples .* \(0, 1, 2\)"):
            Dealing(24, 8, [0, 1, 2], shares)
    dealing = Dealing(30, 8, [0, 1], (), 4)
    dealing.committed([0])
    assert dealing.returned.tolist() == [] and dealing.round.positions.tolist() == [1, 3, 5, 7]
    dealing.committed([0, 1, 2])
    assert (dealing.round.dealt, dealing.step) == (12, 1), "a plain job's step has 8 samples"


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 60))
def test_equal_shares_are_no_shares(members, share, samples):
    with_shares = Dealing(samples, share * members, range(members), [share] * members)
    without = Dealing(samples, share * members, range(members))
    while not without.finished:
        for member in range(members):
            assert np.array_equal(with_shares.positions_of(member), without.positions_of(member))
        for each in (with_shares, without):
            each.committed(range(members), each.division.shares)
    assert with_shares.finished


@given(histories(), shuffles, st.data())
def test_a_part_is_what_its_rounds_say(history, shuffle, data):
    samples, batch, members, losses = history
    each = data.draw(st.sampled_from([0, 3]))
    dealing = Dealing(samples, batch, range(members), (), each)
    epoch = Epoch(Shared(samples, 1, 1, samples, shuffle), 5, 2)
    left, words, shares = range(members), epoch.words(0, samples), ()
    while not dealing.finished:
        if dealing.rounds in losses:
            left = [member for member in left if member not in losses[dealing.rounds]] or left[:1]
            shares = drawn_shares(data, left, batch, each)
            dealing.enter(left, shares)
        if dealing.rounds % 3 == 0 or dealing.rounds in losses:
            _check_parts(dealing, epoch, words)
        dealing.committed(left, shares)
    assert dealing.part(left[0], epoch).steps == 0


def _check_parts(dealing, epoch, words):
    """Those of all members, from the present round to the last."""
    ahead = copy.copy(dealing)
    parts, step = {member: dealing.part(member, epoch) for member in dealing.members}, 0
    while not ahead.finished:
        for member, part in parts.items():
            start, stop = part.bounds(step)
            positions = ahead.positions_of(member)
            assert np.array_equal(part.order[start:stop], epoch.samples_at(positions))
            assert np.array_equal(part.words(start, stop), words[positions]) and stop - start <= part.batch_size
        ahead.committed(ahead.members, ahead.division.shares)
        step += 1
    assert {part.steps for part in parts.values()} == {step}
    assert all(part.bounds(step - 1)[1] == len(part.order) for part in parts.values())


def test_what_comes_back_is_dealt_first_to_who_is_left():
    dealing = Dealing(20, 6, [0, 1, 2])
    dealing.committed([0, 1, 2])
    assert dealing.round.positions.tolist() == [6, 7, 8, 9, 10, 11]
    dealing.enter([0, 2])
    assert dealing.positions_of(1).tolist() == [7, 10], "a carried round stays as it was dealt"
    assert dealing.returned.tolist() == [7, 10]
    dealing.committed([0, 2])
    assert dealing.done == 10 and dealing.round.positions.tolist() == [7, 10, 12, 13, 14, 15]
    assert dealing.positions_of(0).tolist() == [7, 12, 14] and dealing.positions_of(2).tolist() == [10, 13, 15]
    assert not len(dealing.positions_of(1)) and not len(dealing.returned)
    dealing = Dealing(20, 6, range(4))
    dealing.committed([0, 2])
    assert dealing.round.positions.tolist() == [1, 3, 5, 6, 7, 8]
    dealing.enter([2])
    assert dealing.returned.tolist() == [1, 5, 7], "of several, in ascending order"


def test_a_removal_in_the_last_round_makes_another_and_who_joins_has_no_part_of_a_carried_one():
    dealing, used = Dealing(10, 6, [0, 1, 2]), np.zeros(10, int)
    commit(dealing, [0, 1, 2], used)
    dealing.enter([1, 2])
    commit(dealing, [1, 2], used)
    assert not dealing.finished and dealing.round.positions.tolist() == [6, 9]
    commit(dealing, [1], used)  # and another in that one
    assert dealing.round.positions.tolist() == [9]
    assert finish(dealing, used) == 1 and np.all(used == 1)
    # all of whom a round was dealt to are lost but those whose part is empty: nothing of it is committed
    dealing, used = Dealing(1, 6, [0, 1]), np.zeros(1, int)
    assert not len(dealing.positions_of(1))
    commit(dealing, [1], used)
    assert dealing.done == 0 and dealing.positions_of(1).tolist() == [0]
    assert finish(dealing, used) == 1 and np.all(used == 1)
    dealing, used = Dealing(12, 6, [0, 2]), np.zeros(12, int)
    dealing.enter([0, 1, 2])
    epoch = Epoch(Shared(12, 1, 1, 12), 5, 2)
    assert not len(dealing.positions_of(1)) and dealing.part(1, epoch).bounds(0) == (0, 0)
    assert dealing.part(0, epoch).bounds(0) == (0, 3) and dealing.part(0, epoch).batch_size == 3
    commit(dealing, [0, 1, 2], used)
    assert dealing.positions_of(1).tolist() == [7, 10]
    finish(dealing, used)
    assert np.all(used == 1)


def test_an_epoch_that_is_finished_commits_no_more_and_only_members_have_parts():
    dealing = Dealing(3, 4, [0])
    dealing.committed([0])
    with pytest.raises(ValueError, match="all 3 samples"):
        dealing.committed([0])
    with pytest.raises(ValueError):
        Dealing(3, 4, [0, 2]).part(1, Epoch(Shared(3, 1, 1, 3), 5, 2))


# with the batches of the training loop


def test_a_new_member_deals_as_the_others_do():
    """From each round of an epoch with a loss and a return."""
    for at in range(12):
        dealing = Dealing(53, 10, [0, 1, 2])
        for number in range(at):
            if not dealing.finished:
                dealing.committed([0, 2] if number in (2, 3) else [0, 1, 2])
        dealing.enter([0, 2], [7, 3] if at % 2 else [])
        copied = Dealing.of_state(json.loads(json.dumps(dealing.state())))
        assert copied.returned.tolist() == dealing.returned.tolist() and copied.division == dealing.division
        while not dealing.finished:
            assert (copied.step, copied.rounds, copied.finished) == (dealing.step, dealing.rounds, False)
            for member in (0, 1, 2):
                assert copied.positions_of(member).tolist() == dealing.positions_of(member).tolist()
            for each in (dealing, copied):
                each.committed([0, 1, 2])
        assert copied.finished


# Dealing an epoch to workers that make steps of their own; test_async_schedules.py has it with servers


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
    before = AsyncDealing(samples, each, 2 * each, [0, 1])
    dealing = before.after([1], {0: 0, 1: clock}, [1] if begun else [], clock + 1)
    epoch = Epoch(Shared(samples, 2, each, samples), 3, 0)
    part = dealing.part(1, clock, epoch)
    own = [positions for _, positions in dealing.steps_between(1, clock, dealing.end)]
    assert part.steps == len(own)
    for step, positions in enumerate(own):
        start, stop = part.bounds(step)
        assert part.order[start:stop].tolist() == epoch.samples_at(positions).tolist()
        assert part.words(start, stop).tolist() == epoch.words_at(positions).tolist()


# The kvstore of an elastic job changes in the middle of an epoch: what is left is dealt in the other way


def rounds(dealing, count, draw, used):
    """Make so many rounds, of which members are lost; who is left."""
    members = list(dealing.members)
    for _ in range(count):
        if dealing.finished:
            break
        if len(members) > 1 and draw.random() < 0.2:
            members.remove(draw.choice(members))
            dealing.enter(members)
        used += [position for member in members for position in dealing.positions_of(member).tolist()]
        dealing.committed(members)
    return members


def own_steps(dealing, draw, used):
    """Each member makes some of its steps; the deal after it, with who was in the middle of one, and all clocks."""
    clocks, begun = {}, []
    for member in dealing.members:
        steps = [*dealing.steps_between(member, dealing.before(member), dealing.end)]
        made = draw.randint(0, len(steps))
        used += [position for _, positions in steps[:made] for position in positions.tolist()]
        clocks[member] = steps[made - 1][0] if made else dealing.before(member)
        if made < len(steps) and draw.random() < 0.5:
            begun.append(member)
    start = max(clock + (member in begun) for member, clock in clocks.items())
    return dealing.after(dealing.members, clocks, begun, start), clocks


@pytest.mark.parametrize("start", range(40))
def test_each_position_once_whatever_comes_between(start):
    for seed in range(start * 25, start * 25 + 25):
        draw, used = random.Random(seed), []
        samples, each, workers = draw.randint(1, 90), draw.randint(1, 5), draw.randint(1, 4)
        batch, members = each * workers, list(range(workers))
        together = Dealing(samples, batch, members)
        clock = 0
        for _ in range(draw.randint(1, 3)):
            members = rounds(together, draw.randint(0, 4), draw, used)
            assert sorted([*used, *together.rest.tolist()]) == list(range(samples)), seed
            clock += together.rounds
            apart = AsyncDealing.of_rest(samples, each, batch, members, clock, together.rest)
            assert (apart.done, apart.clock) == (len(used), clock)
            for _ in range(draw.randint(0, 2)):
                apart, _ = own_steps(apart, draw, used)
            apart, clocks = own_steps(apart, draw, used)
            apart.hold_back()
            assert apart.count == samples - len(used) and apart.end == apart.clock
            for member in members:
                step = apart.next_of(member, clocks[member])
                assert (step is not None) == (member in apart.carried)
                used += step[1].tolist() if step else []
            clock = apart.end
            together = Dealing.of_rest(samples, batch, members, apart.held)
            assert together.done == len(used) and together.step == len(used) // batch
        rounds(together, samples + 1, draw, used)
        assert together.finished and sorted(used) == list(range(samples)), seed


def test_if_the_change_is_given_up_what_was_held_back_is_dealt_again():
    dealing = AsyncDealing(12, 2, 4, [0, 1])
    dealing = dealing.after([0, 1], {0: 1, 1: 1}, begun=[1], start=2)
    dealing.hold_back()
    assert dealing.held.tolist() == [4, 6, 8, 9, 10, 11] and dealing.next_of(0, 1) is None
    assert dealing.next_of(1, 1)[1].tolist() == [5, 7]
    after = dealing.after([0], {0: 2}, begun=[], start=2)  # worker 1 is lost in its step, and nothing of it is known
    assert after.left.tolist() == [4, 5, 6, 7, 8, 9, 10, 11] and not len(after.held) and after.done == 4


def test_only_what_a_loss_gave_back_is_dealt_again_and_a_new_member_goes_on_from_the_state():
    dealing = Dealing.of_rest(30, 4, [0, 1], np.arange(9, 30, 2))
    assert dealing.returned.tolist() == [] and dealing.positions_of(1).tolist() == [11, 15]
    dealing.enter([0])
    assert dealing.returned.tolist() == [11, 15] and len(dealing.rest) == 11
    dealing.committed([0])
    assert dealing.positions_of(0).tolist() == [11, 15, 17, 19] and dealing.done == 21
    dealing = Dealing.of_rest(30, 4, [0, 1], np.arange(9, 30, 2))
    dealing.committed([0])
    taken = Dealing.of_state(json.loads(json.dumps(dealing.state())))
    while not dealing.finished:
        assert taken.positions_of(0).tolist() == dealing.positions_of(0).tolist() and taken.done == dealing.done
        taken.committed([0])
        dealing.committed([0])
    assert taken.finished and taken.done == 30


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_a_part_of_the_rest_is_what_its_rounds_say(shuffle):
    positions = np.array([1, 2, 5, 6, 7, 8, 11, 12, 13, 19, 20, 21])
    dealing, epoch = Dealing.of_rest(22, 4, [0, 3], positions), Epoch(Shared(22, 2, 2, 22, shuffle=shuffle), 3, 0)
    _check_parts(dealing, epoch, epoch.words(0, 22))
    for expected in ([2, 6], [8, 12], [19, 21]):
        assert dealing.positions_of(3).tolist() == expected
        dealing.committed([0, 3])
    assert dealing.finished
