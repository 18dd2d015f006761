"""The replicas of the PyTorch backend: a network on each of a worker's devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dmltrain.backends.backend import CommonArray, Settings
from dmltrain.backends.replicas import METRICS, Replicas
from dmltrain.backends.torch import devices
from dmltrain.backends.torch import layers as torch_layers
from dmltrain.backends.torch import state as torch_state
from dmltrain.backends.torch.average import average_of
from dmltrain.backends.torch.distributed.flat import copy_all, on_device
from dmltrain.backends.torch.gpu.copies import SampleBuffers
from dmltrain.backends.torch.recipe import Objective, mixed
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.images.mixing import Mixing
from dmltrain.layers import Conv, Network


class TorchReplicas(Replicas[torch.device, torch.Tensor]):
    """See Replicas. `saved`: the model of a checkpoint; None: initial weights from settings.seed. `modules`: the
    replicas, of which the first has the weights that the optimizer changes."""

    def __init__(
        self,
        network: Network,
        settings: Settings,
        normalisation: Normalisation | None,
        saved: Mapping[str, torch.Tensor] | None,
    ) -> None:
        own = list(map(devices.find, settings.device_names))
        self._buffers = {device: SampleBuffers(device) for device in devices.gpus(own)}
        super().__init__(network, own, normalisation, settings.top_k)
        self._dtype, self._loss, self._flips = getattr(torch, settings.dtype), Objective(settings), settings.val_flip
        self._layout = image_layout(network, settings.memory_format)
        first = torch_layers.build(network)
        torch_layers.initialise(first, network, settings.seed)
        if saved:
            torch_state.load_weights(first, saved)
        self.modules = [self._placed(first, device) for device in self.devices]
        self._forwards = [compiled(module) if settings.compile else module for module in self.modules]
        self.average = average_of(self.modules[0], settings, self._metrics)
        self.sums = [torch.zeros(METRICS, dtype=torch.float64, device=device) for device in self.devices]

    def _placed(self, module: nn.Module, device: torch.device) -> nn.Module:
        placed: nn.Module = copy.deepcopy(module).to(device)
        # torch's annotations do not allow the memory format alone
        return placed.to(memory_format=self._layout)  # type: ignore[call-overload, no-any-return]

    def wait(self) -> None:
        """Until the devices have computed what was asked for."""
        for device in self.devices:
            devices.wait(device)

    # -- samples --------------------------------------------------------------------------------------------------

    def place(self, array: Array, device: torch.device) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return self._buffers[device].place(tensor) if device in self._buffers else tensor

    def place_images(self, images: Array, device: torch.device) -> torch.Tensor:
        return self.place(images, device).contiguous(memory_format=self._layout)

    def normalised(self, images: torch.Tensor, mean: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return images.float().sub_(mean).mul_(factor)

    def counted_loss(
        self, index: int, images: torch.Tensor, labels: torch.Tensor, train: bool, mixing: Mixing | None = None
    ) -> torch.Tensor:
        self.modules[index].train(train)
        if not train:
            counted = self._metrics(self._forwards[index], images, labels)
            self.sums[index] += counted
            return counted[-1]
        logits, *auxiliary = self._outputs(self._forwards[index], mixed(images, mixing) if mixing else images)
        loss = self._loss(logits, labels, mixing)
        self.sums[index] += self._training_metrics(logits.detach(), labels, loss.detach(), mixing)
        for weight, others in zip(self.auxiliary_weights, auxiliary, strict=True):
            loss = loss + weight * self._loss(others, labels, mixing)
        return loss

    def _training_metrics(
        self, logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor, mixing: Mixing | None
    ) -> torch.Tensor:
        """Those of the larger share of mixed samples."""
        if mixing and mixing.share < 0.5:
            labels = labels.roll(1, 0)
        if mixing or not self._loss.is_cross_entropy:
            loss = functional.cross_entropy(logits, labels, reduction="sum")
        return count(logits, labels, loss, self.top_k)

    def _outputs(self, forward: Callable[[torch.Tensor], Any], images: torch.Tensor) -> list[torch.Tensor]:
        """Of the network, and in training of its auxiliary classifiers."""
        with torch.autocast(images.device.type, self._dtype, enabled=self._dtype != torch.float32):
            outputs = forward(images)
        return [output.float() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]

    def _metrics(
        self, forward: Callable[[torch.Tensor], Any], images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            logits = self._outputs(forward, images)[0]
            if self._flips:
                logits = (logits + self._outputs(forward, images.flip(3))[0]) / 2
            return count(logits, labels, functional.cross_entropy(logits, labels, reduction="sum"), self.top_k)

    def evaluate(self, images: Array, labels: Array) -> None:
        super().evaluate(images, labels)
        for part in self.parts(images, labels) if self.average and self.average.is_there else ():
            if part:
                self.average.evaluate(*part)  # type: ignore[union-attr]  # the condition above

    def no_loss(self, index: int, left_out: Collection[nn.Parameter]) -> torch.Tensor:
        """The loss of a device without samples, which takes part in the step all the same: 0, with a gradient of zeros
        for each parameter that is not left out."""
        plain = [parameter for parameter in self.modules[index].parameters() if parameter not in left_out]
        return sum((parameter.flatten()[0] * 0.0 for parameter in plain), torch.zeros(()))

    def read(self, tensor: torch.Tensor) -> Array:
        values: Array = tensor.double().cpu().numpy()
        return values

    def write(self, tensor: torch.Tensor, values: Array) -> None:
        tensor.copy_(torch.from_numpy(values))

    def statistics(self, index: int) -> list[torch.Tensor]:
        """Without the counters of batches; with those of the average, whose network is on the first device."""
        own = [buffer for buffer in self.modules[index].buffers() if buffer.is_floating_point()]
        return own + (self.average.statistics() if self.average else [])

    # -- several devices ------------------------------------------------------------------------------------------

    def sum_gradients(self) -> None:
        """Add the other replicas' gradients to the first's, in device order."""
        first, *others = self.modules
        with torch.no_grad():
            for other in others:
                parts = on_device(self.devices[0], _gradients(other))
                torch._foreach_add_(_gradients(first), parts)
                for parameter in other.parameters():
                    parameter.grad = None

    def copy_weights(self) -> None:
        """Give the first replica's weights to the others."""
        first, *others = self.modules
        with torch.no_grad():
            for device, other in zip(self.devices[1:], others, strict=True):
                copy_all(list(other.parameters()), on_device(device, list(first.parameters())))

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the first replica's weights and statistics, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.modules[0].state_dict().items()}

    def load(self, saved: Mapping[str, torch.Tensor], own_statistics: bool) -> None:
        """The inverse of `state`. `own_statistics`: keep those of the replicas."""
        for module in self.modules:
            own = dict(module.named_buffers()) if own_statistics else {}
            kept = {name: buffer.clone() for name, buffer in own.items() if name in saved}
            torch_state.load_weights(module, {**saved, **kept})
        if not own_statistics:
            self.forget_seen()

    def common_arrays(self) -> list[CommonArray]:
        replicas: list[dict[str, Any]] = [module.state_dict() for module in self.modules]
        return [torch_state.common(name, [replica[name] for replica in replicas]) for name in replicas[0]]


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(module.parameters())), "backward has run on all"
    return gradients


