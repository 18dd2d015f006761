"""The speed that a member measures of itself."""

import pytest

from dmltrain.elastic.speed import ROUNDS, SECONDS, SKIPPED, OwnSpeed


def reports(own, seconds, view=1, samples=10, begin=0.0, pause=1.0):
    """What is reported after rounds that take so many seconds each, one in every `pause` seconds."""
    return [own.round(view, samples, each, begin + pause * index) for index, each in enumerate(seconds)]


def test_the_first_rounds_of_a_view_do_not_count():
    own = OwnSpeed()
    found = reports(own, [100.0] * SKIPPED + [2.0] * ROUNDS)
    assert found == [None] * (SKIPPED + ROUNDS - 1) + [5.0]
    found = reports(own, [100.0] * SKIPPED + [4.0] * ROUNDS, view=2, begin=100.0)
    assert found == [None] * (SKIPPED + ROUNDS - 1) + [2.5]


def test_a_new_view_forgets_the_rounds_before():
    own = OwnSpeed()
    reports(own, [1.0] * (SKIPPED + ROUNDS - 1))
    assert [each for each in reports(own, [2.0] * 10, view=2, begin=50.0) if each] == [5.0, 5.0]


def test_one_round_that_was_held_up_does_not_matter():
    assert reports(OwnSpeed(), [1.0] * SKIPPED + [2.0, 50.0, 2.0])[-1] == 5.0


def test_it_reports_at_a_low_rate():
    count, pause = 1000, 0.01
    found = [each for each in reports(OwnSpeed(), [0.01] * count, pause=pause) if each is not None]
    assert len(found) == pytest.approx(count * pause / SECONDS, abs=1)


def test_rounds_without_samples_do_not_count():
    own = OwnSpeed()
    assert set(reports(own, [0.5] * 10, samples=0)) == {None}
    assert reports(own, [2.0] * ROUNDS, begin=20.0)[-1] == 5.0
