"""A torch optimizer that wraps another one: the base of all distributed ones. A single worker uses it as it is."""

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
    """With `factors`: for each dense layer whether it sends factors. `str(choice)` gives the reason and the bytes of a
    step."""
    factored: frozenset[torch.nn.Parameter] = frozenset()  # the weights of the layers that send factors
    committed: Array | None = None
    """In an elastic job: the sum of the checksums (see `round`) of all workers whose gradients are in the last step."""
    rate_factor = 1.0
    """In an elastic job: the next step multiplies learning rates by this. `param_groups` keeps the rates unchanged."""

    _weight = 1.0  # of the next backward
    _more = False  # whether the gradients of this step are incomplete after the next backward

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
        """Parameter -> the arrays of its optimizer state that are the same on all workers of a synchronous job."""
        state: Mapping[torch.Tensor, Mapping[str, Any]] = self.state
        return state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read-only here
        return self.inner.defaults

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
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def push_gradients(self) -> None:
        """Push all gradients. With overlap=False the caller calls this when the gradients are complete."""

    def reduce_gradients(self) -> None:
        """Wait until the gradients are the sum or the mean over all workers. Call it only before code that reads or
        changes gradients between backward() and step(), such as clipping or a gradient scaler's `unscale_`."""
        self._check_complete()
        weight, self._weight = self._weight, 1.0
        self.rescale(weight)

    def weigh(self, weight: float, more: bool = False) -> None:
        """From the next backward on, multiply this worker's gradients by `weight` before they are sent.

        A step with the mean of all workers' gradients counts all workers equally.
        To average over all samples, pass n_own × n_workers / n_total. Each worker's loss must be the mean over its
        own n_own samples. With weight 0 all gradients count as zeros, whatever they are.

        `more`: the next backward only adds to the gradients, and sends nothing. The weight of the next call then
        applies to all that was added up.
        """
        self._weight, self._more = weight, more

    def rescale(self, factor: float) -> None:
        """Multiply the gradients that the step's backward passes have added up so far."""
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

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        """In an elastic job, call this before each step.

        dealt: how many samples all workers got for the step. Losses are divided by it, or gradients are weighed with
        it. checksum: (3,) float64, which samples this worker got: their number, and two sums over them that the caller
        chooses. The step uses the mean over the samples of the workers that are still in the job. After the step `then`
        is called with the sum of their checksums.
        """

    @contextlib.contextmanager
    def _multiplied_rates(self) -> Iterator[None]:
        """Inside this context the learning rates in `param_groups` are multiplied by `rate_factor`."""
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
        """In an elastic job: the script made no step with the gradients of the last backward. Returns False if the
        other workers still wait for these gradients."""
        return False

    def forget_round(self) -> None:
        """In an elastic job: discard the gradients of the last backward."""

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
        """Call this before evaluation or saving. Like `settle`, and with the optimizer on the servers it also fetches
        their latest weights. With dist_local it averages the workers' weights; there every worker must call it."""

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside this context only add to the gradients. The first one after it pushes them."""
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
