"""Carries out the plan with which a worker of an elastic job enters a view: see plan.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore.log import log
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker import clocks
from dmltrain.kvstore.worker.broadcast import Broadcast
from dmltrain.kvstore.worker.clocks import Clocks
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.entering import plan
from dmltrain.kvstore.worker.entering.plan import Lack, NewView, Told
from dmltrain.kvstore.worker.entering.training import NoTraining, Training
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.residual import ResidualHandover
from dmltrain.kvstore.worker.server_steps.steps import ServerSteps

SumUp = Callable[[str, Array], None]  # replaces an array by the sum of all members' arrays


class ViewEntry:
    """`sum_up`: that of Transfers. `complete()` recognises an op. `state`: what this worker still has to do.
    `training`: the program that trains. `collecting`: whether it gives its state for other workers now, and not for a
    checkpoint."""

    def __init__(
        self,
        environment: Environment,
        member: ElasticMembership,
        entries: KeyEntries,
        on_servers: ServerSteps,
        broadcast: Broadcast,
        sum_up: SumUp,
        complete: Callable[[], None],
    ) -> None:
        self._number, self._ranks = environment.index, environment.ranks
        self._member, self._progress = member, member.progress
        self._entries, self._on_servers, self._broadcast = entries, on_servers, broadcast
        self._sum_up, self._complete = sum_up, complete
        self._handing_over = ResidualHandover(environment.index, entries, broadcast)
        self.state = plan.at_start(environment.num_servers, environment.joins)
        self.training: Training = NoTraining()
        self.collecting = False
        self._new: NewView  # the one that was entered last
        self._told = Told((), (), False)  # in it, as what follows
        self._clocks: Clocks | None = None
        self._content = b""
        self._methods: dict[type[plan.Step], Callable[[Any], None]] = {
            plan.LoseStates: lambda step: on_servers.snapshots.enter(step.servers),
            plan.Divide: lambda step: entries.place(step.servers),
            plan.Connect: self._connect,
            plan.Declare: self._declare,
            plan.Acknowledge: self._acknowledge,
            plan.Tell: self._tell,
            plan.TellClocks: self._tell_clocks,
            plan.Share: self._share,
            plan.Restore: self._restore,
            plan.Commit: self._commit,
            plan.Take: self._take,
            plan.Wait: lambda step: self._progress.wait_if_held(),
            plan.Settle: self._settle,
        }

    @property
    def _view(self) -> View:
        assert self._progress.view is not None
        return self._progress.view

    @property
    def _place(self) -> int:
        """This worker's place in the view."""
        return self._view.place(self._number)

    def run(self, new: NewView) -> None:
        """Enter this view. Raises ViewChanged, JobLost; MembershipEnded if the job comes to its end meanwhile."""
        steps, self._new = plan.entry_plan(self.state, new), new
        self.state = plan.entered(self.state, new)
        self._run(steps)

    def _run(self, steps: Sequence[plan.Step]) -> None:
        for step in steps:
            self._methods[type(step)](step)
            self.state = plan.after(self.state, step)

    def _connect(self, step: plan.Connect) -> None:
        if unreachable := self._member.routes.unreachable:
            self._member.wait_for_others(unreachable)
            self._progress.begin()

    def _declare(self, step: plan.Declare) -> None:
        self._entries.declare_again()
        self._member.flush()

    def _acknowledge(self, step: plan.Acknowledge) -> None:
        if step.clock is not None:
            self._on_servers.made = step.clock
        self._on_servers.hold()

    # -- one op with several exchanges: all its barriers have the same name, which is safe, because each is released
    # before the next one is reached

    def _tell(self, step: plan.Tell) -> None:
        self._progress.begin()
        table = np.zeros((3, len(self._view.members)))
        table[:, self._place] = self.state.lacks, self._on_servers.made, self.state.restoring
        self._sum_up("who lacks the state", table)
        lacks, steps, restoring = table.astype(int).tolist()
        self._told, self._clocks = Told(tuple(lacks), tuple(steps), any(restoring)), None

    def _source(self) -> int:
        """The place of the member that sends its state."""
        if self._clocks:
            return self._view.place(self._clocks.freshest)
        if self._told.source is None:
            reason = "all workers that had the state of training were lost: start the job again"
            self._member.abort(reason)
            raise JobLost(reason)
        return self._told.source

    def _tell_clocks(self, step: plan.TellClocks) -> None:
        """The source asks the servers about members that have left."""
        source, table = self._source(), clocks.table_of(self._ranks)
        if not self.state.lacks:
            since = time.monotonic() - self._on_servers.pulled
            clocks.add_own(table, self._number, self._on_servers.made, self.training.begun(), since)
        if self._place == source:
            clocks.add_gone(table, self._on_servers.gone())
        self._sum_up("how many steps all hold", table)
        self._clocks = clocks.read(table)
        if not self.state.lacks:
            self.training.take_clocks(self._clocks)

    def _share(self, step: plan.Share) -> None:
        self._run(plan.share_plan(self.state, self._new, self._told, self._source()))

    def _restore(self, step: plan.Restore) -> None:
        own, members = self._on_servers.snapshots.of_lost(), self._view.members
        sizes = np.zeros(len(members))
        sizes[self._place] = len(own)
        self._sum_up("sizes of snapshots", sizes)
        snapshots = []
        for place in np.flatnonzero(sizes).tolist():
            values = np.frombuffer(own, np.uint8) if place == self._place else np.zeros(int(sizes[place]), np.uint8)
            self._broadcast(values, self._place == step.source, members[place])
            snapshots.append(values.tobytes())
        if self._place == step.source:
            for text in self._on_servers.restore(snapshots):
                log(text)

    def _commit(self, step: plan.Commit) -> None:
        view = self._view
        self._content = b"" if step.source is None else self._sent(step.source)
        residuals = self._handing_over.exchange(view)
        self._member.barrier()  # after it all members that lacked the state have it
        self._complete()
        self._handing_over.settle(view, residuals)
        self._on_servers.snapshots.restored()

    def _sent(self, source: int) -> bytes:
        """The state of training of the member with place `source`; empty if this worker does not lack it."""
        self.collecting = True
        try:
            content = self.training.give_state() if self._place == source else b""
        finally:
            self.collecting = False
        size = np.array([float(len(content))])
        self._sum_up("size of the state", size)
        values = np.frombuffer(content, np.uint8) if self._place == source else np.zeros(int(size[0]), np.uint8)
        self._broadcast(values, bool(self.state.lacks), self._view.members[source])
        return values.tobytes() if self.state.lacks else b""

    def _take(self, step: plan.Take) -> None:
        content, self._content = self._content, b""
        if step.lacked:
            (self.training.take_state if step.lacked == Lack.ALL else self.training.take_step)(content)
            self._member.has_state(self._view)
        self.training.state_is_shared()

    # -- after it -------------------------------------------------------------------------------------------------

    def _settle(self, step: plan.Settle) -> None:
        """Wait until all members hold the op before. Without that, a member of the next view might not know what the
        clock means that this worker now tells the servers. All members go on from the same clock, except those in the
        middle of a step, which they complete first."""
        self._progress.begin()
        self._member.barrier()
        self._complete()
        if not self.training.begun() or self._progress.ends:
            assert self._clocks  # TellClocks comes before
            self._on_servers.skip_to(self._clocks.start)
            self._on_servers.hold()
