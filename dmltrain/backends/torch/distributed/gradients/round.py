"""A round of a reducer: what this worker has sent of its gradients, and how they go on between two rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from dmltrain.backends.torch.distributed.buckets import Bucket, copy_gradient
from dmltrain.backends.torch.distributed.flat import copy_all
from dmltrain.backends.torch.distributed.gradients.facts import RoundFacts
from dmltrain.backends.torch.distributed.gradients.leaving import Leaving
from dmltrain.backends.torch.distributed.gradients.parameter_buckets import ParameterBuckets
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore

GradientVersion = tuple[torch.Tensor | None, int]  # a gradient, with its version
Results = dict[Bucket, list[torch.Tensor]]


class SentGradients:
    """The gradients of one round. `frozen`: the buckets whose parameters all workers have frozen. `added`: the
    parameters to whose gradients only this worker has added since the last round."""

    def __init__(
        self, store: KVStore, known: ParameterBuckets, frozen: Collection[Bucket], added: Collection[int], lossy: bool
    ) -> None:
        self._store, self._known, self._added, self._is_lossy = store, known, added, lossy
        self.begun: set[Bucket] = set()  # the buckets that are sent, or on their way from a GPU
        self.handles: dict[Bucket, Handle] = {}  # of the buckets that are sent
        self._leaving = Leaving()
        self.changes: dict[int, torch.Tensor] = {}  # gradient minus what was sent, where it has changed since
        self._seen: set[int] = set()  # gradients that backward has completed
        self._versions: dict[int, GradientVersion] = {}  # of the gradients that were sent
        self._missing = {
            bucket: sum(parameter.requires_grad for parameter in bucket.parameters)
            for bucket in known.buckets
            if bucket not in frozen
        }

    def has(self, bucket: Bucket | None) -> bool:
        """Whether the bucket belongs to this round."""
        return bucket in self._missing

    def check_new(self, number: int) -> None:
        """With lossy compression, raise UserError for a gradient of a former round, unless this worker added to it."""
        if number in self._seen or number in self._added:
            return
        gradient = self._known.parameters[number].grad
        if gradient is not None and bool(gradient.any()):
            raise UserError(
                f"parameter {self._known.names[number]} still has a gradient, which compression would send a second "
                "time and change: call optimizer.zero_grad() before backward(), put all backward passes of a step but "
                "the last under `with optimizer.accumulate():`, or use compression='none'"
            )

    def arrived(self, number: int, weight: float) -> None:
        """Backward has added to this gradient. Its bucket is sent if it is complete."""
        if number in self._seen:
            return
        self._seen.add(number)
        bucket = self._known.bucket(number)
        if bucket is not None and bucket in self._missing:
            self._missing[bucket] -= 1
            is_last = len(self.begun) + 1 >= len(self._missing)  # the last bucket is sent together with the facts
            if self._missing[bucket] == 0 and not is_last and bucket not in self.begun:
                self.send(bucket, weight)

    def send(self, bucket: Bucket, weight: float) -> None:
        """Send the bucket, from a GPU when it is on the host: see `send_rest`."""
        if self._fill(bucket, weight):
            self._send_filled(bucket)

    def _send_filled(self, bucket: Bucket) -> None:
        self.begun.add(bucket)
        if bucket.freeze():
            self._leaving.add(bucket)
            self._send_copied(wait=False)
        else:
            self._push(bucket)

    def _push(self, bucket: Bucket) -> None:
        self.handles[bucket] = bucket.send(self._store)

    def send_all(self, weight: float) -> Bucket | None:
        """Send the buckets that are left, but for the last one. That is filled and returned, unless it is on a GPU."""
        unsent = [
            bucket for bucket in self._known.buckets[::-1] if bucket in self._missing and bucket not in self.begun
        ]
        for bucket in unsent[:-1]:
            self.send(bucket, weight)
        if not unsent or not self._fill(unsent[-1], weight):
            return None
        if not unsent[-1].on_gpu:
            return unsent[-1]
        self._send_filled(unsent[-1])
        return None

    def send_rest(self) -> None:
        """Wait for what is on its way from a GPU, and send it."""
        self._send_copied(wait=True)

    def _send_copied(self, wait: bool) -> None:
        for bucket in self._leaving.arrived(wait):
            self._push(bucket)

    def _fill(self, bucket: Bucket, weight: float) -> bool:
        """Copy the parameters' gradients into the bucket, and return True. If the parameters have changed so that they
        do not fit the bucket, drop it and return False: they get other buckets after the facts (Reducer._send_late)."""
        if not self._known.fits(bucket):
            self._known.drop(bucket)
            del self._missing[bucket]
            return False
        with torch.no_grad():
            for number in self._known.numbers(bucket):
                self._versions[number] = version_of(self._known.parameters[number].grad)
                if self._is_lossy:
                    self.check_new(number)
            bucket.fill()
            bucket.weigh(weight)
        return True

    def has_changed(self, number: int, state: GradientVersion, weight: float) -> bool:
        """Whether the gradient differs from what was sent. The version alone does not tell: several gradients may be
        views of the same memory, which has one version."""
        sent, gradient = self._versions.get(number, state), state[0]
        if sent[0] is gradient and sent[1] == state[1]:
            return False
        view = self._known.view(number)
        now = torch.zeros_like(view)
        if weight != 0.0:
            copy_gradient(now, gradient)
            now.mul_(weight)
        if gradient is not None and torch.equal(now, view):
            return False
        self.changes[number] = now.sub_(view)
        return True

    def send_changes(self, buckets: list[Bucket]) -> Results:
        """Send what has changed of these buckets since they were sent. Returns the sums or means of the changes."""
        for bucket in buckets:
            bucket.gradients.zero_()
        for number, more in self.changes.items():
            self._known.view(number).copy_(more)
        for bucket in buckets:
            self.handles[bucket] = bucket.send(self._store)
        return dict(self._known.results(self.handles, buckets))

    def take(self, buckets: list[Bucket]) -> Results:
        """Wait for the results of these buckets. A result replaces its gradient at once where no fact can change that:
        the gradient is dense, and has not changed since it was sent."""
        results, on_gpus = {}, []
        for bucket, views in self._known.results(self.handles, buckets):
            results[bucket] = views
            unchanged = [pair for pair in zip(bucket.parameters, views, strict=True) if self._is_unchanged(pair[0])]
            if bucket.on_gpu:
                on_gpus += unchanged
            else:
                write(unchanged)
        write(on_gpus)
        return results

    def _is_unchanged(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient is dense, and what was sent."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return False
        return not self.changes or self._known.number_of[parameter] not in self.changes


class BetweenRounds:
    """How gradients go on between two rounds, and whether workers call backward() unequally often. A worker whose batch
    has no loss may skip backward(); it then joins the others' rounds in its step()."""

    def __init__(self, known: ParameterBuckets, workers: int) -> None:
        self._known, self._workers = known, workers
        self.is_careful = False  # the workers may call backward() unequally often
        self._rounds_at_step = 0
        self._left: list[GradientVersion] = []  # all gradients after the last round

    def note(self) -> None:
        """A round has ended, or there are other parameters."""
        self._left = self.states()

    def states(self) -> list[GradientVersion]:
        return [version_of(parameter.grad) for parameter in self._known.parameters]

    def stepped(self, rounds: int) -> None:
        """The optimizer makes its step after so many rounds."""
        self._rounds_at_step = rounds

    def watch(
        self, facts: RoundFacts, at_step: bool, before: list[GradientVersion], rounds: int, added: Collection[int]
    ) -> None:
        """If the facts point to unequal calls, each worker makes rounds until all workers are in their step().
        `before`: all gradients as they were sent; `rounds`: before this one. `added`: see SentGradients."""
        mixed = 0 < facts.at_step < self._workers
        if (mixed or (self.is_careful and not at_step)) and rounds > self._rounds_at_step:
            self._check_goes_on(before, 0 if at_step else 1, added)
        self.is_careful = mixed or (facts.at_step == 0 and (self.is_careful or not facts.even))

    def _check_goes_on(self, before: list[GradientVersion], most: int, added: Collection[int]) -> None:
        """Raise UserError unless backward has only added to what the last round left, at most `most` times. Otherwise
        the workers may be exchanging gradients of different batches."""
        for number, (gradient, version) in enumerate(before):
            left, its_version = self._left[number]
            goes_on = gradient is left and its_version <= version <= its_version + most
            if number not in added and left is not None and not goes_on:
                raise UserError(
                    "the workers have called backward() unequally often, and the gradient of "
                    f"{self._known.names[number]} has changed since: let all workers call zero_grad(), backward() and "
                    "step() equally often, or call optimizer.reduce_gradients() on all where some have left out "
                    "backward()"
                )

    def replaced(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """The numbers of the parameters whose `grad` is not the tensor that the last round left."""
        numbers = [
            (self._known.number_of.get(parameter, -1), parameter.grad)
            for parameter in parameters
            if parameter.grad is not None
        ]
        return [number for number, gradient in numbers if number >= 0 and gradient is not self._left[number][0]]


def version_of(gradient: torch.Tensor | None) -> GradientVersion:
    return gradient, -1 if gradient is None else gradient._version


def write(pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Set the gradient of each parameter to the value beside it, in the same tensor if that may be written."""
    written = []
    for parameter, value in pairs:
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or 0 in gradient.stride():
            gradient = parameter.grad = torch.empty_like(parameter)
        written.append((gradient, value))
    copy_all([gradient for gradient, _ in written], [value for _, value in written])
