"""Buckets: consecutive parameters of a network share flat memory for gradients and weights, and a kvstore key."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from dmltrain.arrays import Array
from dmltrain.errors import UserError

BUCKET_BYTES = 1 << 20  # small enough to be pushed early in backward, large enough for the cost of a frame
DTYPES = (torch.float32, torch.float64)


@dataclass(eq=False)
class Bucket:
    """Parameters of one optimizer group, type and device. Each keeps its memory order within the flat memory."""

    name: str
    group: int  # number of the optimizer's parameter group
    priority: int  # of its pushes and pulls: forward order first
    parameters: list[torch.nn.Parameter]
    pushed: bool = False
    stepped: bool = False  # step() was called, and its result is not in the weights yet
    gradients: torch.Tensor = field(init=False)  # (elements,)
    pulled: Array = field(init=False)  # receives pulled weights, (elements,)
    _views: list[torch.Tensor] = field(init=False)
    _host: torch.Tensor = field(init=False)
    _weights: torch.Tensor | None = None
    _version: int = 0  # autograd's count of changes to the gradients' memory
    _seen: set[int] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def lay_out(self, memory: Array) -> None:
        """Place gradients in `memory` (elements,), from which they are pushed. A GPU's gradients stay on the GPU, and
        are copied to pinned memory before the push."""
        self._host = torch.from_numpy(memory)
        if self.device.type != "cpu":
            self._host = torch.empty_like(self._host, pin_memory=True)
        self.gradients = self._host if self.device.type == "cpu" else torch.zeros_like(self._host, device=self.device)
        self._views = self._cut(self.gradients)

    @property
    def ready(self) -> bool:
        return len(self._seen) == len(self.parameters)

    @property
    def has_gradients(self) -> bool:
        """Whether each parameter's gradient is still the bucket's memory."""
        return all(parameter.grad is view for parameter, view in zip(self.parameters, self._views, strict=True))

    def begin(self) -> None:
        """Start a new step, without gradients."""
        self._seen.clear()
        self.pushed = self.stepped = False

    def watch(self, when_ready: Callable[[Bucket], None]) -> None:
        """Call `when_ready` each time backward has completed a gradient of this bucket."""
        for index, parameter in enumerate(self.parameters):

            def hook(parameter: torch.nn.Parameter, index: int = index) -> None:
                if not self.pushed:
                    self._collect(index, parameter)
                when_ready(self)

            parameter.register_post_accumulate_grad_hook(hook)

    def complete(self) -> None:
        """Set gradients that backward did not produce to zero."""
        for index, parameter in enumerate(self.parameters):
            self._collect(index, parameter)

    def _collect(self, index: int, parameter: torch.nn.Parameter) -> None:
        view = self._views[index]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        else:
            self._seen.add(index)
            return
        parameter.grad = view
        self._seen.add(index)

    def host_gradients(self) -> Array:
        """The flat gradients in host memory, which does not change until the key's next pull returns."""
        if self._host is not self.gradients:
            self._host.copy_(self.gradients)
        return self._host.numpy()

    @property
    def host_memory(self) -> Array:
        return self._host.numpy()

    def note_version(self) -> None:
        self._version = self.gradients._version

    def check_unchanged(self) -> None:
        """Raise UserError if the gradients were changed after the push."""
        if self.stepped and self.gradients._version != self._version:
            raise UserError(
                "gradients were set to zero in place after step(), before their sum had arrived: call "
                "optimizer.zero_grad(), or model.zero_grad(set_to_none=True)"
            )
        if self.gradients._version != self._version:
            raise UserError(
                "gradients were changed between backward() and step(), after they had been sent: call "
                "optimizer.reduce_gradients() before clipping or unscaling them"
            )

    def take_gradients(self, total: Array, factor: float) -> None:
        """Set the gradients to the sum `total` (elements,) times `factor`."""
        if self.device.type == "cpu":
            torch.mul(_read_only(total), factor, out=self.gradients)
        else:
            self.gradients.copy_(torch.from_numpy(total), non_blocking=True).mul_(factor)

    @contextlib.contextmanager
    def gradients_in_place(self, total: Array, factor: float) -> Iterator[None]:
        """In this context every parameter has the gradient `total` times `factor`, also after zero_grad() has removed
        its own. Makes no copy if the factor is 1."""
        before = [parameter.grad for parameter in self.parameters]
        direct = factor == 1.0 and self.device.type == "cpu"
        if not direct:
            self.take_gradients(total, factor)
        views = self._cut(_read_only(total)) if direct else self._views
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view
        yield
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient

    def host_weights(self) -> Array:
        """A flat copy of the weights."""
        flat = torch.empty(sum(parameter.numel() for parameter in self.parameters), dtype=self.parameters[0].dtype)
        with torch.no_grad():
            for view, parameter in zip(self._cut(flat), self.parameters, strict=True):
                view.copy_(parameter)
        return flat.numpy()

    def set_weights(self, weights: Array) -> None:
        with torch.no_grad():
            for view, parameter in zip(self._cut(torch.from_numpy(weights)), self.parameters, strict=True):
                parameter.copy_(view)

    def adopt_weights(self) -> None:
        """Move the parameters into flat memory, so that weights can be pulled in place."""
        flat = torch.from_numpy(self.host_weights())
        if self.gradients.device.type != "cpu":
            flat = flat.pin_memory()
        self.pulled = flat.numpy()
        self._weights = flat.to(self.gradients.device) if self.gradients.device.type != "cpu" else flat
        with torch.no_grad():
            for view, parameter in zip(self._cut(self._weights), self.parameters, strict=True):
                parameter.data = view

    def take_weights(self) -> None:
        """Take the weights that have arrived in `pulled`."""
        if self._weights is not None and self._weights.device.type != "cpu":
            self._weights.copy_(torch.from_numpy(self.pulled), non_blocking=True)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, offset = [], 0
        for parameter in self.parameters:
            views.append(flat.as_strided(parameter.size(), parameter.stride(), offset))
            offset += parameter.numel()
        return views


