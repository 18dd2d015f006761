"""PyTorch as a backend, with dmltrain's own parameter server. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dmltrain import optimizers
from dmltrain.backends.backend import Capabilities, Settings, Trainer, TrainerState
from dmltrain.backends.torch import release
from dmltrain.base.arrays import Array
from dmltrain.base.env import SERVER_SHARES, TRANSPORTS, Environment
from dmltrain.base.normalisation import Normalisation
from dmltrain.kvstore import codec, types
from dmltrain.kvstore.step import OptimizerStep
from dmltrain.layers import Network

if TYPE_CHECKING:
    from dmltrain.kvstore.base import KVStore

DTYPES = ("float32", "bfloat16", "float16")


class TorchBackend:
    """See the module."""

    name = "torch"
    title = "PyTorch"
    capabilities = Capabilities(
        kvstores=tuple(kvstore_type.name for kvstore_type in types.TABLE),
        codecs=codec.TYPES,
        dtypes=DTYPES,
        optimizers=optimizers.NAMES,
        transports=TRANSPORTS,
        suffix=".pt",
        compile=True,
        server_shares=SERVER_SHARES,
        factors=True,
        host_sum=True,
        residuals=True,
        arithmetic=True,
    )

    def load(self) -> None:
        release.check()
        from dmltrain.backends.torch import trainer  # noqa: F401

    def gpus(self) -> int:
        release.check()
        from dmltrain.backends.torch import devices

        return devices.count()

    def trainer(
        self,
        network: Network,
        settings: Settings,
        store: KVStore,
        state: TrainerState | None = None,
        normalisation: Normalisation | None = None,
    ) -> Trainer:
        from dmltrain.backends.torch.trainer import TorchTrainer

        return TorchTrainer(network, settings, store, state, normalisation)

    def local_store(self, kind: str) -> KVStore:
        from dmltrain.kvstore.local import LocalKVStore

        return LocalKVStore(kind, make_step)

    def store(self, kind: str, staleness: float, environment: Environment) -> KVStore:
        from dmltrain.kvstore.worker.store import DistKVStore

        return DistKVStore(kind, staleness, environment)

    def serve(self, environment: Environment) -> str:
        if environment.role == "scheduler":
            from dmltrain.kvstore.scheduler.process import SchedulerProcess

            return SchedulerProcess(environment).run()
        from dmltrain.kvstore.server import process

        return process.serve(environment, make_step)

    def encode(self, content: Mapping[str, Any]) -> bytes:
        from dmltrain.backends.torch import state

        return state.encode(content)

    def decode(self, content: bytes) -> dict[str, Any]:
        release.check()
        from dmltrain.backends.torch import state

        return state.decode(content)


def make_step(spec: dict[str, Any], key: int | str, value: Array) -> OptimizerStep:
    """The optimizer of `value`, for stores and servers. The first call imports torch. Raises ValueError for an invalid
    spec."""
    release.check()
    from dmltrain.backends.torch import server_optimizer

    return server_optimizer.SliceOptimizer(spec, key, value)
