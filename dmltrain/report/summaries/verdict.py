"""Whether one of two runs is faster or more accurate than the other, beyond noise, with the evidence in the sentence.

Noise is estimated from what there is. With several runs on both sides (seeds, repetitions) it is their scatter. With
one run each it is the scatter of its epochs, which does not show how far a repetition would differ: the sentence says
so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dmltrain.report.summaries.measured import ACCURACY, MeasuredRun, over
from dmltrain.report.summaries.series import points_of
from dmltrain.report.summaries.statistic import Difference, difference

LAST = 5  # epochs whose accuracies show how much it changes from epoch to epoch
_ERRORS = 1.96  # standard errors: a difference of two shares is larger by chance in 5 of 100 cases
Side = Sequence[MeasuredRun]


@dataclass(frozen=True)
class Verdict:
    """about: time or accuracy. result: `B is faster`, `no difference beyond noise`, `unknown`, ... text: a sentence."""

    about: str
    result: str
    text: str


NO_DIFFERENCE, UNKNOWN = "no difference beyond noise", "unknown"


def verdicts(a: Side, b: Side) -> list[Verdict]:
    """The verdicts on the time of an epoch, on the last accuracy, and on the time until an accuracy that both reach."""
    return [_time(a, b), _accuracy(a, b), *_reached(a, b)]


# ---- time -----------------------------------------------------------------------------------------------------------


def _time(a: Side, b: Side) -> Verdict:
    """The verdict on the seconds of an epoch, without the first epoch of each run."""
    single = len(a) == len(b) == 1
    groups = [_epochs(side[0]) if single else _means(side) for side in (a, b)]
    missing = [name for name, group in zip("AB", groups, strict=True) if not group]
    if missing:
        return Verdict(
            "time", UNKNOWN, f"Time of an epoch: no verdict, no epoch of {' and '.join(missing)} has its seconds."
        )
    evidence = f"{_times('A', groups[0], single)}; {_times('B', groups[1], single)}."
    change = difference(*groups) if not single or min(map(len, groups)) > 1 else None
    if change is None:
        needed = "two finite epochs after the first" if single else "two runs of each, or three beside one"
        return Verdict("time", UNKNOWN, f"Time of an epoch: no verdict without {needed}. {evidence}")
    result = NO_DIFFERENCE if not change.beyond_noise else f"B is {'faster' if change.value < 0 else 'slower'}"
    text = f"Time of an epoch: {result}. B takes {_percents(change, fmean(groups[0]))}. {evidence}"
    return Verdict("time", result, " ".join([text, *_unequal(a, b), *([_ONE_RUN] if single else [])]))


_ONE_RUN = "One run each: a repetition can differ by more than the epochs of a run do; compare folders of several runs."


def _epochs(run: MeasuredRun) -> list[float]:
    return [run.epoch_seconds[epoch] for epoch in run.later if epoch in run.epoch_seconds]


def _means(side: Side) -> list[float]:
    means = (over(run.epoch_seconds, run.later) for run in side)
    return [mean for mean in means if mean is not None]


def _times(name: str, seconds: Sequence[float], single: bool) -> str:
    count = f"{len(seconds)} {'epoch' if single else 'run'}{'s' if len(seconds) > 1 else ''}"
    return f"{name}: median {_short(median(seconds))} s, {_short(min(seconds))} to {_short(max(seconds))} s in {count}"


def _percents(change: Difference, whole: float) -> str:
    """`12.3 % more (95 % interval: 10.1 % to 14.5 %)`, of `whole`."""
    if not whole > 0:
        return f"{_short(change.value)} s more"
    value, low, high = (100 * number / whole for number in (change.value, change.low, change.high))
    return f"{abs(value):.1f} % {'more' if value >= 0 else 'less'} (95 % interval: {low:+.1f} % to {high:+.1f} %)"


def _unequal(a: Side, b: Side) -> list[str]:
    """A sentence if epochs of both have different numbers of samples."""
    samples = [{run.facts.training_samples for run in side} for side in (a, b)]
    if samples[0] == samples[1] or None in samples[0] | samples[1]:
        return []
    shown = [", ".join(str(number) for number in sorted(filter(None, group))) for group in samples]
    return [f"Epochs are not alike: {shown[0]} samples in A, {shown[1]} in B; compare samples/s."]


# ---- accuracy -------------------------------------------------------------------------------------------------------


def _accuracy(a: Side, b: Side) -> Verdict:
    """The verdict on the last validation accuracy."""
    curves = [[[cell for _, cell in sorted(run.cells(ACCURACY).items())] for run in side] for side in (a, b)]
    last = [[curve[-1] for curve in side if curve] for side in curves]
    missing = [name for name, group in zip("AB", last, strict=True) if not group]
    if missing:
        return _unknown(f"no epoch of {' and '.join(missing)} has a validation accuracy")
    if not all(map(math.isfinite, (*last[0], *last[1]))):
        return _unknown(f"A ends with {_numbers(last[0])}, B with {_numbers(last[1])}")
    ended = _unequal_lengths(a, b)
    if len(a) == len(b) == 1:
        return _of_two_curves(curves[0][0], curves[1][0], _tells_apart(a[0], b[0], last), ended)
    change = difference(*last)
    evidence = f"A: {_numbers(last[0])}; B: {_numbers(last[1])}."
    if change is None:
        return _unknown(f"it needs two runs of each, or three beside one. {evidence}")
    result = _more_accurate(change.value) if change.beyond_noise else NO_DIFFERENCE
    interval = f"95 % interval: {change.low:+.4f} to {change.high:+.4f}"
    return Verdict(
        "accuracy",
        result,
        " ".join([f"Accuracy: {result}. B - A is {change.value:+.4f} ({interval}).", evidence, *ended]),
    )


def _of_two_curves(a: Sequence[float], b: Sequence[float], chance: float | None, ended: Sequence[str]) -> Verdict:
    """One run each: the difference counts if it is larger than the changes from epoch to epoch and than chance."""
    if min(len(a), len(b)) < 2:
        return _unknown(f"one epoch does not show how much it changes. A: {a[-1]:.6f}; B: {b[-1]:.6f}")
    ranges = [_range(curve[-LAST:]) for curve in (a, b)]
    change = b[-1] - a[-1]
    noise = max(*ranges, chance or 0.0)
    result = _more_accurate(change) if not abs(change) <= noise else NO_DIFFERENCE
    parts = [
        f"Accuracy: {result}. B - A is {change:+.4f}: A ends with {a[-1]:.6f}, B with {b[-1]:.6f}.",
        f"In the last {min(LAST, len(a), len(b))} epochs it changes by {ranges[0]:.4f} in A and {ranges[1]:.4f} in B"
        + (f"; chance in the choice of validation samples makes up to {chance:.4f}." if chance else "."),
        *ended,
        "One run each: other seeds can differ by more.",
    ]
    return Verdict("accuracy", result, " ".join(parts))


def _unknown(why: str) -> Verdict:
    return Verdict("accuracy", UNKNOWN, f"Accuracy: no verdict, {why.rstrip('.')}.")


def _more_accurate(change: float) -> str:
    return f"{'B' if change > 0 else 'A'} is more accurate"


def _tells_apart(a: MeasuredRun, b: MeasuredRun, last: Sequence[Sequence[float]]) -> float | None:
    """The difference of two accuracies that chance in the choice of validation samples makes: a share p of n samples
    has the variance p (1 - p) / n. None if n is unknown."""
    counts = [run.facts.validation_samples for run in (a, b)]
    shares = [min(1.0, max(0.0, group[0])) for group in last]
    if not all(counts):
        return None
    return _ERRORS * math.sqrt(sum(p * (1 - p) / n for p, n in zip(shares, counts, strict=True) if n))


def _unequal_lengths(a: Side, b: Side) -> list[str]:
    """A sentence if the runs have different numbers of epochs."""
    epochs = [sorted({len(run.done) for run in side}) for side in (a, b)]
    if epochs[0] == epochs[1]:
        return []
    shown = [", ".join(map(str, group)) for group in epochs]
    return [f"A has {shown[0]} epochs, B {shown[1]}."]


def _range(numbers: Sequence[float]) -> float:
    finite = [number for number in numbers if math.isfinite(number)]
    return max(finite) - min(finite) if finite else math.inf


# ---- time until an accuracy -----------------------------------------------------------------------------------------


def _reached(a: Side, b: Side) -> list[Verdict]:
    """The time until the accuracy that every run reached. It has no verdict, because each run passes that accuracy only
    once."""
    curves = [[points_of(run, ACCURACY, "time") for run in side] for side in (a, b)]
    finite = [[[(x, y) for x, y in curve if math.isfinite(y)] for curve in side] for side in curves]
    if not all(curve for side in finite for curve in side):
        return []
    target = min(max(y for _, y in curve) for side in finite for curve in side)
    times = [[next(x for x, y in curve if y >= target) for curve in side] for side in finite]
    shown = [
        f"{median(group):.1f} s" + (f" (median of {len(group)} runs)" if len(group) > 1 else "") for group in times
    ]
    text = f"Time until an accuracy of {target:.6f}, which all runs reach: A {shown[0]}, B {shown[1]}."
    return [Verdict("time to accuracy", UNKNOWN, text)]


def _numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.6f}" for number in numbers)


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if abs(seconds) >= 10 else f"{seconds:.3g}"
