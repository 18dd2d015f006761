"""A process's connection to its scheduler, and in an elastic job to the next one when that is lost (following.py)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.following import Following, Standing
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message import encode
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.job import Register, Start
from dmltrain.kvstore.transport.message.views import Enter, Superseded
from dmltrain.kvstore.transport.wire import FrameError


class Connection:
    """`heard`: when the scheduler's last message came, s of time.monotonic. `orphaned`: whether the scheduler is lost
    and another one is looked for. `start`: the message `start`, once it has come."""

    def __init__(
        self, environment: Environment, registration: Register, standing: Callable[[], Standing | None]
    ) -> None:
        """Connect. `standing`: see Control. Raises JobLost when the scheduler cannot be reached."""
        self._following = Following(environment)
        self._seconds = environment.start_seconds
        self._registration, self._standing = registration, standing
        self._moving = threading.Lock()  # guards the messages for every incarnation, and the change to another one
        self.start: Start | None = None
        self.orphaned = False
        self._link = self._connect()
        self.heard = time.monotonic()  # from here on: the scheduler may have started much later than this process
        self.send(registration)

    @property
    def scheduler(self) -> str:
        """The scheduler and its address, for messages."""
        return str(self._following.current)

    @property
    def superseded(self) -> bool:
        """Whether a later incarnation has replaced the scheduler."""
        return self._following.superseded

    @property
    def can_move(self) -> bool:
        """Whether this process can go on with another scheduler."""
        return bool(self._introduction())

    def send(self, message: Message) -> None:
        with contextlib.suppress(Closed):  # which the reading thread reports
            self._link.send(encode(message))

    def send_and_remember(self, message: Message) -> None:
        """Send a message that each later incarnation of the scheduler must get as well."""
        with self._moving:
            self._following.remember(message)
            self.send(message)

    def send_unmoved(self, message: Message) -> None:
        """Send a message that is in `Standing` as well, so that another incarnation need not get it: not while this
        process moves to one."""
        with self._moving:
            self.send(message)

    def supersede(self) -> None:
        """Tell the scheduler that a later incarnation has replaced it, and leave it."""
        self.send(Superseded(self._following.current.number + 1))
        self.cut()

    def read(self) -> Message:
        """The scheduler's next message. Raises an error when the link ends."""
        message = self._link.read_message(self._link.read_header())
        self.heard = time.monotonic()
        if isinstance(message, Enter):
            with self._moving:
                self._following.enter(message.view)
        elif isinstance(message, Start):
            self.start = message
        return message

    def move(self, error: Exception, ended: threading.Event) -> bool:
        """The link has ended. Wait for another scheduler, until `ended` is set. Returns whether there is one."""
        self.orphaned = True
        self._link.close()
        log(f"lost {self.scheduler}: {error}; waiting for the next one")
        while (link := self._following.find(ended)) and not self._introduce(link):
            link.close()
        if link is None:
            return False
        log(f"back with {self.scheduler}, its incarnation {self._following.current.number}")
        return True

    def cut(self) -> None:
        """End the link now: the reading thread goes on with another scheduler, if it can."""
        self._link.cut()

    def close(self) -> None:
        self._link.close()

    def _connect(self) -> Link:
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                return self._following.connect()
            except (OSError, Closed) as error:  # the scheduler may still be starting
                if time.monotonic() > deadline:
                    raise JobLost(f"{self.scheduler} cannot be reached: {error}") from error
            except FrameError as error:
                raise JobLost(f"{self.scheduler}: {error}") from error
            time.sleep(0.05)

    def _introduce(self, link: Link) -> bool:
        """Introduce this process to another scheduler, and continue with this link. False if the link has ended
        already."""
        with self._moving:
            try:
                for message in self._introduction():
                    link.send(encode(message))
            except Closed:
                return False
            self._link, self.heard, self.orphaned = link, time.monotonic(), False
        return True

    def _introduction(self) -> list[Message]:
        return self._following.introduction(self._registration, self.start, self._standing())
