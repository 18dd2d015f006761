"""Optimizers on the servers: torch.optim on slices, from a spec that is a name and numbers (no pickled objects)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from dmltrain.arrays import Array
from dmltrain.backends.torch.optimizer import BY_CLASS, class_of
from dmltrain.errors import UserError


class Step:
    """The optimizer of one slice. `spec`: {"name", "lr", other numbers, "rescale": factor of all gradients (default 1),
    "keys": {str(key): {numbers that differ for this key}}}. Raises ValueError that lists the valid names."""

    def __init__(self, spec: dict[str, Any], key: int | str, value: Array) -> None:
        numbers = {**spec, **spec.get("keys", {}).get(str(key), {})}
        name = str(numbers.pop("name", "")).lower()
        if name not in BY_CLASS:
            raise ValueError(f"unknown optimizer {name!r}: servers have {', '.join(BY_CLASS)}")
        numbers.pop("keys", None)
        self._rescale = _number("rescale", numbers.pop("rescale", 1.0))
        rate = _number("lr", numbers.pop("lr", 0.0))
        row = BY_CLASS[name]
        for given in numbers:
            if given not in row.options:
                raise ValueError(f"optimizer {name} takes lr, {', '.join(row.options)}; not {given!r}")
        arguments = {
            given: tuple(_number(given, x) for x in number)
            if isinstance(number, (list, tuple))
            else _number(given, number)
            for given, number in numbers.items()
        }
        self._parameter = torch.nn.Parameter(torch.from_numpy(value), requires_grad=False)
        fused = {"fused": True} if "cpu" in row.fused else {}
        self._optimizer = class_of(name)([self._parameter], lr=rate, **fused, **arguments)

    def __call__(self, value: Array, gradient: Array, rate: float) -> None:
        """One step with learning rate `rate` (if negative, with the spec's); changes `value` in place."""
        self._parameter.data = torch.from_numpy(value)
        self._parameter.grad = torch.from_numpy(gradient)
        if self._rescale != 1.0:
            self._parameter.grad.mul_(self._rescale)
        if rate >= 0.0:
            self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._parameter.grad = None

    def state(self) -> dict[str, Array]:
        """The optimizer's arrays by their names in torch."""
        return {
            name: torch.as_tensor(item).numpy()
            for name, item in self._optimizer.state[self._parameter].items()
            if item is not None
        }

    def load(self, state: dict[str, Array]) -> None:
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
        self._optimizer.state[self._parameter] = tensors


def make_spec(optimizer: torch.optim.Optimizer, groups: dict[int, dict[str, Any]], rescale: float) -> dict[str, Any]:
    """`optimizer` as a spec; `groups`: key number -> its parameter group. Raises UserError if servers lack it."""
    name = type(optimizer).__name__.lower()
    if name not in BY_CLASS:
        raise UserError(
            f"optimizer {type(optimizer).__name__} cannot run on the servers, which have "
            f"{', '.join(BY_CLASS)}; use one of these, or dist_sync, which supports any optimizer"
        )
    allowed = ("lr", *BY_CLASS[name].options)
    keys = {
        str(key): {option: value for option, value in group.items() if option in allowed and value is not None}
        for key, group in groups.items()
    }
    return {"name": name, "rescale": rescale, "keys": keys}


def _number(name: str, value: Any) -> float | bool:
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"optimizer option {name}={value!r}: expected a finite number")
    return value
