"""Stochastic depth (Huang et al., "Deep Networks with Stochastic Depth", 2016): in training a sample skips the branch
of a residual unit by chance, more often in later units."""

from __future__ import annotations

from dmltrain.base.errors import UserError
from dmltrain.layers import Chain, Layer, StochasticDepth, chain


def check(network: str, probability: float) -> None:
    """Raise UserError if it is none, or 1, which leaves nothing."""
    if not 0.0 <= probability < 1.0:
        raise UserError(f"network {network}: --stochastic-depth is {probability:g}, expected a number from 0, below 1")


def skipped(name: str, rate: float, *branch: Layer) -> Chain:
    """The branch of the unit `name`, which each sample skips with probability `rate`."""
    return chain(*branch, StochasticDepth(f"{name}_skip", rate)) if rate else chain(*branch)
