"""The two places where the MXNet backend runs the optimizer.

- On the servers, from which workers pull weights: dist_async, and dist_sync unless settings.update_on_kvstore is 0.
- On every device, with the sum of all devices' and workers' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.backends.backend import CommonArray, Settings, decayed
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet import state as mxnet_state
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Network

NDArray = Any  # mx.nd.NDArray: MXNet has no types


@dataclass(frozen=True)
class Learned:
    """A learned array: a key of the kvstore, with one NDArray per device."""

    name: str
    number: int  # of the key
    values: list[NDArray]
    gradients: list[NDArray]


class StepOnDevices:
    """Every device makes the step with the sum of all gradients; the store only sums."""

    def __init__(self, learned: list[Learned], spec: dict[str, Any], store: KVStore, devices: int) -> None:
        self._learned, self._store = learned, store
        self._shared = store.is_distributed or devices > 1
        self._updaters = [mxnet_optimizer.Updater(spec) for _ in range(devices)]

    def __call__(self, learning_rate: float) -> None:
        if self._shared:
            for priority, learned in enumerate(self._learned):
                self._store.push(learned.name, learned.gradients, priority=-priority)
                self._store.pull(learned.name, learned.gradients, priority=-priority)
        for index, updater in enumerate(self._updaters):
            updater.set_learning_rate(learning_rate)
            for learned in self._learned:
                updater(learned.number, learned.gradients[index], learned.values[index])

    def synchronize(self) -> None:
        """Nothing to do: the devices have the latest weights."""

    def common_arrays(self) -> list[CommonArray]:
        first, *others = [updater.arrays() for updater in self._updaters]
        return [
            mxnet_state.common(f"state {name}", [array, *(other[name] for other in others)])
            for name, array in first.items()
        ]

    def state(self) -> dict[str, Any]:
        return {"worker": self._updaters[0].state()}

    def load(self, state: Mapping[str, Any]) -> None:
        if "worker" not in state:
            raise UserError(
                "this checkpoint was saved with the optimizer on the servers, but it now runs on the worker: "
                "resume with the kvstore (and --update-on-kvstore) that it was saved with"
            )
        for updater in self._updaters:
            updater.load(state["worker"])


class StepOnServers:
    """The servers make the step: workers push gradients and pull weights."""

    def __init__(self, learned: list[Learned], spec: dict[str, Any], store: KVStore, devices: int) -> None:
        self._learned, self._store = learned, store
        store.set_optimizer(spec)

    def __call__(self, learning_rate: float) -> None:
        for priority, learned in enumerate(self._learned):
            self._store.push(learned.name, learned.gradients, priority=-priority, rate=learning_rate)
            self._store.pull(learned.name, learned.values, priority=-priority)

    def synchronize(self) -> None:
        """Other workers may have stepped since this one's last pull (dist_async)."""
        if not self._store.kvstore_type.synchronous:
            self._pull()

    def _pull(self) -> None:
        for learned in self._learned:
            self._store.pull(learned.name, learned.values)

    def common_arrays(self) -> list[CommonArray]:
        """None: the servers have the state."""
        return []

    def state(self) -> dict[str, Any]:
        return {"servers": [bytes(state) for state in self._store.optimizer_states()]}

    def load(self, state: Mapping[str, Any]) -> None:
        if "servers" not in state:
            raise UserError(
                f"this checkpoint was saved with the optimizer on the workers, but kvstore {self._store.type} now runs "
                "it on the servers: resume with the kvstore (and --update-on-kvstore) that it was saved with"
            )
        self._store.load_optimizer_state_bytes([server_state.tobytes() for server_state in state["servers"]])
        self._pull()


def optimizer_spec(settings: Settings, network: Network, learned: list[Learned]) -> dict[str, Any]:
    """settings.optimizer with MXNet's defaults, and the network's multipliers of learning rate and weight decay."""
    arguments = mxnet_optimizer.TABLE[settings.optimizer].arguments(settings)
    parameters = {parameter.name: parameter for parameter in decayed(network, settings)}
    keys = mxnet_optimizer.key_numbers(settings.optimizer, {array.number: parameters[array.name] for array in learned})
    return {"name": settings.optimizer, "lr": settings.lr, "wd": settings.wd, "keys": keys, **arguments}
