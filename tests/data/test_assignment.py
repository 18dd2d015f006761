"""The assignment of an epoch: a plain job's without faults, and each position exactly once whatever happens."""

import copy
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.data.assignment import partition
from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.parts import Epoch, Shared
from dmltrain.data.assignment.sync_assignment import SyncAssignment

shuffles = st.sampled_from(sorted(partition.SHUFFLES))


def commit(assignment, members, used):
    """Commit the present round in a view of these members; `used` counts how often each position was used."""
    for member in members:
        np.add.at(used, assignment.positions_of(member), 1)
    assignment.committed(members)
    assert assignment.done == used.sum()


@given(st.integers(1, 90), st.integers(1, 20), st.integers(1, 4), st.integers(0, 9))
def test_after_skipped_steps_comes_what_a_plain_job_has_left(samples, batch, members, steps):
    assignment, whole = (SyncAssignment(samples, batch, range(members)) for _ in range(2))
    assignment.skip(steps)
    for _ in range(steps):
        if not whole.finished:
            whole.committed(range(members))
    assert assignment.step == whole.step if not whole.finished else assignment.finished
    while not whole.finished:
        assert assignment.round.positions.tolist() == whole.round.positions.tolist()
        assert assignment.positions_of(0).tolist() == whole.positions_of(0).tolist()
        for each in (assignment, whole):
            each.committed(range(members))
    assert assignment.finished


def finish(assignment, used):
    rounds = 0
    while not assignment.finished:
        commit(assignment, assignment.members, used)
        rounds += 1
    return rounds


# without faults


def with_local_steps(samples, batch, members, each, steps):
    """`each`: the samples of a member in a step; so many `steps` of each make a round."""
    return SyncAssignment(samples, batch, members, (), each * steps, steps)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 6), st.integers(1, 20), st.integers(1, 5), shuffles)
def test_without_faults_it_is_todays_assignment(count, samples, workers, batch, local, shuffle):
    shared = Shared(count, workers, batch, max(count, samples), shuffle)
    step_size, epoch = batch * workers, Epoch(shared, 5, 2)
    assignment = with_local_steps(shared.samples, step_size, range(workers), batch, local)
    parts = [shared.part(rank, 5, 2) for rank in range(workers)]
    whole = [assignment.part(rank, epoch) for rank in range(workers)]
    for step in range(shared.steps):
        made = step - assignment.steps
        assert not assignment.finished and assignment.step_after(made) == step
        assert assignment.round.size == sum(map(sum, map(shared.step_sizes, range(step - made, step - made + local))))
        for rank, (part, same) in enumerate(zip(whole, parts, strict=True)):
            assert part.bounds(step) == same.bounds(step)
            expected = same.order[slice(*same.bounds(step))]
            assert np.array_equal(epoch.samples_at(assignment.step_of(rank, made)), expected)
            assert np.array_equal(part.words(*part.bounds(step)), same.words(*same.bounds(step)))
        if made + 1 == assignment.round.steps_of(0):
            assignment.committed(range(workers))
    assert assignment.finished and assignment.done == shared.samples and not len(assignment.returned)
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
    assignment, used, rounds = SyncAssignment(samples, batch, left, shares, each), np.zeros(samples, int), 0
    while not assignment.finished:
        assert assignment.round.size == min(each * len(left) or batch, samples - assignment.done)
        if shares and assignment.round.size == sum(shares):
            assert tuple(len(assignment.positions_of(member)) for member in left) == shares
        for gone in losses.get(rounds, []):
            back = may_come_back and data.draw(st.booleans())
            left = [member for member in range(members) if member != gone and (back or member in left)] or [left[0]]
            shares = drawn_shares(data, left, batch, each)
            if data.draw(st.booleans()):  # it knows of the view before the round is complete, or learns it with it
                assignment.enter(left, shares)
        assert np.all(np.diff(assignment.returned) > 0), "these are in ascending order"
        np.add.at(used, np.concatenate([assignment.positions_of(member) for member in left]), 1)
        assignment.committed(left, shares)
        done = assignment.done + (batch - 1 if assignment.finished else 0)  # the last step may have fewer samples
        assert assignment.done == used.sum() and assignment.step == done // batch
        rounds += 1
    assert np.array_equal(used, np.ones(samples))
    assert assignment.steps == rounds
    assert may_come_back or each or rounds <= -(-samples // batch) + 2 * members


def test_shares_are_spread_over_the_round_or_are_so_many_samples_for_each():
    assignment = SyncAssignment(24, 8, [0, 2, 5], [4, 1, 3])
    assert [assignment.positions_of(member).tolist() for member in (0, 2, 5)] == [[0, 2, 5, 7], [3], [1, 4, 6]]
    assert assignment.part(0, Epoch(Shared(24, 1, 1, 24), 5, 2)).batch_size == 4
    short = SyncAssignment(8, 32, [0, 1, 2], [16, 8, 8])  # is divided in the same proportions
    assert [len(short.positions_of(member)) for member in (0, 1, 2)] == [4, 2, 2]
    for shares in ([3, 2], [2, 2, 2, 2], [5, 5, 5]):
        with pytest.raises(ValueError, match=r"8 samples .* \(0, 1, 2\)"):
            SyncAssignment(24, 8, [0, 1, 2], shares)
    assignment = SyncAssignment(30, 8, [0, 1], (), 4)
    assignment.committed([0])
    assert assignment.returned.tolist() == [] and assignment.round.positions.tolist() == [1, 3, 5, 7]
    assignment.committed([0, 1, 2])
    assert (assignment.round.size, assignment.step) == (12, 1), "a plain job's step has 8 samples"


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 60))
def test_equal_shares_are_no_shares(members, share, samples):
    with_shares = SyncAssignment(samples, share * members, range(members), [share] * members)
    without = SyncAssignment(samples, share * members, range(members))
    while not without.finished:
        for member in range(members):
            assert np.array_equal(with_shares.positions_of(member), without.positions_of(member))
        for each in (with_shares, without):
            each.committed(range(members), each.division.shares)
    assert with_shares.finished


