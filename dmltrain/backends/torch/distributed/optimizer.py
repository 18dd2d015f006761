"""The optimizer that `dmltrain.distribute` returns: a torch optimizer that wraps another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from dmltrain.backends.torch.distributed.choice import Choice
from dmltrain.backends.torch.distributed.exchange import Exchange
from dmltrain.base.arrays import Array
from dmltrain.base.deprecation import deprecated
from dmltrain.kvstore.base import KVStore


class DistributedOptimizer(torch.optim.Optimizer):
    """Replaces the given optimizer, also for learning-rate schedulers. What the workers do together is its exchange's:
    see exchange.py. A single worker exchanges nothing."""

    store: KVStore  # only in a job of several workers
    choices: tuple[Choice, ...]
    """With `factors`: for each dense layer whether it sends factors. `str(choice)` gives the reason and the bytes of a
    step."""
    factored: frozenset[torch.nn.Parameter]  # the weights of the layers that send factors
    shared: Callable[[], AbstractContextManager[None]]
    """In an elastic job: inside this context the model's weights and `state_dict` are what a worker that joins gets of
    this one."""

    def __init__(self, exchange: Exchange) -> None:  # without super().__init__(): the inner has the state
        self.inner, self._exchange = exchange.inner, exchange
        self._optimizer_step_pre_hooks = self.inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks
        if exchange.store is not None:
            self.store = exchange.store
        self.shared = exchange.shared
        self.choices, self.factored = exchange.chosen.choices, frozenset(exchange.chosen.rows)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # read-only here
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # read-only here
        return self._exchange.state

    @property
    def common_state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """Parameter -> the arrays of its optimizer state that are the same on all workers of a synchronous job."""
        return self._exchange.common_state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read-only here
        return self.inner.defaults

    @property
    def committed(self) -> Array | None:
        """In an elastic job: the sum of the checksums (see `round`) of all workers whose gradients are in the last
        step."""
        return self._exchange.members.committed

    @property
    def rate_factor(self) -> float:
        """In an elastic job: the next step multiplies learning rates by this. `param_groups` keeps the rates
        unchanged."""
        return self._exchange.members.rate_factor

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        self._exchange.members.rate_factor = factor

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped optimizer has, such as `train()` and `eval()` of schedule-free ones. Private names are
        not passed on. One of them (`_step_supports_amp_scaling`) tells GradScaler that a fused optimizer unscales
        gradients itself: GradScaler would then give the scale to this object, which ignores it."""
        if name.startswith("_") or name == "inner":  # the latter is not there yet while the object is made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.inner.__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """In a job of several workers: the parameters must be the model's, and every worker must call it. Raises
        UserError where all must be there before `distribute`."""
        self._exchange.gradients.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._exchange.gradients.zero_grad(set_to_none)

    def push_gradients(self) -> None:
        """Send gradients that are complete; deprecated: `reduce_gradients` does this, and waits for the result."""
        deprecated("DistributedOptimizer.push_gradients", "DistributedOptimizer.reduce_gradients", "0.5")
        self._exchange.gradients.push()

    def reduce_gradients(self) -> None:
        """Wait until the gradients are the sum or the mean over all workers. Call it only before code that reads or
        changes gradients between backward() and step(), such as clipping or a gradient scaler's `unscale_`."""
        self._exchange.reduce_gradients()

    def weigh(self, weight: float, more: bool = False) -> None:
        """From the next backward on, multiply this worker's gradients by `weight` before they are sent.

        A step with the mean of all workers' gradients counts all workers equally.
        To average over all samples, pass n_own × n_workers / n_total. Each worker's loss must be the mean over its
        own n_own samples. With weight 0 all gradients count as zeros, whatever they are.

        `more`: the next backward only adds to the gradients, and sends nothing. The weight of the next call then
        applies to all that was added up.
        """
        self._exchange.gradients.weigh(weight, more)

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that the step's backward passes have added up so far."""
        self._exchange.gradients.rescale(factor)

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        """In an elastic job, call this before each step.

        dealt: how many samples all workers got for the step. Losses are divided by it, or gradients are weighed with
        it. checksum: (3,) float64, which samples this worker got: their number, and two sums over them that the caller
        chooses. The step uses the mean over the samples of the workers that are still in the job. After the step `then`
        is called with the sum of their checksums.
        """
        self._exchange.round(dealt, checksum, then)

    def skip_round(self) -> bool:
        """In an elastic job: the script made no step with the gradients of the last backward. Returns False if the
        other workers still wait for these gradients."""
        return self._exchange.skip_round()

    def forget_round(self) -> None:
        """In an elastic job: discard the gradients of the last backward."""
        self._exchange.forget_round()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """With the gradients of several workers a closure runs once, unless the wrapped optimizer makes whole steps
        with their mean: its loss is then replaced by its mean over the workers, so that all decide alike. In an elastic
        job raises what `KVStore.enter` raises, if this worker is no longer a member."""
        return self._exchange.step(closure)

    def settle(self) -> None:
        """Wait until the model's weights include all steps so far. Needed only before code that reads weights outside
        the model's forward (see `distribute`)."""
        self._exchange.gradients.settle()

    def synchronize(self) -> None:
        """Call this before evaluation or saving. Like `settle`, and with the optimizer on the servers it also fetches
        their latest weights. With dist_local it averages the workers' weights; there every worker must call it."""
        self._exchange.synchronize()

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes inside this context only add to the gradients. The first one after it pushes them."""
        return self._exchange.gradients.accumulate()

    def state_dict(self) -> dict[str, Any]:
        return self._exchange.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._exchange.load_state_dict(state_dict)
