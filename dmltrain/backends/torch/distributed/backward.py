"""Calls back when the outermost backward() ends; reducers exchange their gradients then.

torch can call back when a backward ends. But if a backward runs inside another one (a checkpoint with
use_reentrant=True), torch calls back at the end of the inner one, which is too early. So `torch.autograd.backward` is
wrapped; `Tensor.backward` calls it, too. A script may have imported the original function before: for such a call
torch's callback is used.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import Any, Protocol

import torch


class Waiting(Protocol):
    """Waits for the end of a backward that has reached one of its parameters."""

    number: int  # those with smaller numbers finish first; the numbers are the same on all workers

    def finish(self) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class _Calls(threading.local):
    """The number of outermost backwards of this thread, and for each asker the number at its last
    `calls_since_last`."""

    def __init__(self) -> None:
        self.total = 0
        self.seen: weakref.WeakKeyDictionary[Waiting, int] = weakref.WeakKeyDictionary()


_calls = _Calls()
_numbers = itertools.count()
_lock = threading.Lock()
_running: set[int] = set()  # threads that are in an outermost backward
_reached: dict[Waiting, int] = {}  # -> the thread whose backward has reached it


def next_number() -> int:
    """For Waiting.number. All workers must create their Waiting objects in the same order."""
    return next(_numbers)


def reached(waiting: Waiting) -> None:
    """Call this in a hook of a backward: `waiting.finish` then runs at the end of the outermost backward. The hook may
    run in another thread than the call of backward(), because torch has a thread for each device."""
    thread = threading.get_ident()
    with _lock:
        if waiting in _reached:
            return
        _reached[waiting] = thread
        wrapped = thread in _running or (bool(_running) and _is_of_device(thread))
    if not wrapped:
        callback = functools.partial(_end, thread)
        torch.autograd.Variable._execution_engine.queue_callback(callback)


def calls_since_last(waiting: Waiting) -> int:
    """How many outermost backwards this thread has begun since the last call with the same object."""
    before = _calls.seen.get(waiting, 0)
    _calls.seen[waiting] = _calls.total
    return _calls.total - before


def is_running() -> bool:
    """Whether the caller runs inside a backward, that is, in one of its hooks."""
    return torch._C._current_graph_task_id() != -1


def _is_of_device(thread: int) -> bool:
    """Whether it is one of torch's threads that compute gradients on a device, which Python does not list."""
    return all(running.ident != thread for running in threading.enumerate())


def install() -> None:
    """Wrap torch's backward, once."""
    original = torch.autograd.backward
    if hasattr(original, "_dmltrain"):
        return

    @functools.wraps(original)
    def backward(*arguments: Any, **named: Any) -> None:
        thread = threading.get_ident()
        if is_running() or thread in _running:  # within another backward
            return original(*arguments, **named)
        _running.add(thread)
        _calls.total += 1
        try:
            original(*arguments, **named)
        except BaseException as error:
            for reducer in _taken(thread):
                reducer.failed(error)
            raise
        else:
            reducers = _taken(thread)
        finally:
            _running.discard(thread)
        for reducer in reducers:
            reducer.finish()

    backward._dmltrain = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _end(thread: int) -> None:
    for reducer in _taken(thread):
        reducer.finish()


def _taken(thread: int) -> list[Waiting]:
    """Remove and return what this thread's backward has reached, also through a device's thread, in order."""
    with _lock:
        reducers = [reducer for reducer, of in _reached.items() if of == thread or of not in _running]
        for reducer in reducers:
            del _reached[reducer]
    return sorted(reducers, key=lambda reducer: reducer.number)
