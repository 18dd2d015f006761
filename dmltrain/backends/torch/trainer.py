"""The trainer of the PyTorch backend: one worker's network on its devices.

Each device and worker divides the sum of its samples' gradients by the number of samples in the whole step, over all
workers. So the sum over devices and workers is the mean over the step's samples, even if their shares differ. Metrics
stay on the device until they are read: a step never waits for the previous one.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray, Pace, Settings
from dmltrain.backends.torch import distributed
from dmltrain.backends.torch import layers as torch_layers
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch.distributed.local_steps import OUTER
from dmltrain.backends.torch.exchange import compression, factor_rows
from dmltrain.backends.torch.loss_scale import LossScale, takes_loss_scale, taking_loss_scale
from dmltrain.backends.torch.optimizer import load_state, make_optimizer, set_rate
from dmltrain.backends.torch.replica import (
    Normalise,
    compiled,
    count,
    fill_statistics,
    find_device,
    image_layout,
    statistics,
)
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.layers import Network
from dmltrain.logs.metric import Sums

FACTORED = "factored"  # in checkpoints: the weights whose gradients were sent as factors
OWN_STATES = "workers"  # in checkpoints: the own states of workers 1, 2, ...
RESIDUALS_OF_04 = "held_back"  # their name in checkpoints up to version 0.4


class TorchTrainer:
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
        self._devices = [find_device(name) for name in settings.device_names]
        self._normalise = Normalise(normalisation, self._devices)
        self._top_k = settings.top_k
        self._auxiliary_weights = [auxiliary_output.weight for auxiliary_output in network.auxiliary_outputs]
        self._dtype = getattr(torch, settings.dtype)
        self._layout = image_layout(network, settings.memory_format)
        first = torch_layers.build(network)
        torch_layers.initialise(first, network, settings.seed)
        if state:
            torch_state.load_weights(first, state["model"])
        self._modules = [self._placed(first, device) for device in self._devices]  # one replica on each device
        self._compiled_modules = [compiled(module) if settings.compile else module for module in self._modules]
        self._scale: LossScale | None = None
        self._steps_alone = store.kvstore_type.steps_alone
        self._optimizer = self._distributed(network, settings, store, (state or {}).get(FACTORED))
        if state:
            self._load_training_state(state, store)
        self._sums = [torch.zeros(4, dtype=torch.float64, device=device) for device in self._devices]
        self._seen = [0] * len(self._devices)  # training samples since the last merge of statistics
        self._has_gradient = False  # of `accumulate`
        self.pace: Pace | None = None

    def _placed(self, module: nn.Module, device: torch.device) -> nn.Module:
        placed: nn.Module = copy.deepcopy(module).to(device)
        # torch's annotations do not allow the memory format alone
        return placed.to(memory_format=self._layout)  # type: ignore[call-overload, no-any-return]

    def _distributed(
        self, network: Network, settings: Settings, store: KVStore, factored: Collection[str] | None
    ) -> distributed.DistributedOptimizer:
        """An optimizer of the first replica's weights; its gradient is the sum over workers. `factored`: the value of
        FACTORED in a state."""
        if settings.gc_type != "none":
            store.set_gradient_compression(compression(settings, store))
        inner = make_optimizer(self._modules[0], network, settings)
        if settings.dtype == "float16":
            self._scale = self._loss_scale(inner, settings, store)
        single = len(self._modules) == 1  # else replicas are summed before the push, and need all weights after a step
        choices = ExchangeChoices(
            store.type,
            local_steps=settings.local_steps,
            outer_lr=settings.outer_lr,
            outer_momentum=settings.outer_momentum,
            update_on_kvstore=bool(settings.update_on_kvstore),
            factors=factor_rows(settings, store),
            defer=single and not settings.compile,
            step_early=True,
            average=False,
            overlap=single,
            factored=factored,
        )
        return distributed.connect(self._modules[0], inner, store, choices)

    def _loss_scale(self, inner: torch.optim.Optimizer, settings: Settings, store: KVStore) -> LossScale:
        if store.kvstore_type.steps_on_servers(bool(settings.update_on_kvstore)):
            raise UserError(
                "--dtype float16 scales the loss, which needs the optimizer on the workers: use --kv-store dist_sync "
                "with the optimizer on the workers, or --dtype bfloat16"
            )
        if not takes_loss_scale(inner):
            raise UserError(
                f"--dtype float16 scales the loss, which optimizer {settings.optimizer} does not support here: use one "
                f"of {', '.join(taking_loss_scale(self._devices[0]))}, or --dtype bfloat16"
            )
        return LossScale(inner, self._devices[0])

    # -- a step ---------------------------------------------------------------------------------------------------

    def seed(self, *numbers: int) -> None:
        """Seed torch's random numbers (dropout) on every device."""
        torch.manual_seed(int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1)

    def train_step(
        self, images: Array, labels: Array, total: int, learning_rate: float, checksum: Array | None = None
    ) -> Array | None:
        """One update from this worker's images (N, C, H, W), uint8 or float32, and labels (N,) int64, N may be 0.

        `total`: number of samples in the mean gradient of this step (of all workers, if they step together).
        `checksum` and the result: see Trainer.
        """
        if checksum is not None:
            self._optimizer.round(total, checksum)
        set_rate(self._optimizer, learning_rate)
        self._begin()
        self._backward(images, labels, total)
        self._has_gradient = False
        if len(self._modules) > 1:
            self._sum_gradients()
        self._optimizer.step()
        self._end()
        return self._optimizer.committed

    def accumulate(self, images: Array, labels: Array, total: int) -> None:
        """Add the gradient of these samples to that of the next `train_step`, which has the same `total`."""
        self._begin()
        with self._optimizer.accumulate():
            self._backward(images, labels, total)
        self._has_gradient = True
        self._end()

    def _backward(self, images: Array, labels: Array, total: int) -> None:
        if not self._has_gradient:
            self._optimizer.zero_grad()  # also waits for the weights, if the forward does not (without `defer`)
            self._copy_weights()
        for index, part in enumerate(self._parts(images, labels)):
            loss = self._counted_loss(index, *part, train=True) if len(part[1]) else self._no_loss(index)
            if index == 0:
                self._between()
            scale = 1.0 if self._scale is None else self._scale.value.to(loss.device)
            (loss * (scale / total)).backward()
            self._seen[index] += len(part[1])

    def _begin(self) -> None:
        if self.pace:
            self.pace.begin()

    def _between(self) -> None:
        if self.pace:
            self._wait_for_devices()
            self.pace.between()

    def _end(self) -> None:
        if self.pace:
            self._wait_for_devices()
            self.pace.end()

    def _wait_for_devices(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def evaluate(self, images: Array, labels: Array) -> None:
        """Add the metrics of these samples with the current weights."""
        with torch.no_grad():
            for index, part in enumerate(self._parts(images, labels)):
                if len(part[1]):
                    self._counted_loss(index, *part, train=False)

    def take_sums(self) -> Sums:
        """The metrics since the last call, summed over all devices. Waits for the devices."""
        total = Sums()
        for sums in self._sums:
            total += Sums.of(sums.tolist())
            sums.zero_()
        return total

    def settle(self) -> None:
        """Wait until this worker's weights include its last step."""
        self._optimizer.settle()
        self._copy_weights()

    def synchronize(self) -> None:
        """Wait until the weights include the last step of all workers."""
        self._optimizer.synchronize()
        self._copy_weights()

    def _parts(self, images: Array, labels: Array) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The batch in one equal share per device, on that device."""
        count = len(self._devices)
        shares = zip(np.array_split(images, count), np.array_split(labels, count), self._devices, strict=True)
        return [
            (self._input(index, self._moved(x, device)), self._moved(y, device))
            for index, (x, y, device) in enumerate(shares)
        ]

    def _input(self, index: int, images: torch.Tensor) -> torch.Tensor:
        return self._normalise(index, images.contiguous(memory_format=self._layout))

    @staticmethod
    def _moved(array: Array, device: torch.device) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def _counted_loss(self, index: int, images: torch.Tensor, labels: torch.Tensor, train: bool) -> torch.Tensor:
        """The cross-entropy summed over the samples; in training it includes that of auxiliary outputs. Also counts the
        metrics of the main output."""
        self._modules[index].train(train)
        with torch.autocast(images.device.type, self._dtype, enabled=self._dtype != torch.float32):
            outputs = self._compiled_modules[index](images)
        logits, *auxiliary = (output.float() for output in (outputs if isinstance(outputs, tuple) else (outputs,)))
        loss = functional.cross_entropy(logits, labels, reduction="sum")  # of (N, num_classes)
        self._sums[index] += count(logits.detach(), labels, loss.detach(), self._top_k)
        for weight, others in zip(self._auxiliary_weights, auxiliary, strict=False):  # none in evaluation
            loss = loss + weight * functional.cross_entropy(others, labels, reduction="sum")
        return loss

    def _no_loss(self, index: int) -> torch.Tensor:
        """The loss of a worker without samples, which takes part in the step all the same: 0, with a gradient of zeros
        for each parameter."""
        self._optimizer.settle()  # without a forward, nothing else waits for the weights
        plain = [
            parameter for parameter in self._modules[index].parameters() if parameter not in self._optimizer.factored
        ]
        return sum((parameter.flatten()[0] * 0.0 for parameter in plain), torch.zeros(()))

    # -- several devices ------------------------------------------------------------------------------------------

    def _sum_gradients(self) -> None:
        """Add the other replicas' gradients to the first's, in device order."""
        first, *others = self._modules
        with torch.no_grad():
            for other in others:
                for total, part in zip(first.parameters(), other.parameters(), strict=True):
                    assert total.grad is not None and part.grad is not None  # backward has run on all
                    total.grad.add_(part.grad.to(total.device, non_blocking=True))
                    part.grad = None

    def _copy_weights(self) -> None:
        first, *others = self._modules
        with torch.no_grad():
            for other in others:
                for source, target in zip(first.parameters(), other.parameters(), strict=True):
                    target.copy_(source, non_blocking=True)

    def merge_statistics(self, all_reduce: Callable[[str, Array], Array], num_workers: int) -> None:
        """Replace batch-norm statistics by their mean over devices and workers, weighted by training samples."""
        buffers = [statistics(module) for module in self._modules]
        if buffers[0] and num_workers * len(self._modules) > 1:
            flat = [
                np.concatenate([buffer.double().cpu().numpy().ravel() for buffer in replica]) for replica in buffers
            ]
            merged = weights.merged_statistics(flat, self._seen, all_reduce)
            if merged is not None:
                fill_statistics(buffers, merged)
        self._seen = [0] * len(self._devices)

    # -- state ----------------------------------------------------------------------------------------------------

    def state(
        self, residuals: Mapping[str, Array] | None = None, others: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Everything that the next step depends on except data and seeds, including the kvstore's residuals and the
        other workers' `own_state`. Call `synchronize` first."""
        model = {name: tensor.detach().cpu().clone() for name, tensor in self._modules[0].state_dict().items()}
        state: dict[str, Any] = {"model": model, "optimizer": self._optimizer.state_dict()}
        if self._optimizer.choices:
            state[FACTORED] = [choice.layer.name for choice in self._optimizer.choices if choice.as_factors]
        if self._scale is not None:
            state["loss_scale"] = self._scale.state()
        if residuals:
            state["residuals"] = {name: torch.from_numpy(array) for name, array in residuals.items()}
        if others:
            state[OWN_STATES] = list(others)
        return state

    def take_state(self, state: Mapping[str, Any], own_statistics: bool = False) -> None:
        """Go on from the result of another worker's `state`, also in the middle of a run or of a step.
        `own_statistics`: keep this worker's batch-norm statistics."""
        self._optimizer.forget_round()
        for module in self._modules:
            own = dict(module.named_buffers()) if own_statistics else {}
            kept = {name: buffer.clone() for name, buffer in own.items() if name in state["model"]}
            torch_state.load_weights(module, {**state["model"], **kept})
        load_state(self._optimizer, state["optimizer"])
        if self._scale is not None:
            self._scale.load_state(state["loss_scale"])
        if not own_statistics:
            self._seen = [0] * len(self._devices)

    def own_state(self) -> dict[str, Any]:
        """The part of the state that differs between workers: where workers step alone, the optimizer's state and the
        loss scale; else nothing."""
        if not self._steps_alone:
            return {}
        scale = {} if self._scale is None else {"loss_scale": self._scale.state()}
        return {"optimizer": self._optimizer.state_dict()["state"], **scale}

    def _load_training_state(self, state: Mapping[str, Any], store: KVStore) -> None:
        state = with_own_state(state, store.rank) if self._steps_alone else state
        residuals = state.get("residuals", state.get(RESIDUALS_OF_04))
        if residuals is not None or "servers" in state.get("optimizer", {}):
            self._check_order(state["model"])
        if "optimizer" in state:
            load_state(self._optimizer, state["optimizer"])
        were_alone = OUTER in state.get("optimizer", {})
        # With dist_local, codecs compress differences of weights: residuals of gradients do not fit these.
        if residuals is not None and were_alone == self._steps_alone:
            store.load_residuals({name: tensor.numpy() for name, tensor in residuals.items()})
        if self._scale is not None and "loss_scale" in state:
            self._scale.load_state(state["loss_scale"])

    def _check_order(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Raise UserError unless the weights were saved in the memory order that they have here: the servers' states
        and the residuals are flat memory in that order."""
        for name, own in self._modules[0].named_parameters():
            if saved[name].stride() != own.stride():
                layout = "contiguous" if saved[name].is_contiguous() else "channels_last"
                raise UserError(
                    f"the checkpoint has the servers' optimizer state or residuals in another memory order (weight "
                    f"{name}): resume with --memory-format {layout}"
                )

    def common_arrays(self) -> list[CommonArray]:
        """Weights, statistics, and the state of an optimizer that all workers run alike. Call `synchronize` first."""
        replicas = [module.state_dict() for module in self._modules]
        arrays = [torch_state.common(name, [replica[name] for replica in replicas]) for name in replicas[0]]
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        arrays += torch_state.common_of_optimizer(parameters, self._optimizer.common_state)
        if (scale := self._scale) and not self._steps_alone:
            read, write = (lambda: np.array(scale.state())), (lambda values: scale.load_state(values.tolist()))
            arrays.append(CommonArray("loss scale", read, write))
        return arrays

    def digest(self) -> str:
        """sha256 of all weights and statistics: equal digests mean bit-identical networks."""
        return torch_state.digest(self._modules[0].state_dict())

    def other_files(self, prefix: str, epoch: int) -> dict[Path, bytes]:
        """No files: other programs read torch's checkpoints."""
        return {}

    # -- reports --------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        names = sorted({torch.cuda.get_device_name(device) for device in self._devices if device.type == "cuda"})
        return ", ".join([f"torch {torch.__version__}", f"{torch.get_num_threads()} threads", *names])

    def choices(self) -> list[str]:
        return [f"Layer {choice}" for choice in self._optimizer.choices]

    def device_memory(self) -> float | None:
        """Peak MiB allocated on this worker's GPUs; None on the CPU."""
        used = [torch.cuda.max_memory_allocated(device) for device in self._devices if device.type == "cuda"]
        return sum(used) / 2**20 if used else None


def with_own_state(state: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """A checkpoint's state, with the own state of the worker of this rank; with worker 0's if the checkpoint has fewer
    workers."""
    others = state.get(OWN_STATES, [])
    if not 0 < rank <= len(others) or "optimizer" not in state:
        return state
    own = others[rank - 1]
    return {**state, **own, "optimizer": {**state["optimizer"], "state": own["optimizer"]}}
