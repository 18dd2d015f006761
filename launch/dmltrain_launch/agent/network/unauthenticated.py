"""Accept connections for a listener of an agent, and close those of callers that do not prove soon who they are.

At most MAX of them wait at a time. When one more comes, a random one is closed, so that nobody can keep others out with
many connections. An agent of the job whose connection is closed in this way connects again. No threads, no blocking
calls.
"""

from __future__ import annotations

import errno
import random
import selectors
import socket
from collections.abc import Callable
from functools import partial

MAX = 128
SECONDS = 4.0  # for a proof, which a caller of the job sends at once; a packet that is lost three times takes 3 s
ACCEPTS = 64  # of one call


class Unauthenticated:
    """`ready(connection)` is called when such a connection is readable; it then calls `forget`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ready: Callable[[socket.socket], None],
        clock: Callable[[], float],
        chance: random.Random,
    ):
        self.selector, self.ready, self.clock, self.chance = selector, ready, clock, chance
        self.until: dict[socket.socket, float] = {}  # the oldest first

    @property
    def deadline(self) -> float:
        """When to call `expire`."""
        return next(iter(self.until.values()), float("inf"))

    def accept(self, listener: socket.socket) -> None:
        """Accept connections that wait."""
        for _ in range(ACCEPTS):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._drop_one()
                return  # none waits, or this one is gone
            if len(self.until) >= MAX:
                self._drop_one()
            connection.setblocking(False)
            self.until[connection] = self.clock() + SECONDS
            self.selector.register(connection, selectors.EVENT_READ, partial(self._readable, connection))

    def _readable(self, connection: socket.socket) -> None:
        if connection in self.until:  # an event of the same moment may have closed it
            self.ready(connection)

    def _drop_one(self) -> None:
        if self.until:
            self.forget(self.chance.choice(list(self.until)))

    def expire(self) -> None:
        """Close the connections whose time is over."""
        while self.deadline <= self.clock():
            self.forget(next(iter(self.until)))

    def forget(self, connection: socket.socket) -> None:
        """Close the connection."""
        del self.until[connection]
        self.selector.unregister(connection)
        connection.close()
