"""Gradients on their way from GPUs to the host, and results on their way back. A bucket is sent when it is on the host;
nothing waits before. What is encoded is encoded, and decoded, together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dmltrain.backends.torch.distributed.buckets import Bucket, copy_to_host
from dmltrain.backends.torch.gpu.pinned import Arrival, arrive

TOGETHER = 8 << 20  # bytes of gradients: each encoding has many kernels, however few elements it is of


class Leaving:
    """Gradients."""

    def __init__(self) -> None:
        self._gathered: list[Bucket] = []  # which are to be encoded together
        self._copying: deque[Bucket] = deque()

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._gathered or bucket in self._copying

    def add(self, bucket: Bucket) -> None:
        """The bucket's gradients are complete, on a GPU."""
        if self._gathered and self._gathered[0].device != bucket.device:
            self._begin()
        self._gathered.append(bucket)
        if not bucket.host.encoders or sum(each.gradients.nbytes for each in self._gathered) >= TOGETHER:
            self._begin()

    def arrived(self, wait: bool) -> Iterator[Bucket]:
        """The buckets that are on the host by now, or with `wait` all, in order. Each is to be sent."""
        if wait:
            self._begin()
        while self._copying and (wait or self._copying[0].host.is_complete):
            yield self._copying.popleft()

    def forget(self) -> None:
        self._gathered.clear()
        self._copying.clear()

    def _begin(self) -> None:
        copy_to_host(self._gathered)
        self._copying += self._gathered
        self._gathered.clear()


class Arriving:
    """Results, or weights of servers."""

    def __init__(self) -> None:
        self._gathered: list[Arrival] = []  # which are to be decoded together

    def add(self, arrival: Arrival) -> None:
        if self._gathered and self._gathered[0].target.device != arrival.target.device:
            self.finish()
        self._gathered.append(arrival)
        if not arrival.memory.is_encoded or sum(each.target.nbytes for each in self._gathered) >= TOGETHER:
            self.finish()

    def finish(self) -> None:
        """What is computed from now on sees all that was added."""
        if self._gathered:
            arrive(self._gathered)
        self._gathered.clear()
