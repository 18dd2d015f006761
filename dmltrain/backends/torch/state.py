"""Weights and training state as bytes: the content of checkpoint files, and a digest to compare runs."""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dmltrain.backends import weights
from dmltrain.backends.backend import CommonArray
from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

# All names that the pickle in a checkpoint needs. Even with weights_only torch.load allows more, such as functions
# that only allocate memory.
NAMES = re.compile(r"collections (OrderedDict|Counter)|torch\._utils _rebuild_tensor_v2|torch \w+Storage")


def encode(content: Mapping[str, Any]) -> bytes:
    """The content of a checkpoint file."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Any]:
    """The inverse of `encode`. It reads only tensors, numbers and strings, runs no code from it, and takes no more
    memory than `content`. Raises UserError for other content."""
    try:
        npz.check(content)
        check_names(content)
        decoded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        _check_sizes(decoded)
    except Exception as error:  # torch.load does not document its exceptions
        raise UserError(f"not a checkpoint: {(str(error) or type(error).__name__).splitlines()[0][:200]}") from error
    if not isinstance(decoded, dict):
        raise UserError(f"not a checkpoint: it holds a {type(decoded).__name__}, expected a dictionary")
    return decoded


def check_names(content: bytes) -> None:
    """Raises ValueError if the checkpoint's pickle names anything but NAMES."""
    if not content.startswith(b"PK\3\4"):  # torch.load would read it as another format
        raise ValueError("it is not an archive from its start")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.namelist():
            if member.endswith("data.pkl"):
                for step, argument, _ in pickletools.genops(archive.read(member)):
                    if step.name == "GLOBAL" and not NAMES.fullmatch(str(argument)):
                        raise ValueError(f"it names {argument}, which a checkpoint does not need")


def _check_sizes(content: Any) -> None:
    """Raises ValueError for a tensor with more elements than its data: a copy would take more than the file."""
    for tensor in _tensors(content):
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"a tensor of {list(tensor.shape)} with the data of a smaller one")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def digest(arrays: Mapping[str, torch.Tensor]) -> str:
    """sha256 of all arrays; it does not depend on memory formats and devices."""
    return weights.digest({name: tensor.detach().cpu().contiguous().numpy() for name, tensor in arrays.items()})


def load_weights(module: nn.Module, saved: Mapping[str, torch.Tensor | Array]) -> None:
    """Load `saved`: tensors, or arrays of MXNet's files. Raises UserError unless it has exactly the module's arrays and
    shapes."""
    own, given = ({name: array.shape for name, array in arrays.items()} for arrays in (module.state_dict(), saved))
    weights.check_same(own, given)
    module.load_state_dict({name: torch.as_tensor(array) for name, array in saved.items()})


def common(name: str, replicas: Sequence[torch.Tensor]) -> CommonArray:
    """An array of which every device has a replica."""

    def read() -> Array:
        array: Array = replicas[0].detach().cpu().numpy()
        return array

    def write(values: Array) -> None:
        with torch.no_grad():
            for tensor in replicas:
                tensor.copy_(torch.from_numpy(values).reshape(tensor.shape))

    return CommonArray(name, read, write)


def common_of_optimizer(
    parameters: Iterable[torch.Tensor], state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> list[CommonArray]:
    """The arrays of an optimizer's state that all workers have in common; none where the servers have the state."""
    return [
        common(f"{field} of parameter {number}", [value])
        for number, parameter in enumerate(parameters)
        for field, value in state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
