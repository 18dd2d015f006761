"""The division of a step by measured speeds: bounded, the best one, without flapping; it ends where times are equal."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.kvstore.scheduler.balance import GAIN, LEAST, PAUSE, Balance, divided, seconds
from dmltrain.kvstore.view import Balancing, View

SETTINGS = Balancing(160)


def view_of(members, shares=(), number=1, joined=()):
    return View(number, 0, (tuple(members),), (0,), joined=tuple(joined), shares=tuple(shares))


def reported(balance, view, speeds, now=0.0):
    """Whether one of these reports makes a proposal."""
    return any([balance.report(view, member, speed, now) for member, speed in zip(view.members, speeds, strict=True)])


speed_lists = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=7)


@given(speed_lists, st.integers(0, 500), st.floats(1.0, 9.0))
def test_parts_are_whole_bounded_and_the_total(speeds, more, limit):
    total = len(speeds) + more
    shares, equal = divided(speeds, total, limit), total / len(speeds)
    assert sum(shares) == total
    assert min(shares) >= max(1, int(LEAST * equal)) and max(shares) <= max(math.ceil(equal), limit * equal)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=3), st.integers(3, 12))
def test_no_other_division_is_quicker(speeds, total):
    found = divided(speeds, total, limit=9.0)
    others = itertools.product(range(1, total), repeat=len(speeds))
    best = min(seconds(each, speeds) for each in others if sum(each) == total)
    assert seconds(found, speeds) == pytest.approx(best)


def test_a_slow_host_slows_a_job_by_its_share():
    speeds = [1.0, 1.0, 1.0, 1.0, 0.5]
    shares = divided(speeds, 160, 2.0)
    assert shares == (36, 36, 36, 35, 17)
    assert seconds([32] * 5, speeds) / seconds(shares, speeds) == pytest.approx(64 / 36)
    assert divided([3.0] * 5, 160, 2.0) == (32,) * 5 and divided([3.0] * 3, 64, 1.0) == (22, 21, 21)


def test_a_decision_needs_the_speed_of_every_member():
    balance, view = Balance(SETTINGS), view_of(range(5))
    for member in (0, 1, 2, 4, 4, 4):
        assert not balance.report(view, member, 10.0 if member < 4 else 5.0, 0.0)
    assert balance.report(view, 3, 10.0, 0.0)
    assert balance.proposal == (36, 36, 36, 35, 17)
    assert not balance.report(view, 3, 1.0, 100.0), "it waits for the next view"


def test_nothing_is_divided_without_the_option_or_between_more_members_than_samples():
    balance, view = Balance(Balancing()), view_of(range(2))
    assert not reported(balance, view, [1.0, 9.0])
    assert balance.next_view(view, view_of([0], number=2)).shares == ()
    assert not reported(Balance(Balancing(2)), view_of(range(3)), [1.0, 9.0, 9.0])


def test_reports_of_an_earlier_view_do_not_count():
    balance, view = Balance(SETTINGS), view_of(range(2))
    balance.report(view, 0, 9.0, 0.0)
    view = balance.next_view(view, view_of(range(2), number=2))
    assert not balance.report(view, 1, 1.0, 9.0) and view.shares == ()


def test_two_changes_have_a_pause_between_them():
    balance, view = Balance(SETTINGS), view_of(range(2))
    assert reported(balance, view, [1.0, 2.0], 100.0)
    view = balance.next_view(view, view_of(range(2), number=2))
    assert not reported(balance, view, [2.0, 1.0], 100.0 + PAUSE - 0.1)
    assert reported(balance, view, [2.0, 1.0], 100.0 + PAUSE)


@pytest.mark.parametrize(
    ("members", "joined", "each", "shares"),
    [
        ([0, 1, 2], [], 0, (81, 53, 26)),  # of 75, 50, 25, 10
        ([0, 1, 2, 3, 4], [4], 0, (60, 40, 20, 8, 32)),
        ([1, 2, 3], [], 40, (71, 35, 14)),
    ],
)
def test_those_who_stay_keep_their_proportions(members, joined, each, shares):
    balance = Balance(Balancing(160, each))
    before = view_of(range(4), (75, 50, 25, 10))
    assert balance.next_view(before, view_of(members, number=2, joined=joined)).shares == shares


def test_a_proposal_counts_for_those_who_are_left():
    balance, view = Balance(SETTINGS), view_of(range(4))
    assert balance.next_view(view, view_of([0, 3], number=2)).shares == (), "equal parts stay equal"
    assert reported(balance, view, [2.0, 1.0, 1.0, 1.0])
    assert balance.next_view(view, view_of([0, 1, 3], number=2)).shares == (80, 40, 40)
    assert balance.proposal == ()


@pytest.mark.parametrize("seed", range(20))
def test_it_ends_where_times_are_equal_and_stays_there(seed):
    """Each host has a fixed time of its own, a speed, and some noise."""
    chance = random.Random(seed)
    count = chance.randrange(2, 8)
    hosts = [(chance.uniform(0.0, 0.01), chance.uniform(0.0007, 0.002)) for _ in range(count)]
    balance, view = Balance(Balancing(64 * count)), view_of(range(count))
    changes, now = 0, 0.0
    for _ in range(40):
        now += PAUSE
        parts = view.shares or (64,) * count
        times = [a + b * part for (a, b), part in zip(hosts, parts, strict=True)]
        noisy = [part / time * chance.uniform(0.995, 1.005) for part, time in zip(parts, times, strict=True)]
        if reported(balance, view, noisy, now):
            view = balance.next_view(view, view_of(range(count), number=view.number + 1))
            changes += 1
    assert changes <= 4, "no flapping"
    assert max(times) < 1.12 * sum(times) / count


@given(st.data())
def test_any_history_keeps_shares_of_the_members(data):
    chance = random.Random(data.draw(st.integers(0, 10_000)))
    each = chance.choice([0, 5])
    settings = Balancing(chance.randrange(1, 60), each, chance.choice([1.0, 2.0, 5.0]))
    balance, view, now = Balance(settings), view_of(range(4)), 0.0
    for number in range(2, 12):
        now += chance.uniform(0, 2 * PAUSE)
        for member in view.members:
            balance.report(view, member, chance.choice([0.01, 1.0, 1.0, 3.0, 1e12]), now)
        gone = set(chance.sample(view.members, chance.randrange(len(view.members))))
        come = {each for each in range(6) if chance.random() < 0.3 and each not in set(view.members) - gone}
        members = sorted(set(view.members) - gone | come)
        before, view = view, balance.next_view(view, view_of(members, number=number, joined=come))
        assert not view.shares or sum(view.shares) == settings.size(len(members))
        assert view.shares or not before.shares or settings.size(len(members)) < len(members)


def test_a_gain_that_is_too_small_is_no_reason():
    balance, view = Balance(Balancing(2000)), view_of(range(2))
    assert not reported(balance, view, [1.0, 1.0 / (2 * GAIN - 1) + 0.001])
    assert reported(balance, view, [1.0, 1.0 / (2 * GAIN - 1) - 0.002])


@pytest.mark.parametrize("values", [(-1,), (1, -1), (1, 0, 0.5), (1, 0, math.inf), (1, 0, math.nan)], ids=str)
def test_impossible_settings_are_refused(values):
    with pytest.raises(ValueError, match="0 or more samples.* limit of 1"):
        Balancing(*values)
