"""Runs a core's work, on a pool of threads or on the thread that has received the last push."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.links.answers import Answers, next_of
from dmltrain.kvstore.server.links.shared_core import SharedCore
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.work import Work

MAX_THREADS = 4  # for arithmetic; two or three saturate a machine's memory
QUIESCENT_SECONDS = 10.0  # time limit for work to end before a state is read
INLINE_BYTES = 1 << 16  # work on slices up to this size costs less than handing it to another thread

Forward = Callable[[Sequence[Work]], None]


class Arithmetic:
    """`fail(reason)` ends the job when work has failed. `forward(works)`, if given, gets work that has run, and must
    call `done` later. `name`: of the server, in messages."""

    def __init__(
        self, name: str, shared: SharedCore, answers: Answers, fail: Callable[[str], None], forward: Forward | None
    ) -> None:
        self._name, self._shared, self._answers = name, shared, answers
        self._fail, self._forward = fail, forward
        self._threads = min(MAX_THREADS, os.cpu_count() or 1)
        self.pool = Pool(self._threads, "arithmetic")

    # -- quiescence -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quiescent(self, seconds: float = QUIESCENT_SECONDS) -> Iterator[ServerCore]:
        """The core, exclusively, while no work is in progress. Raises Rejected if there is some for `seconds`."""
        with self.paused():
            if not self._shared.progress.wait_for(lambda: self._shared.core.quiescent, seconds):
                raise Rejected(
                    f"{self._name} was busy with optimizer steps for {seconds:g} s, and each changes "
                    "its state: save and load states between two barriers"
                )
            yield self._shared.core

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context that holds the lock. If the core can pause, no new work begins meanwhile, but afterwards."""
        works = list[Work]()
        try:
            with self._shared.lock:
                is_paused = self._shared.core.pause()
                try:
                    yield
                finally:
                    if is_paused:
                        works = self.act(self._shared.core.resume(time.monotonic()))
        finally:
            if works:
                self._answers.send()
                self._submit(works)

    # -- work -----------------------------------------------------------------------------------------------------

    def act(self, actions: Sequence[Action]) -> list[Work]:
        """Queue the replies; returns the work for `begin`. Call this with the lock held."""
        works = []
        for action in actions:
            if isinstance(action, Work):
                works.append(action)
            else:
                self._answers.queue(action)
        return works

    def begin(self, works: Sequence[Work], at_once: bool) -> None:
        """Send what a push has answered, and run the work that follows from it, `at_once` on this thread."""
        self._answers.send()
        if at_once:
            self._carry_out(deque(works))
        else:
            self._hand_out(deque(works))

    def done(self, work: Work, waited: float, worked: float) -> None:
        """Forwarded work is complete; for the times see ServerCore.done."""
        if works := self._done([work], waited, worked):
            self._submit(works)

    def _hand_out(self, works: deque[Work]) -> None:
        """Run work on the pool if that is faster. (Data that this thread has received is still in its core's cache.)"""
        shared = sum(work.lent_bytes for work in works)
        if shared > INLINE_BYTES:
            for _ in range(min(len(works), self._threads)):
                self.pool.submit(functools.partial(self._carry_out, works))
        else:
            self._carry_out(works)

    def _submit(self, works: Sequence[Work]) -> None:
        self.pool.submit(functools.partial(self._carry_out, deque(works)))

    def _carry_out(self, works: deque[Work]) -> None:
        """Run work and what follows from it. Several threads may share one `works`."""
        try:
            while some := _some(works):
                for work in some:
                    work.run()
                if self._forward:
                    self._forward(some)
                else:
                    works += self._done(some)
        except Exception as error:  # an optimizer's error, or a bug: end the job immediately, with the reason
            if not isinstance(error, Rejected):
                traceback.print_exc()
            self._fail(f"{self._name}: {error}")

    def _done(self, works: Sequence[Work], waited: float = 0.0, worked: float | None = None) -> list[Work]:
        """Report work that has run; returns the work that is now possible."""
        next_works = []
        with self._shared.progress:
            for work in works:
                next_works += self.act(self._shared.core.done(work, time.monotonic(), waited, worked))
            self._shared.progress.notify_all()
        self._answers.send()
        return next_works


def _some(works: deque[Work]) -> list[Work]:
    """The next work, or several small ones."""
    some: list[Work] = []
    size = 0
    while size < INLINE_BYTES and (work := next_of(works)) is not None:
        some.append(work)
        size += work.target.nbytes
    return some


class Pool:
    """A number of threads that run tasks in order, until the process ends.

    concurrent.futures accepts no work once the main thread has ended, before atexit's callbacks run. But a relay still
    serves its host while an atexit callback closes its own worker's kvstore.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True).start()

    def submit(self, task: Callable[[], object]) -> None:
        """Run `task` on one of the threads. It must not raise."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()
