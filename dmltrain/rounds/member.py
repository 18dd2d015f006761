"""A worker of an elastic job, from when the job can go on without it. What depends on whether the members of a view
make each step together, or steps of their own, is in sync_steps.py and async_steps.py; the kvstore may
change from view to view.

It knows no trainer and no options: train/elastic.py makes the rounds of the training programs with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from logging import Logger
from pathlib import Path
from typing import Any

from dmltrain.audit.journal import Journal
from dmltrain.audit.views_file import JobFacts
from dmltrain.base import env
from dmltrain.data.assignment.parts import Epoch
from dmltrain.kvstore.view import EQUAL, Balancing, View
from dmltrain.kvstore.worker.elastic_store import ElasticKVStore
from dmltrain.rounds.async_steps import AsyncSteps
from dmltrain.rounds.speed import OwnSpeed
from dmltrain.rounds.suspects import Suspects
from dmltrain.rounds.sync_steps import SyncSteps
from dmltrain.version import __version__

Give = Callable[[dict[str, Any]], bytes]
Take = Callable[[bytes, bool], Mapping[str, Any]]


class Member:
    """`job`: what a replay has in common. `audit`: the folder of the audit, None without. `give(place)`: the state of
    training, with the `place` where the job is, as bytes; `take(bytes, own)` goes on from such bytes and returns the
    place. With `own` it takes only what a step changes: the weights and the optimizer's state. `has_statistics`, to be
    set before `arm`: whether the network has batch-norm statistics."""

    has_statistics = False

    def __init__(
        self, store: ElasticKVStore, log: Logger, job: JobFacts, audit: str | None, give: Give, take: Take
    ) -> None:
        self.store, self._log, self._job = store, log, job
        self.journal = Journal(log, store.member, job, Path(audit) if audit else None, store.is_alone)
        self.suspects = Suspects()
        self.before: View | None = None  # the last view that was entered
        self.order: Epoch | None = None  # of the epoch whose samples this worker trains
        self._speed: OwnSpeed | None = None
        self.part: SyncSteps | AsyncSteps = self._part()
        store.begun, store.on_clocks = lambda: self.part.begun, lambda clocks: self.part.told(clocks)
        store.between_epochs = lambda: self.journal.between_epochs
        store.on_enter, store.on_shared, store.blamed = self._entered, lambda: self.part.shared(), self._blamed
        store.give_state = lambda: give({**self.part.place(), "suspects": self.suspects.state()})
        store.take_state = lambda content: self._take(take(content, False))
        store.take_step = lambda content: self._took_step(take(content, True))

    @property
    def together(self) -> bool:
        """Whether the members make each step together."""
        return self.store.kvstore_type.synchronous

    def _part(self) -> SyncSteps | AsyncSteps:
        return SyncSteps(self) if self.together else AsyncSteps(self, self._log)

    @property
    def view(self) -> View:
        """The one in which the last op was completed. There is one since `arm`."""
        view = self.store.view
        assert view is not None
        return view

    def arm(
        self, facts: Mapping[str, Any], replay: Callable[[JobFacts], tuple[View, ...]], balance: Balancing = EQUAL
    ) -> None:
        """From now on the job goes on without workers that are lost. Waits for all workers, or as a replacement until
        it has joined: `journal.joins`. `facts`: what a replacement must have in common with the others, beside the job.
        `replay(job)`: the views to go through. `balance`: how samples follow the speed of workers. Raises UserError,
        JobLost, MembershipEnded."""
        self._speed = OwnSpeed() if balance.batch else None
        self._log.info(
            "Elastic: the job goes on when workers are lost, while at least %d are left (--min-workers); "
            "each worker sends its own gradients to the servers",
            env.read().elastic,
        )
        views = replay(self._job) if self.store.member == 0 and not self.store.is_alone else ()
        facts = {"version": __version__, **facts, **vars(self._job)}
        self.store.arm(facts, views, balance, self._why_fixed(balance))

    def _why_fixed(self, balance: Balancing) -> str:
        """Why this job cannot change between steps that all members make together and steps of their own."""
        for name, given in {"--balance": balance.batch, "--batch per-worker": self._job.each}.items():
            if given:
                return f"{name} needs steps that all workers make together: start the job without it"
        return ""

    def wait_to_return(self) -> None:
        """After MembershipEnded: go on in a later view of the replay that has this worker again. Raises JobLost, and
        MembershipEnded if there is none."""
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
        self.suspects = Suspects.of_state(state["suspects"])

    def _took_step(self, place: Mapping[str, Any]) -> None:
        self._log.info("The step of this worker was made by the others, after a server was lost")

    def _entered(self, view: View, missed: bool) -> None:
        self.journal.entered(view, missed)
        if isinstance(self.part, SyncSteps) != self.together:
            self.part = self._part()
            self.journal.assign_rest(self.store.clock)
        self.part.suspect(view)
        if view.number > 1 and self.store.keeps_residuals:
            self._say_residuals(view)
        if self.has_statistics:
            self._say_statistics(view)
        self.before = view

    def _say_residuals(self, view: View) -> None:
        """What becomes of the compression's residuals."""
        handed = set(self.before.hands_over) if self.before and self.before.base < view.base else set()
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

    def _blamed(self, error: str) -> str:
        """Why this worker's error ends the job, if a worker before it has failed at the same sample; else empty."""
        epoch = self.journal.epoch
        if self.journal.assignment is None or self.order is None or self.order.number != epoch:
            return ""
        found = self.suspects.blamed(epoch, self.part.own_positions(), error, self.order.samples_at)
        if found:
            self._log.error("%s", found)
        return found
