"""Buckets: consecutive parameters of a network share flat memory for gradients and weights, and a kvstore key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch.utils.hooks import RemovableHandle

from dmltrain.backends.torch.distributed.flat import FlatWeights, Places, Results, copy_all
from dmltrain.backends.torch.gpu import copies
from dmltrain.backends.torch.gpu.pinned import Arrival, PushedMemory, arrive, begin_copies
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, KVStore
from dmltrain.kvstore.encoded import Encoded, Encoding

EARLY = "(with step_early, defer, factors or in an elastic job)"
CHANGED = (
    f"gradients were changed between backward() and step(), after they had been sent {EARLY}: train without these, or "
    "call optimizer.reduce_gradients() before clipping or unscaling them"
)
REPLACED = (
    f"p.grad was replaced or set to None between backward() and step(), after gradients had been sent {EARLY}: train "
    "without these, or call optimizer.reduce_gradients() first"
)


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
    elements: int = field(init=False)
    on_gpu: bool = field(init=False)
    gradients: torch.Tensor = field(init=False)  # (elements,)
    places: Places = field(init=False)
    weights: FlatWeights = field(init=False)
    views: list[torch.Tensor] = field(init=False)  # of the gradients, one for each parameter
    unused: torch.Event | None = None  # after it nothing that computes before the next step uses the gradients
    host: PushedMemory = field(init=False)
    _results: Results = field(init=False)
    _version: int = 0  # autograd's count of changes to the gradients' memory
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.elements, self.on_gpu = sum(map(torch.Tensor.numel, self.parameters)), self.device.type != "cpu"
        self.places = Places(self.parameters)
        self.weights = FlatWeights(self.parameters, self.places)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def lay_out(self, memory: Array, keep: bool = False, encodings: Sequence[Encoding] = ()) -> None:
        """Place the gradients in `memory` (elements,), from which they are pushed. A GPU's gradients stay on the GPU,
        and are copied before the push: to `memory` if that is pinned, else to pinned memory. Results arrive in the same
        memory. With `keep` (see KVStore.elastic) pushed gradients must stay unchanged, and results get separate
        pinned memory. With `encodings` (see KVStore) a GPU encodes its gradients and decodes its results, and nothing
        is in `memory`."""
        self.host = PushedMemory(memory, self.device, keep, encodings)
        own = torch.from_numpy(memory)
        self.gradients = torch.zeros(self.elements, dtype=own.dtype, device=self.device) if self.on_gpu else own
        self.views, self._results = self.places.cut(self.gradients), Results(self.places)

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
        self.unused = None
        if self.on_gpu:
            self.host.forget(self.device)

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
            copy_gradients(self.views, [parameter.grad for parameter in self.parameters])

    def _collect(self, index: int, parameter: torch.nn.Parameter) -> None:
        view = self.views[index]
        self._check_place(index, parameter)
        self._seen.add(index)
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UserError(f"sparse gradients cannot be sent during backward {EARLY}: train without these")
        if self.on_gpu:
            return  # `gather` takes all at once
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad.detach())  # after backward(create_graph=True) the gradient has a graph
        else:
            return
        parameter.grad = view

    def gather(self) -> None:
        """On a GPU, when the gradients are complete: take them into the bucket, with one kernel for all. The gradient
        of a single parameter needs none: its memory becomes the bucket's."""
        if not self.on_gpu:
            return
        first = self.parameters[0].grad
        if len(self.parameters) == 1 and first is not None and self.places.are_of(first, self.gradients.dtype):
            self.gradients = first.as_strided((self.elements,), (1,))
            self.views = [first]
        else:
            self.fill()
            for view, parameter in zip(self.views, self.parameters, strict=True):
                parameter.grad = view

    def _check_place(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Raise UserError if a parameter's gradient is no longer in the bucket's memory: `model.to()` also moves
        gradients, which are views of that memory."""
        memory, strides = self.gradients, self.places.strides(index)
        if not self.places.hold(index, parameter, self.views[index], memory):
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

    def freeze(self) -> bool:
        """The gradients are complete: nothing may change them. Returns whether they must be copied to the host first:
        those of a GPU."""
        self._version = self.gradients._version  # for `check_unchanged`
        return self.on_gpu

    def host_gradients(self, factors: Sequence[float] = ()) -> Array | Encoded:
        """The flat gradients, times these factors, in host memory, which does not change until the key's next pull
        returns. Encoded only where `lay_out` got encodings."""
        for encoder in self.host.encoders if factors else ():
            encoder.take_back()  # of a copy without factors
        if (factors or not self.host.has_begun) and self.freeze():
            copy_to_host([self], factors)
            return self.host.complete()
        gradients = self.host.complete()
        for factor in factors:
            assert not isinstance(gradients, Encoded)
            gradients = gradients * gradients.dtype.type(factor)
        return gradients

    def send(self, store: KVStore) -> Handle:
        """Push the gradients, and pull the sum or mean of all workers'."""
        return store.pushpull(self.name, self.host_gradients(), self.host.out, self.priority, wait=False)

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
        """Set the parameters' gradients to what `send` has pulled, times `factor`."""
        self.receive(handle, factor)

    def receive(self, handle: Handle, factor: float) -> None:
        """Set the bucket's memory to what `send` has pulled, times `factor`."""
        if self.on_gpu:
            arrive([arrival(self, factor)])
        else:
            self._results.take(self.gradients, handle, factor)

    def result(self, handle: Handle, factor: float) -> list[torch.Tensor]:
        """What `send` has pulled, times `factor`, for each parameter. Read-only, and valid until the next `send`."""
        if factor == 1.0 and not self.on_gpu:
            return self._results.views(handle)
        self.take_result(handle, factor)
        return self.views

    def result_in_place(
        self, handle: Handle, factor: float, copied: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Inside this context the gradient of every parameter is what `send` has pulled, times `factor`, also if
        zero_grad() has removed the parameter's own. If the factor is 1, these gradients are the server's memory, which
        must not be written; `copied` makes copies instead."""
        if not copied:
            return with_gradients(self.parameters, self.result(handle, factor))
        self.receive(handle, factor)
        return with_gradients(self.parameters, self.views)


def arrival(bucket: Bucket, factor: float) -> Arrival:
    """On a GPU: that of the result of `send`, times `factor`."""
    assert bucket.host.arriving is not None
    return Arrival(bucket.host.arriving, bucket.gradients, factor, bucket.unused)


def copy_to_host(buckets: Sequence[Bucket], factors: Sequence[float] = ()) -> None:
    """Begin to copy the gradients of these buckets, all on one GPU, times these factors, to the host."""
    if buckets:
        begin_copies(buckets[0].device, [(bucket.host, bucket.gradients) for bucket in buckets], factors)


def note_last_use(buckets: Sequence[Bucket]) -> None:
    """What has been asked for so far is all that uses the gradients before the next step."""
    events = {
        device: copies.computing(device).record_event() for device in {each.device for each in buckets if each.on_gpu}
    }
    for bucket in buckets:
        bucket.unused = events.get(bucket.device)


@contextlib.contextmanager
def with_gradients(parameters: list[torch.nn.Parameter], views: list[torch.Tensor]) -> Iterator[None]:
    before = [parameter.grad for parameter in parameters]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def copy_gradients(views: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    """Copy gradients to their places in a bucket, on a GPU with one kernel for all that are dense."""
    dense = [(view, each.detach()) for view, each in zip(views, gradients, strict=True) if _is_dense(each)]
    for view, gradient in zip(views, gradients, strict=True):
        if not _is_dense(gradient):
            copy_gradient(view, gradient)
    apart = [(view, gradient) for view, gradient in dense if view.data_ptr() != gradient.data_ptr()]
    copy_all([view for view, _ in apart], [gradient for _, gradient in apart])


def _is_dense(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return gradient is not None and gradient.layout is torch.strided


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
