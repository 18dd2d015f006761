"""The description of an optimizer: its name and options in each framework. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = Callable[[float], Mapping[str, float | bool]]  # from --mom
ClassFrom = Callable[[Any], type[Any]]  # from the imported framework


def no_arguments(_: float) -> Mapping[str, float | bool]:
    """Keep the framework's defaults."""
    return {}


@dataclass(frozen=True)
class Torch:
    """An optimizer in PyTorch. Servers know it by its class name in lower case.

    `own` makes the class if torch.optim has none of that name. Missing options have torch's defaults.
    """

    name: str  # of the class
    options: tuple[str, ...]  # numeric options that servers accept besides lr
    arguments: Arguments = no_arguments  # without learning rate and weight decay
    fused: tuple[str, ...] = ()  # device types that have a fused kernel for the whole step
    elementwise: bool = True  # elements are independent and state is per parameter: parameters can step separately
    own: ClassFrom | None = None


@dataclass(frozen=True)
class MXNet:
    """An optimizer in MXNet. `own` makes the class if mx.optimizer has none of that name."""

    name: str  # of the class
    options: Mapping[str, str] = field(default_factory=dict)  # besides the common ones: argument -> attribute
    arguments: Arguments = no_arguments  # without learning rate and weight decay
    own: ClassFrom | None = None


@dataclass(frozen=True)
class Optimizer:
    """`name` is the value of --optimizer, which offers what PyTorch has. None: the framework lacks this optimizer."""

    name: str
    torch: Torch | None = None
    mxnet: MXNet | None = None
