"""What logs look like. A dialect is a class with `feed(block)`, for each block of a file in turn, and `found()` -> [Found] at its end.

A new one is a file and a row in DIALECTS; the first that finds epochs in a file has read it.
"""

from __future__ import annotations

from typing import Protocol

from dmltrain.report.blocks import Block
from dmltrain.report.dialect.caffe import Caffe
from dmltrain.report.dialect.keras import Keras
from dmltrain.report.dialect.mxnet import MXNet
from dmltrain.report.run import Found


class Dialect(Protocol):
    def feed(self, block: Block) -> None: ...

    def found(self) -> list[Found]: ...


DIALECTS: tuple[type[Dialect], ...] = (MXNet, Caffe, Keras)
