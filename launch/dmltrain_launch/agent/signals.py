"""The signals that an agent gets: some end its job, and some are passed on as notices to leave it."""

from __future__ import annotations

import os
import selectors
import signal

from dmltrain_launch.agent.channel import READ_BYTES, Channel
from dmltrain_launch.agent.children import Children
from dmltrain_launch.agent.events import Noticed


class Signals:
    """They wake `selector`. SIGCHLD sets `zombies` of `children`; call `take` for all others."""

    def __init__(self, selector: selectors.BaseSelector, channel: Channel, children: Children):
        self._channel, self._children = channel, children
        self._number = 0
        self._warned = False  # by SIGUSR1, which an engine sends before it ends the job
        self._noticed = False  # the tasks that can leave have been asked to
        wake, waker = os.pipe()
        for descriptor in (wake, waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: setattr(children, "zombies", True))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: setattr(self, "_number", number))
        signal.signal(signal.SIGUSR1, lambda number, frame: setattr(self, "_warned", True))
        selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, READ_BYTES))

    def take(self, ending: bool) -> int:
        """The number of a signal that ends the job, or 0. `ending`: the job is ending already."""
        if self._warned and not self._noticed and not ending:
            self._ask_to_leave()
        self._warned = False
        number, self._number = self._number, 0
        if number == signal.SIGTERM and not self._noticed and not ending and self._ask_to_leave():
            return 0
        return number

    def _ask_to_leave(self) -> bool:
        """Pass a signal on as a notice to leave: an engine sends it before it takes a spot machine away, for example.

        Returns whether any process of the job can leave.
        """
        if leaving := self._children.leaving:
            self._noticed = True
            self._channel.send(Noticed(self._channel.host, leaving))
            self._children.ask_to_leave(leaving)
        return bool(leaving)
