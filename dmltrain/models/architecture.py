"""What the table of networks knows about each: how to build it, its usual size, and which options it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from dmltrain.layers import Network


@dataclass(frozen=True)
class Architecture:
    """A row of the table of networks.

    `build(num_layers, num_classes, image_shape)` makes the network; `num_layers` None means the usual depth, and
    is all that a network with a single depth gets. Its
    keyword-only arguments, all with defaults, are the network's own options: `batch_norm` is --batch-norm.
    """

    build: Callable[..., Network]
    image_shape: tuple[int, int, int]  # the usual one: channels, height, width
    num_classes: int  # the usual number
    depths: str = ""  # the valid ones in words, the usual one first; empty for a network with a single depth

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the network's own options."""
        arguments = inspect.signature(self.build).parameters.values()
        return tuple(argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY)
