"""A check shared by all networks that have a single depth."""

from __future__ import annotations

from dmltrain.base.errors import UserError


def refuse_depth(network: str, num_layers: int | None) -> None:
    """Raise UserError if --num-layers was given for a network with a single depth."""
    if num_layers is not None:
        raise UserError(f"network {network} has a single depth, found --num-layers {num_layers}; leave this option out")
