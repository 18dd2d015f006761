"""The learning rate of each step: MXNet's steps by epoch, after an optional warm-up. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

# The completed fraction p of the warm-up, 0 < p <= 1 -> the fraction of the learning rate.
WARMUPS = {"linear": lambda p: p, "power2": lambda p: p * p, "sqrt": math.sqrt}


@dataclass(frozen=True)
class Schedule:
    """learning rate = base * factor ** (number of step_epochs reached), as MXNet's MultiFactorScheduler.

    During the first `warmup_epochs` it rises to that value, which the last step of the warm-up reaches.
    A factor of 1 or more disables `step_epochs`, as in MXNet's fit.py.
    """

    base: float
    batches: int  # steps in an epoch
    factor: float = 1.0
    step_epochs: tuple[int, ...] = ()
    warmup_epochs: float = 0.0
    warmup: str = "linear"

    def __call__(self, epoch: int, batch: int) -> float:
        """The learning rate of step `batch` in `epoch`, both from 0."""
        rate = self.base
        if self.factor < 1.0:
            rate *= self.factor ** sum(epoch >= step for step in self.step_epochs)
        done = epoch * self.batches + batch + 1  # steps, including this one
        length = self.warmup_epochs * self.batches
        return rate * WARMUPS[self.warmup](done / length) if done < length else rate
