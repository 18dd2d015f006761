"""How far a worker of an elastic job is: which ops it holds, and in which view it is.

The training thread calls the first group of methods, and the thread of the control link the second group.
scheduler/membership/views.py says how the scheduler uses the answers.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

from dmltrain.base.errors import JobLost
from dmltrain.kvstore.base import JOB_ENDED, MembershipEnded, ViewChanged
from dmltrain.kvstore.transport.message.job import NewServer
from dmltrain.kvstore.transport.message.views import Enter, Flush, Flushed
from dmltrain.kvstore.view import NEVER, View


class Progress:
    """`report` sends an answer to the scheduler. `done`: the last op that this worker holds. `view`: the one that it
    is in; None until it has entered the first. `invited`: whether a change waits for a round of this worker."""

    def __init__(self, member: int, report: Callable[[Flushed], None]) -> None:
        self._member = member
        self.done = 0
        self.met = 0  # the last op whose barrier this worker has reached
        self.invited = False
        self.missed: set[int] = set()  # views in which this worker was behind when they began
        self.returns = False  # whether a later view has this worker, which is not in `view`
        self.view: View | None = None
        self._report = report
        self.announced: Enter | None = None  # the newest view, entered or not
        self._pending: deque[View] = deque()  # announced views that were not yet entered, oldest first
        self._flush: Flush | None = None  # the last one of the present change of view
        self._ends: tuple[int, str] | None = None  # the number of the first view in which the job ends, and why
        self._failure = ""
        self.finished = self._over = False
        self._changed = threading.Condition()

    @property
    def pending(self) -> View | None:
        """The oldest view that was announced and not yet entered."""
        return self._pending[0] if self._pending else None

    @property
    def held_back(self) -> bool:
        """Whether `complete` would wait."""
        return not (self._failure or self._pending or self.done < self._limit)

    @property
    def has_departed(self) -> bool:
        """Whether this worker has left on purpose, as the newest view says."""
        return self.announced is not None and self._member in self.announced.departed

    # -- the training thread ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before each request of an op. Raises ViewChanged if a new view has to be entered first."""
        if self._pending:
            raise ViewChanged

    def complete(self) -> None:
        """All results of the next op have arrived: recognise it, so that this worker holds it. Waits while a change of
        view forbids that. Raises ViewChanged if the op was aborted, and JobLost."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held_back)
            if self._failure:
                raise JobLost(self._failure)
            self.begin()
            self.done += 1
            self._answer()

    def enter(self) -> View:
        """Enter the next view; `done` is its base. Views are entered one by one, even if several were announced: what a
        member derives from the sequence of views, such as how samples are dealt, must be the same on all members."""
        with self._changed:
            self.view = self._pending.popleft()
            return self.view

    def admit(self, ask: Callable[[int], None]) -> None:
        """Let the change that waits come before this worker's next op, a round of training: `ask` the scheduler, given
        the view's number, and wait for a new view. Raises JobLost."""
        with self._changed:
            if not self.invited or self.view is None or self._pending:  # another view comes first: ask in that one
                return
            self.invited, number = False, self.view.number
        ask(number)
        self.wait_for_view()

    def wait_if_held(self) -> None:
        """If the members of the entered view have nothing to do in it, or nothing more, wait for the next view. Raises
        JobLost, and ViewChanged."""
        if self.rests:
            self.wait_for_view()
            self.begin()

    @property
    def rests(self) -> bool:
        """Whether the members have nothing to do before the next view."""
        if self.announced is None or self._pending:
            return False
        view = self.announced.view
        return self.announced.holds or (view.is_passing and self.done == view.until)

    @property
    def ends(self) -> str:
        """Why the job ends with the view that was entered, or empty."""
        return self._ends[1] if self._ends and self.view and self.view.number >= self._ends[0] else ""

    def finish(self) -> None:
        """This worker has finished: it takes part in no later op, but still answers the scheduler."""
        with self._changed:
            self.finished = True
            self._pending.clear()

    def wait_for_view(self) -> None:
        """Wait until a view was announced. Raises JobLost; MembershipEnded if the job has come to its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._pending or self._over)
            if self._failure:
                raise JobLost(self._failure)
            if not self._pending:
                raise MembershipEnded(JOB_ENDED)

    # -- the thread of the control link -----------------------------------------------------------------------------

    def freeze(self, flush: Flush) -> None:
        """A change of view begins, or continues. A flush of an older view than the last announced one is void."""
        with self._changed:
            if self._newest and flush.view == self._newest.number:
                self._flush = flush
                self._answer()
                self._changed.notify_all()

    def announce(
        self,
        view: View,
        returns: bool = False,
        holds: bool = False,
        ends: str = "",
        new_servers: tuple[NewServer, ...] = (),
        departed: tuple[int, ...] = (),
    ) -> None:
        """A new view; see message.Enter. The training thread enters it at its next op; none comes after `finish`."""
        with self._changed:
            self.announced = Enter(view, returns, holds, ends, new_servers, departed)
            self._flush, self.returns = None, returns
            if ends and not self._ends:
                self._ends = view.number, ends
            if self._member in view.behind and self.done < view.base:
                self.missed.add(view.number)
            if self._member in view.joined + view.behind:
                self.done = view.base
            if not self.finished:
                self._pending.append(view)
            self._answer()
            self._changed.notify_all()

    def invite(self) -> None:
        """A change waits for a round of this worker, which leads."""
        self.invited = True

    def end(self) -> None:
        """The job has ended."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """The job is lost: end all waiting."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    # -- rules, under the lock --------------------------------------------------------------------------------------

    @property
    def _newest(self) -> View | None:
        return self.announced.view if self.announced else None

    @property
    def _limit(self) -> float:
        """The last op that may be recognised now."""
        if self._flush is not None:
            return self._flush.until
        planned = self._newest.until if self._newest else NEVER
        return math.inf if planned == NEVER else planned

    def _answer(self) -> None:
        """Report which op this worker holds, if a flush or the planned end of the view asks for it."""
        if self._flush is not None:
            if self.done >= self._flush.until:
                self._report(Flushed(self._flush.view, self._flush.turn, self.done, self.met > self.done))
        elif self._newest and self._newest.until == self.done:
            self._report(Flushed(self._newest.number, 0, self.done))
