"""What Caffe's networks have in common: how biases start and learn."""

from __future__ import annotations

from dmltrain.layers import Constant, LocalResponseNorm, Rule, Xavier

XAVIER = Xavier("uniform", "in", 3)  # Caffe's filler "xavier"


def bias(value: float, wd_mult: float = 0.0) -> Rule:
    """Starts as `value`; with twice the learning rate of weights (lr_mult 2), without decay (decay_mult 0)."""
    return Rule(Constant(value), lr_mult=2.0, wd_mult=wd_mult)


def response_norm(name: str) -> LocalResponseNorm:
    """Caffe's LRN across channels, with its constant k = 1."""
    return LocalResponseNorm(name, size=5, alpha=1e-4, beta=0.75, offset=1.0)
