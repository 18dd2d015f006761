"""The tiers: `make test` has every pair of a matrix, .ci/run every three, `make test-all` all; less of a dear one. The
covering arrays below them have every combination of the cases, in far fewer cases."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import QUICK_FILES, ROOT, TOGETHER
from tests.covering import covering
from tests.tiers import tiered

MATRIX = list(product("abcde", "12", "+-", "xyz"))


def of_tier(params: list, *skipped: str) -> list[tuple]:
    return [param.values for param in params if not {mark.name for mark in param.marks} & set(skipped)]


def combined(cases: list[tuple], strength: int) -> set:
    return {combination for case in cases for combination in combinations(enumerate(case), strength)}


def test_each_tier_has_the_combinations_that_it_promises():
    params = tiered(MATRIX)
    test, ci = of_tier(params, "thorough", "exhaustive"), of_tier(params, "exhaustive")
    assert of_tier(params) == MATRIX, "all of them, in their order"
    assert combined(test, 2) == combined(MATRIX, 2) and combined(ci, 3) == combined(MATRIX, 3)
    assert len(test) < len(ci) < len(MATRIX) and set(test) <= set(ci)


def test_of_a_dear_matrix_the_first_tier_has_each_of_few_values_and_ci_the_pairs():
    params, usual = tiered(MATRIX, few=lambda case: (case[0], case[1:3])), tiered(MATRIX)
    test, ci = of_tier(params, "thorough", "exhaustive"), of_tier(params, "exhaustive")
    assert {case[0] for case in test} == set("abcde") and {case[1:3] for case in test} == {*product("12", "+-")}
    assert len(test) == 5
    assert set(ci) == {*test, *of_tier(usual, "thorough", "exhaustive")} and of_tier(params) == MATRIX


def test_cases_that_are_objects_are_one_argument_each_and_two_of_the_same_values_are_refused():
    params = tiered(["a1", "b2"], key=tuple, name=str.upper)
    assert [(param.values, param.id) for param in params] == [(("a1",), "A1"), (("b2",), "B2")]
    with pytest.raises(AssertionError, match="the same values"):
        tiered([("a", "b"), ("a", "b")])


def test_files_with_a_treatment_of_their_own_exist():
    assert [path for path in [*QUICK_FILES, *(ROOT / file for file in TOGETHER)] if not path.is_file()] == []


CASES = st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=40, unique=True)


@given(CASES, st.integers(1, 4))
def test_every_combination_that_a_case_has_is_kept_and_no_case_is_superfluous(cases: list, strength: int):
    chosen = covering(cases, strength)
    assert combined(chosen, strength) == combined(cases, strength) and len(chosen) <= len(combined(cases, strength))
    assert [case for case in cases if case in chosen] == chosen, "in their order, each once"
    assert covering(cases, strength) == chosen, "the same in every process: xdist compares them"


def test_pairs_of_a_whole_product_need_little_more_than_its_two_largest_factors():
    cases = list(product(range(10), range(4), range(4), range(3)))
    assert 40 <= len(covering(cases, 2)) <= 48
    assert 160 <= len(covering(cases, 3)) <= 208