def _read_only(array: Array) -> torch.Tensor:
    """A tensor of the same memory, which must not be written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def make_buckets(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, prefix: str, single: bool = False
) -> list[Bucket]:
    """Buckets of all parameters of `optimizer`, in the model's order; names start with `prefix`. `single`: one for each
    parameter. Raises UserError for unsupported types of weights."""
    groups = enumerate(optimizer.param_groups)
    group_of = {parameter: number for number, group in groups for parameter in group["params"]}
    open_lists: dict[tuple[int, torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    lists: list[tuple[int, list[torch.nn.Parameter]]] = []
    for name, parameter in _in_order(model, group_of):
        _check(name, parameter)
        kind = (group_of[parameter], parameter.dtype, parameter.device)
        current = open_lists.get(kind)
        if current is None or single or _bytes(current) + _bytes([parameter]) > BUCKET_BYTES:
            current = open_lists[kind] = []
            lists.append((group_of[parameter], current))
        current.append(parameter)
    return [
        Bucket(f"{prefix}.{number}", group, len(lists) - number, parameters)
        for number, (group, parameters) in enumerate(lists)
    ]


def _in_order(model: torch.nn.Module, wanted: dict[torch.nn.Parameter, int]) -> list[tuple[str, torch.nn.Parameter]]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
    missing = set(wanted) - {parameter for _, parameter in named}
    if missing:
        raise UserError(
            f"the optimizer has {len(missing)} parameters that are not the model's: "
            "call dmltrain.distribute with the model that the optimizer was made for"
        )
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _check(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.dtype not in DTYPES:
        raise UserError(
            f"parameter {name} is {parameter.dtype}, expected float32 or float64: keep the weights in "
            "float32, and use torch.autocast for lower precision"
        )
    dense = parameter.is_contiguous() or any(
        parameter.dim() == dim and parameter.is_contiguous(memory_format=layout)
        for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    if not dense:
        parameter.data = parameter.data.contiguous()


def _bytes(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
