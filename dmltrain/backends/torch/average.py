"""An average of the weights over the steps or epochs of a run, beside the weights that are trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dmltrain.backends.backend import CommonArray, Settings
from dmltrain.backends.replicas import METRICS
from dmltrain.backends.torch import state as torch_state
from dmltrain.logs.metric import Sums

Metrics = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]  # (network, images, labels) -> (METRICS,)


class WeightAverage:
    """With `settings.ema_decay`, d, the average becomes d average + (1 - d) weights in each step; with
    `settings.swa_from` it is the mean of the weights at the ends of the epochs from that number on.

    `module`: a copy of the network with the averages, batch-norm statistics among them. `trained`: the network whose
    weights are averaged; `metrics`: of a network and samples on `trained`'s device."""

    def __init__(self, trained: nn.Module, settings: Settings, metrics: Metrics) -> None:
        self._trained, self._metrics = trained, metrics
        self.module = copy.deepcopy(trained).requires_grad_(False).eval()
        self._decay, self._from = settings.ema_decay, settings.swa_from
        self._epochs, self._last = 0, 0  # how many epochs the mean has, and the number of the last one
        device = next(trained.parameters()).device
        self._sums = torch.zeros(METRICS, dtype=torch.float64, device=device)

    @property
    def is_there(self) -> bool:
        return self._decay is not None or self._epochs > 0

    def after_step(self) -> None:
        """The trained weights include one more step."""
        if self._decay is not None:
            self._approach(1.0 - self._decay)

    def end_epoch(self, epochs: int) -> None:
        """So many whole epochs are trained. Another call for the same epoch, as a member of an elastic job makes that
        has got its state from another one since, changes nothing."""
        if self._from is not None and epochs >= self._from and epochs > self._last:
            self._epochs, self._last = self._epochs + 1, epochs
            self._approach(1.0 / self._epochs)

    def _approach(self, share: float) -> None:
        """Go this share of the way from the average to the trained network."""
        own, trained = self.module.state_dict(), self._trained.state_dict()
        floating = [name for name, value in own.items() if value.is_floating_point()]
        with torch.no_grad():
            torch._foreach_lerp_([own[name] for name in floating], [trained[name].detach() for name in floating], share)
            for name in own.keys() - set(floating):
                own[name].copy_(trained[name])

    # -- evaluation and state -------------------------------------------------------------------------------------

    def statistics(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    def evaluate(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        if self.is_there:
            device = self._sums.device
            self._sums += self._metrics(self.module, images.to(device), labels.to(device))

    def take_sums(self) -> Sums | None:
        if not self.is_there:
            return None
        total = Sums.of(self._sums.tolist())
        self._sums.zero_()
        return total

    def digest(self) -> str:
        return "" if not self.is_there else torch_state.digest(self.module.state_dict())

    def state(self) -> dict[str, Any]:
        model = {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}
        return {"model": model, "decay": self._decay, "epochs": self._epochs, "last": self._last}

    def load(self, state: Mapping[str, Any], own_statistics: bool = False) -> None:
        """`own_statistics`: keep those of this worker."""
        own = {name: buffer.clone() for name, buffer in self.module.named_buffers()} if own_statistics else {}
        torch_state.load_weights(self.module, {**state["model"], **own})
        self._epochs, self._last = state["epochs"], state["last"]

    def common_arrays(self) -> list[CommonArray]:
        return [torch_state.common(f"average of {name}", [value]) for name, value in self.module.state_dict().items()]


def average_of(trained: nn.Module, settings: Settings, metrics: Metrics) -> WeightAverage | None:
    """None unless the settings ask for one."""
    asked = settings.ema_decay is not None or settings.swa_from is not None
    return WeightAverage(trained, settings, metrics) if asked else None
