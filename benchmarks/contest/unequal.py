"""Workers of unequal pace in the training contests: emulated computing, stragglers, and a host that freezes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dmltrain.train.emulation import Slowness

FROZEN = 1  # rank of the worker whose host freezes


class Unequal:
    """How long one worker sleeps before its steps.

    pause: seconds before each step, as if an accelerator computed. probability, factor: of a step whose pause is so
    many times as long; the same steps straggle in each system. freeze: (seconds, every), or None: one worker sleeps so
    long whenever its system has trained for `every` seconds more, as if its host did something else.
    """

    def __init__(
        self, rank: int, pause: float, probability: float, factor: float, freeze: Sequence[float] | None
    ) -> None:
        self.slowness = Slowness(pause, probability, factor, 1.0, 0, rank)
        self.frozen, self.every = freeze if freeze and rank == FROZEN else (0.0, 0.0)
        self.due = self.every

    def sleep(self, step: int, trained: float) -> None:
        """Sleep before the step of this number, counted from 0. trained: seconds of training so far, in all turns."""
        seconds = self.slowness.target(step)(0.0)
        if self.frozen and trained >= self.due:
            self.due += self.every
            seconds += self.frozen
        if seconds:
            time.sleep(seconds)
