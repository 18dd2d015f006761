"""The parameters that a reducer has, by number, and the buckets that carry their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import nn

from dmltrain.backends.torch.distributed.buckets import Bucket, arrival
from dmltrain.backends.torch.distributed.gradients.leaving import Arriving
from dmltrain.backends.torch.distributed.layout import check_trainable, lay_out, split, wire_type
from dmltrain.kvstore.base import Handle, KVStore

TensorKind = tuple[torch.dtype, torch.Size, torch.device]


class ParameterBuckets:
    """A parameter gets a bucket when any worker trains it for the first time. All workers call the methods in the same
    order."""

    def __init__(self, store: KVStore, prefix: str, average: bool) -> None:
        self._store, self._prefix, self._average = store, prefix, average
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.number_of: dict[nn.Parameter, int] = {}
        self.buckets: list[Bucket] = []
        self.changes = 0  # how often parameters or buckets have changed; the same on all workers
        self._bucket_of: dict[int, Bucket] = {}
        self._place_of: dict[int, int] = {}  # in its bucket
        self._kinds: dict[Bucket, list[TensorKind]] = {}
        self._factor: dict[Bucket, float] = {}  # a bucket's result times this is the mean

    def add(self, name: str, parameter: nn.Parameter) -> int:
        number = self.number_of[parameter] = len(self.parameters)
        self.parameters.append(parameter)
        self.names.append(name)
        return number

    def lay_out(self, numbers: Iterable[int]) -> list[Bucket]:
        """Create buckets for these parameters, which have none yet."""
        named = [(self.names[number], self.parameters[number]) for number in numbers]
        for name, parameter in named:
            check_trainable(name, parameter)
        lists = split(named, lambda parameter: (parameter.dtype, parameter.device))
        buckets = [
            Bucket(self._store.new_name(self._prefix), 0, len(lists) - place, parameters)
            for place, parameters in enumerate(lists)
        ]
        if not buckets:
            return []
        keys = [bucket.name for bucket in buckets]
        values = [np.zeros(bucket.elements, wire_type(bucket.parameters[0].dtype)) for bucket in buckets]
        self._store.init(keys, values, mean=self._average)
        lay_out(self._store, buckets)
        for bucket in buckets:
            self._kinds[bucket] = [_kind(parameter) for parameter in bucket.parameters]
            self._factor[bucket] = bucket.factor_to_mean(self._store) if self._average else 1.0
            for place, number in enumerate(self.numbers(bucket)):
                self._bucket_of[number], self._place_of[number] = bucket, place
        self.buckets += buckets
        return buckets

    def fits(self, bucket: Bucket) -> bool:
        """Whether the script has left its parameters' types, shapes and devices as they were."""
        return self._kinds[bucket] == [_kind(parameter) for parameter in bucket.parameters]

    def drop(self, bucket: Bucket) -> None:
        """Remove the bucket: its parameters then have none."""
        self.changes += 1
        self.buckets.remove(bucket)
        for number in self.numbers(bucket):
            del self._bucket_of[number]

    def numbers(self, bucket: Bucket) -> list[int]:
        return [self.number_of[parameter] for parameter in bucket.parameters]

    def bucket(self, number: int) -> Bucket | None:
        return self._bucket_of.get(number)

    def of(self, numbers: Iterable[int]) -> list[Bucket]:
        """The buckets of these parameters, in order."""
        wanted = {self._bucket_of.get(number) for number in numbers}
        return [bucket for bucket in self.buckets if bucket in wanted]

    def view(self, number: int) -> torch.Tensor:
        """The view of a parameter's gradient in its bucket. It is valid until the bucket's result has been taken."""
        return self._bucket_of[number].views[self._place_of[number]]

    def part(self, number: int, results: Mapping[Bucket, list[torch.Tensor]]) -> torch.Tensor:
        """The parameter's part of its bucket's result."""
        return results[self._bucket_of[number]][self._place_of[number]]

    def results(
        self, sent: Mapping[Bucket, Handle], buckets: Iterable[Bucket]
    ) -> Iterator[tuple[Bucket, list[torch.Tensor]]]:
        """The sums or means of these buckets, as they arrive, those on GPUs at the end: valid until the bucket is sent
        again."""
        left, arriving, on_gpus = list(buckets), Arriving(), []
        while left:
            bucket = next((bucket for bucket in left if sent[bucket].done), left[0])
            left.remove(bucket)
            sent[bucket].wait()
            if bucket.on_gpu:
                arriving.add(arrival(bucket, self._factor[bucket]))
                on_gpus.append(bucket)
            else:
                yield bucket, bucket.result(sent[bucket], self._factor[bucket])
        arriving.finish()
        yield from ((bucket, bucket.views) for bucket in on_gpus)


def _kind(parameter: nn.Parameter) -> TensorKind:
    return parameter.dtype, parameter.shape, parameter.device
