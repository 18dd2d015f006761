"""The arrays of a network: their names, shapes and kinds, how they start and how they learn."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dmltrain.layers.initialisers import Initialiser

Shape = tuple[int, ...]
LEARNED_KINDS = ("weight", "bias", "gamma", "beta")
AUXILIARY_KINDS = ("moving_mean", "moving_var")
DECAYING_KINDS = ("weight", "gamma")  # unless a layer says otherwise; MXNet's rule (Optimizer.set_wd_mult)


@dataclass(frozen=True)
class Parameter:
    """One array of a network. `kind` is one of `LEARNED_KINDS` or, for batch-norm statistics, of `AUXILIARY_KINDS`.

    `initial` None means the usual first values: weights by the network's initialiser, ones for gammas and variances,
    zeros for the rest. The learning rate and the weight decay are multiplied by `lr_mult` and `wd_mult`.
    """

    name: str
    shape: Shape
    kind: str
    initial: Initialiser | None = None
    lr_mult: float = 1.0
    wd_mult: float = 1.0

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Rule:
    """How an array of a layer starts and learns, where this is not as usual: see `Parameter`.

    `wd_mult` None means that weights and gammas decay, biases and betas do not.
    """

    initial: Initialiser | None = None
    lr_mult: float = 1.0
    wd_mult: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("lr_mult", self.lr_mult), ("wd_mult", self.wd_mult)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number from 0, is {value}")

    def parameter(self, name: str, shape: Shape, kind: str) -> Parameter:
        """The array `name`, of a kind in `LEARNED_KINDS`, by this rule."""
        decay = float(kind in DECAYING_KINDS) if self.wd_mult is None else self.wd_mult
        return Parameter(name, shape, kind, self.initial, self.lr_mult, decay)


USUAL = Rule()