@given(histories(), shuffles, st.data())
def test_a_part_is_what_its_rounds_say(history, shuffle, data):
    samples, batch, members, losses = history
    each, local = data.draw(st.sampled_from([(0, 1), (3, 1), (2, 2), (3, 4)]))
    assignment = SyncAssignment(samples, batch, range(members), (), each * local, local)
    epoch = Epoch(Shared(samples, 1, 1, samples, shuffle), 5, 2)
    left, words, shares = range(members), epoch.words(0, samples), ()
    for rounds in itertools.count():
        if assignment.finished:
            break
        if rounds in losses:
            left = [member for member in left if member not in losses[rounds]] or left[:1]
            shares = () if local > 1 else drawn_shares(data, left, batch, each)
            assignment.enter(left, shares)
        if rounds % 3 == 0 or rounds in losses:
            _check_parts(assignment, epoch, words)
        assignment.committed(left, shares)
    assert assignment.part(left[0], epoch).steps == 0


def _check_parts(assignment, epoch, words):
    """Those of all members, from the present round to the last."""
    ahead = copy.copy(assignment)
    parts = {member: assignment.part(member, epoch) for member in assignment.members}
    steps = dict.fromkeys(parts, 0)
    while not ahead.finished:
        for member, part in parts.items():
            for made in range(ahead.round.steps_of(member)):
                start, stop = part.bounds(steps[member])
                positions = ahead.step_of(member, made)
                assert np.array_equal(part.order[start:stop], epoch.samples_at(positions))
                assert np.array_equal(part.words(start, stop), words[positions]) and stop - start <= part.batch_size
                steps[member] += 1
        ahead.committed(ahead.members, ahead.division.shares)
    assert {member: part.steps for member, part in parts.items()} == steps
    assert all(part.bounds(part.steps - 1)[1] == len(part.order) for part in parts.values())


