"""An optimizer's step on one array, as stores and servers use it; backends implement it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dmltrain.base.arrays import Array


class OptimizerStep(Protocol):
    """A step may also have the attributes `whole` and `needs_pulled`: see the functions below."""

    def __call__(self, value: Array, gradient: Array, rate: float) -> None:
        """One step, in place, with learning rate `rate`, or the spec's learning rate if `rate` is negative."""

    def state(self) -> dict[str, Array]:
        """The optimizer's arrays by name."""

    def load(self, state: dict[str, Array]) -> None:
        """Restore what `state` returned."""


# (spec, key, value) -> step; raises ValueError for a wrong spec
MakeStep = Callable[[dict[str, Any], int | str, Array], OptimizerStep]


def is_whole(step: OptimizerStep | None) -> bool:
    """Whether the step needs a whole key, because it takes norms: `whole`."""
    return bool(getattr(step, "whole", False))


def needs_pulled(step: OptimizerStep | None) -> bool:
    """Whether the step takes a fourth argument, the value that the worker had pulled before it computed the gradient:
    `needs_pulled`."""
    return bool(getattr(step, "needs_pulled", False))
