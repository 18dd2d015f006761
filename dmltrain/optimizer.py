"""The optimizers by MXNet's names, as specs: a torch.optim class and its numbers. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """The name of a torch.optim class and its keyword arguments, without learning rate and weight decay."""

    name: str
    arguments: dict[str, float | bool]


TABLE: dict[str, Callable[[float], Spec]] = {  # from --mom
    "sgd": lambda momentum: Spec("SGD", {"momentum": momentum}),
    "nag": lambda momentum: Spec("SGD", {"momentum": momentum, "nesterov": momentum > 0}),
    "adam": lambda momentum: Spec("Adam", {}),
    "adamw": lambda momentum: Spec("AdamW", {}),
    "adagrad": lambda momentum: Spec("Adagrad", {}),
    "rmsprop": lambda momentum: Spec("RMSprop", {"alpha": 0.9}),  # MXNet's gamma1
}
