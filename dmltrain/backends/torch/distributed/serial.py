"""A torch optimizer in the place of another one: what both kinds of distributed optimizers begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dmltrain.errors import UserError


class DistributedOptimizer(torch.optim.Optimizer):
    """The given optimizer, to be used in its place, also by learning-rate schedulers.

    This class is the one for a single worker: it only passes on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:  # no super().__init__(): state is the inner one's
        self.inner = optimizer
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # nobody assigns it
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # nobody assigns it
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # nobody assigns it
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
        """Send all gradients, for a caller that has completed them itself (overlap=False)."""

    def reduce_gradients(self) -> None:
        """Wait until the gradients are those of all workers. Needed only where something reads or changes them between
        backward() and step(): clipping, a gradient scaler's `unscale_`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)

    def settle(self) -> None:
        """Wait until the steps made so far are in the model's weights, as far as they are on their way. Needed only
        where weights are read outside the model's forward (see `distribute`)."""

    def synchronize(self) -> None:
        """Wait until the model has the weights that follow from all steps so far. Call before evaluation or saving."""

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context only add to the gradients; the first one after it sends them."""
        yield

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "servers" in state_dict:
            raise UserError(
                "this state was saved with the optimizer on the servers, here it is on the worker: "
                "continue with the kvstore (and update_on_kvstore) it was saved with"
            )
        self.inner.load_state_dict(state_dict)
