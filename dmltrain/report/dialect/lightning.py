"""PyTorch Lightning's CSVLogger: metrics.csv, with rows of steps and rows of epochs, and many empty cells.

    epoch,step,train_loss_step,train_loss_epoch,val_acc
    0,49,0.71,,
    0,390,,1.21,
    0,390,,,0.5521

An epoch has the last number of each column. Of `loss_step` and `loss_epoch` the second is the epoch's. A row without an
epoch (LearningRateMonitor writes them) belongs to the next one. What `trainer.test` measured after the last epoch
belongs to it; what `trainer.validate` did is no epoch's.
"""

from __future__ import annotations

from typing import ClassVar

from dmltrain.report.dialect.rows import Epochs, is_metric, key, own_seconds, plain
from dmltrain.report.runs.block import Block
from dmltrain.report.runs.run import FileValues


class Lightning:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("PyTorch Lightning",)
    sign: ClassVar[bytes] = rb"(?i)^(?=.*\bstep\b).{0,200}\bepoch[,;\t]"

    def __init__(self) -> None:
        self._epochs = Epochs(_accept, _name)

    def feed(self, block: Block) -> bool:
        return self._epochs.feed(block)

    def runs(self) -> list[FileValues]:
        notes = self._epochs.notes()
        return [FileValues(run, notes=notes, elapsed=own_seconds(run)) for run in self._epochs.values()]


def _accept(header: list[str]) -> bool:
    names = [plain(name) for name in header]
    return "epoch" in names and "step" in names and any(map(is_metric, names))


def _name(name: str, header: list[str]) -> str:
    if plain(name) == "step":
        return "step"
    if name.endswith("_step"):
        base = name.removesuffix("_step")
        return "" if f"{base}_epoch" in header or base in header else key(base)
    return key(name.removesuffix("_epoch"))
