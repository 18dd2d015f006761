"""CSV files with a row for each epoch: Keras' CSVLogger, and what other programs write in its shape.

    epoch,accuracy,loss,val_accuracy,val_loss
    0,0.4676,1.4524,0.5589,1.2345

Keras counts from 0; a file whose first epoch is 1 counts from 1. Columns without `val` are training metrics. With
`append=True` a file can have several runs. A file is a log if a column is called like a metric: loss, accuracy, val_...

    epoch,train_loss,valid_loss,accuracy,time
    0,1.4524,1.2345,0.5589,00:26

fastai measures what has no split in its name on the validation data, and prints minutes and seconds of each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dmltrain.report.dialect.rows import Epochs, is_metric, key, own_seconds, plain
from dmltrain.report.runs.block import Block
from dmltrain.report.runs.run import FileValues


class CSVLogger:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("Keras' CSVLogger",)
    sign: ClassVar[bytes] = rb"(?i)^(?!.*\bstep\b).{0,200}\bepoch[,;\t]"

    def __init__(self) -> None:
        self._epochs = Epochs(_accept, _key)

    def feed(self, block: Block) -> bool:
        return self._epochs.feed(block)

    def runs(self) -> list[FileValues]:
        notes, of_fastai = self._epochs.notes(), _is_of_fastai(self._epochs.rows.header)
        return [
            FileValues(run, first=1 if min(run) == 1 else 0, notes=notes, elapsed={} if of_fastai else own_seconds(run))
            for run in self._epochs.values()
        ]


def _is_of_fastai(header: Sequence[str]) -> bool:
    return list(map(plain, header[:3])) == ["epoch", "train_loss", "valid_loss"]


def _key(name: str, header: list[str]) -> str:
    return key(name, "validation" if _is_of_fastai(header) else "train")


def _accept(header: list[str]) -> bool:
    names = [plain(name) for name in header]
    return "epoch" in names and "step" not in names and any(map(is_metric, names))
