"""The formats of logs. A new dialect is a file and a row in DIALECTS.

The values of a file are those of the first dialect that finds epochs in it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from dmltrain.report.dialect.caffe import Caffe
from dmltrain.report.dialect.csv_logger import CSVLogger
from dmltrain.report.dialect.estimator import Estimator
from dmltrain.report.dialect.keras import Keras
from dmltrain.report.dialect.lightning import Lightning
from dmltrain.report.dialect.mxnet import MXNet
from dmltrain.report.dialect.pmls import PMLS
from dmltrain.report.dialect.tensorboard import TensorBoard
from dmltrain.report.runs.block import Block
from dmltrain.report.runs.run import FileValues


class Dialect(Protocol):
    programs: ClassVar[tuple[str, ...]]  # that write such logs, for help and messages
    sign: ClassVar[bytes]  # a pattern of lines that only these programs write, also without a value

    def feed(self, block: Block) -> bool:
        """Read the next block of a file. True if later dialects can skip it, because this one has found a run by now,
        or the file's header. A mark alone is not enough: then the result would depend on where blocks end."""

    def runs(self) -> list[FileValues]:
        """The runs in the file, after its last block."""


DIALECTS: tuple[type[Dialect], ...] = (
    MXNet,
    Estimator,
    PMLS,  # before Caffe, whose lines it has, too
    Caffe,
    Keras,
    CSVLogger,
    Lightning,
    TensorBoard,
)


def programs(conjunction: str) -> str:
    """All programs whose logs can be read, as a list for a sentence."""
    *first, last = [name for dialect in DIALECTS for name in dialect.programs]
    return f"{', '.join(first)} {conjunction} {last}"
