"""The description of an optimizer: its name and options in each framework. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Chosen(Protocol):
    """The options of a training program that an optimizer's arguments depend on."""

    @property
    def mom(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def warmup_strategy(self) -> str: ...


Number = float | bool
Arguments = Callable[[Chosen], Mapping[str, Number]]
OfKind = Callable[[str], Mapping[str, Number]]  # from the kind of an array: weight, bias, gamma or beta
ClassFrom = Callable[[Any], type[Any]]  # from the imported framework


def no_arguments(_: Chosen) -> Mapping[str, Number]:
    """Keep the framework's defaults."""
    return {}


def momentum(chosen: Chosen) -> Mapping[str, Number]:
    """--mom as the framework's `momentum`."""
    return {"momentum": chosen.mom}


def the_same(_: str) -> Mapping[str, Number]:
    """Arrays of all kinds have the same arguments."""
    return {}


@dataclass(frozen=True)
class Torch:
    """An optimizer in PyTorch, which keeps its state per parameter. Servers know it by its class name in lower case.

    `own` makes the class if torch.optim has none of that name. Missing options have torch's defaults.
    """

    name: str  # of the class
    options: tuple[str, ...]  # numeric options that servers accept besides lr
    arguments: Arguments = no_arguments  # without learning rate and weight decay
    of_kind: OfKind = the_same  # further arguments, which may replace the weight decay
    of_last: Mapping[str, Number] = field(default_factory=dict)  # and those of the last layer's weight
    fused: tuple[str, ...] = ()  # devices, cpu and gpu, that have a fused kernel for the whole step
    elementwise: bool = True  # elements are independent; False: a server needs a whole parameter as one key
    rate_in_momentum: bool = False  # `momentum_buffer` follows changes of the learning rate as in MXNet
    numbered: bool = False  # a parameter's state has its `number`, for random numbers
    needs_pulled: bool = False  # a step on a server needs the weights that the worker has computed its gradient with
    own: ClassFrom | None = None

    def takes_loss_scale(self, device: str) -> bool:
        """Whether its steps divide gradients by a loss scale, and are left out after an overflow, on this device, cpu
        or gpu: fused kernels and classes of our own do."""
        return self.own is not None or device in self.fused


@dataclass(frozen=True)
class MXNet:
    """An optimizer in MXNet. `own` makes the class if MXNet has none, or one with a fault that matters here."""

    name: str  # of the class
    options: tuple[str, ...] = ()  # its arguments besides the common ones
    arguments: Arguments = no_arguments  # without learning rate and weight decay
    of_kind: OfKind = the_same  # a key's wd_mult or `layerwise`
    elementwise: bool = True  # as Torch's
    own: ClassFrom | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)  # of arguments whose attribute has another name


@dataclass(frozen=True)
class Optimizer:
    """`name` is the value of --optimizer, which offers what PyTorch has. None: the framework lacks this optimizer.

    `plain` is torch.optim's class of the same method, for scripts, if --optimizer has MXNet's formula instead.
    """

    name: str
    torch: Torch | None = None
    mxnet: MXNet | None = None
    plain: Torch | None = None
    asynchronous: bool = False  # it makes sense only where each push is a step
