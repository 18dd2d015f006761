"""`dmltrain.loader`: the batches of each epoch, dealt out to the present workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dmltrain.audit import sample_checksum
from dmltrain.base import random_bits
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.assignment.parts import Epoch, Part, Shared
from dmltrain.rounds.plain import Rounds

if TYPE_CHECKING:
    from dmltrain.api.state import State

NOT_OPTIONS = ("shuffle", "sampler", "batch_sampler", "generator")  # of torch's DataLoader


class Loader:
    """See dmltrain.loader. count: how many samples of the present batch count in its step; 0 for a batch that replaces
    missing samples of this worker. step_ends: whether this batch is the last one of its step."""

    def __init__(
        self,
        state: State,
        dataset: Any,
        batch_size: int,
        micro_batches: int,
        seed: int,
        drop_last: bool,
        options: dict[str, Any],
    ) -> None:
        _check({"batch_size": (batch_size, 1), "micro_batches": (micro_batches, 1), "seed": (seed, 0)}, options)
        from dmltrain.backends.torch import loop

        self._state, self.dataset, self.batch_size, self.seed, self.count = state, dataset, batch_size, seed, 0
        self.micro_batches, self.step_ends = micro_batches, True
        size, workers = loop.length(dataset), state.workers_at_start
        batch = batch_size * micro_batches * workers
        samples = size // batch * batch if drop_last else size
        if not samples:
            raise UserError(
                f"dmltrain.loader: the data set has {size} samples, which is less than a step of {workers} workers "
                f"({batch}): choose a smaller batch_size, or leave drop_last out"
            )
        self.shared = Shared(size, workers, batch_size * micro_batches, samples)
        self._batches: list[list[int]] = []  # of the indices of samples, for torch's loader
        self._loader = loop.Batches(dataset, self._batches, options)
        self._changed: bool | None = None  # the result of Rounds.end; None: the round's step has not been made
        state.take_loader(self)

    @property
    def batch(self) -> int:
        """Samples of a step, of all workers."""
        return self.shared.batch_size * self.shared.num_workers

    def __len__(self) -> int:
        """Steps of an epoch. An epoch in which workers are lost or join may have more."""
        return self.shared.steps

    def at(self, epoch: int) -> Epoch:
        """The samples of this epoch, in their order."""
        return Epoch(self.shared, self.seed, epoch)

    def __iter__(self) -> Iterator[Any]:
        """Raises UserError outside of a loop over `State.epochs`."""
        state = self._state
        with state.reading() as rounds:
            epoch = self.at(state.epoch)
            while not rounds.is_over():
                yield from self._until_changed(rounds, epoch)
        state.settle()

    def _until_changed(self, rounds: Rounds, epoch: Epoch) -> Iterator[Any]:
        """The batches until a round is completed by other members, or to the epoch's end. torch's loader prepares
        batches of later rounds in advance; they are dropped if the members change."""
        state = self._state
        planned = self._indices(rounds.part(), epoch)
        self._batches[:] = [batch for batches_of_round in planned for batch in batches_of_round]
        self._loader.seed(random_bits.seed_of(self.seed, state.epoch, state.member, state.view_number))
        batches = iter(self._loader)
        for batches_of_round in planned:
            first = next(batches)
            if rounds.has_moved:  # the loop's body has entered a view, by something else than a step
                return
            positions, dealt = rounds.begin()
            state.optimizer.rate_factor = state.rate_factor(rounds)
            sizes = [len(batch) for batch in batches_of_round]
            if len(positions):
                yield from self._round(rounds, sizes, itertools.chain([first], batches), positions, dealt)
            elif not state.steps_alone or not dealt:
                with state.unchanged_statistics():
                    yield from self._round(rounds, [0], iter([first]), positions, dealt)
            else:
                self._skip(rounds, positions, dealt)
            if self._changed:
                return

    def _round(
        self, rounds: Rounds, sizes: list[int], batches: Iterator[Any], positions: Array, dealt: int
    ) -> Iterator[Any]:
        """One round: batches of these `sizes`. The loop's body makes the step with the last one."""
        optimizer, own = self._state.optimizer, rounds.checksum
        self._changed, before = None, 0
        for number, self.count in enumerate(sizes, 1):
            self.step_ends = number == len(sizes)
            if before:  # all gradients of a step get the last batch's weight: see _weight
                optimizer.rescale(before / self.count)
            optimizer.weigh(self._weight(self.count, len(positions), dealt), more=not self.step_ends)
            if self.step_ends and own is not None:
                optimizer.round(dealt, own, lambda checksums: self._step_made(rounds, len(positions), checksums))
            yield next(batches)
            before = self.count
        if own is None:  # the members never change, or meet only after a later step
            self._step_made(rounds, len(positions), sample_checksum.of(positions))
        elif self._changed is None and not optimizer.skip_round():
            raise UserError(
                "the loop over dmltrain.loader has not called optimizer.step() for a batch, and the other workers wait "
                "for it: in an elastic job call it once for each batch (with micro-batches, where loader.step_ends)"
            )

    def _skip(self, rounds: Rounds, positions: Array, dealt: int) -> None:
        """A local step for which this worker has no samples. Perhaps the others wait for its part of the average."""
        own = rounds.checksum
        if own is None:
            self._step_made(rounds, 0, sample_checksum.of(positions))
            return
        self._state.optimizer.round(dealt, own, lambda checksums: self._step_made(rounds, 0, checksums))
        self._state.optimizer.skip_round()

    def _step_made(self, rounds: Rounds, samples: int, checksums: Array) -> None:
        self._changed = rounds.end(checksums)
        self._state.add_seen(samples)

    def _weight(self, count: int, own: int, dealt: int) -> float:
        """The weight for DistributedOptimizer.weigh: this worker has `own` samples of the step, and `count` of them are
        in the last batch. Gradients of earlier batches were rescaled to a batch of `count`. The weight is exactly 1 if
        all workers have equally many samples in one batch each."""
        if not self._state.steps_together:
            return count / own if own else 0.0
        return count * self.shared.num_workers / dealt

    def _indices(self, part: Part, epoch: Epoch) -> list[list[list[int]]]:
        """The samples of each batch of each round. In a round without samples of this worker the epoch's first ones
        take their place: so the loop's body makes equally many steps on all workers, and all change the learning rate
        alike."""
        bounds: Sequence[tuple[int, int]] = [part.bounds(step) for step in range(part.steps)]
        rounds = [part.order[start:stop].tolist() for start, stop in bounds]
        if not all(rounds):
            first = epoch.samples_at(np.arange(min(self.batch_size, self.shared.samples))).tolist()
            rounds = [samples or first for samples in rounds]
        size = self.batch_size if self.micro_batches > 1 else max(map(len, rounds), default=1)
        return [[samples[start : start + size] for start in range(0, len(samples), size)] for samples in rounds]


def _check(numbers: dict[str, tuple[Any, int]], options: dict[str, Any]) -> None:
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"dmltrain.loader: {name}={value!r}, expected a whole number of at least {least}")
    for name in NOT_OPTIONS:
        if name in options:
            raise UserError(
                f"dmltrain.loader: {name} is not an option, because the order of samples follows from seed and epoch: "
                "leave it out"
            )
