"""Poison samples: a sample at which one worker after another fails ends the job. Pure.

When a worker ends by an error of its own, the samples that it had of the round in progress come back and are assigned
to others. If another worker fails with some of the same samples, one of these is the cause. It would end one worker
after the other, so the second failure ends the job. Workers that are killed, silent or cut off cast no suspicion on
samples.

A committed sample is assigned in no later round of its epoch, so it can match no later failure: entries of `failures`
never have to be removed.
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
    """`epoch`: the epoch of the positions. `failures`: for each worker that failed its positions, int64, and its
    error."""

    epoch: int = 0
    failures: list[tuple[Array, str]] = field(default_factory=list)

    def add(self, epoch: int, positions: Array, reason: str) -> None:
        """A worker has ended by an error of its own, and had these positions."""
        self._begin(epoch)
        if len(positions):
            self.failures.append((positions, reason))

    def blamed(self, epoch: int, positions: Array, error: str, samples: Callable[[Array], Array]) -> str:
        """The reason to end the job when a worker with these positions fails with this error; empty if no earlier
        worker has failed with any of them. `samples`: positions -> indices of the data set."""
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
        """The failures so far, for a new member."""
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
