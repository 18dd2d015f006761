"""The options of the group Emulation: steps that take longer than on this machine (dmltrain/train/emulation.py)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from dmltrain.options.field import Group, option
from dmltrain.options.values import integer, number


def probability(text: str) -> float:
    value = number(0.0)(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability from 0 to 1")
    return value


def with_factor(first: Callable[[str], float], expected: str) -> Callable[[str], tuple[float, float]]:
    """'0.05:10' -> (0.05, 10.0): what `first` reads, and a factor of at least 1."""

    def parse_pair(text: str) -> tuple[float, float]:
        left, colon, right = text.partition(":")
        if not colon:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return first(left), number(1.0)(right)

    return parse_pair


@dataclass(frozen=True)
class EmulationOptions(Group):
    """See `Options`."""

    emulate_step: float = option(
        "Emulation",
        "each step's computing takes at least so many seconds, as on a slower device: the worker sleeps for the rest "
        "before it sends gradients (0: off)",
        number(0.0),
        0.0,
        metavar="SECONDS",
    )
    emulate_sample: float = option(
        "Emulation",
        "and so many seconds more for each sample that the worker has in the step, as where hosts get parts of unequal "
        "size (0: off)",
        number(0.0),
        0.0,
        metavar="SECONDS",
    )
    stragglers: tuple[float, float] | None = option(
        "Emulation",
        "a worker's step takes FACTOR times as long with this probability, for example 0.05:10; drawn from --seed, the "
        "worker's rank and the step",
        with_factor(probability, "PROBABILITY:FACTOR such as 0.05:10"),
        metavar="PROBABILITY:FACTOR",
    )
    slow_worker: tuple[int, float] | None = option(
        "Emulation",
        "each step of the worker of this rank takes FACTOR times as long, for example 4:3",
        with_factor(integer(0), "RANK:FACTOR such as 4:3"),
        metavar="RANK:FACTOR",
    )
