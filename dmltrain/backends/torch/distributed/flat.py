"""The flat memory of a bucket: where each parameter has its place in it, the weights there, and results that arrive."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch import copies
from dmltrain.backends.torch.codecs import SliceEncoder, encode
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle
from dmltrain.kvstore.codec import Codec
from dmltrain.kvstore.encoded import Encoded, Encoding

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

    pulled: Array  # receives pulled weights, (elements,)

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

    def adopt(self) -> None:
        """Move the parameters into flat memory, so that weights can be pulled in place."""
        device = self._parameters[0].device
        flat = torch.from_numpy(self.on_host())
        if device.type != "cpu":
            flat = flat.pin_memory()
        self.pulled = flat.numpy()
        self._weights = flat.to(device) if device.type != "cpu" else flat
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

    def take(self) -> None:
        """Take the weights that have arrived in `pulled`."""
        if self._weights is not None and self._weights.device.type != "cpu":
            copies.to_device(torch.from_numpy(self.pulled), self._weights)


class PushedMemory:
    """The memory from which a bucket is pushed: on a CPU that of its gradients, for a GPU pinned. `encoders`: of a GPU
    that encodes its gradients; then there is memory for each of their slices."""

    def __init__(self, memory: Sequence[torch.Tensor], encoders: Sequence[SliceEncoder] = ()) -> None:
        self.memory, self.encoders = memory, encoders
        arrays = [each.numpy() for each in memory]
        self._pushed: Array | Encoded = Encoded(arrays) if encoders else arrays[0]
        self._copied: torch.Event | None = None  # None: no copy has begun

    @property
    def has_begun(self) -> bool:
        return self._copied is not None

    @property
    def is_complete(self) -> bool:
        """Whether `complete` returns at once."""
        return self._copied is None or self._copied.query()

    def begun(self, copied: torch.Event) -> None:
        """A copy to the memory has begun, which is complete after the event."""
        self._copied = copied

    def complete(self) -> Array | Encoded:
        """Wait for the copy that has begun, if one has."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._pushed

    def forget(self, device: torch.device) -> None:
        """What is computed from now on may change the gradients of the copy, for which nobody waits any more."""
        if self._copied is not None:
            copies.computing(device).wait_event(self._copied)
            self._copied = None


def encoded_memory(encodings: Sequence[Encoding], device: torch.device) -> PushedMemory:
    """For a GPU's gradients, which are encoded there."""
    encoders = [SliceEncoder(encoding, device) for encoding in encodings]
    bare = [np.empty(each.nbytes, np.uint8) if each.memory is None else each.memory for each in encodings]
    parts = list(map(pinned, bare))
    return PushedMemory(parts, encoders)


def begin_copies(device: torch.device, sources: Sequence[tuple[PushedMemory, torch.Tensor]]) -> None:
    """Begin to copy the gradients (elements,) of buckets on one GPU to the host. Those that are encoded are encoded
    together."""
    copied = copies.to_host(device, lambda: _pairs(sources))
    for memory, _ in sources:
        memory.begun(copied)


def _pairs(sources: Sequence[tuple[PushedMemory, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    coded: dict[Codec, list[tuple[SliceEncoder, torch.Tensor, torch.Tensor]]] = {}
    for host, gradients in sources:
        if not host.encoders:
            yield gradients, host.memory[0]
        for encoder, place in zip(host.encoders, host.memory, strict=False):
            coded.setdefault(encoder.codec, []).append((encoder, encoder.of(gradients), place))
    for each in coded.values():
        encoders, slices, places = zip(*each, strict=True)
        yield from zip(encode(encoders, slices), places, strict=True)


def pinned(memory: Array) -> torch.Tensor:
    """The same memory if it is pinned, else other memory that is."""
    here = torch.from_numpy(memory)
    return here if here.is_pinned() else torch.empty_like(here, pin_memory=True)


class Results:
    """The results of a bucket's pushes. They are read where the store has them, or for a GPU (not `on_cpu`) arrive in
    pinned `memory`."""

    def __init__(self, memory: torch.Tensor, places: Places, on_cpu: bool) -> None:
        self._memory, self._places, self._on_cpu = memory, places, on_cpu
        self._kept: dict[int, list[torch.Tensor]] = {}  # by address; see _views_of

    @property
    def out(self) -> Any:
        """For `KVStore.pushpull`."""
        return READ if self._on_cpu else self._memory.numpy()

    def take(self, gradients: torch.Tensor, handle: Handle, factor: float, unused: torch.Event | None = None) -> None:
        """Set the gradients (elements,) to the result, times `factor`. `unused`: see Bucket."""
        total = self._total(handle)
        if self._on_cpu:
            torch.mul(_read_only(total), factor, out=gradients)
        else:
            copies.to_device(torch.from_numpy(total), gradients, unused)
            if factor != 1.0:
                gradients.mul_(factor)

    def views(self, handle: Handle, factor: float) -> list[torch.Tensor] | None:
        """The result for each parameter where the store has it, read-only; None if it must be taken."""
        return self._views_of(self._total(handle)) if factor == 1.0 and self._on_cpu else None

    def _total(self, handle: Handle) -> Array:
        return handle.values[0] if handle.values else self._memory.numpy()

    def _views_of(self, total: Array) -> list[torch.Tensor]:
        """The gradients in `total`, which must not be written. Results arrive at the same few addresses, so the views
        are kept by address. A view keeps its memory alive, so no other array can get the same address."""
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
