"""The journal of a worker that makes steps of its own (dist_async, dist_ssp).

An op in its lines is the number of a worker's step, and each committed step has one member. After the loss of a worker
the leader writes the line of its last step, in case that servers have it and the worker could not write it any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dmltrain.arrays import Array
from dmltrain.audit import receipt
from dmltrain.audit.journal import Journal
from dmltrain.data.async_deal import AsyncDealing
from dmltrain.kvstore.view import View


class AsyncJournal(Journal):
    """See the module."""

    dealing: AsyncDealing | None

    def deal_steps(self, epoch: int, view: View, clock: int, first: int = 0) -> AsyncDealing:
        """See `deal`. `clock`: the steps that each member holds."""
        self.epoch, job = epoch, self._job
        if self._taken is None or self.dealing is None:
            each = job.batch // job.workers
            self.dealing = AsyncDealing(job.samples, each, job.batch, view.members, clock, first * job.batch)
            self._dealt_in = view.number
        self._taken = None
        return self.dealing

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Another view may begin before this worker's first step: it takes part in the next deal at once."""
        super().take_state(state)
        self.dealing, self._dealt_in = self._taken, self._entered[-1].view.number

    def dealt(self, dealing: AsyncDealing, view: View, lost: Iterable[tuple[int, int, Array]]) -> None:
        """All members go on with this deal. `lost`: members that have left, and number and positions of the last step
        of each that counts."""
        if self._writer and view.leader == self._member:
            for member, number, positions in lost:
                self._writer.committed_alone(number, self._dealt_in, member, receipt.of(positions))
        self.dealing, self._dealt_in = dealing, view.number
        left = len(dealing.left) + sum(len(positions) for _, positions in dealing.carried.values())
        self._log.info("%d samples of this epoch are left", left)

    def committed_step(self, number: int, own: Array) -> None:
        """This worker holds its step with this receipt, float64 (3,)."""
        self._begun = None
        if self._writer:
            self._writer.committed_alone(number, self._dealt_in, self._member, own)

    @staticmethod
    def _dealing_of(state: Mapping[str, Any]) -> AsyncDealing:
        return AsyncDealing.of_state(state)

    def _back(self, view: View) -> Array:
        """They are dealt again when all have said what they hold; see `dealt`."""
        return np.empty(0, np.int64)

    def _step(self, view: View) -> str:
        return f"Each step has {self._job.batch // self._job.workers} samples of one worker"