def test_what_comes_back_is_dealt_first_to_who_is_left():
    assignment = SyncAssignment(20, 6, [0, 1, 2])
    assignment.committed([0, 1, 2])
    assert assignment.round.positions.tolist() == [6, 7, 8, 9, 10, 11]
    assignment.enter([0, 2])
    assert assignment.positions_of(1).tolist() == [7, 10], "a carried round stays as it was dealt"
    assert assignment.returned.tolist() == [7, 10]
    assignment.committed([0, 2])
    assert assignment.done == 10 and assignment.round.positions.tolist() == [7, 10, 12, 13, 14, 15]
    assert assignment.positions_of(0).tolist() == [7, 12, 14] and assignment.positions_of(2).tolist() == [10, 13, 15]
    assert not len(assignment.positions_of(1)) and not len(assignment.returned)
    assignment = SyncAssignment(20, 6, range(4))
    assignment.committed([0, 2])
    assert assignment.round.positions.tolist() == [1, 3, 5, 6, 7, 8]
    assignment.enter([2])
    assert assignment.returned.tolist() == [1, 5, 7], "of several, in ascending order"


def test_a_removal_in_the_last_round_makes_another_and_who_joins_has_no_part_of_a_carried_one():
    assignment, used = SyncAssignment(10, 6, [0, 1, 2]), np.zeros(10, int)
    commit(assignment, [0, 1, 2], used)
    assignment.enter([1, 2])
    commit(assignment, [1, 2], used)
    assert not assignment.finished and assignment.round.positions.tolist() == [6, 9]
    commit(assignment, [1], used)  # and another in that one
    assert assignment.round.positions.tolist() == [9]
    assert finish(assignment, used) == 1 and np.all(used == 1)
    # all of whom a round was dealt to are lost but those whose part is empty: nothing of it is committed
    assignment, used = SyncAssignment(1, 6, [0, 1]), np.zeros(1, int)
    assert not len(assignment.positions_of(1))
    commit(assignment, [1], used)
    assert assignment.done == 0 and assignment.positions_of(1).tolist() == [0]
    assert finish(assignment, used) == 1 and np.all(used == 1)
    assignment, used = SyncAssignment(12, 6, [0, 2]), np.zeros(12, int)
    assignment.enter([0, 1, 2])
    epoch = Epoch(Shared(12, 1, 1, 12), 5, 2)
    assert not len(assignment.positions_of(1)) and assignment.part(1, epoch).bounds(0) == (0, 0)
    assert assignment.part(0, epoch).bounds(0) == (0, 3) and assignment.part(0, epoch).batch_size == 3
    commit(assignment, [0, 1, 2], used)
    assert assignment.positions_of(1).tolist() == [7, 10]
    finish(assignment, used)
    assert np.all(used == 1)


def test_an_epoch_that_is_finished_commits_no_more_and_only_members_have_parts():
    assignment = SyncAssignment(3, 4, [0])
    assignment.committed([0])
    with pytest.raises(ValueError, match="all 3 samples"):
        assignment.committed([0])
    with pytest.raises(ValueError):
        SyncAssignment(3, 4, [0, 2]).part(1, Epoch(Shared(3, 1, 1, 3), 5, 2))


# with the batches of the training loop


def test_a_new_member_deals_as_the_others_do():
    """From each round of an epoch with a loss and a return."""
    for at, local in itertools.product(range(12), (1, 2)):
        assignment = SyncAssignment(53, 10, [0, 1, 2], (), (local - 1) * 6, local)
        for number in range(at):
            if not assignment.finished:
                assignment.committed([0, 2] if number in (2, 3) else [0, 1, 2])
        assignment.enter([0, 2], [7, 3] if at % 2 and local == 1 else [])
        copied = SyncAssignment.of_state(json.loads(json.dumps(assignment.state())))
        assert copied.returned.tolist() == assignment.returned.tolist() and copied.division == assignment.division
        while not assignment.finished:
            assert (copied.step, copied.steps, copied.finished) == (assignment.step, assignment.steps, False)
            for member in (0, 1, 2):
                assert copied.positions_of(member).tolist() == assignment.positions_of(member).tolist()
                assert copied.round.steps_of(member) == assignment.round.steps_of(member)
            for each in (assignment, copied):
                each.committed([0, 1, 2])
        assert copied.finished


# Assigning an epoch to workers that make steps of their own; test_async_schedules.py has it with servers


