"""MXNet 1.9.1 as a backend, with its own kvstores and ps-lite. Importing this module imports no mxnet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dmltrain import optimizers
from dmltrain.backends.backend import Capabilities, Settings, Trainer, TrainerState
from dmltrain.base.env import Environment
from dmltrain.base.normalisation import Normalisation
from dmltrain.layers import Network

if TYPE_CHECKING:
    from dmltrain.kvstore.base import KVStore


LOSS = "its loss is gluon's cross-entropy of whole labels"
CLIP = "its gradients go from backward to the kvstore, and there is no step between them"
MIXING = "its loss is of whole labels, and mixed images have two"
FLIP = "its validation gives each image to the network once"
AVERAGE = "its trainer keeps one copy of the weights on each device, and none of an average"
SYNC_BN = "its batch norms are gluon's, each with the samples of its own device"


REASONS = {
    "kv_store": "ps-lite has no bounded staleness and no averages of weights",
    "gc_type": "ps-lite compresses to 2 bits only",
    "transport": "ps-lite sends over TCP only",
    "server_shares": "ps-lite divides the weights itself",
    "factors": "ps-lite sends gradients only",
    "compile": "a network of MXNet is one graph already",
    "deterministic": "MXNet has an environment variable for it, MXNET_ENFORCE_DETERMINISM",
    "tf32": "MXNet leaves it to CUDA's libraries",
    "dtype": "its trainer does not scale the loss, without which small gradients become 0",
    "optimizer": "MXNet 1.9.1 has none of this name",
}


class MXNetBackend:
    """See the module."""

    name = "mxnet"
    title = "MXNet"
    capabilities = Capabilities(
        kvstores=("local", "dist_sync", "dist_async"),
        codecs=("none", "2bit"),
        dtypes=("float32", "bfloat16"),
        optimizers=tuple(name for name in optimizers.NAMES if optimizers.BY_NAME[name].mxnet),
        transports=("auto", "tcp"),
        suffix=".npz",
        update_on_kvstore=True,
        lacks={
            "label_smoothing": LOSS,
            "bce_threshold": LOSS,
            "loss=bce": LOSS,
            "clip_gradient_norm": CLIP,
            "clip_gradient_value": CLIP,
            "ema_decay": AVERAGE,
            "swa_from": AVERAGE,
            "mixup": MIXING,
            "cutmix": MIXING,
            "val_flip": FLIP,
            "sync_bn": SYNC_BN,
        },
        reasons=REASONS,
    )

    def load(self) -> None:
        from dmltrain.backends.mxnet import trainer  # noqa: F401

    def gpus(self) -> int:
        from dmltrain.backends.mxnet import compat

        return int(compat.load().context.num_gpus())

    def trainer(
        self,
        network: Network,
        settings: Settings,
        store: KVStore,
        state: TrainerState | None = None,
        normalisation: Normalisation | None = None,
    ) -> Trainer:
        from dmltrain.backends.mxnet.trainer import MXNetTrainer

        return MXNetTrainer(network, settings, store, state, normalisation)

    def local_store(self, kind: str) -> KVStore:
        from dmltrain.backends.mxnet.kvstore.local import MXNetLocalKVStore

        return MXNetLocalKVStore(kind)

    def store(self, kind: str, staleness: float, environment: Environment) -> KVStore:
        from dmltrain.backends.mxnet.kvstore.dist import MXNetKVStore

        return MXNetKVStore(kind, staleness, environment)

    def serve(self, environment: Environment) -> str:
        from dmltrain.backends.mxnet import server

        return server.serve(environment)

    def encode(self, content: Mapping[str, Any]) -> bytes:
        from dmltrain.backends.mxnet import state

        return state.encode(content)

    def decode(self, content: bytes) -> dict[str, Any]:
        from dmltrain.backends.mxnet import state

        return state.decode(content)
