"""Further outputs of a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dmltrain.layers.joins import Chain
from dmltrain.layers.layer import Layer, LayerCall
from dmltrain.layers.parameter import Shape


@dataclass(frozen=True)
class Auxiliary(Layer):
    """The identity, with a classifier beside it (Szegedy et al. 2015, "Going deeper with convolutions", section 5).

    In training the branch's logits are a further output of the network, and their cross-entropy counts `weight` times
    in the loss. Metrics and evaluation do not see them.
    """

    branch: Layer = Chain()
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.require(0 <= self.weight < float("inf"), f"weight must be a number from 0, is {self.weight}")

    def trace(self, shape: Shape) -> Iterator[LayerCall]:
        yield from self.branch.trace(shape)
        yield LayerCall(self, shape, shape)
