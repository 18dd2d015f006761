"""The link to one worker or relay: what its frames do, on the one thread that receives them."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.log import log
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.links import handlers
from dmltrain.kvstore.server.links.arithmetic import QUIESCENT_SECONDS
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.work import Work
from dmltrain.kvstore.transport import message
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.data import Error
from dmltrain.kvstore.transport.outbox import Outbox
from dmltrain.kvstore.transport.wire import Flag, FrameError, FrameKind, Header

if TYPE_CHECKING:
    from dmltrain.kvstore.server.links.service import Service

BATCH = 16  # maximum of headers read together: with more, the first sums would begin later
MAX_BACKLOG = 8  # pushes of a slice that wait for their step


class WorkerLink:
    """`number`: of the worker or relay; `outbox`: the queue to it."""

    def __init__(self, service: Service, link: Link, outbox: Outbox, role: str, number: int) -> None:
        self.service, self.link, self.outbox, self.number = service, link, outbox, number
        self.shared, self.arithmetic, self.answers = service.shared, service.arithmetic, service.answers
        self._role, self._handlers = role, handlers.permitted(role, service.is_relay, service.is_elastic)
        self._memory = np.empty(0, np.uint8)  # reused, so that it stays in the cache of this thread's core

    def serve(self, caller: str) -> Exception:
        """Take the link's frames to its end. Returns what has ended it. `caller`: its name in messages."""
        name = self.service.name
        try:
            first = self.link.read_headers(1)[0]
            self.service.admission.heard(self.outbox)
            self.take(first)
            while True:
                headers = self.link.read_headers(BATCH)
                self.outbox.wait_for_room()
                if all(header.kind == FrameKind.PUSH and header.flags & Flag.SHARED for header in headers):
                    self._take_lent(headers)
                else:
                    for header in headers:
                        self.take(header)
                        self.outbox.wait_for_room()
        except Closed as error:
            return error
        except (Rejected, FrameError) as error:
            log(f"{name}: {caller}: {error}")
            self.outbox.put(message.encode(Error(str(error))))
            return error
        except Exception as error:  # a bug in this program: end the job immediately, with the reason
            traceback.print_exc()
            self.outbox.put(message.encode(Error(f"{name}: {type(error).__name__}: {error}")))
            return error

    def take(self, header: Header) -> None:
        """Handle a frame of which the header has come."""
        handler = self._handlers.get(header.kind)
        if handler is None:
            to = "to a relay" if self.service.is_relay else f"from a {self._role}"
            where = " in an elastic job" if self.service.is_elastic else ""
            raise FrameError(f"frame kind {header.kind} {to}{where}")
        if not handler.of_any_view:
            self.shared.wait_for(header.view)
            self.shared.check_member(self.number, header.view)
        if handler.call(self, header):
            self.outbox.put(Header(FrameKind.DONE, 0, header.view).pack())

    def receive(self, header: Header, initial: bool = False) -> Buffer | None:
        """The payload of a push, or of an initial value; None if it is of an older view."""
        with self.shared.lock:
            if header.view < self.shared.view:
                buffer = None
            elif header.flags & Flag.SHARED:
                return self._lent(header)
            else:
                core, push = self.shared.core, (self.number, header.key, header.slice, header.length, header.dtype)
                buffer = None if initial else core.completing_buffer(*push, header.clock, self._own_memory)
                buffer = buffer or core.buffer(*push, initial)
        if buffer is None:
            self.link.discard(header)
        elif header.length:
            try:
                self.link.read_into(memoryview(buffer.array).cast("B"))  # type: ignore[arg-type]
            except (Closed, FrameError):
                with self.shared.lock:
                    buffer.give_back()
                raise
        return buffer

    def push(self, headers: list[Header], buffers: list[Buffer]) -> None:
        """These pushes have been received."""
        now, works, full = time.monotonic(), list[Work](), list[tuple[int, int]]()
        core, worker = self.shared.core, self.number
        with self.shared.lock:
            for header, buffer in zip(headers, buffers, strict=True):
                if header.view < self.shared.view:
                    buffer.give_back()
                    continue
                actions = core.push(
                    worker, header.key, header.slice, header.clock, header.number, buffer, now, header.waited
                )
                if header.flags & Flag.PULL:
                    actions += core.pull(worker, header.key, header.slice, header.clock, now, header.priority)
                works += self.arithmetic.act(actions)
                if core.backlog(header.key, header.slice) > MAX_BACKLOG:
                    full.append((header.key, header.slice))
        self.arithmetic.begin(works, at_once=buffers[0].kind == "completing")
        for key, index in full:  # if steps are slower than pushes, this limits the memory for pushes that wait
            self._let_step(key, index)

    def _let_step(self, key: int, index: int) -> None:
        core = self.shared.core
        with self.shared.progress:
            self.shared.progress.wait_for(lambda: core.backlog(key, index) <= MAX_BACKLOG, QUIESCENT_SECONDS)

    def _take_lent(self, headers: list[Header]) -> None:
        """Handle pushes in the worker's shared memory, all together."""
        self.shared.wait_for(max([header.view for header in headers]))
        self.shared.check_member(self.number, headers[-1].view)
        with self.shared.lock:
            headers = [header for header in headers if header.view == self.shared.view]
            buffers = [self._lent(header) for header in headers]
        if headers:
            self.push(headers, buffers)

    def _lent(self, header: Header) -> Buffer:
        """A push in the worker's shared memory. Call this with the lock held. Raises FrameError."""
        if self.link.peer_arena is None:
            raise FrameError("a payload in shared memory, but this link shares none")
        try:
            data = self.link.peer_arena.view(header.offset, header.length)
        except ValueError as error:
            raise FrameError(str(error)) from error
        return self.shared.core.lend(self.number, header.key, header.slice, data, header.dtype)

    def _own_memory(self, size: int) -> Array:
        if self._memory.size < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]
