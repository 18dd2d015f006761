"""The learning rate of each step: a policy of MXNet, Caffe or torch, and a warm-up. Pure.

A step is one update of the weights, Caffe's iteration. Policies count epochs or steps, both from 0. A new policy is a
row in POLICIES. Sources: `_get_lr_scheduler` in MXNet's example/image-classification/common/fit.py, LBSGD in its
optimizer.py, `GetLearningRate` in Caffe's src/caffe/solvers/sgd_solver.cpp, torch/optim/lr_scheduler.py
(CosineAnnealingLR, CosineAnnealingWarmRestarts, LinearLR, OneCycleLR) and timm/scheduler/cosine_lr.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

POLICY = "multistep"
FACTOR = 0.1  # MXNet's
LARGE_BATCH_WARMUP = 5.0  # epochs, MXNet's with lbsgd
PEAK, RISE, FALL = 0.3, 25.0, 1e4  # torch's pct_start, div_factor and final_div_factor of OneCycleLR
LARS = "lars"  # a warm-up strategy that is no warm-up: the optimizer scales each layer's rate
# The completed fraction p of the warm-up, 0 < p <= 1 -> the fraction of the learning rate.
WARMUPS = {"linear": lambda p: p, "power2": lambda p: p * p, "sqrt": math.sqrt}


@dataclass(frozen=True)
class Schedule:
    """learning rate = (floor + (base - floor) * policy's fraction) * warm-up's multiplier.

    During the first `warmup_epochs` the multiplier rises from `low` to `high`, which the last step of the warm-up
    reaches. With `first`, the first step's rate, the step after the warm-up reaches it. `marks` are the steps at which
    the rate changes, if the policy has them: `step_iterations`, else `step_epochs`. `batches` is the number of steps in
    an epoch, `total` in the whole run.
    """

    base: float
    batches: int
    factor: float = 1.0  # Caffe's gamma
    step_epochs: tuple[int, ...] = ()
    warmup_epochs: float = 0.0
    warmup: str = "linear"
    policy: str = POLICY
    step_iterations: tuple[int, ...] = ()
    power: float = 1.0
    by: str = "iteration"  # what policies without marks count: iteration or epoch
    total: int = 1
    low: float = 0.0
    high: float = 1.0
    floor: float = 0.0
    first: float | None = None
    prefix: bool = True  # policies that fall to the floor begin after the warm-up
    cycle_epochs: int = 0  # length of the first cycle of cosine; 0: the whole run
    cycle_factor: int = 1
    peak: float = PEAK  # of onecycle: a fraction of the run

    def __call__(self, epoch: int, batch: int) -> float:
        """The learning rate of step `batch` in `epoch`, both from 0."""
        iteration = epoch * self.batches + batch
        policy = POLICIES[self.policy]
        by_epoch = not self.step_iterations if policy.marked else self.by == "epoch"
        rate = self.floor + (self.base - self.floor) * policy.fraction(self, epoch if by_epoch else iteration)
        return rate * (self._multiplier(epoch, iteration) if policy.warms_up else self.high)

    def _multiplier(self, epoch: int, iteration: int) -> float:
        if self.first is None:
            low, done, length = self.low, iteration + 1, self.warmup_epochs * self.batches
        else:
            low, done, length = self.first / (self.base or 1.0), epoch if self.by == "epoch" else iteration, self.start
        return low + (self.high - low) * WARMUPS[self.warmup](done / length) if done < length else self.high

    @property
    def start(self) -> float:
        """The end of the warm-up, in epochs or steps as the policy counts."""
        return self.warmup_epochs * (1 if self.by == "epoch" else self.batches)

    def count(self, epochs: int) -> int:
        """So many epochs in epochs or steps, as the policy counts."""
        return epochs * (1 if self.by == "epoch" else self.batches)

    @property
    def marks(self) -> tuple[int, ...]:
        return self.step_iterations or self.step_epochs

    @property
    def end(self) -> int:
        """Epochs or steps of the whole run, as the policy counts."""
        return -(-self.total // self.batches) if self.by == "epoch" else self.total


@dataclass(frozen=True)
class Policy:
    """A row of POLICIES. `t` counts epochs or steps from 0."""

    formula: str  # for users: the fraction of --lr
    fraction: Callable[[Schedule, int], float]
    marked: bool = False  # whether --lr-step-epochs or --lr-step-iterations has its marks
    needs: tuple[str, ...] = ()  # options without a useful default
    takes: tuple[str, ...] = ()  # options that only some policies have
    warms_up: bool = True  # with the schedule's warm-up, else in its own way


def _multistep(schedule: Schedule, t: int) -> float:
    """A factor of 1 or more disables the steps, as in MXNet's fit.py."""
    return schedule.factor ** sum(t >= mark for mark in schedule.marks) if schedule.factor < 1.0 else 1.0


def _pow(schedule: Schedule, t: int) -> float:
    """MXNet's PolyScheduler, which counts steps from 1."""
    return (1.0 - (t + 1) / schedule.end) ** schedule.power if schedule.factor < 1.0 else 1.0


def _sigmoid(schedule: Schedule, t: int) -> float:
    exponent = -schedule.factor * (t - schedule.marks[0])
    return 1.0 / (1.0 + math.exp(exponent)) if exponent < 700 else 0.0  # math.exp overflows at 710


def _after_warm_up(schedule: Schedule, t: int) -> tuple[float, float]:
    """How much of the way from the warm-up's end to the run's end is done, and the length of this way."""
    first = schedule.start if schedule.prefix else 0.0
    return (t - first if t >= schedule.start else 0.0), max(schedule.end - first, 1e-9)


def _cosine(schedule: Schedule, t: int) -> float:
    done, length = _after_warm_up(schedule, t)
    if schedule.cycle_epochs:
        length = schedule.count(schedule.cycle_epochs)
        while done >= length:
            done, length = done - length, length * schedule.cycle_factor
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done / length)))