def steps(assignment, member, clock):
    return [
        (number, positions.tolist()) for number, positions in assignment.steps_between(member, clock, assignment.end)
    ]


@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 4))
def test_without_a_change_each_worker_has_the_samples_of_a_plain_job(samples, each, members):
    assignment, plain = AsyncAssignment(samples, each, each * members, range(members), 7), []
    rounds = SyncAssignment(samples, each * members, range(members))
    while not rounds.finished:
        plain.append([rounds.positions_of(member).tolist() for member in range(members)])
        rounds.committed(range(members))
    assert assignment.end == 7 + len(plain)
    for member in range(members):
        own = [(8 + number, row[member]) for number, row in enumerate(plain) if row[member]]
        assert steps(assignment, member, 7) == own


def test_who_is_in_the_middle_of_a_step_keeps_it_and_the_rest_is_divided_anew():
    before = AsyncAssignment(20, 2, 6, [0, 1, 2])
    assert steps(before, 1, 0) == [(1, [1, 4]), (2, [7, 10]), (3, [13, 16]), (4, [19])]
    after = before.after([0, 2], {0: 2, 1: 1, 2: 0}, begun=[2], start=2)
    assert after.done == 6 and after.step == 1
    assert after.carried[2][0] == 1 and after.carried[2][1].tolist() == [2, 5]
    assert after.left.tolist() == [7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert steps(after, 0, 2) == [(3, [7, 10]), (4, [12, 14]), (5, [16, 18])]
    assert steps(after, 2, 0) == [(1, [2, 5]), (3, [8, 11]), (4, [13, 15]), (5, [17, 19])]
    assert after.step_at(0) == 1 and after.step_at(4) == 3


def test_of_whom_nothing_is_known_all_samples_come_again_and_a_finished_epoch_has_none():
    after = AsyncAssignment(12, 2, 4, [0, 1]).after([0], {0: 1}, begun=[], start=1)
    assert after.left.tolist() == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assignment = AsyncAssignment(10, 2, 4, [0, 1], clock=3, done=4)
    assert not assignment.finished and assignment.left.tolist() == [4, 5, 6, 7, 8, 9]
    assignment.finish()
    assert assignment.finished and assignment.next_of(0, 3) is None and assignment.end == 3
    assert np.array_equal(assignment.part(1, 3, Epoch(Shared(10, 2, 2, 10), 3, 0)).order, [])


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_newcomer_goes_on_from_the_state(samples, each, first, second, begun):
    before = AsyncAssignment(samples, each, 2 * each, [0, 1])
    before = before.after([0, 1, 4], {0: first, 1: second}, [0] if begun else [], start=max(first + begun, second))
    taken = AsyncAssignment.of_state(json.loads(json.dumps(before.state())))
    for member in (0, 1, 4):
        clock = before.before(member)
        assert steps(taken, member, clock) == steps(before, member, clock)
    assert (taken.done, taken.end, taken.batch) == (before.done, before.end, before.batch)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_what_a_worker_trains_is_what_its_steps_have(samples, each, clock, begun):
    before = AsyncAssignment(samples, each, 2 * each, [0, 1])
    assignment = before.after([1], {0: 0, 1: clock}, [1] if begun else [], clock + 1)
    epoch = Epoch(Shared(samples, 2, each, samples), 3, 0)
    part = assignment.part(1, clock, epoch)
    own = [positions for _, positions in assignment.steps_between(1, clock, assignment.end)]
    assert part.steps == len(own)
    for step, positions in enumerate(own):
        start, stop = part.bounds(step)
        assert part.order[start:stop].tolist() == epoch.samples_at(positions).tolist()
        assert part.words(start, stop).tolist() == epoch.words_at(positions).tolist()


# The kvstore of an elastic job changes in the middle of an epoch: what is left is dealt in the other way


def rounds(assignment, count, draw, used):
    """Make so many rounds, of which members are lost; who is left."""
    members = list(assignment.members)
    for _ in range(count):
        if assignment.finished:
            break
        if len(members) > 1 and draw.random() < 0.2:
            members.remove(draw.choice(members))
            assignment.enter(members)
        used += [position for member in members for position in assignment.positions_of(member).tolist()]
        assignment.committed(members)
    return members


def own_steps(assignment, draw, used):
    """Each member makes some of its steps; the deal after it, with who was in the middle of one, and all clocks."""
    clocks, begun = {}, []
    for member in assignment.members:
        steps = [*assignment.steps_between(member, assignment.before(member), assignment.end)]
        made = draw.randint(0, len(steps))
        used += [position for _, positions in steps[:made] for position in positions.tolist()]
        clocks[member] = steps[made - 1][0] if made else assignment.before(member)
        if made < len(steps) and draw.random() < 0.5:
            begun.append(member)
    start = max(clock + (member in begun) for member, clock in clocks.items())
    return assignment.after(assignment.members, clocks, begun, start), clocks


def test_each_position_once_whatever_comes_between():
    for seed in range(400):
        draw, used = random.Random(seed), []
        samples, each, workers = draw.randint(1, 90), draw.randint(1, 5), draw.randint(1, 4)
        batch, members = each * workers, list(range(workers))
        together = SyncAssignment(samples, batch, members)
        clock = 0
        for _ in range(draw.randint(1, 3)):
            members = rounds(together, draw.randint(0, 4), draw, used)
            assert sorted([*used, *together.rest.tolist()]) == list(range(samples)), seed
            clock += together.steps
            apart = AsyncAssignment.of_rest(samples, each, batch, members, clock, together.rest)
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
            together = SyncAssignment.of_rest(samples, batch, members, apart.held_back)
            assert (
                together.done == len(used) and together.step == (len(used) + (batch - 1) * together.finished) // batch
            )
        rounds(together, samples + 1, draw, used)
        assert together.finished and sorted(used) == list(range(samples)), seed


def test_if_the_change_is_given_up_what_was_held_back_is_dealt_again():
    assignment = AsyncAssignment(12, 2, 4, [0, 1])
    assignment = assignment.after([0, 1], {0: 1, 1: 1}, begun=[1], start=2)
    assignment.hold_back()
    assert assignment.held_back.tolist() == [4, 6, 8, 9, 10, 11] and assignment.next_of(0, 1) is None
    assert assignment.next_of(1, 1)[1].tolist() == [5, 7]
    after = assignment.after([0], {0: 2}, begun=[], start=2)  # worker 1 is lost in its step, and nothing of it is known
    assert after.left.tolist() == [4, 5, 6, 7, 8, 9, 10, 11] and not len(after.held_back) and after.done == 4


def test_only_what_a_loss_gave_back_is_dealt_again_and_a_new_member_goes_on_from_the_state():
    assignment = SyncAssignment.of_rest(30, 4, [0, 1], np.arange(9, 30, 2))
    assert assignment.returned.tolist() == [] and assignment.positions_of(1).tolist() == [11, 15]
    assignment.enter([0])
    assert assignment.returned.tolist() == [11, 15] and len(assignment.rest) == 11
    assignment.committed([0])
    assert assignment.positions_of(0).tolist() == [11, 15, 17, 19] and assignment.done == 21
    assignment = SyncAssignment.of_rest(30, 4, [0, 1], np.arange(9, 30, 2))
    assignment.committed([0])
    taken = SyncAssignment.of_state(json.loads(json.dumps(assignment.state())))
    while not assignment.finished:
        assert taken.positions_of(0).tolist() == assignment.positions_of(0).tolist() and taken.done == assignment.done
        taken.committed([0])
        assignment.committed([0])
    assert taken.finished and taken.done == 30


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_a_part_of_the_rest_is_what_its_rounds_say(shuffle):
    positions = np.array([1, 2, 5, 6, 7, 8, 11, 12, 13, 19, 20, 21])
    assignment, epoch = (
        SyncAssignment.of_rest(22, 4, [0, 3], positions),
        Epoch(Shared(22, 2, 2, 22, shuffle=shuffle), 3, 0),
    )
    _check_parts(assignment, epoch, epoch.words(0, 22))
    for expected in ([2, 6], [8, 12], [19, 21]):
        assert assignment.positions_of(3).tolist() == expected
        assignment.committed([0, 3])
    assert assignment.finished
