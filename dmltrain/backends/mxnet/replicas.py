"""The replicas of the MXNet backend: a network on each of a worker's devices (contexts)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray, Settings
from dmltrain.backends.device import gpu_index
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import layers as mxnet_layers
from dmltrain.backends.mxnet import state as mxnet_state
from dmltrain.backends.replicas import METRICS, Replicas
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.images.mixing import Mixing
from dmltrain.layers import Network

mx = mxnet_compat.load()
NDArray = Any  # mx.nd.NDArray: MXNet has no types


class MXNetReplicas(Replicas[Any, NDArray]):
    """See Replicas. `saved`: the model of a checkpoint; None: initial weights from settings.seed. `arrays`: MXNet's
    parameters by name, each with an NDArray for each context."""

    def __init__(
        self,
        network: Network,
        settings: Settings,
        normalisation: Normalisation | None,
        saved: Mapping[str, Array] | None,
    ) -> None:
        super().__init__(network, find_contexts(settings.device_names), normalisation, settings.top_k)
        self._block = mxnet_layers.build(network, settings.dtype)
        self.arrays = self._block.collect_params()
        self._learned = [parameter.name for parameter in network.parameters()]
        self._statistics = [statistic.name for statistic in network.auxiliary()]
        mxnet_layers.initialise(self._block, network, settings.seed, self.devices)
        if saved:
            self._load(network, saved)
        self._block.hybridize(static_alloc=True)
        if settings.dtype != "float32":
            self._check_dtype(network, settings.dtype)
        self.sums = [mx.nd.zeros(METRICS, context, dtype="float64") for context in self.devices]

    def _load(self, network: Network, saved: Mapping[str, Array]) -> None:
        own = {parameter.name: parameter.shape for parameter in (*network.parameters(), *network.auxiliary())}
        weights.check_same(own, {name: array.shape for name, array in saved.items()})
        for name, array in saved.items():
            self.arrays[name].set_data(mx.nd.array(array))

    def _check_dtype(self, network: Network, dtype: str) -> None:
        """Compute one image: MXNet reports an unsupported type only then."""
        for context in self.devices:
            try:
                self._block(mx.nd.zeros((1, *network.input_shape), context)).wait_to_read()
            except mx.MXNetError as error:
                raise UserError(
                    f"--dtype {dtype}: MXNet {mx.__version__} does not support it on {context}: "
                    f"{str(error).strip().splitlines()[-1][:200]}; it supports bfloat16 on processors with "
                    "AVX-512; use float32"
                ) from error

    # -- samples --------------------------------------------------------------------------------------------------

    def place(self, array: Array, device: Any) -> NDArray:
        """uint8 or float32: MXNet computes with labels as numbers of that type."""
        return mx.nd.array(array, device, dtype="uint8" if array.dtype == np.uint8 else "float32")

    def normalised(self, images: NDArray, mean: NDArray, factor: NDArray) -> NDArray:
        return mx.nd.broadcast_mul(mx.nd.broadcast_sub(images.astype("float32"), mean), factor)

    def counted_loss(
        self, index: int, images: NDArray, labels: NDArray, train: bool, mixing: Mixing | None = None
    ) -> NDArray:
        """In training it is called within mx.autograd.record(), always without a mixing."""
        outputs = self._block(images)
        logits, *auxiliary = outputs if self.auxiliary_weights else [outputs]  # (N, num_classes) each
        loss = cross_entropy(logits, labels)
        with mx.autograd.pause():
            self.sums[index] += count(logits, labels, loss, self.top_k)
        for weight, others in zip(self.auxiliary_weights, auxiliary, strict=True):
            loss = loss + weight * cross_entropy(others, labels)
        return loss

    def read(self, tensor: NDArray) -> Array:
        values: Array = tensor.asnumpy().astype(np.float64)
        return values

    def write(self, tensor: NDArray, values: Array) -> None:
        tensor[:] = values

    def statistics(self, index: int) -> list[NDArray]:
        return [self.arrays[name].list_data()[index] for name in self._statistics]

    # -- arrays ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """A copy of the first replica's weights and statistics."""
        return {name: replicas[0].asnumpy() for name, replicas in self._named().items()}

    def common_arrays(self) -> list[CommonArray]:
        return [mxnet_state.common(name, replicas) for name, replicas in self._named().items()]

    def _named(self) -> dict[str, list[NDArray]]:
        return {name: self.arrays[name].list_data() for name in (*self._learned, *self._statistics)}


def find_contexts(names: tuple[str, ...]) -> list[Any]:
    """('cpu', 'cpu') -> [mx.cpu(0), mx.cpu(1)]; 'gpu:1' -> mx.gpu(1). Raises UserError for an absent GPU."""
    framework = f"MXNet {mx.__version__}"
    return [
        mx.cpu(index) if name == "cpu" else mx.gpu(gpu_index(name, mx.context.num_gpus(), framework))
        for index, name in enumerate(names)
    ]


def wait_for(arrays: Iterable[list[NDArray]]) -> None:
    """Wait until MXNet's engine has computed these."""
    for replicas in arrays:
        for replica in replicas:
            replica.wait_to_read()


def cross_entropy(logits: NDArray, labels: NDArray) -> NDArray:
    """Summed over the samples, (1,)."""
    return -mx.nd.log_softmax(logits).pick(labels).sum()


def count(logits: NDArray, labels: NDArray, loss: NDArray, top_k: int) -> NDArray:
    """(samples, correct, correct in top k, cross-entropy) as float64 (4,) on the device."""
    correct = (logits.argmax(axis=1) == labels).sum()
    top = logits.topk(axis=1, k=top_k, ret_typ="mask").pick(labels).sum() if top_k else mx.nd.zeros_like(correct)
    samples = mx.nd.full((1,), len(labels), labels.context)
    return mx.nd.concat(samples, correct, top, loss, dim=0).astype("float64")