def _linear(schedule: Schedule, t: int) -> float:
    done, length = _after_warm_up(schedule, t)
    return 1.0 - min(1.0, done / length)


def _one_cycle(schedule: Schedule, t: int) -> float:
    """torch's OneCycleLR: from the first rate to the base and down to the floor, each by half a period of a cosine."""
    peak, last, span = schedule.peak * schedule.end - 1.0, schedule.end - 1, schedule.base - schedule.floor
    low = ((schedule.first or 0.0) - schedule.floor) / span if span else 1.0
    if t <= peak:
        return low + (1.0 - low) * 0.5 * (1.0 - math.cos(math.pi * (t / peak if peak else 1.0)))
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (t - peak) / (last - peak))))


POLICIES = {
    "fixed": Policy("1", lambda schedule, t: 1.0),
    "multistep": Policy("factor ^ (number of marks reached)", _multistep, marked=True),
    "step": Policy(
        "factor ^ floor(t / mark)", lambda schedule, t: schedule.factor ** (t // schedule.marks[0]), marked=True
    ),
    "exp": Policy("factor ^ t", lambda schedule, t: schedule.factor**t, needs=("lr_factor",)),
    "inv": Policy(
        "(1 + factor * t) ^ -power",
        lambda schedule, t: (1.0 + schedule.factor * t) ** -schedule.power,
        needs=("lr_factor", "lr_power"),
    ),
    "poly": Policy(
        "(1 - t / total) ^ power",
        lambda schedule, t: (1.0 - t / schedule.end) ** schedule.power,
        needs=("lr_power",),
        takes=("min_lr",),
    ),
    "pow": Policy(
        "(1 - (t + 1) / total) ^ power, MXNet's `--lr-step-epochs powX`", _pow, needs=("lr_power",), takes=("min_lr",)
    ),
    "sigmoid": Policy("1 / (1 + e ^ (-factor * (t - mark)))", _sigmoid, marked=True, needs=("lr_factor",)),
    "cosine": Policy(
        "(1 + cos(pi * t / cycle)) / 2; a cycle is the run without the warm-up, or `--lr-restart-epochs`",
        _cosine,
        takes=("min_lr", "warmup_prefix", "lr_restart_epochs", "lr_restart_factor"),
    ),
    "linear": Policy("1 - t / (total without the warm-up)", _linear, takes=("min_lr", "warmup_prefix")),
    "onecycle": Policy(
        "(1 - cos(pi * t / peak)) / 2 up to the peak, then (1 + cos(pi * (t - peak) / (total - 1 - peak))) / 2, with "
        "peak = `--lr-peak` * total - 1",
        _one_cycle,
        takes=("min_lr", "lr_peak"),
        warms_up=False,
    ),
}
