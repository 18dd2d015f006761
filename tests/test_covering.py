"""Covering arrays have every combination of the cases, in far fewer cases."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import covering


def combined(cases: list, strength: int) -> set:
    return {each for case in cases for each in combinations(enumerate(case), strength)}


CASES = st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=40, unique=True)


@given(CASES, st.integers(1, 5))
def test_every_combination_that_a_case_has_is_kept(cases: list, strength: int):
    chosen = covering(cases, strength)
    assert combined(chosen, strength) == combined(cases, strength)
    assert [case for case in cases if case in chosen] == chosen, "in their order, each once"


@given(CASES, st.integers(1, 4))
def test_no_case_is_superfluous(cases: list, strength: int):
    chosen = covering(cases, strength)
    assert len(chosen) <= len(combined(cases, strength)) and len(chosen) == len(set(chosen))
    assert covering(cases, strength) == chosen, "the same in every process: xdist compares them"


def test_pairs_of_a_whole_product_need_little_more_than_its_two_largest_factors():
    cases = list(product(range(10), range(4), range(4), range(3)))
    assert 40 <= len(covering(cases, 2)) <= 48
    assert 160 <= len(covering(cases, 3)) <= 208
