"""The trainer of the PyTorch backend: one worker's network on its devices.

Each device and worker divides the sum of its samples' gradients by the number of samples in the whole step, over all
workers. So the sum over devices and workers is the mean over the step's samples, even if their shares differ. Metrics
stay on the device until they are read: a step never waits for the previous one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dmltrain.backends.backend import CommonArray, Settings
from dmltrain.backends.replicas import TrainerOfReplicas
from dmltrain.backends.torch import devices, distributed, sync_bn
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch.loss_scale import LossScale
from dmltrain.backends.torch.optimizer import compression, factor_rows, make_optimizer, set_rate
from dmltrain.backends.torch.recipe import Clipping
from dmltrain.backends.torch.replicas import TorchReplicas
from dmltrain.backends.torch.training_state import FACTORED, TrainingState
from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.images.mixing import Mixing
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.layers import Network


class TorchTrainer(TrainerOfReplicas):
    """`network` on settings.device_names, connected to the other workers by `store`.

    It starts with initial weights from settings.seed, or with `state`, an earlier result of `state()`. Without
    "optimizer" in it the optimizer starts anew. Raises UserError if the state does not fit the network, or a device
    does not exist.
    """

    def __init__(
        self,
        network: Network,
        settings: Settings,
        store: KVStore,
        state: Mapping[str, Any] | None = None,
        normalisation: Normalisation | None = None,
    ) -> None:
        self.replicas = TorchReplicas(network, settings, normalisation, state["model"] if state else None)
        super().__init__(self.replicas)
        self.average = self.replicas.average
        self._notes = _notes(self.replicas.devices, settings, store)
        self._is_single = len(self.replicas.modules) == 1  # else they are summed before the push
        self._turns = sync_bn.join(self.replicas.modules, store) if settings.sync_bn else None
        self._scale: LossScale | None = None
        self._clipping = Clipping(settings, store.kvstore_type.steps_on_servers(bool(settings.update_on_kvstore)))
        self._optimizer = self._distributed(network, settings, store, (state or {}).get(FACTORED))
        self._steps_alone = store.kvstore_type.steps_alone
        self._state = TrainingState(self.replicas, self._optimizer, self._scale, self._steps_alone)
        if state:
            self._state.resume(state, store)
        self._has_gradient = False  # of `accumulate`
        self._samples = 0  # of this worker in the present step

    def _distributed(
        self, network: Network, settings: Settings, store: KVStore, factored: Collection[str] | None
    ) -> distributed.DistributedOptimizer:
        """An optimizer of the first replica's weights; its gradient is the sum over workers. `factored`: the value of
        FACTORED in a state."""
        if settings.gc_type != "none":
            store.set_gradient_compression(compression(settings, store))
        inner = make_optimizer(self.replicas.modules[0], network, settings)
        if settings.dtype == "float16":
            self._scale = LossScale(inner, self.replicas.devices[0])
        choices = ExchangeChoices(
            store.type,
            local_steps=settings.local_steps,
            outer_lr=settings.outer_lr,
            outer_momentum=settings.outer_momentum,
            update_on_kvstore=bool(settings.update_on_kvstore),
            factors=factor_rows(settings, store),
            defer=self._is_single and not settings.compile and not self._clipping,
            step_early=True,
            average=False,
            overlap=self._is_single and not (self._clipping and self._clipping.on_servers),
            factored=factored,
        )
        return distributed.connect(self.replicas.modules[0], inner, store, choices)

    # -- a step ---------------------------------------------------------------------------------------------------

    def seed(self, *numbers: int) -> None:
        if devices.gpus(self.replicas.devices):
            torch.manual_seed(random_bits.seed_of(*numbers))
        else:  # the same, without a look at the sources of all callers, in case that there is a GPU after all
            torch.default_generator.manual_seed(random_bits.seed_of(*numbers))

    def train_step(
        self,
        images: Array,
        labels: Array,
        total: int,
        learning_rate: float,
        checksum: Array | None = None,
        mixing: Mixing | None = None,
    ) -> Array | None:
        if checksum is not None:
            self._optimizer.round(total, checksum)
        set_rate(self._optimizer, learning_rate)
        self.reach("begin")
        self._backward(images, labels, total, mixing)
        self._has_gradient = False
        if not self._is_single:
            self.replicas.sum_gradients()
        if self._clipping:
            scale: Any = 1.0 if self._scale is None else self._scale.value
            if self._clipping.on_servers:
                scale = self._samples / total
            else:
                self._optimizer.reduce_gradients()
            self._clipping(self.replicas.modules[0].parameters(), scale)
        self._optimizer.step()
        self._average(self._optimizer.committed)
        self.reach("end", self.replicas.wait)
        return self._optimizer.committed

    def _average(self, committed: Array | None) -> None:
        """Follow the step, unless it had no samples, or the state after it came from another member."""
        if self.replicas.average and (committed is None or committed[0]):
            self._optimizer.settle()
            self.replicas.average.after_step()

    def accumulate(self, images: Array, labels: Array, total: int, mixing: Mixing | None = None) -> None:
        self.reach("begin")
        with self._optimizer.accumulate():
            self._backward(images, labels, total, mixing)
        self._has_gradient = True
        self.reach("end", self.replicas.wait)

    def _backward(self, images: Array, labels: Array, total: int, mixing: Mixing | None) -> None:
        if not total:
            return
        if not self._has_gradient:
            self._optimizer.zero_grad()  # also waits for the weights, if the forward does not (without `defer`)
            self.replicas.copy_weights()
        self._samples = len(labels) + (self._samples if self._has_gradient else 0)
        parts = self.replicas.parts(images, labels, with_empty=self._turns is not None)
        trainings = [partial(self._train, index, part, total, mixing) for index, part in enumerate(parts)]
        if self._turns:
            return self._turns.run(trainings)
        for training in trainings:
            training()

    def _train(
        self, index: int, part: tuple[torch.Tensor, torch.Tensor] | None, total: int, mixing: Mixing | None
    ) -> None:
        """Add the gradients of a replica's samples."""
        loss = self.replicas.training_loss(index, part, mixing) if part else self._no_loss(index)
        if index == 0:
            self.reach("between", self.replicas.wait)
        scale = 1.0 if self._scale is None else self._scale.value.to(loss.device)
        (loss * (scale / total)).backward()

    def _no_loss(self, index: int) -> torch.Tensor:
        self._optimizer.settle()  # without a forward, nothing else waits for the weights
        return self.replicas.no_loss(index, self._optimizer.factored)

    def settle(self) -> None:
        self._optimizer.settle()
        self.replicas.copy_weights()

    def synchronize(self) -> None:
        self._optimizer.synchronize()
        self.replicas.copy_weights()

    # -- state ----------------------------------------------------------------------------------------------------

    def state(
        self, residuals: Mapping[str, Array] | None = None, others: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        return self._state.give(residuals, others)

    def shared_state(self) -> dict[str, Any]:
        if not self._steps_alone:
            self.synchronize()
        with self._optimizer.shared():
            return self._state.give(None, ())

    def take_state(self, state: Mapping[str, Any], only_step: bool = False) -> None:
        self._state.take(state, only_step)

    def own_state(self) -> dict[str, Any]:
        return self._state.own()

    def common_arrays(self) -> list[CommonArray]:
        return self._state.common_arrays()

    def digest(self) -> str:
        return torch_state.digest(self.replicas.modules[0].state_dict())

    def other_files(self, prefix: str, epoch: int) -> dict[Path, bytes]:
        """No files: other programs read torch's checkpoints."""
        return {}

    # -- reports --------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        names = devices.names(self.replicas.devices)
        return ", ".join([f"torch {torch.__version__}", f"{torch.get_num_threads()} threads", *names])

    def choices(self) -> list[str]:
        return [*self._notes, *(f"Layer {choice}" for choice in self._optimizer.choices)]

    def device_memory(self) -> float | None:
        """Peak MiB allocated on this worker's GPUs; None on the CPU."""
        return devices.memory(self.replicas.devices)


def _notes(own: Sequence[torch.device], settings: Settings, store: KVStore) -> list[str]:
    """What the log says of the choices, and of what they cost."""
    notes = [arithmetic] if (arithmetic := devices.set_arithmetic(own, settings)) else []
    notes += [
        f"Warning: {name} is also used by another process of dmltrain on this host, so that both are slower: give each "
        "worker a GPU of its own (gpus= in the hosts file, or --devices auto)"
        for name in map(str, devices.shared(own))
    ]
    if settings.compile and store.kvstore_type.distributed:
        notes.append(
            "--compile: a compiled backward gives all gradients when it ends, so none is sent while it computes"
        )
    return notes
