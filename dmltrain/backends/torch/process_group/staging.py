"""Tensors on a GPU, or with gaps: operations get dense copies on the host, and results go back at the end."""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dmltrain.backends.torch.process_group.work import NO_LIMIT

IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")  # whose results replace their tensors
WITHOUT_RESULTS = ("send",)
Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor on any device -> its copy on the host


class StagedWork(dist.Work):
    """What `work` brings to the host, `land` takes from there, in a wait or before the future ends. `results`: of the
    future."""

    def __init__(self, work: dist.Work, land: Callable[[], None], results: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._results = work, results
        self._land_all: Callable[[], None] | None = land  # None: it has
        self._lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        self._work.wait(timeout)
        self._land()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        devices = {tensor.device for tensor in self._results if not tensor.is_cpu}
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=list(devices))

        def end(done: torch.futures.Future[Any]) -> None:
            try:
                done.value()
                self._land()
                future.set_result(self.result())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._work.get_future().add_done_callback(end)
        return future

    def _land(self) -> None:
        with self._lock, torch.no_grad():
            land, self._land_all = self._land_all, None
            if land:
                land()


def staged(name: str, operation: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """This operation of a process group, for tensors on any device and of any strides."""

    @functools.wraps(operation)
    def on_any_device(self: Any, *arguments: Any, **options: Any) -> dist.Work:
        if all(map(_is_plain, tensors_of(arguments))):
            return operation(self, *arguments, **options)
        results: list[Pair] = []
        first = _on_host(arguments[0], name in (*IN_PLACE, *WITHOUT_RESULTS), results)
        work = operation(self, first, *(_on_host(more, True, []) for more in arguments[1:]), **options)
        if name in WITHOUT_RESULTS:
            return work
        return StagedWork(work, functools.partial(_copy_back, results), list(tensors_of(arguments[:1])))

    return on_any_device


def _copy_back(pairs: list[Pair]) -> None:
    for tensor, copy in pairs:
        tensor.copy_(copy)


def tensors_of(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_of(argument)


def _on_host(argument: Any, filled: bool, pairs: list[Pair]) -> Any:
    """The argument with copies of its tensors, which are `filled` with their values; adds them to `pairs`."""
    if isinstance(argument, (list, tuple)):
        return [_on_host(each, filled, pairs) for each in argument]
    if not isinstance(argument, torch.Tensor) or _is_plain(argument):
        return argument
    copy = on_host(argument, filled)
    pairs.append((argument, copy))
    return copy


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it needs no copy. Of sparse tensors gloo copies what it needs."""
    if tensor.layout != torch.strided:
        return tensor.is_cpu
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def on_host(tensor: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """A dense copy, with the values if `filled`, in pinned memory if the tensor is on a GPU; a plain tensor itself."""
    if _is_plain(tensor) or tensor.layout != torch.strided:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not tensor.is_cpu)
    return copy.copy_(tensor.detach()) if filled else copy
