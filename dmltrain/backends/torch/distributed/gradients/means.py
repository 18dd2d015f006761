"""Gradients that are the mean over the workers when backward() returns (reducer.py): the default of dist_sync."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed import backward, owners
from dmltrain.backends.torch.distributed.gradients.own import OwnGradients
from dmltrain.backends.torch.distributed.gradients.reducer import check_optimizer, reducers_of
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices


class MeanGradients(OwnGradients):
    """See the module. A model may have several optimizers, and an optimizer the parameters of several models."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, choices: ExchangeChoices
    ) -> None:
        super().__init__(optimizer)
        self._store, self._choices, self._model = store, choices, model
        check_optimizer(model, optimizer)
        self._reducers = reducers_of(model, store, choices)
        # reducer -> its number of rounds when this optimizer made its last step or zero_grad
        self._before = {reducer: reducer.rounds for reducer in self._reducers}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        check_optimizer(self._model, self.inner)
        self._reducers = reducers_of(self._model, self._store, self._choices)
        self._before = {reducer: self._before.get(reducer, reducer.rounds) for reducer in self._reducers}

    def zero_grad(self, set_to_none: bool) -> None:
        for reducer in self._reducers:
            reducer.zeroed()
            self._before[reducer] = reducer.rounds
        super().zero_grad(set_to_none)

    def weigh(self, weight: float, more: bool = False) -> None:
        super().weigh(weight, more)
        for reducer in self._reducers:
            reducer.weight, reducer.holds = weight, more

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        before = [reducer.holds for reducer in self._reducers]
        for reducer in self._reducers:
            reducer.holds = True
        try:
            yield
        finally:
            for reducer, held in zip(self._reducers, before, strict=True):
                reducer.holds = held

    def reduce(self) -> None:
        """Average only gradients that the script has set itself, or added under `accumulate`, since the last step. All
        others are the mean already when backward() returns."""
        self.check_complete()
        for reducer in self._reducers:
            reducer.ensure_round(self._before[reducer], bool(reducer.replaced(self.parameters())))

    def begin_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """A closure's loss is replaced by its mean over the workers, so that the optimizers of all workers decide
        alike."""
        if closure is not None:
            return lambda: self._mean_loss(closure)
        self._prepare()
        return None

    def end_step(self) -> None:
        self._before = {reducer: reducer.rounds for reducer in self._reducers}
        self.weigh(1.0)

    def _prepare(self) -> None:
        if backward.is_running():
            raise UserError(
                "step() was called by a hook of backward(), but gradients are the means only when backward() has "
                "returned: call step() after it"
            )
        if any(reducer.is_released for reducer in self._reducers):
            raise UserError(owners.REPLACED)
        self.check_complete()
        for reducer in self._reducers:
            reducer.ensure_round(self._before[reducer])
            reducer.check_step(self.parameters())

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        self._before = {reducer: reducer.rounds for reducer in self._reducers}
        with torch.enable_grad():
            loss = closure()
        self._prepare()
        if loss is None:
            return None
        weight = self._reducers[0].weight if self._reducers else 1.0
        number = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        own = number * weight if weight else 0.0
        mean = float(self._store.all_reduce("loss of a closure", np.array([own]))[0]) / self._store.num_workers
        return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean
