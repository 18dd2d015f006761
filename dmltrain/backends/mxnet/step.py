"""Who makes the optimizer's step of the MXNet backend.

The servers, which then hand out weights (dist_async; dist_sync unless settings.update_on_kvstore is 0); else every
device, from the sum of all devices' and workers' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.backends.backend import Settings
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.errors import UserError
from dmltrain.kvstore import KVStore

NDArray = Any  # mx.nd.NDArray: MXNet has no types


@dataclass(frozen=True)
class Learned:
    """One learned array: a key of the kvstore, with one NDArray a device."""

    name: str
    number: int  # of the key
    values: list[NDArray]
    gradients: list[NDArray]


class StepOnDevices:
    """Every device makes the step from the sum of all gradients; the store only adds."""

    def __init__(self, learned: list[Learned], spec: dict[str, Any], store: KVStore, devices: int) -> None:
        self._learned, self._store = learned, store
        self._shared = store.is_distributed or devices > 1
        self._updaters = [mxnet_optimizer.Updater(spec) for _ in range(devices)]

    def __call__(self, learning_rate: float) -> None:
        if self._shared:
            for priority, each in enumerate(self._learned):
                self._store.push(each.name, each.gradients, priority=-priority)
                self._store.pull(each.name, each.gradients, priority=-priority)
        for index, updater in enumerate(self._updaters):
            updater.set_learning_rate(learning_rate)
            for each in self._learned:
                updater(each.number, each.gradients[index], each.values[index])

    def synchronize(self) -> None:
        """The devices' weights are the weights."""

    def state(self) -> dict[str, Any]:
        return {"worker": self._updaters[0].state()}

    def load(self, state: Mapping[str, Any]) -> None:
        if "worker" not in state:
            raise UserError(
                "this checkpoint was saved with the optimizer on the servers, here it is on the worker: "
                "continue with the kvstore (and --update-on-kvstore) it was saved with"
            )
        for updater in self._updaters:
            updater.load(state["worker"])


class StepOnServers:
    """Gradients go out, weights come back."""

    def __init__(self, learned: list[Learned], spec: dict[str, Any], store: KVStore, devices: int) -> None:
        self._learned, self._store = learned, store
        store.set_optimizer(spec)

    def __call__(self, learning_rate: float) -> None:
        for priority, each in enumerate(self._learned):
            self._store.push(each.name, each.gradients, priority=-priority, rate=learning_rate)
            self._store.pull(each.name, each.values, priority=-priority)

    def synchronize(self) -> None:
        """Other workers may have stepped since this one's last pull (dist_async)."""
        if not self._store.kvstore_type.synchronous:
            self._pull()

    def _pull(self) -> None:
        for each in self._learned:
            self._store.pull(each.name, each.values)

    def state(self) -> dict[str, Any]:
        return {"servers": [bytes(state) for state in self._store.optimizer_states()]}

    def load(self, state: Mapping[str, Any]) -> None:
        if "servers" not in state:
            raise UserError(
                f"this checkpoint was saved with the optimizer on the workers; kvstore {self._store.type} "
                "has it on the servers here: continue with the kvstore (and --update-on-kvstore) it was "
                "saved with"
            )
        self._store.load_optimizer_state_bytes([each.tobytes() for each in state["servers"]])
        self._pull()


def optimizer_spec(settings: Settings, learned: list[Learned]) -> dict[str, Any]:
    """settings.optimizer with MXNet's own defaults; biases and betas do not decay."""
    arguments = mxnet_optimizer.TABLE[settings.optimizer].arguments(settings.mom)
    keys = mxnet_optimizer.key_numbers({each.number: each.name for each in learned})
    return {"name": settings.optimizer, "lr": settings.lr, "wd": settings.wd, "keys": keys, **arguments}
