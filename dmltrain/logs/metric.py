"""Metrics of training and validation, as sums that can be added over batches, devices and workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

# --loss -> the name of MXNet's metric. For a softmax both are the cross-entropy.
LOSSES = {"ce": "cross-entropy", "nll_loss": "nll-loss", "nll": "nll-loss"}
BCE = "bce"  # a value of --loss that is trained with, and not reported


@dataclass(frozen=True)
class Sums:
    """Sums over samples. `correct_top_k` counts samples whose label is among the k largest outputs."""

    samples: float = 0.0
    correct: float = 0.0
    correct_top_k: float = 0.0
    cross_entropy: float = 0.0  # natural logarithm

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))

    def values(self) -> tuple[float, ...]:
        return astuple(self)

    @classmethod
    def of(cls, values: Iterable[float]) -> Sums:
        return cls(*(float(value) for value in values))

    def metrics(self, top_k: int = 0, losses: Iterable[str] = ()) -> dict[str, float]:
        """Means by MXNet's metric names, with the cross-entropy and those of `losses` that LOSSES has; nan without
        samples."""
        count = self.samples or float("nan")
        named = {"accuracy": self.correct / count}
        if top_k:
            named[f"top_k_accuracy_{top_k}"] = self.correct_top_k / count
        return {**named, **{LOSSES[name]: self.cross_entropy / count for name in ("ce", *losses) if name in LOSSES}}
