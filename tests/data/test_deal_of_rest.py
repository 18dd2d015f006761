"""The kvstore of an elastic job changes in the middle of an epoch: what is left is dealt in the other way."""

import json
import random

import numpy as np
import pytest

from dmltrain.data.async_deal import AsyncDealing
from dmltrain.data.deal import Dealing
from dmltrain.data.parts import Epoch, Shared


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
    part, own = dealing.part(3, epoch), []
    while not dealing.finished:
        own.append(dealing.positions_of(3))
        dealing.committed([0, 3])
    assert [each.tolist() for each in own] == [[2, 6], [8, 12], [19, 21]] and part.steps == 3
    for step, each in enumerate(own):
        first, stop = part.bounds(step)
        assert part.order[first:stop].tolist() == epoch.samples_at(each).tolist()
