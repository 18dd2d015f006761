"""The trainer of the MXNet backend: one worker's network on its devices, with gluon.

Each device and worker divides the sum of its samples' gradients by the number of samples in the whole step, over all
workers. So the sum over devices and workers is the mean over the step's samples, even if their shares differ. MXNet's
engine is asynchronous: a step only puts operations into its queue. It does not wait for the previous step, but for the
one AHEAD steps before.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray, Pace, Settings
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import layers as mxnet_layers
from dmltrain.backends.mxnet import state as mxnet_state
from dmltrain.backends.mxnet.replica import Normalise, count, cross_entropy, find_contexts, wait_for
from dmltrain.backends.mxnet.step import Learned, StepOnDevices, StepOnServers, optimizer_spec
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Network
from dmltrain.logs.metric import Sums

mx = mxnet_compat.load()
NDArray = Any  # mx.nd.NDArray: MXNet has no types
THRESHOLD = 0.5  # of 2bit, MXNet's default
AHEAD = 4  # steps in the engine's queue, which itself has no limit; each step keeps its images in memory


class MXNetTrainer:
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
        self._contexts = find_contexts(settings.device_names)
        self._normalise = Normalise(normalisation, self._contexts)
        self._top_k = settings.top_k
        self._auxiliary_weights = [auxiliary_output.weight for auxiliary_output in network.auxiliary_outputs]
        self._symbol = mxnet_layers.symbol(network)  # float32, for other programs
        self._block = mxnet_layers.build(network, settings.dtype)
        self._arrays = self._block.collect_params()
        self._statistics = [statistic.name for statistic in network.auxiliary()]
        mxnet_layers.initialise(self._block, network, settings.seed, self._contexts)
        if state:
            self._load_weights(network, state["model"])
        self._block.hybridize(static_alloc=True)
        if settings.dtype != "float32":
            self._check_dtype(network, settings.dtype)
        self._connect(network, settings, store)
        if state and "optimizer" in state:
            self._step.load(state["optimizer"])
        self._sums = [mx.nd.zeros(4, context, dtype="float64") for context in self._contexts]
        self._seen = [0] * len(self._contexts)  # training samples since the last merge of statistics
        self._queued: deque[list[NDArray]] = deque()
        self._accumulated: list[tuple[Learned, list[NDArray]]] = []  # gradients of `accumulate`, one for each device
        self.pace: Pace | None = None

    def _check_dtype(self, network: Network, dtype: str) -> None:
        """Compute one image: MXNet reports an unsupported type only then."""
        for context in self._contexts:
            try:
                self._block(mx.nd.zeros((1, *network.input_shape), context)).wait_to_read()
            except mx.MXNetError as error:
                raise UserError(
                    f"--dtype {dtype}: MXNet {mx.__version__} does not support it on {context}: "
                    f"{str(error).strip().splitlines()[-1][:200]}; it supports bfloat16 on processors with "
                    "AVX-512; use float32"
                ) from error

    def _load_weights(self, network: Network, saved: Mapping[str, Array]) -> None:
        own = {parameter.name: parameter.shape for parameter in (*network.parameters(), *network.auxiliary())}
        weights.check_same(own, {name: array.shape for name, array in saved.items()})
        for name, array in saved.items():
            self._arrays[name].set_data(mx.nd.array(array))

    def _connect(self, network: Network, settings: Settings, store: KVStore) -> None:
        """Declare the keys; every worker starts from worker 0's weights and statistics."""
        names = [parameter.name for parameter in network.parameters()]
        if settings.gc_type != "none":
            self._gradient_factor = samples_of_a_step(settings, store)
            store.set_gradient_compression({"type": settings.gc_type, "threshold": settings.gc_threshold or THRESHOLD})
        store.init(names, [self._arrays[name].list_data()[0] for name in names])
        self._learned = [
            Learned(name, store.key_number(name), self._arrays[name].list_data(), self._arrays[name].list_grad())
            for name in names
        ]
        if store.is_distributed:
            for learned in self._learned:
                store.pull(learned.name, learned.values)
        if store.num_workers > 1 and self._statistics:
            own = self._flat_statistics(0)
            first = store.all_reduce("first statistics", own if store.rank == 0 else np.zeros_like(own))
            self._fill_statistics(first)
        on_servers = store.kvstore_type.steps_on_servers(bool(settings.update_on_kvstore))
        kind = StepOnServers if on_servers else StepOnDevices
        spec = {**optimizer_spec(settings, network, self._learned), "rescale_grad": 1.0 / self._gradient_factor}
        self._step = kind(self._learned, spec, store, len(self._contexts))

    # -- a step ---------------------------------------------------------------------------------------------------

    def seed(self, *numbers: int) -> None:
        """Seed MXNet's random numbers (dropout) on every device."""
        mx.random.seed(int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little") >> 1)

    def train_step(
        self, images: Array, labels: Array, total: int, learning_rate: float, checksum: Array | None = None
    ) -> None:
        """One update from this worker's images (N, C, H, W), uint8 or float32, and labels (N,) int64, N may be 0.

        `total`: number of samples in the mean gradient of this step (of all workers in a synchronous job). `checksum`
        has no effect: jobs with MXNet are not elastic.
        """
        self._backward(images, labels, total)
        for learned, sums in self._accumulated:
            for gradient, so_far in zip(learned.gradients, sums, strict=True):
                gradient += so_far
        self._accumulated = []
        self._step(learning_rate)

    def accumulate(self, images: Array, labels: Array, total: int) -> None:
        """Add the gradient of these samples to that of the next `train_step`, which has the same `total`."""
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
        self._begin()
        losses = []
        for index, part in enumerate(self._parts(images, labels)):
            if part:
                with mx.autograd.record():
                    losses.append(self._counted_loss(index, *part) * (self._gradient_factor / total))
                self._seen[index] += len(part[1])
            else:
                self._no_gradient(index)
        self._between(losses)
        if losses:
            mx.autograd.backward(losses)
        self._end()
        self._queued.append(losses)
        if len(self._queued) > AHEAD:
            for loss in self._queued.popleft():
                loss.wait_to_read()

    def _begin(self) -> None:
        if self.pace:
            wait_for(learned.values for learned in self._learned)
            self.pace.begin()

    def _between(self, losses: list[NDArray]) -> None:
        if self.pace:
            wait_for([losses])
            self.pace.between()

    def _end(self) -> None:
        if self.pace:
            wait_for(learned.gradients for learned in self._learned)
            self.pace.end()

    def evaluate(self, images: Array, labels: Array) -> None:
        """Add the metrics of these samples with the current weights."""
        for index, part in enumerate(self._parts(images, labels)):
            if part:
                self._counted_loss(index, *part)

    def take_sums(self) -> Sums:
        """The metrics since the last call, summed over all devices. Waits for the devices."""
        total = Sums()
        for sums in self._sums:
            total += Sums.of(sums.asnumpy())
            sums[:] = 0
        return total

    def settle(self) -> None:
        """Wait until this worker's weights include its last step."""
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the weights include the last step of all workers."""
        self._step.synchronize()
        mx.nd.waitall()

    def _parts(self, images: Array, labels: Array) -> list[tuple[NDArray, NDArray] | None]:
        """The batch in one equal share per device, on that device; None for a share without samples."""
        count = len(self._contexts)
        shares = zip(np.array_split(images, count), np.array_split(labels, count), self._contexts, strict=True)
        return [
            (self._normalise(index, mx.nd.array(x, context, dtype=x.dtype)), mx.nd.array(y, context, dtype="float32"))
            if len(y)
            else None
            for index, (x, y, context) in enumerate(shares)
        ]

    def _counted_loss(self, index: int, images: NDArray, labels: NDArray) -> NDArray:
        """The cross-entropy summed over the samples, including that of auxiliary outputs. Also counts the metrics of
        the main output."""
        outputs = self._block(images)
        logits, *auxiliary = outputs if self._auxiliary_weights else [outputs]  # (N, num_classes) each
        loss = cross_entropy(logits, labels)
        with mx.autograd.pause():
            self._sums[index] += count(logits, labels, loss, self._top_k)
        for weight, others in zip(self._auxiliary_weights, auxiliary, strict=True):
            loss = loss + weight * cross_entropy(others, labels)
        return loss

    def _no_gradient(self, index: int) -> None:
        """Set the gradients of a device without samples to zero."""
        for learned in self._learned:
            learned.gradients[index][:] = 0

    # -- statistics -----------------------------------------------------------------------------------------------

    def merge_statistics(self, all_reduce: Callable[[str, Array], Array], num_workers: int) -> None:
        """Replace batch-norm statistics by their mean over devices and workers, weighted by training samples."""
        count = len(self._contexts)
        if self._statistics and num_workers * count > 1:
            flat = [self._flat_statistics(index) for index in range(count)]
            merged = weights.merged_statistics(flat, self._seen, all_reduce)
            if merged is not None:
                self._fill_statistics(merged)
        self._seen = [0] * count

    def _flat_statistics(self, index: int) -> Array:
        """Running means and variances of one device, float64."""
        arrays = [self._arrays[name].list_data()[index].asnumpy().ravel() for name in self._statistics]
        flat: Array = np.concatenate(arrays).astype(np.float64)
        return flat

    def _fill_statistics(self, values: Array) -> None:
        shapes = [self._arrays[name].shape for name in self._statistics]
        for name, part in zip(self._statistics, weights.split(values, shapes), strict=True):
            self._arrays[name].set_data(mx.nd.array(part))

    # -- state ----------------------------------------------------------------------------------------------------

    def state(
        self, residuals: Mapping[str, Array] | None = None, others: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Everything that the next step depends on except data and seeds. Call `synchronize` first."""
        return {"model": self._model(), "optimizer": self._step.state()}

    def take_state(self, state: Mapping[str, Any], own_statistics: bool = False) -> None:
        raise NotImplementedError  # elastic jobs are refused: rounds/checks.py

    def own_state(self) -> dict[str, Any]:
        """Nothing: all workers step together, or the servers do."""
        return {}

    def _model(self) -> dict[str, Array]:
        names = (*(learned.name for learned in self._learned), *self._statistics)
        return {name: self._arrays[name].list_data()[0].asnumpy() for name in names}

    def common_arrays(self) -> list[CommonArray]:
        """Weights, statistics, and the optimizer's state if it runs on the workers. Call `synchronize` first."""
        names = (*(learned.name for learned in self._learned), *self._statistics)
        return [mxnet_state.common(name, self._arrays[name].list_data()) for name in names] + self._step.common_arrays()

    def digest(self) -> str:
        """sha256 of all weights and statistics: equal digests mean bit-identical networks."""
        return weights.digest(self._model())

    def other_files(self, prefix: str, epoch: int) -> dict[Path, bytes]:
        """Files in MXNet's format, to be written with a checkpoint."""
        values = {name: array.list_data()[0] for name, array in self._arrays.items()}
        return mxnet_state.own_files(prefix, epoch, self._symbol, values)

    # -- reports --------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"mxnet {mx.__version__}, {mx.base._LIB.omp_get_max_threads()} threads"

    def choices(self) -> list[str]:
        return []

    def device_memory(self) -> float | None:
        """MiB in use on this worker's GPUs by all programs; None on the CPU."""
        of_devices = [
            mx.context.gpu_memory_info(context.device_id) for context in self._contexts if context.device_type == "gpu"
        ]
        return sum(total - free for free, total in of_devices) / 2**20 if of_devices else None


def samples_of_a_step(settings: Settings, store: KVStore) -> int:
    """The factor of compressed gradients. As in MXNet's programs, --gc-threshold applies to the sum over a step's
    samples; their mean would hardly ever reach it."""
    return settings.batch_size * (store.num_workers if store.kvstore_type.synchronous else 1)
