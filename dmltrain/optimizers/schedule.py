"""The learning rate of each step: a policy of MXNet or Caffe, and a warm-up. Pure.

A step is one update of the weights, Caffe's iteration. Policies count epochs or steps, both from 0. A new policy is a
row in POLICIES. Sources: `_get_lr_scheduler` in MXNet's example/image-classification/common/fit.py, LBSGD in its
optimizer.py, and `GetLearningRate` in Caffe's src/caffe/solvers/sgd_solver.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

POLICY = "multistep"
FACTOR = 0.1  # MXNet's
LARGE_BATCH_WARMUP = 5.0  # epochs, MXNet's with lbsgd
LARS = "lars"  # a warm-up strategy that is no warm-up: the optimizer scales each layer's rate
# The completed fraction p of the warm-up, 0 < p <= 1 -> the fraction of the learning rate.
WARMUPS = {"linear": lambda p: p, "power2": lambda p: p * p, "sqrt": math.sqrt}


@dataclass(frozen=True)
class Schedule:
    """learning rate = base * policy's fraction * warm-up's multiplier.

    During the first `warmup_epochs` the multiplier rises from `low` to `high`, which the last step of the warm-up
    reaches. `marks` are the steps at which the rate changes, if the policy has them: `step_iterations`, else
    `step_epochs`. `batches` is the number of steps in an epoch, `total` in the whole run.
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

    def __call__(self, epoch: int, batch: int) -> float:
        """The learning rate of step `batch` in `epoch`, both from 0."""
        iteration = epoch * self.batches + batch
        policy = POLICIES[self.policy]
        by_epoch = not self.step_iterations if policy.marked else self.by == "epoch"
        return self.base * policy.fraction(self, epoch if by_epoch else iteration) * self._multiplier(iteration + 1)

    def _multiplier(self, done: int) -> float:
        """`done`: steps, including this one."""
        length = self.warmup_epochs * self.batches
        return self.low + (self.high - self.low) * WARMUPS[self.warmup](done / length) if done < length else self.high

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


def _multistep(schedule: Schedule, t: int) -> float:
    """A factor of 1 or more disables the steps, as in MXNet's fit.py."""
    return schedule.factor ** sum(t >= mark for mark in schedule.marks) if schedule.factor < 1.0 else 1.0


def _pow(schedule: Schedule, t: int) -> float:
    """MXNet's PolyScheduler, which counts steps from 1."""
    return (1.0 - (t + 1) / schedule.end) ** schedule.power if schedule.factor < 1.0 else 1.0


def _sigmoid(schedule: Schedule, t: int) -> float:
    exponent = -schedule.factor * (t - schedule.marks[0])
    return 1.0 / (1.0 + math.exp(exponent)) if exponent < 700 else 0.0  # math.exp overflows at 710


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
    ),
    "pow": Policy("(1 - (t + 1) / total) ^ power, MXNet's `--lr-step-epochs powX`", _pow, needs=("lr_power",)),
    "sigmoid": Policy("1 / (1 + e ^ (-factor * (t - mark)))", _sigmoid, marked=True, needs=("lr_factor",)),
}
