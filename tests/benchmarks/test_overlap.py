"""benchmarks/overlap.py runs real steps through the kvstore and counts what computing does not hide."""

from types import SimpleNamespace

import pytest

from tests.benchmarks.as_a_user import benchmark_module, figures


@pytest.mark.thorough
def test_steps_with_compute_are_held_against_steps_without():
    result = figures("overlap.py --loopback --hosts 2 --megabytes 0.4 --compute 0.3 --repeats 2 --steps 2")
    assert result["compute_seconds"] == 0.3 and result["step_seconds"]["min"] > 0.3 - 1e-9
    assert 0 < result["communication_seconds"]["min"] <= result["communication_seconds"]["max"]
    assert len(result["exposed_share_of_each_turn"]) == 2 and min(result["exposed_share_of_each_turn"]) > -1e-6


def test_exposed_is_what_a_step_takes_beyond_its_compute_in_communications():
    overlap = benchmark_module("overlap")
    blocks = [SimpleNamespace(seconds=each, other_cores=0.0) for each in (2.0, 2.3, 2.0, 2.7, 1.0, 2.1)]
    result = overlap.report(SimpleNamespace(blocks=blocks), 2.0, {})
    assert result["exposed_share_of_each_turn"] == pytest.approx([0.15, 0.35, 0.1])
    assert result["exposed_share"] == pytest.approx(0.15)


def test_each_key_is_computed_once_the_classifier_last():
    order = benchmark_module("contest.programs.overlap").forward_order(100)
    assert sorted(order) == list(range(100)) and order[0] == 0 and order[-2:] == [98, 99]
