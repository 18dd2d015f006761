"""A worker of an elastic job, from the moment from which the job can go on without it. The members of a view make each
step together (sync_steps.py), or steps of their own (async_steps.py); this may change from view to view.

It knows no trainer and no options: train/elastic.py makes the rounds of the training programs with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import Logger
from pathlib import Path
from typing import Any

from dmltrain.audit.journal import Journal
from dmltrain.audit.views_file import JobFacts
from dmltrain.base import env
from dmltrain.data.assignment.parts import Epoch
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.view import EQUAL, Balancing, View
from dmltrain.kvstore.worker.clocks import Clocks
from dmltrain.kvstore.worker.elastic_ops import ElasticOps
from dmltrain.rounds.async_steps import AsyncSteps
from dmltrain.rounds.poison_samples import PoisonSamples
from dmltrain.rounds.sync_steps import SyncSteps
from dmltrain.version import __version__

SKIPPED = 2  # the first rounds of a view: memory for parts of another size, and samples that are read anew
ROUNDS = 3  # of a report, at least
SECONDS = 2.0  # between two reports, at least

Give = Callable[[dict[str, Any]], bytes]
Take = Callable[[bytes, bool], Mapping[str, Any]]


class SpeedMeter:
    """How fast a member computes its samples, as --balance needs it. Pure.

    What counts is the time from when a batch is there until the last of its gradients has been pushed. So neither waits
    for other workers nor the reading of samples count. A report is the median of some rounds, so that one that was held
    up does not matter.
    """

    def __init__(self) -> None:
        self._view = 0
        self._skipped = 0
        self._since = 0.0  # s, the last report
        self._speeds: list[float] = []  # since then, samples per second

    def round(self, view: int, samples: int, seconds: float, now: float) -> float | None:
        """A round of this view has taken so many seconds for its samples. Returns a speed to report, samples per
        second, or None."""
        if view != self._view:
            self._view, self._skipped, self._since = view, 0, now
            self._speeds.clear()
        if self._skipped < SKIPPED:
            self._skipped += 1
            return None
        if samples and seconds > 0.0:
            self._speeds.append(samples / seconds)
        if len(self._speeds) < ROUNDS or now - self._since < SECONDS:
            return None
        speed, self._since = statistics.median(self._speeds), now
        self._speeds.clear()
        return speed


class Member:
    """`job`: what a replay must have in common with the recorded job. `audit`: the folder of the audit; None: no audit.
    `give(place)` returns the state of training as bytes, with the `place` in the epoch at which the job is.
    `take(bytes, only_step)` continues from such bytes and returns the place; with `only_step` it takes only what a step
    changes: the weights and the optimizer's state. `has_statistics`, to be set before `start`: whether the network has
    batch-norm statistics. It is the Training of its store."""

    has_statistics = False

    def __init__(self, store: KVStore, log: Logger, job: JobFacts, audit: str | None, give: Give, take: Take) -> None:
        assert isinstance(store.ops, ElasticOps)
        self.store, self.ops, self._log, self._job = store, store.ops, log, job
        self.journal = Journal(log, store.member, job, Path(audit) if audit else None, store.is_alone)
        self.poison_samples = PoisonSamples()
        self.before: View | None = None  # the last view that was entered
        self.order: Epoch | None = None  # of the epoch whose samples this worker trains
        self._speed: SpeedMeter | None = None
        self.steps: SyncSteps | AsyncSteps = self._new_steps()
        self._give, self._take = give, take

    @property
    def steps_together(self) -> bool:
        """Whether the members make each step together."""
        return self.store.kvstore_type.synchronous

    def _new_steps(self) -> SyncSteps | AsyncSteps:
        return SyncSteps(self) if self.steps_together else AsyncSteps(self, self._log)

    @property
    def view(self) -> View:
        """The view in which the last op was completed. Only after `start`."""
        view = self.ops.view
        assert view is not None
        return view

    def start(
        self, facts: Mapping[str, Any], replay: Callable[[JobFacts], tuple[View, ...]], balance: Balancing = EQUAL
    ) -> None:
        """From now on the job goes on without workers that are lost. Waits for all workers; a replacement waits until
        it has joined (`journal.joins`). `facts`: what a replacement must have in common with the others, besides the
        job. `replay(job)`: the views to go through. `balance`: how samples follow the speed of workers. Raises
        UserError, JobLost, MembershipEnded."""
        self._speed = SpeedMeter() if balance.batch else None
        self._log.info(
            "Elastic: the job goes on when workers are lost, while at least %d are left (--min-workers); "
            "each worker sends its own gradients to the servers",
            env.read().elastic,
        )
        views = replay(self._job) if self.store.member == 0 and not self.store.is_alone else ()
        facts = {"version": __version__, **facts, **vars(replace(self._job, options=None))}
        self.ops.start(self, facts, views, balance, self._why_fixed(balance))

    def _why_fixed(self, balance: Balancing) -> str:
        """Why the kvstore of this job must stay synchronous; empty if it can change."""
        for name, given in {"--balance": balance.batch, "--batch per-worker": self._job.each}.items():
            if given:
                return f"{name} needs steps that all workers make together: start the job without it"
        return ""

    def wait_to_return(self) -> None:
        """Call this after MembershipEnded: wait for a later view of the replay that has this worker. Raises JobLost,
        and MembershipEnded if there is none."""
        self.journal.lacks_state = True
        self.ops.views.wait_to_return()

    def measured(self, view: View, samples: int, seconds: float) -> None:
        """This worker has computed a round of this view for `seconds`, without its waits for others."""
        if not self._speed:
            return
        if speed := self._speed.round(view.number, samples, seconds, time.perf_counter()):
            self.ops.report_speed(view, speed)

    def close(self) -> None:
        """Call this last, before this worker leaves the job."""
        self.journal.close(self.ops.done)

    # -- Training -------------------------------------------------------------------------------------------------

    def give_state(self) -> bytes:
        return self._give({**self.steps.place(), "suspects": self.poison_samples.state()})

    def take_state(self, content: bytes) -> None:
        state = self._take(content, False)
        self.journal.take_state(state)
        self.poison_samples = PoisonSamples.of_state(state["suspects"])

    def take_step(self, content: bytes) -> None:
        self._take(content, True)
        self._log.info("The step of this worker was made by the others, after a server was lost")

    def state_is_shared(self) -> None:
        self.steps.state_is_shared()

    def take_clocks(self, clocks: Clocks) -> None:
        self.steps.take_clocks(clocks)

    def begun(self) -> bool:
        return self.steps.begun

    def between_epochs(self) -> bool:
        return self.journal.between_epochs

    def entered(self, view: View, missed: bool) -> None:
        self.journal.entered(view, missed)
        if isinstance(self.steps, SyncSteps) != self.steps_together:
            self.steps = self._new_steps()
            self.journal.assign_rest(self.ops.clock)
        self.steps.note_failures(view)
        if view.number > 1 and self.ops.keeps_residuals:
            self._log_residuals(view)
        if self.has_statistics:
            self._log_statistics(view)
        self.before = view

    def _log_residuals(self, view: View) -> None:
        """Log what happens to the compression's residuals."""
        handed = set(self.before.hands_over) if self.before and self.before.base < view.base else set()
        if lost := [str(worker.member) for worker in view.lost if worker.member not in handed]:
            self._log.warning("Compression: the residuals of these workers are lost: %s", ", ".join(lost))
        if view.hands_over:
            who = ", ".join(map(str, view.hands_over))
            self._log.info("Compression: worker %d takes over the residuals of workers %s", view.receiver, who)
        self._log.info("Compression: the servers' residuals begin at zero in view %d", view.number)

    def _log_statistics(self, view: View) -> None:
        """Log that the batch-norm statistics of members that are gone are lost."""
        if gone := sorted(worker.member for worker in (*view.lost, *view.left)):
            who = f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
            self._log.warning(
                "Batch-norm statistics of %s since the last merge are lost; weights do not need them", who
            )

    def blamed(self, error: str) -> str:
        """An earlier worker has failed at the same sample."""
        epoch = self.journal.epoch
        if self.journal.assignment is None or self.order is None or self.order.number != epoch:
            return ""
        reason = self.poison_samples.blamed(epoch, self.steps.own_positions(), error, self.order.samples_at)
        if reason:
            self._log.error("%s", reason)
        return reason
