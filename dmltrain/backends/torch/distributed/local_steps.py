"""Local SGD: each worker steps alone, with any optimizer, and all meet to average their weights (dist_local).

Workers meet after their local steps, and in `synchronize`. At a meeting they first tell each other from which of these
they come. A worker that waits in `synchronize` contributes its unchanged weights to the averages of workers that still
make steps, until all workers are in `synchronize`. So workers may make unequal numbers of steps between two calls of
`synchronize`, if they train a single model. With several models a worker that waits in one model's `synchronize` cannot
take part in another model's averages.

In an elastic job an average is a round of all members (members.py), and `round` comes before its last local step: so
nobody has to ask where the others come from. If members change before it is recognised, those that are left make it
again, from the weights that each of them has: it is the mean over those that have made local steps since the last one.
What a lost worker has learned since then is lost with it, and its samples are dealt again. A worker that joins begins
with the weights of the last average and the outer momentum; it has a part from the next round on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.exchange import Exchange, evaluated
from dmltrain.backends.torch.distributed.gradients.own import OwnGradients
from dmltrain.backends.torch.distributed.layout import declared
from dmltrain.backends.torch.distributed.members import RECEIPT, Members
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import READ, Handle, KVStore
from dmltrain.kvstore.local_steps import LocalSteps

OUTER = "outer"  # in a state_dict: what all workers have in common, beside the worker's own inner state


class WeightAverages(Exchange):
    """See the module. The inner optimizer's state is each worker's own; that of the outer one is the same on all."""

    store: KVStore

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, store: KVStore, settings: LocalSteps
    ) -> None:
        members = Members(store, "receipt")
        buckets = declared(model, optimizer, store, mean=not members.elastic)
        if members.elastic:
            store.init([members.key], [np.zeros(RECEIPT + 1)])
        super().__init__(OwnGradients(optimizer, buckets), store, members)
        self._settings = settings
        _check_equal(settings, store)
        self._model = store.key_number(buckets[0].name) if buckets else -1  # identifies the model
        self._outer = [OuterOptimizer(bucket, settings) for bucket in buckets]
        self._steps_made = 0  # local steps since the last average
        self._is_shared = False  # whether `state_dict` has only what is the same on all workers
        self._numbers = {parameter: number for number, parameter in enumerate(self.gradients.parameters())}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.members.is_known and not self.members.dealt:  # this worker has just joined
            loss = evaluated(closure)
        else:
            self._begin()
            loss = super().step(closure)
            self._steps_made += 1
        if self.members.is_known:
            self._meet_members()
        elif self._steps_made >= self._settings.steps:  # more if the state is from a run with other settings
            self.members.check()
            self._meet(last=False)
        return loss

    def synchronize(self) -> None:
        if not self.members.elastic:
            while not self._meet(last=True):
                pass
        elif self._steps_made:
            raise UserError(
                "an elastic job averages weights after so many batches of dmltrain.loader, and at the end of the loop "
                "over it: call optimizer.synchronize() and state.save() after that loop"
            )

    def _begin(self) -> None:
        """Copy the weights before the first local step, not right after the average: in between the program may load
        other weights."""
        if self._steps_made == 0:
            for outer in self._outer:
                outer.begin()

    def _meet(self, last: bool) -> bool:
        """Average the weights if any worker has made steps. `last`: this worker is in `synchronize`. Returns whether
        all workers are."""
        own = np.array([last, self._steps_made > 0, self._model, self._model**2], np.float64)
        here, moved, models, squares = self.store.all_reduce("local steps of workers", own)
        if models**2 != self.store.num_workers * squares:  # equal only for equal numbers (Cauchy-Schwarz)
            raise UserError(
                "the workers average different models: where a script has several models with dist_local, all workers "
                "must make the same number of steps of each, and call synchronize() of each in the same order"
            )
        if moved:
            self._average()
        return bool(here == self.store.num_workers)

    def _average(self) -> None:
        self._begin()
        with torch.no_grad():
            sent = self._send_all()
            for outer, handle in sent:
                handle.wait()
                outer.take(handle, outer.bucket.factor_to_mean(self.store))
        self._steps_made = 0

    def _send_all(self) -> list[tuple[OuterOptimizer, Handle]]:
        """Push all parts; on a GPU all are copied to the host while the first ones are sent."""
        for outer in self._outer:
            outer.begin_copy()
        return [(outer, outer.bucket.send(self.store)) for outer in self._outer]

    # -- rounds of an elastic job ---------------------------------------------------------------------------------

    def round(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None = None) -> None:
        if self.members.elastic:
            self.members.begin(dealt, checksum, then)

    def skip_round(self) -> bool:
        if self.members.is_known:
            self._meet_members()
        return True

    def forget_round(self) -> None:
        """Also the local steps since the last average."""
        self.members.forget()
        self._return()

    def _meet_members(self) -> None:
        found = self.members.recognised(self._attempt)
        if found is None:  # the others have made it, and its weights are here
            self.members.end(None)
        else:
            sent, total = found
            self.members.end(total[:RECEIPT])
            self._take(sent, int(total[RECEIPT]))
        self.members.tell()

    def _attempt(self) -> tuple[list[tuple[OuterOptimizer, Handle]], Array]:
        """Wait for the sums in the present view, and until the round is recognised. Returns the results of the buckets,
        and the sum of the checksums, with the number of workers that have made local steps."""
        self._begin()
        own = np.append(self.members.checksum, float(self._steps_made > 0))
        with torch.no_grad():
            sent = self._send_all()
        total = self.store.pushpull(self.members.key, own, READ, wait=False)
        for handle in (*(handle for _, handle in sent), total):
            handle.wait()
        self.store.complete()
        return sent, np.array(total.values[0])

    def _take(self, sent: list[tuple[OuterOptimizer, Handle]], workers: int) -> None:
        """Make the outer step with the mean over so many workers; if there are none, all have the weights before."""
        with torch.no_grad():
            for outer, handle in sent if workers else ():
                outer.take(handle, 1.0 / workers)
        self._steps_made = 0

    def _return(self) -> None:
        """Go back to the weights of the last average."""
        for outer in self._outer if self._steps_made else ():
            outer.bucket.weights.set(outer.start)
        self._steps_made = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        own, made = [torch.from_numpy(outer.bucket.weights.on_host()) for outer in self._outer], self._steps_made
        self._return()
        self._is_shared = True
        try:
            yield
        finally:
            self._is_shared, self._steps_made = False, made
            for outer, weights in zip(self._outer, own, strict=True):
                outer.bucket.weights.set(weights)

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def common_state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        return {
            parameter: {"outer_momentum": view}
            for outer in self._outer
            if outer.momentum is not None
            for parameter, view in zip(outer.bucket.parameters, outer.bucket.places.cut(outer.momentum), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under OUTER that of the outer one: `steps` since the last average;
        `momentum` and `start` (the weights at the last average; only between two averages) by a parameter's number."""
        outer: dict[str, Any] = {"steps": self._steps_made, "momentum": {}, "start": {}}
        for outer_optimizer in self._outer:
            outer["momentum"] |= self._by_number(outer_optimizer, outer_optimizer.momentum)
            outer["start"] |= self._by_number(outer_optimizer, outer_optimizer.start if self._steps_made else None)
        inner = super().state_dict()
        return {**inner, **({"state": {}} if self._is_shared else {}), OUTER: outer}

    def _by_number(self, outer: OuterOptimizer, flat: torch.Tensor | None) -> dict[int, torch.Tensor]:
        if flat is None:
            return {}
        views = zip(outer.bucket.parameters, outer.bucket.places.cut(flat), strict=True)
        return {self._numbers[parameter]: view.cpu().clone() for parameter, view in views}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads a state from another type of kvstore with the optimizer on the workers; the outer momentum then
        starts at zero."""
        super().load_state_dict(state_dict)
        outer = state_dict.get(OUTER, {})
        self._steps_made = int(outer.get("steps", 0))
        for outer_optimizer in self._outer:
            if outer_optimizer.momentum is not None:
                outer_optimizer.momentum.zero_()
                self._load(outer_optimizer, outer_optimizer.momentum, outer.get("momentum", {}))
            if self._steps_made:
                outer_optimizer.begin()  # for parameters that were frozen when the state was saved
                self._load(outer_optimizer, outer_optimizer.start, outer["start"])

    def _load(self, outer: OuterOptimizer, flat: torch.Tensor, saved: Mapping[int, torch.Tensor]) -> None:
        for parameter, view in zip(outer.bucket.parameters, outer.bucket.places.cut(flat), strict=True):
            number = self._numbers[parameter]
            if number in saved and saved[number].shape != view.shape:
                raise UserError(
                    f"the outer optimizer's state belongs to another model: parameter {number} has the shape "
                    f"{tuple(saved[number].shape)} there and {tuple(view.shape)} here"
                )
            if number in saved:
                view.copy_(saved[number])


def _check_equal(settings: LocalSteps, store: KVStore) -> None:
    """Raise UserError unless all workers have the same settings."""
    table = agreement.rows(
        store, "settings of local steps", [settings.steps, settings.outer_lr, settings.outer_momentum]
    )
    if others := agreement.different(table):
        shown = [
            f"{steps:.0f}, {rate:g} and {momentum:g} on worker {worker}"
            for worker, (steps, rate, momentum) in ((worker, table[worker]) for worker in (0, others[0]))
        ]
        raise UserError(
            f"local_steps, outer_lr and outer_momentum are {' but '.join(shown)}: give all workers the same"
        )


class OuterOptimizer:
    """The outer optimizer of one bucket: from the weights at the last average and the mean of the workers' weights to
    the next weights of all workers (kvstore/local_steps.py). It runs on every worker, with the same numbers.

    `start`: the bucket's weights at the last average, (elements,). `momentum`: (elements,), None without momentum.
    Both lie in the memory order of the bucket, on its device."""

    def __init__(self, bucket: Bucket, settings: LocalSteps) -> None:
        self.bucket, self._settings = bucket, settings
        self.start = torch.zeros_like(bucket.gradients)
        self.momentum = torch.zeros_like(self.start) if settings.outer_momentum else None

    def begin(self) -> None:
        """Copy the bucket's weights: the local steps begin."""
        self.bucket.weights.copy_to(self.start)

    def begin_copy(self) -> None:
        """Compute this worker's part of the outer gradient, which the bucket then sends. It uses the bucket's memory
        for gradients, which is free: with local steps each gradient stays where backward puts it."""
        part = self.bucket.gradients
        self.bucket.weights.copy_to(part)
        torch.sub(self.start, part, out=part)
        self.bucket.begin_copy()

    def take(self, handle: Handle, factor: float) -> None:
        """Make the outer step with the result of the push, times `factor`."""
        self.bucket.take_result(handle, factor)
        outer_step(self.start, self.bucket.gradients, self.momentum, self._settings)
        self.bucket.weights.set(self.start)


def outer_step(
    weights: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor | None, settings: LocalSteps
) -> None:
    """A step with Nesterov momentum by the formula of torch.optim.SGD, as in DiLoCo. Changes `weights` and `momentum`
    (elements,) in place."""
    weights.add_(gradient, alpha=-settings.outer_lr)
    if momentum is not None:
        momentum.mul_(settings.outer_momentum).add_(gradient)
        weights.add_(momentum, alpha=-settings.outer_lr * settings.outer_momentum)
