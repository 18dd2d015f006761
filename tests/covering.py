"""Covering arrays: few cases in which every combination of so many values still occurs. Pure.

A fault that needs more than two or three conditions at once is rare (Kuhn, Wallace, Gallo: Software Fault Interactions,
IEEE TSE 30/6, 2004). The cases are chosen from given ones, so what cannot be combined is simply not among them.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Sequence[Hashable])


def covering(cases: Sequence[Case], strength: int) -> list[Case]:
    """Some of `cases`, in their order: each combination of `strength` values that a case has, one of them has.

    Each step takes the case that adds the most combinations, the first of them if there are several.
    """
    adds = {number: set(_combinations(case, strength)) for number, case in enumerate(cases)}
    taken: list[int] = []
    while adds:
        best = max(adds, key=lambda number: (len(adds[number]), -number))
        covered = adds.pop(best)
        if not covered:
            break
        taken.append(best)
        for left in adds.values():
            left -= covered
    return [cases[number] for number in sorted(taken)]


def _combinations(case: Sequence[Hashable], strength: int) -> list[tuple[tuple[int, Hashable], ...]]:
    """Each combination of `strength` values, with the places that they are at; of fewer where there are not so many."""
    return list(combinations(enumerate(case), min(strength, len(case))))