def image_layout(network: Network, name: str) -> torch.memory_format:
    """channels_last makes convolutions faster; a network that only flattens its images would convert them back."""
    convolves = any(isinstance(call.layer, Conv) for call in network.layer_calls)
    return torch.channels_last if name == "channels_last" and convolves else torch.contiguous_format


def compiled(module: nn.Module) -> Callable[[torch.Tensor], Any]:
    """torch.compile, which compiles, and can fail, at the first call."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    forward = torch.compile(module)

    def call(images: torch.Tensor) -> Any:
        try:
            return forward(images)
        except TorchDynamoException as error:
            raise UserError(
                f"--compile: {str(error).splitlines()[0][:200]}; on a CPU torch.compile needs a C++ "
                "compiler such as g++, and no space in the path of PyTorch; or leave --compile out"
            ) from error

    return call


def count(logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor, top_k: int) -> torch.Tensor:
    """(samples, correct, correct in top k, cross-entropy) as a float64 tensor (4,) on the device."""
    correct = (logits.argmax(dim=1) == labels).sum()
    top = logits.new_zeros(())
    if top_k:
        top = (logits.topk(top_k, dim=1).indices == labels[:, None]).sum()
    samples = logits.new_full((), len(labels))
    return torch.stack([samples.double(), correct.double(), top.double(), loss.double()])
