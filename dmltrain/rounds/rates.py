"""Learning rates that follow the samples of a step, as --batch per-worker-scaled-lr asks."""

from __future__ import annotations

from logging import Logger

from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.sync_assignment import SyncAssignment
from dmltrain.options.training import SCALED


class Rates:
    """`batch`: the kind of batch, one of BATCHES. Logs each change of the factor."""

    def __init__(self, log: Logger, batch: str) -> None:
        self._log, self._follow, self._factor = log, batch == SCALED, 1.0

    def factor(self, assignment: SyncAssignment | AsyncAssignment | None) -> float:
        """The factor of learning rates in the present round."""
        if not self._follow:
            return 1.0
        assert isinstance(assignment, SyncAssignment)  # steps of one worker have always as many samples
        size, usual = assignment.round.division.batch, assignment.batch
        factor = size / usual
        if factor != self._factor:
            self._factor = factor
            text = "Learning rates are multiplied by %.4g: a step has %d samples, %d at the job's start"
            self._log.info(text, factor, size, usual)
        return factor
