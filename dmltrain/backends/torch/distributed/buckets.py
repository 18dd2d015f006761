"""Buckets: consecutive parameters of a network share flat memory for gradients and weights, and a kvstore key."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils.hooks import RemovableHandle

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle, KVStore

EARLY = "(with step_early, defer, factors or in an elastic job)"
CHANGED = (
    f"gradients were changed between backward() and step(), after they had been sent {EARLY}: train without these, or "
    "call optimizer.reduce_gradients() before clipping or unscaling them"
)
REPLACED = (
    f"p.grad was replaced or set to None between backward() and step(), after gradients had been sent {EARLY}: train "
    "without these, or call optimizer.reduce_gradients() first"
)
MAX_PLACES = 8  # addresses of results for which a bucket keeps views


@dataclass(eq=False)
class Bucket:
    """Parameters of the same optimizer group, type and device. Each keeps the order of its dimensions in memory."""

    name: str
    group: int  # number of the optimizer's parameter group
    priority: int  # of its pushes and pulls: forward order first
    parameters: list[torch.nn.Parameter]
    names: list[str] = field(default_factory=list)  # of the parameters, in the model
    pushed: bool = False
    stepped: bool = False  # step() was called, and its result is not in the weights yet
    gradients: torch.Tensor = field(init=False)  # (elements,)
    pulled: Array = field(init=False)  # receives pulled weights, (elements,)
    views: list[torch.Tensor] = field(init=False)  # of the gradients, one for each parameter
    _places: list[tuple[torch.Size, tuple[int, ...], int]] = field(init=False)  # shape, strides and offset
    _host: torch.Tensor = field(init=False)
    _results_memory: torch.Tensor = field(init=False)  # receives results that cannot be read where the store has them
    _weights: torch.Tensor | None = None
    _weight_views: list[torch.Tensor] = field(default_factory=list)
    _version: int = 0  # autograd's count of changes to the gradients' memory
    _seen: set[int] = field(default_factory=set)
    _results: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by address; see _views_of

    def __post_init__(self) -> None:
        offsets = itertools.accumulate((parameter.numel() for parameter in self.parameters), initial=0)
        self._places = [
            (parameter.size(), dense_strides(parameter), offset)
            for parameter, offset in zip(self.parameters, offsets, strict=False)
        ]

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def lay_out(self, memory: Array, keep: bool = False) -> None:
        """Place the gradients in `memory` (elements,), from which they are pushed. A GPU's gradients stay on the GPU,
        and are copied to pinned memory before the push. Results arrive in the same pinned memory. With `keep` (see
        KVStore.keeps_gradients) pushed gradients must stay unchanged, and results get separate pinned memory."""
        self._host = torch.from_numpy(memory)
        if self.device.type != "cpu":
            self._host = torch.empty_like(self._host, pin_memory=True)
        self._results_memory = self._host
        if keep and self.device.type != "cpu":
            self._results_memory = torch.empty_like(self._host, pin_memory=True)
        self.gradients = self._host if self.device.type == "cpu" else torch.zeros_like(self._host, device=self.device)
        self.views = self.cut(self.gradients)

    @property
    def ready(self) -> bool:
        return len(self._seen) == len(self.parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether each parameter's gradient is still the bucket's memory."""
        return all(parameter.grad is view for parameter, view in zip(self.parameters, self.views, strict=True))

    def missing(self) -> torch.nn.Parameter | None:
        """A parameter whose gradient is None."""
        return next((parameter for parameter in self.parameters if parameter.grad is None), None)

    def begin(self) -> None:
        """Start a new step, without gradients."""
        self._seen.clear()
        self.pushed = self.stepped = False

    def accumulate(self) -> None:
        """The gradients are not complete: a later backward adds to them."""
        self.begin()

    def discard(self) -> None:
        """zero_grad() was called. The optimizer itself removes the gradients of these parameters."""

    def watch(self, when_ready: Callable[[Bucket], None]) -> list[RemovableHandle]:
        """Call `when_ready` each time backward has completed a gradient of this bucket."""
        handles = []
        for index, parameter in enumerate(self.parameters):

            def hook(parameter: torch.nn.Parameter, index: int = index) -> None:
                if not self.pushed:
                    self._collect(index, parameter)
                when_ready(self)

            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return handles

    def complete(self) -> None:
        """Set gradients that backward did not produce to zero."""
        for index, parameter in enumerate(self.parameters):
            self._collect(index, parameter)

    def fill(self) -> None:
        """Copy all gradients into the bucket. The parameters' own gradients are not changed."""
        with torch.no_grad():
            for view, parameter in zip(self.views, self.parameters, strict=True):
                copy_gradient(view, parameter.grad)

    def _collect(self, index: int, parameter: torch.nn.Parameter) -> None:
        view = self.views[index]
        self._check_place(index, parameter)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.layout is not torch.strided:
            raise UserError(f"sparse gradients cannot be sent during backward {EARLY}: train without these")
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad.detach())  # after backward(create_graph=True) the gradient has a graph
        else:
            self._seen.add(index)
            return
        parameter.grad = view
        self._seen.add(index)

    def _check_place(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Raise UserError if a parameter's gradient is no longer in the bucket's memory: `model.to()` also moves
        gradients, which are views of that memory."""
        _, strides, offset = self._places[index]
        view, memory = self.views[index], self.gradients
        moved = view.numel() and view.data_ptr() != memory.data_ptr() + offset * memory.element_size()
        if moved or parameter.dtype != memory.dtype or parameter.stride() != strides:
            raise UserError(
                f"parameter {self.names[index]} was {memory.dtype} with strides {strides} at distribute, and is "
                f"{described(parameter)} with strides {parameter.stride()} now: change the model's type and memory "
                "format before dmltrain.distribute, or call it again"
            )

    def weigh(self, weight: float) -> None:
        """Multiply the complete gradients before the push. Weight 0 sets them to zero, also where they are NaN."""
        if weight == 0.0:
            self.gradients.zero_()
        elif weight != 1.0:
            self.gradients.mul_(weight)

    def host_gradients(self) -> Array:
        """The flat gradients in host memory, which does not change until the key's next pull returns."""
        if self._host is not self.gradients:
            self._host.copy_(self.gradients)
        return self._host.numpy()

    def send(self, store: KVStore) -> Handle:
        """Push the gradients, and pull the sum or mean of all workers'."""
        gradients = self.host_gradients()
        self.note_sent()
        out = READ if self.device.type == "cpu" else self._results_memory.numpy()  # pinned, for the copy to the GPU
        return store.pushpull(self.name, gradients, out, self.priority, wait=False)

    def send_with(self, store: KVStore, key: str, values: Array) -> Handle:
        """Like `send`, on a CPU, in one call with another key."""
        gradients = self.host_gradients()
        self.note_sent()
        return store.pushpull([self.name, key], [gradients, values], READ, self.priority, wait=False)

    def note_sent(self) -> None:
        """Remember the version of the gradients that are pushed now, for `check_unchanged`."""
        self._version = self.gradients._version

    def factor_to_mean(self, store: KVStore) -> float:
        """What `send` pulls, times this, is the mean."""
        return store.factor_to_mean(self.name)

    def check_unchanged(self) -> None:
        """Raise UserError if the gradients were changed or replaced after the push."""
        if self.stepped and self.gradients._version != self._version:
            raise UserError(
                "gradients were set to zero in place after step(), before their sum had arrived: call "
                "optimizer.zero_grad(), or model.zero_grad(set_to_none=True)"
            )
        if self.gradients._version != self._version:
            raise UserError(CHANGED)
        if not self.stepped:
            for index, parameter in enumerate(self.parameters):
                self._check_place(index, parameter)
                if parameter.grad is not self.views[index]:
                    raise UserError(REPLACED)

    def take_result(self, handle: Handle, factor: float) -> None:
        """Set the gradients to what `send` has pulled, times `factor`."""
        self._take(self._result(handle), factor)

    def result(self, handle: Handle, factor: float) -> list[torch.Tensor]:
        """What `send` has pulled, times `factor`, for each parameter. Read-only, and valid until the next `send`."""
        total = self._result(handle)
        if factor == 1.0 and self.device.type == "cpu":
            return self._views_of(total)
        self._take(total, factor)
        return self.views

    def _result(self, handle: Handle) -> Array:
        return handle.values[0] if handle.values else self._results_memory.numpy()

    def _take(self, total: Array, factor: float) -> None:
        if self.device.type == "cpu":
            torch.mul(_read_only(total), factor, out=self.gradients)
        else:
            self.gradients.copy_(torch.from_numpy(total), non_blocking=True).mul_(factor)

    def result_in_place(
        self, handle: Handle, factor: float, copied: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Inside this context the gradient of every parameter is what `send` has pulled, times `factor`, also if
        zero_grad() has removed the parameter's own. If the factor is 1, these gradients are the server's memory, which
        must not be written; `copied` makes copies instead."""
        if not copied:
            return self._with_gradients(self.result(handle, factor))
        self._take(self._result(handle), factor)
        return self._with_gradients(self.views)

    @contextlib.contextmanager
    def _with_gradients(self, views: list[torch.Tensor]) -> Iterator[None]:
        before = [parameter.grad for parameter in self.parameters]
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def host_weights(self) -> Array:
        """A flat copy of the weights."""
        flat = torch.empty(self.elements, dtype=self.parameters[0].dtype)
        self.copy_weights(flat)
        return flat.numpy()

    def copy_weights(self, flat: torch.Tensor) -> None:
        """Copy the weights to `flat` (elements,), on any device."""
        with torch.no_grad():
            for view, parameter in zip(self.cut(flat), self.parameters, strict=True):
                view.copy_(parameter)

    def set_weights(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            for view, parameter in zip(self.cut(flat), self.parameters, strict=True):
                parameter.copy_(view)

    def adopt_weights(self) -> None:
        """Move the parameters into flat memory, so that weights can be pulled in place."""
        flat = torch.from_numpy(self.host_weights())
        if self.gradients.device.type != "cpu":
            flat = flat.pin_memory()
        self.pulled = flat.numpy()
        self._weights = flat.to(self.gradients.device) if self.gradients.device.type != "cpu" else flat
        with torch.no_grad():
            self._weight_views = self.cut(self._weights)
            for view, parameter in zip(self._weight_views, self.parameters, strict=True):
                parameter.data = view

    def check_adopted(self) -> None:
        """Raise UserError for parameters whose memory is no longer that of `adopt_weights`."""
        for name, view, parameter in zip(self.names, self._weight_views, self.parameters, strict=True):
            if view.data_ptr() != parameter.data_ptr():
                raise UserError(
                    f"the memory of parameter {name} was replaced (model.to, parameter.data), "
                    "but its weights come from the servers: do this before dmltrain.distribute, or call it again"
                )

    def take_weights(self) -> None:
        """Take the weights that have arrived in `pulled`."""
        if self._weights is not None and self._weights.device.type != "cpu":
            self._weights.copy_(torch.from_numpy(self.pulled), non_blocking=True)

    def _views_of(self, total: Array) -> list[torch.Tensor]:
        """The gradients in `total`, which must not be written. Results arrive at the same few addresses, so the views
        are kept by address. A view keeps its memory alive, so no other array can get the same address."""
        address = total.__array_interface__["data"][0]
        views = self._results.get(address)
        if views is None:
            if len(self._results) == MAX_PLACES:
                self._results.clear()
            views = self._results[address] = self.cut(_read_only(total))
        return views

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` (elements,), one for each parameter, with its first shape and memory order."""
        return [flat.as_strided(*place) for place in self._places]


def copy_gradient(view: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Copy a parameter's gradient, dense or sparse, to its place in a bucket."""
    if gradient is None:
        view.zero_()
    else:
        view.copy_(gradient.to_dense() if gradient.layout is not torch.strided else gradient)


def same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a type have the same bits, NaN included."""
    kind = torch.int64 if first.dtype == torch.float64 else torch.int32
    return first.shape == other.shape and torch.equal(first.view(kind), other.view(kind))


def described(tensor: torch.Tensor) -> str:
    """Its type and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


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
