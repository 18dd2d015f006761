"""The optimizer on the workers, any of torch, with `step_early`; servers only sum.

Gradients are sent during backward, and nothing may read or change them before step(). If the optimizer treats
parameters independently, its step is made in parts: each bucket is stepped as soon as its sum has arrived. The results
are bit-identical to those of a whole step, and fused kernels stay fused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from dmltrain.backends.torch import plain_step
from dmltrain.backends.torch.distributed.buckets import EARLY, Bucket
from dmltrain.backends.torch.distributed.choice import NOTHING_CHOSEN, Chosen
from dmltrain.backends.torch.distributed.overlap import OverlappedOptimizer
from dmltrain.backends.torch.optimizer import BY_CLASS, class_of
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.choices import ExchangeChoices

OF_SCRIPTS = (optim.RAdam, optim.Adadelta, optim.Rprop, optim.ASGD)  # used by scripts only
PER_PARAMETER = (*map(class_of, BY_CLASS), *OF_SCRIPTS)


class EarlyOptimizer(OverlappedOptimizer):
    """See the module."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        store: KVStore,
        choices: ExchangeChoices,
        chosen: Chosen = NOTHING_CHOSEN,
    ) -> None:
        _check_closure(optimizer)
        super().__init__(
            model, optimizer, store, choices, mean=choices.average and not store.elastic, factored=chosen.rows
        )
        self.choices, self.factored = chosen.choices, frozenset(chosen.rows)
        self._factors_to_mean = {
            bucket: bucket.factor_to_mean(store) if choices.average else 1.0 for bucket in self._buckets
        }
        self._groups: list[dict[str, Any]] | None = None  # the options of the step whose buckets are pending
        self._factor = 1.0  # of that step
        in_buckets = {parameter for bucket in self._buckets for parameter in bucket.parameters}
        self._frozen = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in in_buckets
        ]

    def _push(self, bucket: Bucket) -> None:
        bucket.pushed = True
        self._pending[bucket] = bucket.send(self.store)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._push_all()
        self._share_buffers()
        self._step_all()
        return loss

    def reduce_gradients(self) -> None:
        self._push_all()
        self._wait(list(self._pending))

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.settle()
        super().load_state_dict(state_dict)

    def synchronize(self) -> None:
        self.settle()

    def _push_all(self) -> None:
        if any(parameter.grad is not None for parameter in self._frozen):
            raise UserError(
                "a parameter that was frozen at dmltrain.distribute has a gradient now, which is this worker's own "
                f"{EARLY}: train without these, or call dmltrain.distribute again after unfreezing"
            )
        self.push_gradients()
        for bucket in self._pending:
            bucket.check_unchanged()

    def _step_all(self, factor: float = 1.0) -> None:
        """Step all buckets with their results times `factor`: each as its result arrives, or with `defer` later."""
        self._groups, self._factor = self._options_of_parts(), factor
        if self._groups is None:
            self._wait(list(self._pending))
            self.inner.step()
            for bucket in self._buckets:
                bucket.begin()
            return
        for bucket in self._buckets:
            bucket.stepped = True
        if not self._defer:
            self._wait(list(self._pending))

    def _options_of_parts(self) -> list[dict[str, Any]] | None:
        """The groups' options for a step in parts; None if all parameters must be stepped at once."""
        if len(self._pending) < len(self._buckets):
            return None
        if not all(bucket.has_gradients for bucket in self._buckets):
            return None
        return step_options(self.inner)

    def _take(self, bucket: Bucket, handle: Handle) -> None:
        factor = self._factors_to_mean[bucket] * self._factor
        if not bucket.stepped:
            bucket.take_result(handle, factor)
            return
        assert self._groups is not None  # _step_all sets `stepped` only if there are options for a step in parts
        bucket.check_unchanged()
        options = self._groups[bucket.group]
        with bucket.result_in_place(handle, factor, copied=changes_gradients(options)):
            step_parameters(self.inner, options, bucket.parameters)
        bucket.begin()


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for optimizers that call a closure several times in a step, such as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer {type(optimizer).__name__} computes gradients several times in a step, which are sent for one "
            f"step {EARLY}: train without these"
        )


def step_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]] | None:
    """A copy of each group's current options, without its parameters. None if the step cannot be made in parts: the
    class is not in PER_PARAMETER (subclasses are not), hooks expect whole steps, there is a gradient scaler, or an
    option is a tensor.
    """
    if type(optimizer) not in PER_PARAMETER or not plain_step.is_possible(optimizer):
        return None
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if any(isinstance(value, torch.Tensor) for group in options for value in group.values()):
        return None
    return options


def changes_gradients(options: dict[str, Any]) -> bool:
    """Whether a step with these options writes to gradients. torch's _multi_tensor_sgd does: it adds the momentum to
    them in place."""
    return bool(options.get("nesterov") and options.get("foreach"))


def step_parameters(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], parameters: list[torch.nn.Parameter]
) -> None:
    """Step these parameters of one group. `options`: the group's options when step() was called."""
    whole = optimizer.param_groups
    optimizer.param_groups = [{**options, "params": parameters}]
    try:
        plain_step.step(optimizer)
    finally:
        optimizer.param_groups = whole
