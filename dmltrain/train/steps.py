"""The steps of an epoch on this worker, the same loop in plain and in elastic jobs: see `Rounds` in rounds/plain.py.

All workers stop where a snapshot, a test or an exchange about signals is due (`next_stop`). Exactly the samples before
a stop are used then, also if workers were lost, joined or left. So a run that goes on from a snapshot uses each sample
that is left once, also with other workers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from math import sqrt

import numpy as np

from dmltrain.audit import sample_checksum
from dmltrain.base.errors import Unreadable, UserError
from dmltrain.base.random_bits import seed_of
from dmltrain.data.assignment.parts import Part
from dmltrain.data.batches import Batch, TrainBatches
from dmltrain.data.broken import TooManyBroken
from dmltrain.data.images import mixing
from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.mixing import Mixing
from dmltrain.logs import record
from dmltrain.rounds.plain import PlainRounds, Rounds
from dmltrain.rounds.rates import Rates
from dmltrain.train import elastic, loading
from dmltrain.train.meter import Meter
from dmltrain.train.plan import Position
from dmltrain.train.run import Run


class Steps:
    """The steps of epoch `epoch` from number `first` on. rate: the last learning rate."""

    def __init__(self, run: Run, epoch: int, first: int, meter: Meter) -> None:
        self._run, self._epoch, self._meter, self._last = run, epoch, meter, run.plan.steps_of(epoch)
        run.snapshot_signal.begin(first)
        begin = elastic.rounds if run.member else plain_rounds
        self._rounds: Rounds = begin(run, epoch, first, next_stop(run, epoch, first))
        self._number = self._rounds.count * run.plan.group  # of the next batch
        self._rates, self.rate = Rates(run.log, run.options.batch), 0.0
        self._part: Part | None = None
        self._batches: Generator[Batch, None, None] | None = None  # of `_part`, those to come
        # Of the present step: its number, its samples, and the sum of the checksums of all members that made it.
        self._present, self._dealt, self._checksum = first, 0, np.zeros(sample_checksum.SIZE)

    def stops(self) -> Iterator[tuple[int, bool]]:
        """Make the steps. At each stop before the epoch's last step yield the next step, and whether a signal asks for
        a snapshot."""
        try:
            while (step := self._until_stop()) < self._last:
                yield step, self._run.snapshot_signal.comes(step)
                self._rounds.go_on(next_stop(self._run, self._epoch, step))
        finally:
            self._close()

    def _until_stop(self) -> int:
        goes_on = self._part is not None
        while not self._rounds.is_over():
            if not goes_on:
                self._seed()
            self._until_moved()
            goes_on = False
        return self._rounds.stop

    def _seed(self) -> None:
        """From the second view on, this worker's random numbers follow from the view."""
        if (member := self._run.member) and member.view.number > 1:
            self._run.trainer.seed(self._run.options.seed, self._epoch, member.store.member, member.view.number)

    def _until_moved(self) -> None:
        """Train until the steps to come are other ones than those for which batches are prepared, or to a stop."""
        part = self._prepare()
        assert self._batches
        for batch in self._batches:
            if self._train(batch, part.batches_of(batch.index // part.group)):
                return

    def _prepare(self) -> Part:
        """The rounds to come on this worker. Their batches are prepared in advance."""
        run, part = self._run, self._rounds.part()
        if run.member and run.plan.group > 1:
            part = part.in_batches(run.options.batch_size)
        if part is not self._part:
            self._close()
            self._part = part
            samples = loading.train_samples(run.options, run.dataset, self._epoch)
            batches = iter(TrainBatches(samples, part, run.threads, run.options.prefetch_bytes))
            self._batches = _read(batches) if run.member else batches
        return part

    def _close(self) -> None:
        if self._batches:
            self._batches.close()

    def _train(self, batch: Batch, of_round: range) -> bool:
        """Train on this batch of a round. Returns whether the batches to come are other ones."""
        if batch.index == of_round.start:
            if self._rounds.has_moved:
                return True
            self._begin(len(of_round))
        ends = batch.index + 1 == of_round.stop
        mixing = self._mixing(batch, batch.index - of_round.start)
        self._seed_skips(batch.index - of_round.start)
        if ends:
            self._step(batch, mixing)
        else:
            self._run.trainer.accumulate(batch.images, batch.labels, self._dealt, mixing)
        if self._number and self._number % self._run.options.disp_batches == 0:
            self._meter.show(self._number)
        self._number += 1
        return ends and self._end()

    def _begin(self, batches: int) -> None:
        """A round of so many batches begins."""
        run, rounds, self._present = self._run, self._rounds, self._rounds.step
        step = self._present
        self.rate = self._rates.factor(rounds.assignment) * run.schedule(self._epoch, step)
        positions, self._dealt = rounds.begin()
        if run.pace:
            run.pace.step(run.plan.iteration(Position(self._epoch, step)), batches, len(positions))

    def _mixing(self, batch: Batch, number: int) -> Mixing | None:
        """Of the batch with this number in its round: the same on all workers, and in each repetition."""
        seed = seed_of(self._run.options.seed, self._epoch, int(self._present), number)
        return mixing.drawn(self._run.options, batch.images.shape[2:], RandomNumbers(seed))

    def _seed_skips(self, number: int) -> None:
        """Which samples skip layers follows from the step, so that it is the same in a repetition."""
        if (run := self._run).network.skips_samples:
            run.trainer.seed(run.options.seed, self._epoch, run.store.member, int(self._present), number)

    def _step(self, batch: Batch, mixing: Mixing | None) -> None:
        """Make the round's step, with its last batch. It may be completed in a later view."""
        own, trainer = self._rounds.checksum, self._run.trainer
        committed = trainer.train_step(batch.images, batch.labels, self._dealt, self.rate, own, mixing)
        known = own if committed is None else committed
        if known is not None:
            self._checksum = known

    def _end(self) -> bool:
        """The step was made. Returns whether the batches to come are other ones."""
        run, rounds = self._run, self._rounds
        has_moved = rounds.end(self._checksum)
        if interval := run.options.monitor:
            before, now = (run.plan.iteration(Position(self._epoch, step)) for step in (self._present, rounds.step))
            if (times := now // interval) > before // interval:
                log_sizes(run, times * interval)
        return has_moved


def next_stop(run: Run, epoch: int, step: int) -> int:
    """The first step of the epoch after `step` before which a snapshot, a test or an exchange about signals is due, or
    its end."""
    iteration = run.plan.iteration(Position(epoch, step))
    intervals = filter(None, (run.options.snapshot, run.options.test_interval))
    due = [run.snapshot_signal.next_stop(step), *(step + interval - iteration % interval for interval in intervals)]
    return int(min(run.plan.steps_of(epoch), *due))


def plain_rounds(run: Run, epoch: int, first: int, stop: int) -> PlainRounds:
    plan, part = run.plan, run.parts.part(run.store.rank, run.options.seed, epoch)
    rounds = replace(part, group=plan.group).between(first, plan.steps_of(epoch))
    return PlainRounds(rounds, partial(_total, run) if run.store.kvstore_type.steps_together else None, first, stop)


def _total(run: Run, step: int) -> int:
    """Number of all workers' samples in a step of a plain job."""
    return sum(sum(run.parts.step_sizes(batch)) for batch in run.plan.batches_of(step))


def _read(batches: Iterator[Batch]) -> Generator[Batch, None, None]:
    """The batches. If this worker cannot read its data, the fault is its host's: the job goes on without the worker.
    More broken records than --skip-broken allows are a mistake of the user."""
    try:
        yield from batches
    except TooManyBroken:
        raise
    except UserError as error:
        raise Unreadable(f"{error}; the job goes on without this worker") from error


def log_sizes(run: Run, iteration: int) -> None:
    """--monitor: log the sizes of the network's arrays after this step, in the network's order, as MXNet's Monitor
    prints them (python/mxnet/monitor.py): each one's norm divided by the root of its number of elements."""
    run.trainer.settle()
    arrays = {common_array.name: common_array.read for common_array in run.trainer.common_arrays()}
    for parameter in (*run.network.parameters(), *run.network.auxiliary()):
        array = arrays[parameter.name]()
        size = float(np.linalg.norm(array.astype(np.float64).ravel())) / sqrt(array.size)
        run.log.info(record.array_size(iteration, parameter.name, size))
