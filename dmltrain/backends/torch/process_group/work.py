"""What torch.distributed waits for: operations of dmltrain, and those of gloo whose errors get the job's cause."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dmltrain.backends.torch.process_group.watch import Watch

NO_LIMIT = datetime.timedelta(0)
LOOK_SECONDS = 0.25  # between two looks whether a peer is lost for which gloo waits
# What torch.distributed.Work has itself, so that the operation of gloo has to be asked by name.
OF_GLOO = (
    *("is_completed", "is_success", "exception", "result", "synchronize", "block_current_stream"),
    *("get_future_result", "source_rank", "_source_rank", "_get_op_type", "_get_duration"),
)


class OwnWork(dist.Work):
    """An operation that gloo does not make. It ends when all pieces of the tensors have arrived."""

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
                f"an operation of dmltrain has not ended within {seconds:g} s, the limit of wait()"
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


class Waiter:
    """A thread that makes one call after another: `ask` for a call, and what is `told` returns its value or raises."""

    def __init__(self) -> None:
        self.ask: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="dmltrain peer", daemon=True).start()

    def _run(self) -> None:
        while True:
            call = self.ask.get()
            try:
                value = call()
                self.told.put(functools.partial(bool, value))
            except RuntimeError as error:
                self.told.put(functools.partial(_raise, error))


_idle: list[Waiter] = []


def _waiter() -> Waiter:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    return Waiter()


class GlooWork(dist.Work):
    """An operation of gloo, which waits for ever for a peer that is stopped, so `watch` ends the wait. `alone`: send or
    recv, whose wait has no limit that leaves the connection as it is, so another thread waits."""

    def __init__(self, work: dist.Work, watch: Watch, alone: bool = False) -> None:
        super().__init__()
        self._work, self._watch, self._alone = work, watch, alone

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        if self._alone:
            return self._wait_alone(timeout)
        end = time.monotonic() + timeout.total_seconds() if timeout else math.inf
        while True:
            seconds = min(LOOK_SECONDS, max(0.001, end - time.monotonic()))
            try:
                return bool(self._work.wait(datetime.timedelta(seconds=seconds)))
            except RuntimeError as error:
                if self._work.is_completed() or time.monotonic() >= end:
                    raise self._watch.explained(error) from error
                if self._watch.reason:
                    raise dist.DistBackendError(self._watch.reason) from error

    def _wait_alone(self, timeout: datetime.timedelta) -> bool:
        waiter = _waiter()
        waiter.ask.put(lambda: self._work.wait(timeout))
        while True:
            try:
                value = waiter.told.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._watch.reason:
                    raise dist.DistBackendError(self._watch.reason) from None
            else:
                _idle.append(waiter)
                return bool(self._with_cause(value))

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        over = threading.Lock()  # taken by who ends the future

        def end(value: Callable[[], Any]) -> None:
            if over.acquire(blocking=False):
                self._watch.waiting.pop(end, None)
                try:
                    future.set_result(self._with_cause(value))
                except dist.DistBackendError as error:
                    future.set_exception(error)

        self._watch.until_lost(end)
        gloo: Any = self._work.get_future()
        gloo.add_done_callback(lambda done: end(done.value))
        return future

    def _with_cause(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except RuntimeError as error:
            raise self._watch.explained(error) from error


def _raise(error: Exception) -> None:
    raise error


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
