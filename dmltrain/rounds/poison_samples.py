"""The sample at which one worker after another fails. Pure.

When a worker ends by an error of its own, the samples that it had of the round in progress come back and are dealt to
others. If one of these fails with some of the same samples in its hands, one of them is the cause, and would end one
worker after the other: so it ends the job. Workers that are killed, silent or cut off have no samples in suspicion.

A sample that was committed is dealt in no later round of its epoch, so nothing has to be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array

SHOWN = 10  # samples that a message names
FIX = "repair or remove the faulty sample, and start the job again from its last checkpoint"


@dataclass
class PoisonSamples:
    """`epoch`: of the positions. `failures`: the positions that a worker had, int64, and why it ended."""

    epoch: int = 0
    failures: list[tuple[Array, str]] = field(default_factory=list)

    def add(self, epoch: int, positions: Array, reason: str) -> None:
        """A worker has ended by an error of its own, and had these positions."""
        self._begin(epoch)
        if len(positions):
            self.failures.append((positions, reason))

    def blamed(self, epoch: int, positions: Array, error: str, samples: Callable[[Array], Array]) -> str:
        """What to say when a worker with these positions fails with this error, too; empty if no worker before it had
        any of them. `samples`: positions -> indices of the data set."""
        self._begin(epoch)
        for had, reason in self.failures:
            both = np.intersect1d(had, positions)
            if len(both):
                numbers = samples(both)
                what = "sample" if len(both) == 1 else "one of the samples"
                where = "position" if len(both) == 1 else "positions"
                return (
                    f"two workers have failed at {what} {_listed(numbers)} of the training data ({where} "
                    f"{_listed(both)} of epoch {epoch}): {reason}; then this worker failed: {error}: {FIX}"
                )
        return ""

    def state(self) -> list[Any]:
        """What a new member needs."""
        return [self.epoch, [[had.tolist(), reason] for had, reason in self.failures]]

    @classmethod
    def of_state(cls, state: Sequence[Any]) -> PoisonSamples:
        """The inverse of `state`."""
        return cls(state[0], [(np.array(had, np.int64), reason) for had, reason in state[1]])

    def _begin(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.failures.clear()


def _listed(numbers: Array) -> str:
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN].tolist())) + more
