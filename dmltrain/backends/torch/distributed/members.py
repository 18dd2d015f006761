"""Who takes part in a step of an elastic job, whose members may change in the middle of it.

A round is a step that all workers make together. Until the store has recognised it, this worker changes no weights. If
the members change before that, the remaining ones push the same gradients again. So a round is made by all members that
stay in the job, or by none. A worker that cannot get the results, because a server was lost, gets the result of the
step from another worker.

Each worker also tells the others a checksum of its samples. The sum of the checksums says of how many samples the
gradients are: fewer than were dealt if a worker was lost. The step uses the mean over these.

With dist_async and dist_ssp each worker makes its own steps, which are no ops of the job. If the members change in the
middle of such a step, this worker enters the new view and pushes the same gradients again. A server that has them
already does not use them twice. So each step of a worker that stays in the job counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore, ViewChanged
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.elastic_ops import ElasticOps

RECEIPT = 3  # numbers of a checksum
T = TypeVar("T")


class Members:
    """Of one optimizer; see the module. In a job that is not elastic, and for a single worker, nothing changes: no step
    needs to be known, and each is recognised. `name`: of the key of the checksums."""

    def __init__(self, store: KVStore | None = None, name: str = "") -> None:
        self.elastic = store is not None and store.elastic
        self._store = cast(KVStore, store)
        self.committed: Array | None = None  # see DistributedOptimizer, as the next
        self.rate_factor = 1.0
        self.key = self._store.new_name(name) if self.elastic else ""
        self.dealt, self.checksum = 0, np.zeros(RECEIPT)  # of the present round
        self._is_known = False
        self._then: Callable[[Array], None] | None = None
        self.sent: set[Bucket] = set()  # in the present view
        self._sent_in: View | None = None  # that view
        self._total: Handle | None = None  # of the checksums, in the present view

    @property
    def together(self) -> bool:
        """Whether all workers make each step together. A change of the kvstore may change it."""
        return self._store.kvstore_type.synchronous

    # -- a round --------------------------------------------------------------------------------------------------

    def begin(self, dealt: int, checksum: Array, then: Callable[[Array], None] | None) -> None:
        """See DistributedOptimizer.round."""
        self.dealt, self.checksum, self._then = dealt, np.array(checksum, np.float64), then
        self._is_known = True

    @property
    def is_known(self) -> bool:
        """Whether `begin` has come since the last round."""
        return self._is_known

    def check(self) -> None:
        """Raise UserError unless `begin` has come before this step."""
        if self.elastic and not self._is_known:
            raise UserError(
                "in an elastic job each step() needs to know its samples: make one step for each batch of a "
                "dmltrain.loader (docs/elastic-scripts.md), or start the job without --elastic"
            )

    def recognised(self, attempt: Callable[[], T], again: Callable[[], None] = lambda: None) -> T | None:
        """The result of `attempt`, which makes the round in one view, and raises ViewChanged if that ends. In the next
        view `again` comes before it. None if other workers have made the step, and its result is here already. Raises
        what `KVStore.enter` raises."""
        together = self.together
        while True:
            try:
                return attempt()
            except ViewChanged:
                self.begin_again()
                if self._store.enter() and together:
                    return None
                again()

    def end(self, committed: Array | None) -> None:
        """The round was made; with this sum of checksums, or None if it is not known here."""
        self.committed, self._is_known = np.zeros(RECEIPT) if committed is None else committed, False

    def tell(self) -> None:
        """Call what the script wants to be called after the step."""
        if self._then and self.committed is not None:
            self._then(self.committed)

    def forget(self) -> None:
        """Make no step of the present round."""
        self._is_known = False
        self.begin_again()

    @contextlib.contextmanager
    def rates(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Inside this context the learning rates of these groups are multiplied by `rate_factor`."""
        if self.rate_factor == 1.0:
            yield
            return
        own = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate * self.rate_factor
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate

    # -- what is sent in one view ---------------------------------------------------------------------------------

    def begin_again(self) -> None:
        """What was sent counts no more."""
        self._total = None
        self.sent.clear()

    def follow_view(self) -> None:
        """Begin again if this worker has entered another view since, which happens while the script saves a
        checkpoint."""
        if self._sent_in is not self._store.ops.view:
            self.begin_again()
            self._sent_in = self._store.ops.view

    def sum_checksums(self) -> Handle:
        """The sum of the checksums in the present view, before any gradient is sent."""
        self.follow_view()
        if self._total is None:
            self._total = cast(ElasticOps, self._store.ops).sum_in_round(self.key, self.checksum)
        return self._total

    def has_samples(self) -> bool:
        """Whether the sum of the checksums in the present view has arrived, with samples in it."""
        self.follow_view()
        if self._total is None or not self._total.done:
            return False
        self._total.wait()
        return self.samples() > 0

    def samples(self) -> int:
        """Of all members, by the sum of the checksums, which has arrived."""
        assert self._total is not None
        return int(self._total.values[0][0])
