"""What torch.distributed waits for: sums on the servers, and operations of gloo whose errors get the job's cause."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NO_LIMIT = datetime.timedelta(0)
# What torch.distributed.Work has itself, so that the operation of gloo has to be asked by name.
OF_GLOO = (
    *("is_completed", "is_success", "exception", "result", "synchronize", "block_current_stream"),
    *("get_future", "get_future_result", "source_rank", "_source_rank", "_get_op_type", "_get_duration"),
)


class SumWork(dist.Work):
    """Ends when all pieces of the tensors have arrived."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._ended = threading.Event()

    def end(self, error: Exception | None) -> None:
        self._ended.set()
        if error:
            self._future.set_exception(dist.DistBackendError(str(error)))  # type: ignore[arg-type]
        else:
            self._future.set_result(self._tensors)

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        seconds = timeout.total_seconds()
        if seconds > 0 and not self._ended.wait(seconds):
            raise dist.DistBackendError(
                f"a sum over the servers has not ended within {seconds:g} s, the limit of wait()"
            )
        self._future.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self._future.value()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future

    def result(self) -> list[torch.Tensor]:
        return self._tensors


class GlooWork(dist.Work):
    """`explained(error)` is raised in place of an error of gloo."""

    def __init__(self, work: dist.Work, explained: Callable[[Exception], Exception]) -> None:
        super().__init__()
        self._work, self._explained = work, explained

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        try:
            return bool(self._work.wait(timeout))
        except RuntimeError as error:
            raise self._explained(error) from error


def _of_gloo(name: str) -> Callable[..., Any]:
    def method(self: GlooWork, *arguments: Any) -> Any:
        return getattr(self._work, name)(*arguments)

    return method


for _name in OF_GLOO:
    setattr(GlooWork, _name, _of_gloo(_name))


class Works(dist.Work):
    """Several operations as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])
