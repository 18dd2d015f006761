"""Local SGD: each worker makes steps alone, and then the workers' weights are averaged, with an outer optimizer.

With `steps` steps between two averages, a job sends 1 / steps of what one gradient a step would take. The outer
gradient is the weights at the last average minus the mean of the workers' weights; the outer optimizer makes the step
from there that becomes all workers' new weights (DiLoCo: Douillard et al. 2023, arXiv:2311.08105, algorithm 1, with
Nesterov's momentum, section 2). Without outer momentum and with an outer learning rate of 1 the new weights are the
mean itself (local SGD: Stich 2018, arXiv:1805.09767, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from dmltrain.base.errors import UserError


@dataclass(frozen=True)
class LocalSteps:
    """`steps` of each worker between two averages, and the outer optimizer's rate and momentum; see `checked`."""

    steps: int
    outer_lr: float
    outer_momentum: float


def checked(settings: LocalSteps, name: Callable[[str], str] = str) -> LocalSteps:
    """The settings. Raises UserError, which calls them `name(parameter of dmltrain.distribute)`, unless there is at
    least one step, the rate is above 0, and the momentum is from 0 to below 1."""
    steps: Any = settings.steps
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 1:
        raise UserError(f"{name('local_steps')} {steps!r}: expected a whole number of steps, at least 1")
    if not _is_number(settings.outer_lr) or not 0.0 < settings.outer_lr < math.inf:
        raise UserError(
            f"{name('outer_lr')} {settings.outer_lr!r}: expected a number above 0; 1 without momentum is the mean"
        )
    if not _is_number(settings.outer_momentum) or not 0.0 <= settings.outer_momentum < 1.0:
        raise UserError(
            f"{name('outer_momentum')} {settings.outer_momentum!r}: expected a number from 0 to below 1; 0 is none"
        )
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
