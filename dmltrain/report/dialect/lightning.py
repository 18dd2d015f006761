"""PyTorch Lightning's CSVLogger: metrics.csv, with rows of steps and rows of epochs, and many empty cells.

    epoch,step,train_loss_step,train_loss_epoch,val_acc
    0,49,0.71,,
    0,390,,1.21,
    0,390,,,0.5521

An epoch has the last number of each column. Of `loss_step` and `loss_epoch` the second is the epoch's. A row without an
epoch (LearningRateMonitor writes them) belongs to the next one. What `trainer.test` measured after the last epoch
belongs to it.
"""

from __future__ import annotations

from array import array
from typing import ClassVar

from dmltrain.report.block import Block
from dmltrain.report.dialect.rows import Epochs, is_metric, key, plain
from dmltrain.report.run import Found, Values


class Lightning:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("PyTorch Lightning",)

    def __init__(self) -> None:
        self._epochs = Epochs(_accept, _name)

    def feed(self, block: Block) -> bool:
        return self._epochs.feed(block)

    def found(self) -> list[Found]:
        return [Found(_with_test(run), notes=self._epochs.notes()) for run in self._epochs.values()]


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


def _with_test(run: dict[int, Values]) -> dict[int, Values]:
    """The epochs, with the test's values in the last one that was trained."""
    *epochs, last = sorted(run)
    if epochs and all(name == "step" or name.startswith("test_") for name in run[last]):
        tested = {name: numbers for name, numbers in run[last].items() if name != "step"}
        run = {epoch: values for epoch, values in run.items() if epoch != last}
        run[epochs[-1]] = {**run[epochs[-1]], **{name: array("d", numbers) for name, numbers in tested.items()}}
    return run
