"""The flat memory of a bucket: where each parameter has its place in it, the weights there, and results that arrive."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dmltrain.backends.torch.gpu.pinned import Arrival, ArrivingMemory
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.encoded import Encoding

CHUNK = 1 << 25  # bytes that one copy takes from a GPU to another, which both have memory for
MAX_RESULTS = 8  # addresses of results for which views are kept


class Places:
    """Shape, strides and offset of each parameter in flat memory. Each keeps the order of its dimensions there."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        offsets = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
        self._places = [
            (parameter.size(), dense_strides(parameter), offset)
            for parameter, offset in zip(parameters, offsets, strict=False)
        ]

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` (elements,), one for each parameter, with its first shape and memory order."""
        return [flat.as_strided(*place) for place in self._places]

    def strides(self, index: int) -> tuple[int, ...]:
        return self._places[index][1]

    def are_of(self, gradient: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the gradient of the first parameter lies in its own memory as it would here, and may be written."""
        return gradient.dtype == dtype and gradient.stride() == self.strides(0) and not gradient.requires_grad

    def hold(self, index: int, parameter: torch.nn.Parameter, view: torch.Tensor, memory: torch.Tensor) -> bool:
        """Whether the parameter still fits its place, and its `view` is still in the flat `memory`."""
        _, strides, offset = self._places[index]
        moved = view.numel() and view.data_ptr() != memory.data_ptr() + offset * memory.element_size()
        return not moved and parameter.dtype == memory.dtype and parameter.stride() == strides


class FlatWeights:
    """The weights of some parameters, which are copied to flat memory and from it, or moved into it."""

    pulled: Array  # receives pulled weights, (elements,); not for the adopted ones of a GPU
    arriving: ArrivingMemory | None = None  # these arrive here

    def __init__(self, parameters: list[torch.nn.Parameter], places: Places) -> None:
        self._parameters, self._places = parameters, places
        self._weights: torch.Tensor | None = None  # of `adopt`
        self._views: list[torch.Tensor] = []

    def on_host(self) -> Array:
        """A flat copy of the weights."""
        elements = sum(parameter.numel() for parameter in self._parameters)
        flat = torch.empty(elements, dtype=self._parameters[0].dtype, device="cpu")
        self.copy_to(flat)
        return flat.numpy()

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copy the weights to `flat` (elements,), on any device."""
        with torch.no_grad():
            copy_all(self._places.cut(flat), self._parameters)

    def set(self, flat: torch.Tensor) -> None:
        """Copy `flat` (elements,), on any device, to the weights."""
        with torch.no_grad():
            copy_all(self._parameters, self._places.cut(flat.to(self._parameters[0].device)))

    def adopt(self, encodings: Sequence[Encoding] = ()) -> None:
        """Move the parameters into flat memory, so that weights can be pulled in place. `encodings`: see KVStore."""
        device = self._parameters[0].device
        flat = torch.from_numpy(self.on_host())
        if device.type == "cpu":
            self.pulled = flat.numpy()
        else:
            self.arriving = ArrivingMemory(None if encodings else flat.pin_memory(), encodings)
        self._weights = flat.to(device)
        with torch.no_grad():
            self._views = self._places.cut(self._weights)
            for view, parameter in zip(self._views, self._parameters, strict=True):
                parameter.data = view

    def check_adopted(self, names: list[str]) -> None:
        """Raise UserError for parameters, of these names, whose memory is no longer that of `adopt`."""
        for name, view, parameter in zip(names, self._views, self._parameters, strict=True):
            if view.data_ptr() != parameter.data_ptr():
                raise UserError(
                    f"the memory of parameter {name} was replaced (model.to, parameter.data), "
                    "but its weights come from the servers: do this before dmltrain.distribute, or call it again"
                )

    @property
    def out(self) -> Any:
        """For `KVStore.pull`."""
        return self.arriving.out if self.arriving else self.pulled

    def arrival(self) -> Arrival:
        """Of weights that have arrived for a GPU."""
        assert self._weights is not None and self.arriving is not None
        return Arrival(self.arriving, self._weights)


class Results:
    """The results of a bucket's pushes, which are read where the store has them."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._kept: dict[int, list[torch.Tensor]] = {}  # by address

    def take(self, gradients: torch.Tensor, handle: Handle, factor: float) -> None:
        """Set the gradients (elements,) to the result, times `factor`."""
        torch.mul(_read_only(handle.values[0]), factor, out=gradients)

    def views(self, handle: Handle) -> list[torch.Tensor]:
        """The result for each parameter, which must not be written. Results arrive at the same few addresses, so the
        views are kept by address. A view keeps its memory alive, so no other array can get the same address."""
        total = handle.values[0]
        address = total.__array_interface__["data"][0]
        views = self._kept.get(address)
        if views is None:
            if len(self._kept) == MAX_RESULTS:
                self._kept.clear()
            views = self._kept[address] = self._places.cut(_read_only(total))
        return views


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target: on a GPU with one kernel for all."""
    if targets and targets[0].device.type != "cpu" and sources[0].device == targets[0].device:
        return torch._foreach_copy_(list(targets), list(sources))
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def on_device(device: torch.device, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, all of one device, on this one: from a GPU to another one few copies for all. Each keeps the order
    of its dimensions in memory."""
    if any(kind == "cpu" for kind in (device.type, tensors[0].device.type)) or tensors[0].device == device:
        return [tensor.to(device) for tensor in tensors]
    placed: dict[int, torch.Tensor] = {}
    for numbers in _chunks(tensors):
        places = Places([tensors[number] for number in numbers])
        flat = tensors[numbers[0]].new_empty(sum(tensors[number].numel() for number in numbers))
        copy_all(places.cut(flat), [tensors[number] for number in numbers])
        placed |= zip(numbers, places.cut(flat.to(device, non_blocking=True)), strict=True)
    return [placed[number] for number in range(len(tensors))]


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of tensors of one type, in lists of at most CHUNK bytes if none is larger."""
    chunks: list[list[int]] = []
    filled: dict[torch.dtype, tuple[list[int], int]] = {}  # by type: the last chunk, and its bytes
    for number, tensor in enumerate(tensors):
        chunk, size = filled.get(tensor.dtype, ([], CHUNK + 1))
        if size + tensor.nbytes > CHUNK:
            chunk, size = [], 0
            chunks.append(chunk)
        chunk.append(number)
        filled[tensor.dtype] = chunk, size + tensor.nbytes
    return chunks


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions that have several elements, from the outermost to the innermost in a bucket's memory."""
    strides = dense_strides(tensor)
    return sorted((axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1), key=lambda axis: -strides[axis])


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of the tensor if it has no gaps, else those of a contiguous one."""
    return torch.empty_like(tensor, device="meta").stride()


def _read_only(array: Array) -> torch.Tensor:
    """A tensor of the same memory, which must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
