"""What today's recipes change in a step of PyTorch: the loss, and the gradients between backward and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dmltrain.backends.backend import Settings
from dmltrain.data.images.mixing import Mixing
from dmltrain.logs.metric import BCE


class Objective:
    """The loss that `settings` ask for: `objective(logits, labels, mixing)` is its sum over the samples. logits:
    float32 (N, classes); labels: int64 (N,)."""

    def __init__(self, settings: Settings) -> None:
        self._smoothing, self._threshold = settings.label_smoothing, settings.bce_threshold
        self._binary = BCE in settings.loss
        self.is_cross_entropy = not (self._smoothing or self._binary)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, mixing: Mixing | None = None) -> torch.Tensor:
        if not self._binary:
            smoothed = partial(functional.cross_entropy, logits, reduction="sum", label_smoothing=self._smoothing)
            return _in_shares(smoothed, labels, mixing)
        targets = _in_shares(partial(self._targets, logits), labels, mixing)
        if self._threshold is not None:
            targets = targets.gt(self._threshold).to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / logits.shape[1]

    def _targets(self, like: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(N, classes): of timm's BinaryCrossEntropy."""
        off = self._smoothing / like.shape[1]
        return torch.full_like(like, off).scatter_(1, labels[:, None], 1.0 - self._smoothing + off)


def _in_shares(of: Callable[[torch.Tensor], torch.Tensor], labels: torch.Tensor, mixing: Mixing | None) -> torch.Tensor:
    """of(labels), which is linear in the targets, of samples whose labels have these shares."""
    own = of(labels)
    return own if mixing is None else mixing.share * own + (1.0 - mixing.share) * of(labels.roll(1, 0))


def mixed(images: torch.Tensor, mixing: Mixing) -> torch.Tensor:
    """float32 (N, C, H, W); a new tensor in the same layout."""
    made = images.clone() if mixing.box else images.mul(mixing.share)
    for own, partners in ((made[1:], images[:-1]), (made[:1], images[-1:])):  # `roll` would copy all images
        if mixing.box:
            top, left, bottom, right = mixing.box
            own[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
        else:
            own.add_(partners, alpha=1.0 - mixing.share)
    return made


class Clipping:
    """Clipping of gradients by value and by their norm, as `settings` ask for.

    With the optimizer on the workers it is the mean of all workers that is clipped, by torch's formulas. With
    `on_servers` these get each worker's part of the mean; there each worker clips the mean over its own samples.
    """

    def __init__(self, settings: Settings, on_servers: bool) -> None:
        self._norm, self._value = settings.clip_gradient_norm, settings.clip_gradient_value
        self.on_servers = on_servers

    def __bool__(self) -> bool:
        return self._norm is not None or self._value is not None

    def __call__(self, parameters: Iterable[torch.nn.Parameter], scale: Any) -> None:
        """Clip the gradients, which are `scale` times those that the limits are about: a number, as a worker's part of
        a mean (0: it has no samples), or a tensor of one, the loss scale, which looks for numbers that are not finite
        afterwards, so that they stay so."""
        if isinstance(scale, float) and not scale:
            return
        clipped = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in clipped if parameter.grad is not None]
        if self._value is not None:
            for gradient in gradients:
                _limit(gradient, self._value * scale)
        if self._norm is not None:
            clip_grads_with_norm_(clipped, self._norm, get_total_norm(gradients) / scale)


def _limit(gradient: torch.Tensor, most: Any) -> None:
    """Limit each number to `most`, as torch's clip_grad_value_; with a loss scale (a tensor) but for infinite ones."""
    overflow = gradient.isinf() if isinstance(most, torch.Tensor) else None
    gradient.clamp_(-most, most)
    if overflow is not None:
        gradient.masked_fill_(overflow, torch.inf)
