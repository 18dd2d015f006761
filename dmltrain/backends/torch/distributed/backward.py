"""The end of the outermost backward(): what a reducer does there.

torch can call back when a backward ends, but a backward that runs within another one (a checkpoint with
use_reentrant=True) calls back too early. So `torch.autograd.backward`, which `Tensor.backward` calls too, is wrapped.
A backward that is called in another way, through a name that a script imported before, calls back on its own.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from typing import Any, Protocol

import torch


class Waiting(Protocol):
    """What has something to do at the end of a backward that has reached it."""

    number: int  # the order in which they do it, the same on all workers

    def finish(self) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class _Calls(threading.local):
    """Outermost backwards of this thread, and how many there were when `calls_since_last` was asked by each."""

    def __init__(self) -> None:
        self.total = 0
        self.seen: weakref.WeakKeyDictionary[Waiting, int] = weakref.WeakKeyDictionary()


_calls = _Calls()
_numbers = itertools.count()
_lock = threading.Lock()
_running: set[int] = set()  # threads that are in an outermost backward
_reached: dict[Waiting, int] = {}  # with the thread whose backward has


def next_number() -> int:
    """For Waiting.number, if all workers make what waits in the same order."""
    return next(_numbers)


def reached(waiting: Waiting) -> None:
    """Call this in a hook of a backward: `waiting.finish` runs at the end of the outermost one. Devices have threads of
    their own for backward."""
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
    """How many outermost backwards this thread has begun since this was called last."""
    before = _calls.seen.get(waiting, 0)
    _calls.seen[waiting] = _calls.total
    return _calls.total - before


def is_running() -> bool:
    """Whether a hook of a backward calls this."""
    return torch._C._current_graph_task_id() != -1


def _is_of_device(thread: int) -> bool:
    """Python does not know the threads in which torch computes gradients on a device."""
    return all(each.ident != thread for each in threading.enumerate())


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
            for each in _taken(thread):
                each.failed(error)
            raise
        else:
            found = _taken(thread)
        finally:
            _running.discard(thread)
        for each in found:
            each.finish()

    backward._dmltrain = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _end(thread: int) -> None:
    for each in _taken(thread):
        each.finish()


def _taken(thread: int) -> list[Waiting]:
    """What this thread's backward has reached, also in a device's thread, in order."""
    with _lock:
        found = [each for each, of in _reached.items() if of == thread or of not in _running]
        for each in found:
            del _reached[each]
    return sorted(found, key=lambda each: each.number)
