"""Optimizers on the servers: torch.optim on slices, from a spec that is a name and numbers (no pickled objects)."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.optimizer import BY_CLASS, class_of, follow, row_of
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

RATE = "lr"  # in a state


class SliceOptimizer:
    """The optimizer of one slice of a key's weights.

    `spec`: {"name", "lr", other numbers, "keys": {str(key): {numbers that differ for this key}}}. Every optimizer takes
    the numbers "rescale", the factor of all gradients (default 1), "rate_in_momentum" and "number" (see
    optimizers.Torch; default: no, and the key's number). Raises ValueError for a wrong spec; the message lists the
    valid names."""

    def __init__(self, spec: dict[str, Any], key: int | str, value: Array) -> None:
        numbers = {**spec, **spec.get("keys", {}).get(str(key), {})}
        name = str(numbers.pop("name", "")).lower()
        if name not in BY_CLASS:
            raise ValueError(f"unknown optimizer {name!r}: servers have {', '.join(BY_CLASS)}")
        numbers.pop("keys", None)
        self._rescale = _number("rescale", numbers.pop("rescale", 1.0))
        rate = _number("lr", numbers.pop("lr", 0.0))
        self._follows = bool(_number("rate_in_momentum", numbers.pop("rate_in_momentum", False)))
        self._rate: float | None = rate  # of the momentum; None: not known
        number = numbers.pop("number", key if isinstance(key, int) else zlib.crc32(key.encode()))
        row = BY_CLASS[name]
        self.whole, self.needs_pulled = not row.elementwise, row.needs_pulled
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
        plain_step.postpone_compiler()
        self._optimizer = class_of(name)([self._parameter], lr=rate, **fused, **arguments)
        if row.numbered:
            self._state["number"] = int(_number("number", number))

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[self._parameter]
        return state

    def __call__(self, value: Array, gradient: Array, rate: float, pulled: Array | None = None) -> None:
        """One step with learning rate `rate` (if negative, with the spec's); changes `value` in place. `pulled`: the
        weights with which the gradient was computed, if they are not `value`."""
        self._parameter.data = torch.from_numpy(value)
        self._parameter.grad = torch.from_numpy(gradient)
        if self._rescale != 1.0:
            self._parameter.grad.mul_(self._rescale)
        if rate >= 0.0:
            self._set_rate(rate)
        if pulled is not None:
            self._state["pulled"] = torch.from_numpy(pulled)
        plain_step.step(self._optimizer)
        self._parameter.grad = None

    def _set_rate(self, rate: float) -> None:
        before, self._rate = self._rate, rate
        self._optimizer.param_groups[0]["lr"] = rate
        if self._follows and before is not None and rate != before:
            follow(self._optimizer, [self._parameter], before, rate)

    def state(self) -> dict[str, Array]:
        """The optimizer's arrays by their names in torch, and the learning rate if the momentum depends on it."""
        arrays = {name: np.asarray(item) for name, item in self._state.items() if item is not None}
        if self._follows and self._rate is not None and "momentum_buffer" in arrays:
            arrays[RATE] = np.array(self._rate)
        return arrays

    def load(self, state: dict[str, Array]) -> None:
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.items() if name != RATE}
        self._optimizer.state[self._parameter] = tensors
        self._rate = float(state[RATE]) if RATE in state else None


def make_spec(optimizer: torch.optim.Optimizer, groups: dict[int, dict[str, Any]], rescale: float) -> dict[str, Any]:
    """`optimizer` as a spec; `groups`: key number -> its parameters' options. Raises UserError if servers lack it."""
    row = row_of(optimizer)
    if row is None:
        raise UserError(
            f"optimizer {type(optimizer).__name__} cannot run on the servers, which have "
            f"{', '.join(BY_CLASS)}; use one of these, or dist_sync, which supports any optimizer"
        )
    allowed = ("lr", "rate_in_momentum", "number", *row.options)
    keys = {
        str(key): {option: plain(value) for option, value in group.items() if option in allowed and value is not None}
        for key, group in groups.items()
    }
    return {"name": row.name.lower(), "rescale": rescale, "keys": keys}


def plain(value: Any) -> Any:
    """An option of an optimizer, with numbers in place of tensors of one element, which torch accepts as well."""
    if isinstance(value, (tuple, list)):
        return tuple(plain(each) for each in value)
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _number(name: str, value: Any) -> float | bool:
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"optimizer option {name}={value!r}: expected a finite number")
    return value
