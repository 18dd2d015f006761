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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed.buckets import Bucket, arrival
from dmltrain.backends.torch.distributed.exchange import Exchange, evaluated
from dmltrain.backends.torch.distributed.flat import copy_all
from dmltrain.backends.torch.distributed.gradients.leaving import Arriving, Leaving
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
        self._outer = OuterOptimizer(buckets, settings)
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
            self._outer.begin()

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
            self._outer.take(sent, {bucket: bucket.factor_to_mean(self.store) for bucket in sent})
        self._steps_made = 0

    def _send_all(self) -> dict[Bucket, Handle]:
        """Push all parts; on a GPU all are copied to the host while the first ones are sent."""
        leaving = Leaving()
        self._outer.compute_parts()
        for bucket in self._outer.buckets:
            if bucket.freeze():
                leaving.add(bucket)
        sent = {bucket: bucket.send(self.store) for bucket in self._outer.buckets if not bucket.on_gpu}
        return sent | {bucket: bucket.send(self.store) for bucket in leaving.arrived(wait=True)}

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

    def _attempt(self) -> tuple[dict[Bucket, Handle], Array]:
        """Wait for the sums in the present view, and until the round is recognised. Returns the results of the buckets,
        and the sum of the checksums, with the number of workers that have made local steps."""
        self._begin()
        own = np.append(self.members.checksum, float(self._steps_made > 0))
        with torch.no_grad():
            sent = self._send_all()
        total = self.store.pushpull(self.members.key, own, READ, wait=False)
        for handle in (*sent.values(), total):
            handle.wait()
        self.store.complete()
        return sent, np.array(total.values[0])

    def _take(self, sent: Mapping[Bucket, Handle], workers: int) -> None:
        """Make the outer step with the mean over so many workers; if there are none, all have the weights before."""
        if workers:
            with torch.no_grad():
                self._outer.take(sent, dict.fromkeys(sent, 1.0 / workers))
        self._steps_made = 0

    def _return(self) -> None:
        """Go back to the weights of the last average."""
        if self._steps_made:
            self._outer.set_weights(self._outer.buckets)
        self._steps_made = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        buckets, made = self._outer.buckets, self._steps_made
        own = [torch.from_numpy(bucket.weights.on_host()) for bucket in buckets]
        self._return()
        self._is_shared = True
        try:
            yield
        finally:
            self._is_shared, self._steps_made = False, made
            for bucket, weights in zip(buckets, own, strict=True):
                bucket.weights.set(weights)

    # -- state ----------------------------------------------------------------------------------------------------

    @property
    def common_state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        return {
            parameter: {"outer_momentum": view}
            for bucket, momentum in self._outer.momentum.items()
            for parameter, view in zip(bucket.parameters, bucket.places.cut(momentum), strict=True)
        }

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under OUTER that of the outer one: `steps` since the last average;
        `momentum` and `start` (the weights at the last average; only between two averages) by a parameter's number."""
        start = self._outer.start if self._steps_made else {}
        momentum = self._by_number(self._outer.momentum)
        outer = {"steps": self._steps_made, "momentum": momentum, "start": self._by_number(start)}
        inner = super().state_dict()
        return {**inner, **({"state": {}} if self._is_shared else {}), OUTER: outer}

    def _by_number(self, flat: Mapping[Bucket, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            self._numbers[parameter]: view.cpu().clone()
            for bucket, values in flat.items()
            for parameter, view in zip(bucket.parameters, bucket.places.cut(values), strict=True)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads a state from another type of kvstore with the optimizer on the workers; the outer momentum then
        starts at zero."""
        super().load_state_dict(state_dict)
        outer = state_dict.get(OUTER, {})
        self._steps_made = int(outer.get("steps", 0))
        for bucket, momentum in self._outer.momentum.items():
            momentum.zero_()
            self._load(bucket, momentum, outer.get("momentum", {}))
        if self._steps_made:
            self._outer.begin()  # for parameters that were frozen when the state was saved
            for bucket, start in self._outer.start.items():
                self._load(bucket, start, outer["start"])

    def _load(self, bucket: Bucket, flat: torch.Tensor, saved: Mapping[int, torch.Tensor]) -> None:
        for parameter, view in zip(bucket.parameters, bucket.places.cut(flat), strict=True):
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
    """The outer optimizer: from the weights at the last average and the mean of the workers' weights to the next
    weights of all workers (kvstore/local_steps.py). It runs on every worker, with the same numbers.

    `start`: of each bucket the weights at the last average, (elements,). `momentum`: (elements,), none without
    momentum. Both lie in the memory order of the bucket, on its device. On a GPU one kernel is for all buckets."""

    def __init__(self, buckets: Sequence[Bucket], settings: LocalSteps) -> None:
        self.buckets, self._settings = buckets, settings
        self.start = {bucket: torch.zeros_like(bucket.gradients) for bucket in buckets}
        has_momentum = buckets if settings.outer_momentum else ()
        self.momentum = {bucket: torch.zeros_like(bucket.gradients) for bucket in has_momentum}
        self._views = {bucket: bucket.places.cut(start) for bucket, start in self.start.items()}
        self._weights: list[torch.Tensor] = [parameter for bucket in buckets for parameter in bucket.parameters]

    def begin(self) -> None:
        """Copy the weights: the local steps begin."""
        with torch.no_grad():
            copy_all([view for views in self._views.values() for view in views], self._weights)

    def set_weights(self, buckets: Sequence[Bucket]) -> None:
        """Go to the weights in `start`."""
        with torch.no_grad():
            weights = [parameter for bucket in buckets for parameter in bucket.parameters]
            copy_all(weights, [view for bucket in buckets for view in self._views[bucket]])

    def compute_parts(self) -> None:
        """Compute this worker's part of the outer gradient, which the buckets then send. It uses their memory for
        gradients, which is free: with local steps each gradient stays where backward puts it."""
        for bucket in self.buckets:
            if bucket.on_gpu:
                bucket.host.forget(bucket.device)
        parts = [bucket.gradients for bucket in self.buckets]
        copy_all(parts, list(self.start.values()))
        if parts:
            torch._foreach_sub_([view for bucket in self.buckets for view in bucket.views], self._weights)

    def take(self, sent: Mapping[Bucket, Handle], factors: Mapping[Bucket, float]) -> None:
        """Make the outer step with the results of the pushes, times these factors."""
        arriving, arrived = Arriving(), []
        for bucket, handle in sent.items():
            handle.wait()
            if bucket.on_gpu:
                arriving.add(arrival(bucket, 1.0))
                arrived.append(bucket)
            else:
                bucket.receive(handle, factors[bucket])
                self._step([bucket], 1.0)
        arriving.finish()
        for factor in sorted({factors[bucket] for bucket in arrived}):
            self._step([bucket for bucket in arrived if factors[bucket] == factor], factor)

    def _step(self, buckets: Sequence[Bucket], factor: float) -> None:
        gradients = [bucket.gradients for bucket in buckets]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        momenta = [self.momentum[bucket] for bucket in buckets if bucket in self.momentum]
        outer_step([self.start[bucket] for bucket in buckets], gradients, momenta, self._settings)
        self.set_weights(buckets)


def outer_step(
    weights: list[torch.Tensor], gradients: list[torch.Tensor], momenta: list[torch.Tensor], settings: LocalSteps
) -> None:
    """A step with Nesterov momentum by the formula of torch.optim.SGD, as in DiLoCo. Changes `weights` and `momenta`,
    each (elements,), in place. No momenta: none is kept."""
    torch._foreach_add_(weights, gradients, alpha=-settings.outer_lr)
    if momenta:
        torch._foreach_mul_(momenta, settings.outer_momentum)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(weights, momenta, alpha=-settings.outer_lr * settings.outer_momentum)
