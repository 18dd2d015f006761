"""Emulated computing: a worker's steps take as long as on a slower device, or some steps take longer (stragglers).

The computing of a step is its forward and backward pass and the worker's own part of the optimizer: the time of the
training thread without its waits for the kvstore. With emulation it takes

    max(own, --emulate-step + --emulate-sample x SAMPLES) x FACTOR

seconds. FACTOR is that of --stragglers if this step was drawn, times that of --slow-worker. SAMPLES is the number of
this worker's samples in the step. The worker sleeps between the forward pass, which has waited for the weights, and the
backward pass, which sends the gradients. So the weights are as old, and the gradients as late, as on a device that
needs this time. The time of the backward pass is not known yet; the shortest of the last few is used in its place. If
the backward pass takes longer than that, the step is too long by the difference; the first step is too long by a whole
backward pass.

Differences to a slower device: gradients are sent during the real backward pass only, so the transfer does not overlap
with the emulated part. The processor is free while a worker sleeps. Reading and augmenting images, tests and snapshots
take their real time.

The draws depend on (seed, rank, step) only. So they are the same in every run, with any number of workers, with every
kvstore, and when a run resumes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dmltrain.base import random_bits
from dmltrain.kvstore.base import KVStore
from dmltrain.options import Options

PASSES = 5  # the next backward pass is expected to take as long as the shortest of so many


@dataclass(frozen=True)
class Slowness:
    """What the options ask of one worker: the least time of a step, `seconds` and `per_sample` for each sample, and how
    often it takes longer."""

    seconds: float
    probability: float  # of a straggling step
    factor: float  # of a straggling step
    always: float  # the factor of all steps of this worker
    seed: int
    rank: int
    per_sample: float = 0.0

    def straggles(self, iteration: int) -> bool:
        """Whether this worker's step of this number (counted over the whole run, from 0) was drawn."""
        if self.probability == 0.0:
            return False
        (word,) = random_bits.words_from(iteration, 1, self.seed, self.rank, random_bits.STRAGGLERS)
        return int(word) < self.probability * 2**64

    def least(self, samples: int) -> float:
        """The least time of a step with so many samples of this worker, s, without factors."""
        return self.seconds + self.per_sample * samples

    def target(self, iteration: int, samples: int = 0) -> Callable[[float], float]:
        """A function: the real seconds of a step with so many samples -> the seconds that it must take."""
        factor = self.always * (self.factor if self.straggles(iteration) else 1.0)
        return lambda own: max(own, self.least(samples)) * factor

    def mean(self, own: float, samples: int = 0) -> float:
        """The expected seconds of a step that takes `own` seconds on this machine."""
        return max(own, self.least(samples)) * self.always * (1.0 + self.probability * (self.factor - 1.0))


def slowness(options: Options, rank: int) -> Slowness | None:
    """None where nothing is emulated."""
    probability, factor = options.stragglers or (0.0, 1.0)
    slow, always = options.slow_worker or (rank, 1.0)
    if slow != rank:
        always = 1.0
    if not (options.emulate_step or options.emulate_sample) and probability == 0.0 and always == 1.0:
        return None
    return Slowness(options.emulate_step, probability, factor, always, options.seed, rank, options.emulate_sample)


def describe(options: Options) -> list[str]:
    """The line of the log; none where nothing is emulated."""
    least = [f"{options.emulate_step:g} s"] if options.emulate_step else []
    least += [f"{options.emulate_sample:g} s for each sample of the worker"] if options.emulate_sample else []
    parts = [f"each step takes at least {' and '.join(least)}"] if least else []
    if options.stragglers:
        probability, factor = options.stragglers
        parts.append(f"with a probability of {100 * probability:g} % a worker's step takes {factor:g} times as long")
    if options.slow_worker:
        rank, factor = options.slow_worker
        parts.append(f"each step of worker {rank} takes {factor:g} times as long")
    return [f"Computing is emulated: {'; '.join(parts)}"] if parts else []


class SlowPace:
    """Makes a worker's steps slow; see backends.backend.Pace. `waited()`: seconds that the training thread has waited
    for the kvstore so far."""

    def __init__(
        self,
        slow: Slowness,
        waited: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slow, self._waited, self._clock, self._sleep = slow, waited, clock, sleep
        self._passes: deque[float] = deque(maxlen=PASSES)  # s, the own time of the last backward passes
        self._batches = 1
        self._target = slow.target(0)
        self._mark = 0.0

    def step(self, iteration: int, batches: int, samples: int = 0) -> None:
        """The next `batches` batches make this step, with `samples` samples of this worker. Each batch takes an equal
        share of the step's time."""
        self._target, self._batches = self._slow.target(iteration, samples), batches

    def begin(self) -> None:
        self._mark = self._own()

    def between(self) -> None:
        own = self._own() - self._mark + min(self._passes, default=0.0)
        self._sleep(max(0.0, self._target(own * self._batches) / self._batches - own))
        self._mark = self._own()

    def end(self) -> None:
        self._passes.append(self._own() - self._mark)

    def _own(self) -> float:
        """A clock that stands still while the thread waits for the kvstore."""
        return self._clock() - self._waited()


def pace(options: Options, store: KVStore) -> SlowPace | None:
    """The pace of this worker; None where nothing is emulated."""
    slow = slowness(options, store.rank)
    return SlowPace(slow, lambda: store.waits.total if store.waits else 0.0) if slow else None
