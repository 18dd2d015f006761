"""CSV files with a row for each epoch: Keras' CSVLogger, and what other programs write in its shape.

    epoch,accuracy,loss,val_accuracy,val_loss
    0,0.4676,1.4524,0.5589,1.2345

Keras counts from 0; a file whose first epoch is 1 counts from 1. Columns without `val` are training metrics. With
`append=True` a file can have several runs. A file is a log if a column is called like a metric: loss, accuracy, val_...
"""

from __future__ import annotations

from typing import ClassVar

from dmltrain.report.block import Block
from dmltrain.report.dialect.rows import Epochs, is_metric, key, own_seconds, plain
from dmltrain.report.run import Found


class CSVLogger:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Keras' CSVLogger",)
    sign: ClassVar[bytes] = rb"(?i)^(?!.*\bstep\b).{0,200}\bepoch[,;\t]"

    def __init__(self) -> None:
        self._epochs = Epochs(_accept, lambda name, header: key(name))

    def feed(self, block: Block) -> bool:
        return self._epochs.feed(block)

    def found(self) -> list[Found]:
        notes = self._epochs.notes()
        return [
            Found(run, first=1 if min(run) == 1 else 0, notes=notes, elapsed=own_seconds(run))
            for run in self._epochs.values()
        ]


def _accept(header: list[str]) -> bool:
    names = [plain(name) for name in header]
    return "epoch" in names and "step" not in names and any(map(is_metric, names))
