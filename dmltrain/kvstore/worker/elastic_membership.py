"""A worker's membership in an elastic job, which goes on when workers are lost: see scheduler/membership/views.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, ViewChanged
from dmltrain.kvstore.scheduler.client import Told
from dmltrain.kvstore.scheduler.following import Standing
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.job import LinkLost
from dmltrain.kvstore.transport.message.views import Admit, Enter, Flush, HasState, Invite, Leaving, Ready, Speed
from dmltrain.kvstore.view import View, barrier_of
from dmltrain.kvstore.worker.links.routes import Sharing
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.progress import Progress


class ElasticMembership(Membership):
    """`progress`: the ops that this worker holds, and its view. `is_out`: the newest view is without this worker."""

    def __init__(self, environment: Environment, sharing: Sharing, exit_seconds: float) -> None:
        self.is_out = False
        self.progress = Progress(environment.index, lambda message: self._control.send(message))
        super().__init__(environment, sharing, exit_seconds)

    def start(self, message: Ready) -> None:
        """Wait for the first view, which comes when all workers have called this. From then on the job goes on without
        workers that are lost. A replacement waits until it is admitted. Raises JobLost, MembershipEnded."""
        self._control.report(message)
        self.progress.wait_for_view()

    def admit(self) -> None:
        """Allow the waiting change of view before the next op. Only for the leader, before a round of training. Raises
        JobLost."""
        self.progress.admit(lambda view: self._control.send(Admit(view)))

    def leave(self, reason: str, residuals: bool) -> None:
        """Ask the scheduler to let this worker leave before one of its next rounds. `residuals`: whether it has some to
        hand over. For any thread."""
        self._control.report(Leaving(reason, residuals))

    def confirm(self) -> None:
        """See KVStore.confirm."""
        self._control.confirm()

    def wait_for_others(self, unreachable: Sequence[LinkLost]) -> None:
        """Servers of this view cannot be reached: wait for the next view, in which the scheduler decides which
        processes go on. Raises JobLost."""
        for link in unreachable:
            self._control.report(self._dated(link))
        self.progress.wait_for_view()

    def speed(self, view: View, samples: float) -> None:
        """Report how many samples this worker computes per second in this view."""
        self._control.send(Speed(view.number, samples))

    def has_state(self, view: View) -> None:
        """Report that this worker, which lacked the state of training, has got it in this view."""
        self._control.send(HasState(view.number))

    def barrier(self) -> None:
        """Wait for all members. Raises JobLost, ViewChanged."""
        if self.progress.view is None:
            super().barrier()
            return
        self.progress.met = self.progress.done + 1
        name, view = barrier_of(self.progress.met), self.progress.view.number
        if not self._control.barrier(name, view, lambda: self.progress.pending is not None):
            raise ViewChanged(f"barrier {name!r}: the members of the job have changed")

    def watched(self, handle: Handle) -> Handle:
        """The handle; it fails, or is interrupted, immediately if the job is lost or a new view has to be entered."""
        if self.progress.pending is not None:
            handle.interrupt()
        return super().watched(handle)

    def close(self) -> None:
        """Leave. This worker enters no view that is announced from now on."""
        self.progress.finish()
        super().close()

    @property
    def _waits_to_join(self) -> bool:
        return super()._waits_to_join and self.progress.view is None

    def _standing(self) -> Standing | None:
        return Standing(self.progress.announced)

    def _done(self) -> int:
        return self.progress.done

    def _announce(self, message: Enter) -> None:
        self.is_out = self._environment.index not in message.view.members
        # The order matters. As soon as `progress` has the view, the training thread may enter it: so the routes must
        # know the addresses before. `retire` and `interrupt` end waits with ViewChanged, after which the training
        # thread enters the next view: so `progress` must have it before.
        lost = self._routes.announce(message.view, message.new_servers) if self._routes else []
        self.progress.announce(
            message.view, message.returns, message.holds, message.ends, message.new_servers, message.departed
        )
        if self._routes:
            self._routes.retire(lost)
        if self.progress.pending is not None and self._routes:
            for link in self._routes.all_links:
                link.interrupt(message.view.number)

    TOLD: ClassVar[Mapping[type[Message], Told]] = {
        Flush: Told(
            "begins no later op; sends `flushed` when it holds all that it has begun",
            lambda membership, message: membership.progress.freeze(message),
        ),
        Enter: Told("enters the view before its next op", _announce),
        Invite: Told("as the leader, sends `admit` at its next round", lambda member, _: member.progress.invite()),
    }

    def _link_lost(self, lost: LinkLost) -> None:
        """The scheduler decides which processes go on. That may take as long as it takes to notice a lost host."""
        link = self._routes.by_number.get(lost.peer.index) if self._routes else None
        if self._closed:
            return
        if not self.is_out:
            seconds, settled = (
                self._environment.wait_seconds,
                lambda: self.is_out or (link is not None and link.retired),
            )
            self._control.link_lost(self._dated(lost), seconds, settled)
        if link is not None and self.is_out:  # no later view will tell this worker that the server was lost
            link.retire()

    def _dated(self, lost: LinkLost) -> LinkLost:
        announced = self.progress.announced
        return replace(lost, view=announced.view.number if announced else 0)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        if reason:
            self.progress.lose(reason)
            return
        self.progress.end()
        if self._routes and not self._closed:  # it waits to join: the servers end, and answer nothing more
            for link in self._routes.all_links:
                link.retire(job_ended=True)

    def _fail(self, reason: str) -> None:
        """An error of this worker: the job goes on without it, unless it is a UserError, which all workers have."""
        if isinstance(sys.last_value, UserError):
            super()._fail(reason)
        else:
            self.drop_out()
