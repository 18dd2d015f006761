"""The trainer of the MXNet backend: one worker's network on its devices, with gluon.

Each device and worker divides the sum of its samples' gradients by the number of samples in the whole step, over all
workers. So the sum over devices and workers is the mean over the step's samples, even if their shares differ. MXNet's
engine is asynchronous: a step only puts operations into its queue. It does not wait for the previous step, but for the
one AHEAD steps before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray, Settings, samples_of_a_step
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import layers as mxnet_layers
from dmltrain.backends.mxnet import state as mxnet_state
from dmltrain.backends.mxnet.replicas import MXNetReplicas, wait_for
from dmltrain.backends.mxnet.step import Learned, StepOnDevices, StepOnServers, optimizer_spec
from dmltrain.backends.replicas import TrainerOfReplicas
from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.images.mixing import Mixing
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Network

mx = mxnet_compat.load()
NDArray = Any  # mx.nd.NDArray: MXNet has no types
THRESHOLD = 0.5  # of 2bit, MXNet's default
AHEAD = 4  # steps in the engine's queue, which itself has no limit; each step keeps its images in memory


class MXNetTrainer(TrainerOfReplicas):
    """`network` on settings.device_names, connected to the other workers by `store`.

    It starts with initial weights from settings.seed, or with `state`, an earlier result of `state()`. Without
    "optimizer" in it the optimizer starts anew. Raises UserError if the state does not fit the network, or a device
    does not exist.
    """

    _gradient_factor = 1  # gradients are multiplied by this before the push; the optimizer divides by it

    def __init__(
        self,
        network: Network,
        settings: Settings,
        store: KVStore,
        state: Mapping[str, Any] | None = None,
        normalisation: Normalisation | None = None,
    ) -> None:
        self.replicas = MXNetReplicas(network, settings, normalisation, state["model"] if state else None)
        super().__init__(self.replicas)
        self._symbol = mxnet_layers.symbol(network)  # float32, for other programs
        self._connect(network, settings, store)
        if state and "optimizer" in state:
            self._step.load(state["optimizer"])
        self._queued: deque[list[NDArray]] = deque()
        self._accumulated: list[tuple[Learned, list[NDArray]]] = []  # gradients of `accumulate`, one for each device

    def _connect(self, network: Network, settings: Settings, store: KVStore) -> None:
        """Declare the keys; every worker starts from worker 0's weights and statistics."""
        arrays, names = self.replicas.arrays, [parameter.name for parameter in network.parameters()]
        if settings.gc_type != "none":
            self._gradient_factor = samples_of_a_step(settings, store)
            store.set_gradient_compression({"type": settings.gc_type, "threshold": settings.gc_threshold or THRESHOLD})
        store.init(names, [arrays[name].list_data()[0] for name in names])
        self._learned = [
            Learned(name, store.key_number(name), arrays[name].list_data(), arrays[name].list_grad()) for name in names
        ]
        if store.is_distributed:
            for learned in self._learned:
                store.pull(learned.name, learned.values)
        if store.num_workers > 1 and network.auxiliary():
            own = self.replicas.flat_statistics(0)
            first = store.all_reduce("first statistics", own if store.rank == 0 else np.zeros_like(own))
            self.replicas.set_statistics(first)
        on_servers = store.kvstore_type.steps_on_servers(bool(settings.update_on_kvstore))
        kind = StepOnServers if on_servers else StepOnDevices
        spec = {**optimizer_spec(settings, network, self._learned), "rescale_grad": 1.0 / self._gradient_factor}
        self._step = kind(self._learned, spec, store, len(self.replicas.devices))

    # -- a step ---------------------------------------------------------------------------------------------------

    def seed(self, *numbers: int) -> None:
        mx.random.seed(random_bits.seed_of(*numbers, size=4))

    def train_step(
        self,
        images: Array,
        labels: Array,
        total: int,
        learning_rate: float,
        checksum: Array | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        """`checksum` and `mixing` have no effect: elastic jobs and the options of mixing are refused."""
        self._backward(images, labels, total)
        for learned, sums in self._accumulated:
            for gradient, so_far in zip(learned.gradients, sums, strict=True):
                gradient += so_far
        self._accumulated = []
        self._step(learning_rate)

    def accumulate(self, images: Array, labels: Array, total: int, mixing: Mixing | None = None) -> None:
        self._backward(images, labels, total)
        if not self._accumulated:
            self._accumulated = [
                (learned, [gradient.copy() for gradient in learned.gradients]) for learned in self._learned
            ]
            return
        for learned, sums in self._accumulated:
            for gradient, so_far in zip(learned.gradients, sums, strict=True):
                so_far += gradient

    def _backward(self, images: Array, labels: Array, total: int) -> None:
        self.reach("begin", lambda: wait_for(learned.values for learned in self._learned))
        losses: list[NDArray] = []
        for index, part in enumerate(self.replicas.parts(images, labels)):
            if part:
                with mx.autograd.record():
                    losses.append(self.replicas.training_loss(index, part) * (self._gradient_factor / total))
            else:
                self._no_gradient(index)
        self.reach("between", lambda: wait_for([losses]))
        if losses:
            mx.autograd.backward(losses)
        self.reach("end", lambda: wait_for(learned.gradients for learned in self._learned))
        self._queued.append(losses)
        if len(self._queued) > AHEAD:
            for loss in self._queued.popleft():
                loss.wait_to_read()

    def _no_gradient(self, index: int) -> None:
        """Set the gradients of a device without samples to zero."""
        for learned in self._learned:
            learned.gradients[index][:] = 0

    def settle(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self._step.synchronize()
        mx.nd.waitall()

    # -- state ----------------------------------------------------------------------------------------------------

    def state(
        self, residuals: Mapping[str, Array] | None = None, others: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        return {"model": self.replicas.state(), "optimizer": self._step.state()}

    def shared_state(self) -> dict[str, Any]:
        raise NotImplementedError  # elastic jobs are refused: rounds/checks.py

    def take_state(self, state: Mapping[str, Any], only_step: bool = False) -> None:
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """Nothing: all workers step together, or the servers do."""
        return {}

    def common_arrays(self) -> list[CommonArray]:
        return self.replicas.common_arrays() + self._step.common_arrays()

    def digest(self) -> str:
        return weights.digest(self.replicas.state())

    def other_files(self, prefix: str, epoch: int) -> dict[Path, bytes]:
        """Files in MXNet's format."""
        values = {name: array.list_data()[0] for name, array in self.replicas.arrays.items()}
        return mxnet_state.own_files(prefix, epoch, self._symbol, values)

    # -- reports --------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"mxnet {mx.__version__}, {mx.base._LIB.omp_get_max_threads()} threads"

    def choices(self) -> list[str]:
        return []

    def device_memory(self) -> float | None:
        """MiB in use on this worker's GPUs by all programs; None on the CPU."""
        contexts = [context for context in self.replicas.devices if context.device_type == "gpu"]
        of_devices = [mx.context.gpu_memory_info(context.device_id) for context in contexts]
        return sum(total - free for free, total in of_devices) / 2**20 if of_devices else None
