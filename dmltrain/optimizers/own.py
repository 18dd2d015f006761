"""Optimizers of our own for PyTorch, each from one function that updates one array. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmltrain.optimizers.optimizer import Number, Torch

Group = dict[str, Any]  # a parameter group: lr, weight_decay and the optimizer's own options
ParameterState = dict[str, Any]  # of one parameter
Update = Callable[[Any, Any, Any, ParameterState, Group], None]  # (torch, weight, gradient, state, group)


def own_torch(name: str, update: Update, defaults: dict[str, Number], **fields: Any) -> Torch:
    """The table row of a class `name`, which has the options of `defaults` besides lr and weight_decay. `update`
    changes the weight in place. It must not write to the gradient: that may be shared memory, which other processes
    read."""

    def make(torch: Any) -> type[Any]:
        return _made(torch, name, update, defaults)

    return Torch(name, ("weight_decay", *defaults), own=make, **fields)


def array(torch: Any, state: ParameterState, name: str, weight: Any) -> Any:
    """An array of the state, zeros at first."""
    if name not in state:
        state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state[name]


def count(state: ParameterState) -> int:
    """The number of this step, from 1."""
    state["step"] = int(state.get("step", 0)) + 1
    return int(state["step"])


def decayed(weight: Any, gradient: Any, group: Group) -> Any:
    """The gradient plus weight decay."""
    return gradient.add(weight, alpha=group["weight_decay"])


def _made(torch: Any, name: str, update: Update, defaults: dict[str, Number]) -> type[Any]:
    class Own(torch.optim.Optimizer):  # type: ignore[misc]  # the class is known at run time only
        def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0, **options: Number) -> None:
            unknown = options.keys() - defaults.keys()
            if unknown:
                raise TypeError(f"{name} has no option {min(unknown)!r}")
            super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults, **options})

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            overflow, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
            if overflow is not None and overflow.item():  # of a loss scale
                return loss
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        gradient = weight.grad if scale is None else weight.grad / scale
                        update(torch, weight, gradient, self.state[weight], group)
            return loss

    Own.__name__ = Own.__qualname__ = name
    return Own
