"""The one check that networks of a single depth share."""

from __future__ import annotations

from dmltrain.errors import UserError


def refuse_depth(network: str, num_layers: int | None) -> None:
    """Raises UserError if a depth was asked of a network that has only one."""
    if num_layers is not None:
        raise UserError(f"network {network} has a single depth, found {num_layers} layers; leave --num-layers out")
