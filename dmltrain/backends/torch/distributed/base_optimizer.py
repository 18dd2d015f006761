"""A torch optimizer that wraps another one: the base of all distributed optimizers, used as it is by one worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.choice import Choice
from dmltrain.backends.torch.optimizer import lay_out_state, row_of
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError


class DistributedOptimizer(torch.optim.Optimizer):
    """Replaces the given optimizer, also for learning-rate schedulers. This base class only delegates to it."""

    choices: tuple[Choice, ...] = ()
    """With `factors`, one for each dense layer: whether it sends factors. `str` says why, with the bytes of a step."""
    factored: frozenset[torch.nn.Parameter] = frozenset()  # the weights of those that do
    committed: Array | None = None
    """In an elastic job: the sum of the receipts (see `round`) of all workers whose gradients the last step has."""
    rate_factor = 1.0
    """In an elastic job: what the next step multiplies learning rates by. `param_groups` keeps them without it."""

    _weight = 1.0  # of the next backward
    _more = False  # whether the gradients need another backward after it

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
    def common_state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """By parameter: the optimizers' arrays that all workers of a synchronous job have in common."""
        found: Mapping[torch.Tensor, Mapping[str, Any]] = self.state
        return found

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read-only here
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped optimizer has, such as `train()` and `eval()` of schedule-free ones. Private names are
        not passed on: one of them tells GradScaler that a fused optimizer unscales gradients, and GradScaler would give
        the scale to this object, which ignores it."""
        if name.startswith("_") or name == "inner":  # the latter is not there yet while the object is made
            raise AttributeError(name)
        return getattr(self.inner, name)

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
        self._check_complete()
        weight, self._weight = self._weight, 1.0
        self.rescale(weight)

    def weigh(self, weight: float, more: bool = False) -> None:
        """From the next backward on, multiply this worker's gradients before they are sent. Where steps have the mean
        of all workers' gradients, it is that over all samples if each worker's loss is the mean over its own, and its
        weight is their number, times the workers, divided by the samples of all. With 0 any gradients count as zeros.
        With `more` backward only adds to the gradients, and the next weight counts, for all of them."""
        self._weight, self._more = weight, more

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that backward passes have added up so far in a step that needs more of them."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and factor != 1.0:
                    with torch.no_grad():
                        parameter.grad.mul_(factor)

    def _check_complete(self) -> None:
        if self._more:
            raise UserError(
                "step() before the last micro-batch of dmltrain.loader: call it only where loader.step_ends is true"
            )

    def round(self, dealt: int, receipt: Array, then: Callable[[Array], None] | None = None) -> None:
        """In an elastic job this comes before each step: `dealt` is the number of samples that all workers got for it,
        by which losses are divided, or gradients are weighed; `receipt` (3,) float64 says which this worker got: their
        number, and two sums over them that the caller chooses. The step has the mean over the samples of those workers
        that go on; after it `then` is called with the sum of their receipts."""

    @contextlib.contextmanager
    def _multiplied_rates(self) -> Iterator[None]:
        """In this context `param_groups` has the rates times `rate_factor`."""
        if self.rate_factor == 1.0:
            yield
            return
        own = [group["lr"] for group in self.param_groups]
        try:
            for group, rate in zip(self.param_groups, own, strict=True):
                group["lr"] = rate * self.rate_factor
            yield
        finally:
            for group, rate in zip(self.param_groups, own, strict=True):
                group["lr"] = rate

    def skip_round(self) -> bool:
        """In an elastic job: the script makes no step with the gradients of the last backward. Returns False if the
        other workers still wait for them."""
        return False

    def forget_round(self) -> None:
        """In an elastic job: make no step with the gradients of the last backward."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        DistributedOptimizer.reduce_gradients(self)
        return self._step_inner(closure)

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """The wrapped optimizer's own step."""
        if closure is None and row_of(self.inner) and plain_step.is_possible(self.inner):
            return plain_step.step(self.inner)
        return self.inner.step(closure)

    def settle(self) -> None:
        """Wait until the model's weights include all steps so far. Needed only before code that reads weights outside
        the model's forward (see `distribute`)."""

    def synchronize(self) -> None:
        """Like `settle`; with the optimizer on the servers also fetch their latest weights, and with dist_local, where
        every worker must call it, average the workers' weights. Call it before evaluation or saving."""

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
        self._load_inner(state_dict)

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        lay_out_state(self.inner)
