"""Which parameters the workers have used in a round that is made when backward() ends, in an elastic job: the gradient
of one that no worker has used is None then, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dmltrain.backends.torch.distributed import backward
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import READ, Handle, KVStore


class ParameterUses:
    """See the module. `reduce` is called when an outermost backward() that has reached a parameter ends."""

    def __init__(self, store: KVStore, buckets: Sequence[Bucket], reduce: Callable[[], None]) -> None:
        backward.install()
        self.number = backward.next_number()
        self._reduce = reduce
        self._unused: set[torch.nn.Parameter] = set()  # by this worker, in this round
        self._order = [parameter for bucket in buckets for parameter in bucket.parameters]
        self._of_all: Array = np.ones(len(self._order))  # workers that have used each parameter
        self._store, self._key = store, store.new_name("uses of parameters")
        store.init([self._key], [np.zeros(len(self._order))])

    def finish(self) -> None:
        """An outermost backward() has ended."""
        self._reduce()

    def failed(self, error: BaseException) -> None:
        """Gradients that were sent cannot be taken back; zero_grad() raises the error."""

    def note_unused(self, bucket: Bucket) -> None:
        """Of a bucket without all its gradients: notice which are missing."""
        self._unused |= {parameter for parameter in bucket.parameters if parameter.grad is None}

    def send(self, weight: float) -> Handle:
        """Tell the others: 1.0 for each parameter that this worker's part of the round has used, else 0.0. With weight
        0 the part counts for nothing."""
        used = [weight != 0.0 and parameter not in self._unused for parameter in self._order]
        return self._store.pushpull(self._key, np.array(used, np.float64), READ, wait=False)

    def take(self, handle: Handle) -> None:
        """All workers have told."""
        self._of_all = np.array(handle.values[0])

    def apply(self) -> None:
        """Set the gradients of parameters that no worker has used to None."""
        for parameter, count in zip(self._order, self._of_all, strict=True):
            if not count:
                parameter.grad = None
        self.forget()

    def forget(self) -> None:
        """The round is over."""
        self._unused.clear()
