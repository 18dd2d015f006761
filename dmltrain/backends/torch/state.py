"""Weights and training state as bytes: the content of checkpoint files, and the digest that tells runs apart."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmltrain.backends import weights
from dmltrain.errors import UserError


def encode(content: Mapping[str, Any]) -> bytes:
    """A checkpoint, as the content of its file."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Any]:
    """The reverse; reads tensors, numbers and strings only, runs no code. Raises UserError for other content."""
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load documents no list of types
        raise UserError(f"not a checkpoint: {str(error).splitlines()[0][:200]}") from error
    if not isinstance(found, dict):
        raise UserError(f"not a checkpoint: it holds a {type(found).__name__}, expected a dictionary")
    return found


def digest(arrays: Mapping[str, torch.Tensor]) -> str:
    """Of all arrays; the same for any memory format and device."""
    return weights.digest({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in arrays.items()})


def load_weights(module: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Raises UserError unless `found` has the module's arrays, all and with their shapes."""
    own, given = ({name: each.shape for name, each in arrays.items()} for arrays in (module.state_dict(), found))
    weights.check_same(own, given)
    module.load_state_dict(found)
