"""A torch optimizer that wraps another one: the base of both distributed optimizers, used as it is by one worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.choice import Choice
from dmltrain.backends.torch.optimizer import row_of
from dmltrain.errors import UserError


class DistributedOptimizer(torch.optim.Optimizer):
    """Replaces the given optimizer, also for learning-rate schedulers. This base class only delegates to it."""

    choices: tuple[Choice, ...] = ()  # of dense layers, whether they send factors
    factored: frozenset[torch.nn.Parameter] = frozenset()  # the weights of those that do

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:  # without super().__init__(): the inner has the state
        self.inner = optimizer
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # read-only here
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # read-only here
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read-only here
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.inner.__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def push_gradients(self) -> None:
        """Push all gradients. With overlap=False the caller does this after it has completed them."""

    def reduce_gradients(self) -> None:
        """Wait until the gradients are the sum or mean of all workers'. Needed only before code that reads or changes
        them between backward() and step(): clipping, a gradient scaler's `unscale_`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None and row_of(self.inner) and plain_step.is_possible(self.inner):
            return plain_step.step(self.inner)
        return self.inner.step(closure)

    def settle(self) -> None:
        """Wait until the model's weights include all steps so far. Needed only before code that reads weights outside
        the model's forward (see `distribute`)."""

    def synchronize(self) -> None:
        """Like `settle`, and with the optimizer on the servers also fetch their latest weights. Call it before
        evaluation or saving."""

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context only add to the gradients; the next one after it pushes them."""
        yield

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "servers" in state_dict:
            raise UserError(
                "this state was saved with the optimizer on the servers, but it now runs on the worker: "
                "resume with the kvstore (and update_on_kvstore) that it was saved with"
            )
        self.inner.load_state_dict(state_dict)
