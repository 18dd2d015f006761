"""An optimizer's step on one array, as stores and servers make it; a backend says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dmltrain.arrays import Array


class Step(Protocol):
    def __call__(self, value: Array, gradient: Array, rate: float) -> None:
        """One step with learning rate `rate` (with the spec's own where that is negative); changes `value` in place."""

    def state(self) -> dict[str, Array]:
        """The optimizer's arrays by name."""

    def load(self, state: dict[str, Array]) -> None:
        """Put back what `state` gave."""


MakeStep = Callable[[dict[str, Any], int | str, Array], Step]  # (spec, key, value); ValueError for a wrong spec
