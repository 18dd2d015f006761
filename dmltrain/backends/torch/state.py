"""Weights and training state as bytes: the content of checkpoint files, and a digest to compare runs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmltrain.backends import weights
from dmltrain.errors import UserError


def encode(content: Mapping[str, Any]) -> bytes:
    """The content of a checkpoint file."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Any]:
    """The inverse: reads tensors, numbers and strings only, and runs no code. Raises UserError for other content."""
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load does not document its exceptions
        raise UserError(f"not a checkpoint: {str(error).splitlines()[0][:200]}") from error
    if not isinstance(found, dict):
        raise UserError(f"not a checkpoint: it holds a {type(found).__name__}, expected a dictionary")
    return found


def digest(arrays: Mapping[str, torch.Tensor]) -> str:
    """sha256 of all arrays; it does not depend on memory formats and devices."""
    return weights.digest({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in arrays.items()})


def load_weights(module: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """Load `found` into the module. Raises UserError unless it has exactly the module's arrays and shapes."""
    own, given = ({name: each.shape for name, each in arrays.items()} for arrays in (module.state_dict(), found))
    weights.check_same(own, given)
    module.load_state_dict(found)
