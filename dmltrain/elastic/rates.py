"""Learning rates that follow the samples of a step, as --batch per-worker-scaled-lr asks."""

from __future__ import annotations

from logging import Logger

from dmltrain.data.deal import Dealing
from dmltrain.options.training import SCALED


class Rates:
    """`batch`: the kind of batch, one of BATCHES. Logs each change of the factor."""

    def __init__(self, log: Logger, batch: str) -> None:
        self._log, self._follow, self._factor = log, batch == SCALED, 1.0

    def factor(self, dealing: Dealing) -> float:
        """What learning rates are multiplied by in the present round."""
        size, usual = dealing.round.division.batch, dealing.batch
        factor = size / usual if self._follow else 1.0
        if factor != self._factor:
            self._factor = factor
            text = "Learning rates are multiplied by %.4g: a step has %d samples, %d at the job's start"
            self._log.info(text, factor, size, usual)
        return factor
