"""A worker of an elastic job, from when the job can go on without it: its journal, and its rounds of an epoch.

It knows no trainer and no options: rounds.py makes the rounds of the training programs with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from logging import Logger
from pathlib import Path
from typing import Any

import dmltrain
from dmltrain import env
from dmltrain.arrays import Array
from dmltrain.audit.journal import Journal
from dmltrain.audit.views_file import Job
from dmltrain.data.deal import Dealing
from dmltrain.data.parts import Epoch, Part
from dmltrain.elastic.speed import OwnSpeed
from dmltrain.elastic.suspects import Suspects
from dmltrain.kvstore.view import EQUAL, Balancing, Lost, View
from dmltrain.kvstore.worker.elastic_store import ElasticKVStore

Give = Callable[[dict[str, Any]], bytes]
Take = Callable[[bytes, bool], Mapping[str, Any]]


class Member:
    """`job`: what a replay has in common. `audit`: the folder of the audit, None without. `give(place)`: the state of
    training, with the `place` where the job is, as bytes; `take(bytes, own)` goes on from such bytes and returns the
    place. With `own` it takes only what a step changes: the weights and the optimizer's state. `has_statistics`, to be
    set before `arm`: whether the network has batch-norm statistics."""

    _journal: type[Journal] = Journal
    has_statistics = False

    def __init__(self, store: ElasticKVStore, log: Logger, job: Job, audit: str | None, give: Give, take: Take) -> None:
        self.store, self._log, self._job = store, log, job
        self.journal: Journal = self._journal(log, store.member, job, Path(audit) if audit else None, store.is_alone)
        store.on_enter, store.on_shared, store.blamed = self._entered, self._shared, self._blamed
        store.give_state = lambda: give({**self._place(), "suspects": self._suspects.state()})
        store.take_state = lambda content: self._take(take(content, False))
        store.take_step = lambda content: self._took_step(take(content, True))
        self._suspects = Suspects()
        self._before: View | None = None  # the last view that was entered
        self.order: Epoch | None = None  # of the epoch whose samples this worker trains
        self._speed: OwnSpeed | None = None

    def _place(self) -> dict[str, Any]:
        """Where the job is, for new members."""
        return self.journal.state()

    @property
    def view(self) -> View:
        """The one in which the last op was completed. There is one since `arm`."""
        view = self.store.view
        assert view is not None
        return view

    def arm(
        self, facts: Mapping[str, Any], replay: Callable[[Job], tuple[View, ...]], balance: Balancing = EQUAL
    ) -> None:
        """From now on the job goes on without workers that are lost. Waits for all workers, or as a replacement until
        it has joined: `journal.joins`. `facts`: what a replacement must have in common with the others, beside the job.
        `replay(job)`: the views to go through. `balance`: how samples follow the speed of workers. Raises UserError,
        JobLost, Dismissed."""
        self._speed = OwnSpeed() if balance.batch else None
        self._log.info(
            "Elastic: the job goes on when workers are lost, while at least %d are left (--min-workers); "
            "each worker sends its own gradients to the servers",
            env.read().elastic,
        )
        views = replay(self._job) if self.store.member == 0 and not self.store.is_alone else ()
        self.store.arm({"version": dmltrain.__version__, **facts, **vars(self._job)}, views, balance)

    def wait_to_return(self) -> None:
        """After Dismissed: go on in a later view of the replay that has this worker again. Raises Dismissed if there is
        none, JobLost."""
        self.journal.lacks_state = True
        self.store.wait_to_return()

    def measured(self, view: View, samples: int, seconds: float) -> None:
        """A round of this view has taken this worker so many seconds, without its waits for others."""
        if not self._speed:
            return
        if speed := self._speed.round(view.number, samples, seconds, time.perf_counter()):
            self.store.report_speed(view, speed)

    def close(self) -> None:
        """The last thing before this worker leaves the job."""
        self.journal.close(self.store.done)

    def _take(self, state: Mapping[str, Any]) -> None:
        """Go on where another member is."""
        self.journal.take_state(state)
        self._suspects = Suspects.of_state(state["suspects"])

    def _took_step(self, place: Mapping[str, Any]) -> None:
        self._log.info("The step of this worker was made by the others, after a server was lost")

    def _entered(self, view: View, missed: bool) -> None:
        self.journal.entered(view, missed)
        self._suspect(view)
        if view.number > 1 and self.store.keeps_residuals:
            self._say_residuals(view)
        if self.has_statistics:
            self._say_statistics(view)
        self._before = view

    def _suspect(self, view: View) -> None:
        """The samples at which members have failed."""
        if dealing := self.journal.dealing:
            for each in (lost for lost in view.lost if lost.failed):
                self._suspects.add(self.journal.epoch, self._in_hand(dealing, view, each), each.reason)

    def _say_residuals(self, view: View) -> None:
        """What becomes of the compression's residuals."""
        handed = set(self._before.hands_over) if self._before and self._before.base < view.base else set()
        if lost := [str(each.member) for each in view.lost if each.member not in handed]:
            self._log.warning("Compression: the residuals of these workers are lost: %s", ", ".join(lost))
        if view.hands_over:
            who = ", ".join(map(str, view.hands_over))
            self._log.info("Compression: worker %d takes over the residuals of workers %s", view.receiver, who)
        self._log.info("Compression: the servers' residuals begin at zero in view %d", view.number)

    def _say_statistics(self, view: View) -> None:
        """What becomes of the batch-norm statistics of those who have gone."""
        if gone := sorted(each.member for each in (*view.lost, *view.left)):
            who = f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            self._log.warning(
                "Batch-norm statistics of %s since the last merge are lost; weights do not need them", who
            )

    def _in_hand(self, dealing: Dealing, view: View, lost: Lost) -> Array:
        """The positions that the lost member was training when it failed. It may have completed the round that the
        others now make again without it; then these are its positions of the round after that."""
        if lost.failed > view.base + 1 and not dealing.finished and self._before:
            dealing = dealing.after(self._before.members, self._before.shares)
        return dealing.positions_of(lost.member)

    def _blamed(self, error: str) -> str:
        """Why this worker's error ends the job, if a worker before it has failed at the same sample; else empty."""
        dealing, epoch = self.journal.dealing, self.journal.epoch
        if dealing is None or self.order is None or self.order.number != epoch:
            return ""
        found = self._suspects.blamed(epoch, self._own_positions(dealing), error, self.order.samples_at)
        if found:
            self._log.error("%s", found)
        return found

    def _own_positions(self, dealing: Any) -> Array:
        """What this member is training."""
        own: Array = dealing.positions_of(self.store.member)
        return own

    def _shared(self) -> None:
        """All members have the state of training."""
        self.journal.postponed(self.store.done + 1, self.view)


