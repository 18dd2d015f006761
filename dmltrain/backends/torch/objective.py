"""The losses of training in PyTorch: the cross-entropy, with smoothed labels, and the binary cross-entropy."""

from __future__ import annotations

import torch
from torch.nn import functional

from dmltrain.backends.backend import Settings
from dmltrain.logs.metric import BCE


class Objective:
    """The loss that `settings` ask for: `objective(logits, labels)` is its sum over the samples. logits: float32
    (N, classes); labels: int64 (N,)."""

    def __init__(self, settings: Settings) -> None:
        self._smoothing, self._threshold = settings.label_smoothing, settings.bce_threshold
        self._binary = BCE in settings.loss
        self.is_cross_entropy = not (self._smoothing or self._binary)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self._binary:
            return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)
        targets = self._targets(labels, logits)
        if self._threshold is not None:
            targets = targets.gt(self._threshold).to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / logits.shape[1]

    def _targets(self, labels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """(N, classes): of timm's BinaryCrossEntropy."""
        off = self._smoothing / like.shape[1]
        return torch.full_like(like, off).scatter_(1, labels[:, None], 1.0 - self._smoothing + off)
