"""What the trainers of all frameworks have in common: a network's replicas on a worker's devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from dmltrain.backends import weights
from dmltrain.backends.backend import AllReduce, Average, Pace
from dmltrain.base.arrays import Array
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.images.mixing import Mixing
from dmltrain.layers import Network
from dmltrain.logs.metric import Sums

METRICS = len(Sums().values())
Device = TypeVar("Device")
Tensor = TypeVar("Tensor", bound=Any)


class Replicas(ABC, Generic[Device, Tensor]):
    """One replica of `network` on each of the devices: its input, its metrics, and its batch-norm statistics. Metrics
    stay on the device until they are read.

    `normalisation`: of uint8 images; None: there are none. `top_k`: of the metrics; 0: not counted.
    """

    sums: list[Tensor]  # on each device the metrics since `take_sums`, float64 (METRICS,)

    def __init__(
        self, network: Network, devices: Sequence[Device], normalisation: Normalisation | None, top_k: int
    ) -> None:
        self.devices, self.top_k = devices, top_k
        self.auxiliary_weights = [output.weight for output in network.auxiliary_outputs]
        arrays = () if normalisation is None else (normalisation.subtrahend(), normalisation.factor())
        self._normalisation = [[self.place(array[None], device) for array in arrays] for device in devices]
        self._seen = [0] * len(devices)  # training samples since the last merge of statistics

    # -- a framework's --------------------------------------------------------------------------------------------

    @abstractmethod
    def place(self, array: Array, device: Device) -> Tensor:
        """The array on the device."""

    def place_images(self, images: Array, device: Device) -> Tensor:
        """Images (N, C, H, W), in any order of memory, on the device."""
        return self.place(images, device)

    @abstractmethod
    def normalised(self, images: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
        """float32 of uint8 `images` (N, C, H, W), by the operations of Normalisation.apply."""

    @abstractmethod
    def counted_loss(
        self, index: int, images: Tensor, labels: Tensor, train: bool, mixing: Mixing | None = None
    ) -> Tensor:
        """The cross-entropy summed over the samples; in training it includes that of auxiliary outputs, and of samples
        that are mixed. Also counts the metrics of the main output."""

    @abstractmethod
    def read(self, tensor: Tensor) -> Array:
        """A copy in host memory, float64. Waits for the device."""

    @abstractmethod
    def write(self, tensor: Tensor, values: Array) -> None: ...

    @abstractmethod
    def statistics(self, index: int) -> list[Tensor]:
        """The running means and variances of a replica's batch norms."""

    # -- samples --------------------------------------------------------------------------------------------------

    def parts(self, images: Array, labels: Array, with_empty: bool = False) -> list[tuple[Tensor, Tensor] | None]:
        """The batch in one equal share per device, on that device; without `with_empty` None for a share without
        samples."""
        count = len(self.devices)
        shares = zip(np.array_split(images, count), np.array_split(labels, count), strict=True)
        return [
            (self._input(index, x), self.place(y, self.devices[index])) if len(y) or with_empty else None
            for index, (x, y) in enumerate(shares)
        ]

    def _input(self, index: int, images: Array) -> Tensor:
        """The network's input. Images of another type than uint8 are that already."""
        placed = self.place_images(images, self.devices[index])
        if images.dtype != np.uint8:
            return placed
        if not self._normalisation[index]:
            raise ValueError("uint8 images, but the trainer was made without a normalisation")
        return self.normalised(placed, *self._normalisation[index])

    def training_loss(self, index: int, part: tuple[Tensor, Tensor], mixing: Mixing | None = None) -> Tensor:
        self._seen[index] += len(part[1])
        return self.counted_loss(index, *part, train=True, mixing=mixing)

    def evaluate(self, images: Array, labels: Array) -> None:
        """See Trainer."""
        for index, part in enumerate(self.parts(images, labels)):
            if part:
                self.counted_loss(index, *part, train=False)

    def take_sums(self) -> Sums:
        """See Trainer."""
        total = Sums()
        for sums in self.sums:
            total += Sums.of(self.read(sums))
            self.write(sums, np.zeros(METRICS))
        return total

    # -- statistics -----------------------------------------------------------------------------------------------

    def merge_statistics(self, all_reduce: AllReduce, num_workers: int) -> None:
        """See Trainer."""
        if self.statistics(0) and num_workers * len(self.devices) > 1:
            own = [self.flat_statistics(index) for index in range(len(self.devices))]
            merged = weights.merged_statistics(own, self._seen, all_reduce)
            if merged is not None:
                self.set_statistics(merged)
        self.forget_seen()

    def flat_statistics(self, index: int) -> Array:
        """Those of a replica, float64."""
        return np.concatenate([self.read(tensor).ravel() for tensor in self.statistics(index)])

    def set_statistics(self, values: Array) -> None:
        """Give all replicas these, float64 as above."""
        for index in range(len(self.devices)):
            tensors = self.statistics(index)
            for tensor, part in zip(tensors, weights.split(values, [each.shape for each in tensors]), strict=True):
                self.write(tensor, part)

    def forget_seen(self) -> None:
        """The statistics are those of all from now on."""
        self._seen = [0] * len(self.devices)


class TrainerOfReplicas:
    """The base of a trainer with these replicas. See Trainer for its methods."""

    def __init__(self, replicas: Replicas[Any, Any]) -> None:
        self.pace: Pace | None = None
        self.average: Average | None = None
        self._of_all = replicas

    def evaluate(self, images: Array, labels: Array) -> None:
        self._of_all.evaluate(images, labels)

    def take_sums(self) -> Sums:
        return self._of_all.take_sums()

    def merge_statistics(self, all_reduce: AllReduce, num_workers: int) -> None:
        self._of_all.merge_statistics(all_reduce, num_workers)

    def reach(self, point: str, wait: Callable[[], None] | None = None) -> None:
        """The computation is at this point of a batch, a method of Pace, once `wait` returns."""
        if self.pace:
            if wait:
                wait()
            getattr(self.pace, point)()