class MemberRounds:
    """The rounds of one epoch on this worker: `begin`, the step, and `end`, until `is_over`."""

    has_moved = False  # a view begins in a round only

    def __init__(self, member: Member, epoch: int, first: int = 0) -> None:
        """`first`: the step from which an earlier job's checkpoint goes on."""
        self._member = member
        self._dealing, self._has_joined = member.journal.deal(epoch, member.view, first)
        self._part_view = member.view  # for which `part` was asked
        self._begun = member.view, 0, 0.0  # of this round: the view, this worker's samples, and when, s

    @property
    def dealing(self) -> Dealing:
        return self._dealing

    def is_over(self) -> bool:
        """Whether all samples of the epoch are used."""
        return self.dealing.finished

    @property
    def step(self) -> int:
        """The step of a plain job that is like this round; a schedule's."""
        return self.dealing.step

    @property
    def count(self) -> int:
        """How many rounds of the epoch this worker has made."""
        return self.dealing.rounds

    def part(self, epoch: Epoch) -> Part:
        """The samples of this worker from the present round on, until `end` says otherwise."""
        self._part_view, self._member.order = self._member.view, epoch
        return self.dealing.part(self._member.store.member, epoch)

    def begin(self) -> tuple[Array, int]:
        """Before the first push of the round: this worker's positions, int64, and how many were dealt to all. Those who
        wait may join. Raises JobLost."""
        member = self._member
        store, view = member.store, member.view
        if view.leader == store.member:
            store.admit()
        positions = self.dealing.positions_of(store.member)
        member.journal.began(store.done + 1, view, positions)
        self._begun = view, len(positions), time.perf_counter()
        return positions, self.dealing.round.dealt

    def end(self, receipts: Array) -> bool:
        """The step was made; `receipts`: the sum of all members', float64 (3,). Returns whether the rounds to come are
        not those of the last `part`."""
        member, view = self._member, self._member.view
        joined, self._has_joined = self._has_joined, False  # the first round of a new member is a carried one
        if member.journal.take_missed():  # the round that follows was dealt before the view, as for the others
            return joined
        began, samples, since = self._begun
        if view is began:
            member.measured(view, samples, member.store.pushed - since)
        member.journal.committed(member.store.done, view, self.dealing.round.dealt, receipts)
        self.dealing.committed(view.members, view.shares)
        return joined or view is not self._part_view
