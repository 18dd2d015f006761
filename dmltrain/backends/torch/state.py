"""Weights and training state as bytes: the content of checkpoint files, and a digest to compare runs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dmltrain.arrays import Array
from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray
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


def common(name: str, replicas: Sequence[torch.Tensor]) -> CommonArray:
    """An array of which every device has a replica."""

    def read() -> Array:
        array: Array = replicas[0].detach().cpu().contiguous().numpy()
        return array

    def write(values: Array) -> None:
        with torch.no_grad():
            for tensor in replicas:
                tensor.copy_(torch.from_numpy(values).reshape(tensor.shape))

    return CommonArray(name, read, write)


def common_of_optimizer(optimizer: torch.optim.Optimizer) -> list[CommonArray]:
    """The optimizer's state, which servers may have instead."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state
    return [
        common(f"{field} of parameter {number}", [value])
        for number, parameter in enumerate(parameters)
        for field, value in state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
