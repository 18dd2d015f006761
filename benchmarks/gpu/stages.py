"""The stages: a row each. All together have to fit into ten minutes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from gpu.running import Asked, Row


@dataclass(frozen=True)
class Stage:
    """`module`: of this folder; its `rows(asked)` are the stage's results."""

    module: str
    seconds: float  # at most

    def rows(self, asked: Asked) -> Iterator[Row]:
        rows: Iterator[Row] = importlib.import_module(f"gpu.{self.module}").rows(asked)
        return rows


STAGES = {
    "machine": Stage("rates", 40.0),
    "tests": Stage("own_tests", 90.0),
    "equal": Stage("equal", 60.0),
    "jobs": Stage("jobs", 100.0),
    "speed": Stage("speed", 130.0),
    "shared": Stage("shared", 110.0),
    "codecs": Stage("codecs", 20.0),
    "feeding": Stage("feeding", 90.0),
}
