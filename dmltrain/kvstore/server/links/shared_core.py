"""A core that several threads use, one at a time, and the view that it is in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.transport.link import Closed
from dmltrain.kvstore.transport.wire import FrameError


class SharedCore:
    """`view`: the number of the present view, which changes only while nobody has the core exclusively. `over`: whether
    the job is."""

    def __init__(self, core: ServerCore, elastic: bool) -> None:
        self.core, self._elastic = core, elastic
        self.lock = threading.Lock()  # guards the core, and what the service's Answers have sent
        self.progress = threading.Condition(self.lock)  # work is done, or another view or the end has come
        self.changed = threading.Condition(self.lock)  # another view or the end has come, or a link has begun or ended
        self.view = 0
        self.over = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[ServerCore]:
        """The core, exclusively for this thread."""
        with self.lock:
            yield self.core

    def enter(self, view: int) -> None:
        """This view has begun. Call this with the lock held."""
        self.view = view
        self.progress.notify_all()
        self.changed.notify_all()

    def end(self) -> None:
        """The job is over: wake all threads that wait for something."""
        with self.lock:
            self.over = True
            self.progress.notify_all()
            self.changed.notify_all()

    def wait_for(self, view: int) -> None:
        """Wait until this server has entered the view, which a worker has already. Raises Closed at the job's end."""
        if view <= self.view:
            return
        if not self._elastic:
            raise FrameError(f"a frame of view {view} in a job that is not elastic")
        with self.progress:
            self.progress.wait_for(lambda: view <= self.view or self.over)
        if view > self.view:
            raise Closed(f"the job has ended before view {view}")

    def check_member(self, worker: int, view: int) -> None:
        """Raises Closed if the present view is without this worker although the worker has entered a view of the same
        number. A lost scheduler may have announced that one, and the next scheduler another one."""
        if not view or self.core.workers.takes(worker):
            return
        with self.lock:  # else a view that begins could have its workers already, and not yet its number
            if view == self.view and not self.core.workers.takes(worker):
                raise Closed(f"view {view} is without this worker")
