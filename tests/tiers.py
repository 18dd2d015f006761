"""Which part of a large matrix each tier of the suite runs; the tiers are markers, explained in pyproject.toml."""

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest

from tests.covering import covering

FUZZ = "DMLTRAIN_TEST_FUZZ"  # how many times as many random examples as `make test` tries


def tiered(
    cases: Sequence[Any],
    key: Callable[[Any], Sequence[Hashable]] = tuple,
    name: Callable[[Any], str] | None = None,
    few: Callable[[Any], Sequence[Hashable]] | None = None,
    paired: Callable[[Any], Sequence[Hashable]] | None = None,
) -> list[Any]:
    """All cases for `parametrize`: `make test` runs some that have every pair of values, .ci/run every three.

    `key(case)` are the values that are combined. With `name` a case is one argument of the test, called `name(case)`.
    Where a case is expensive, `make test` has only each value of `few(case)`, and .ci/run only the pairs, too: of
    `paired(case)`, if that is given.
    """
    keys = [tuple(key(case)) for case in cases]
    assert len(set(keys)) == len(keys), "two cases have the same values"

    def some(values: Callable[[Any], Sequence[Hashable]], strength: int) -> set[tuple[Hashable, ...]]:
        of_cases = [tuple(values(case)) for case in cases]
        return {keys[of_cases.index(each)] for each in covering(of_cases, strength)}

    pairs = set(covering(keys, 2)) if paired is None else some(paired, 2)
    in_test = some(few, 1) if few else pairs
    in_ci = pairs if few else pairs | set(covering(keys, 3))

    def marks(values: tuple[Hashable, ...]) -> list[pytest.MarkDecorator]:
        if values in in_test:
            return []
        return [pytest.mark.thorough if values in in_ci else pytest.mark.exhaustive]

    return [
        pytest.param(case, marks=marks(values), id=name(case)) if name else pytest.param(*case, marks=marks(values))
        for case, values in zip(cases, keys, strict=True)
    ]


def examples(count: int) -> int:
    """How many examples hypothesis tries where `make test` tries `count`."""
    return count * int(os.environ.get(FUZZ, "1"))


def seed_ranges(in_test: int, in_ci: int, more: int) -> list[Any]:
    """The seeds of random schedules for `parametrize`, as ranges: `make test` runs those below `in_test`, .ci/run also
    those below `in_ci`, and the exhaustive tests, without a time limit, those below `more`. None is in two ranges."""
    exhaustive = [pytest.mark.exhaustive, pytest.mark.timeout(0)]
    return [
        pytest.param(range(in_test), id=f"first {in_test}"),
        pytest.param(range(in_test, in_ci), id=f"to {in_ci}", marks=pytest.mark.thorough),
        pytest.param(range(in_ci, more), id=f"to {more}", marks=exhaustive),
    ]
