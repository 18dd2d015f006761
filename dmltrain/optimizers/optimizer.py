"""What an optimizer is: a value that says how each framework calls it. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = Callable[[float], Mapping[str, float | bool]]  # from --mom
ClassFrom = Callable[[Any], type[Any]]  # from the imported framework


def no_arguments(_: float) -> Mapping[str, float | bool]:
    """All are the framework's own defaults."""
    return {}


@dataclass(frozen=True)
class Torch:
    """An optimizer in PyTorch. Servers step it under the name of its class, in small letters.

    `own` makes the class where torch.optim has none of that name. An option that is not given has torch's default.
    """

    name: str  # of the class
    options: tuple[str, ...]  # numbers that servers accept besides lr
    arguments: Arguments = no_arguments  # without learning rate and weight decay
    fused: tuple[str, ...] = ()  # types of devices on which one kernel makes the whole step
    elementwise: bool = True  # each element for itself, with state by parameter: parts can step one after the other
    own: ClassFrom | None = None


@dataclass(frozen=True)
class MXNet:
    """An optimizer in MXNet. `own` makes the class where mx.optimizer has none of that name."""

    name: str  # of the class
    options: Mapping[str, str] = field(default_factory=dict)  # numbers besides the common ones: argument -> attribute
    arguments: Arguments = no_arguments  # without learning rate and weight decay
    own: ClassFrom | None = None


@dataclass(frozen=True)
class Optimizer:
    """`name` is --optimizer's. None: that framework does not have it; `--optimizer` offers those that PyTorch has."""

    name: str
    torch: Torch | None = None
    mxnet: MXNet | None = None
