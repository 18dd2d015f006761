"""Whether the training metric of a log that does not name it is an accuracy.

    [Epoch 0] train=0.467608 val=0.558900 loss=1.452417 time: 16.450441       an accuracy
    [Epoch 0] train=0.229176 val=0.422300 loss=2.035208 time: 21.937484       with mixup: the root mean square error

gluoncv's train_cifar10.py and train_mixup_cifar10.py print the same words and options, so the values have to tell. An
accuracy rises while the validation accuracy does; this error falls. The error of probabilities of n classes is at most
sqrt(2/n), and sqrt((n - 1)/n^2) where they are equal. What is called an accuracy in the log is never judged.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from enum import Enum

Epochs = Mapping[int, dict[str, "array[float]"]]

TRAIN, VALIDATION = "train_accuracy", "validation_accuracy"
SHOWN_AS = "train_metric"  # the key of what is no accuracy
_MIXUP = re.compile(rb"mixup(?!\s*=\s*(?:False|None|0(?:\.0*)?)(?![\w.]))", re.IGNORECASE)  # a path with this word, too
_FEW = 3  # epochs; a trend needs as many
_FALLS = -0.5  # correlation with the number of the epoch
_LARGEST_ERROR = 0.5
_LEARNS = 0.1  # what the validation accuracy gains
_MUCH_LESS = 0.5  # an accuracy is lower over the first epoch than at its end, but seldom that much


class Verdict(Enum):
    ACCURACY = "an accuracy"
    DOUBTFUL = "doubtful"
    ERROR = "no accuracy"


def judge(train: Sequence[float], validation: Sequence[float], mixup: bool) -> Verdict:
    """What `train` is, from its values and the validation accuracy after each epoch. mixup: the log has this word."""
    if any(number < 0 or number > 100 for number in train):
        return Verdict.ERROR
    if not train or max(train) > 1:
        return Verdict.ACCURACY  # in percent
    small = max(train) < _LARGEST_ERROR
    apart = small and max(train) < _MUCH_LESS * min(validation)
    learns = validation[-1] - validation[0] >= _LEARNS
    if len(train) < _FEW:
        falls = len(train) > 1 and train[-1] < train[0]
        if falls and small and learns and mixup:
            return Verdict.ERROR
        return Verdict.DOUBTFUL if apart or (falls and learns) else Verdict.ACCURACY
    if _trend(train) > _FALLS or not (learns or apart):
        return Verdict.ACCURACY
    return Verdict.ERROR if small else Verdict.DOUBTFUL


def rename(epochs: Epochs, heads: Sequence[bytes]) -> tuple[str, ...]:
    """Rename the training metric of `epochs` if it is no accuracy; returns notes for readers of the table.

    heads: the lines of the logs that describe the run.
    """
    rows = [epochs[epoch] for epoch in sorted(epochs) if TRAIN in epochs[epoch] and VALIDATION in epochs[epoch]]
    pairs = [(_mean(row[TRAIN]), _mean(row[VALIDATION])) for row in rows]
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    train, validation = [first for first, _ in finite], [second for _, second in finite]
    verdict = judge(train, validation, any(_MIXUP.search(head) for head in heads))
    if verdict is Verdict.ACCURACY:
        return ()
    reason = f"`train=` does not say which metric it is; it goes from {train[0]:g} to {train[-1]:g}, "
    reason += f"the validation accuracy from {validation[0]:g} to {validation[-1]:g}: "
    if verdict is Verdict.DOUBTFUL:
        return (reason + "it may be no accuracy, but an error such as the one that gluoncv prints with mixup",)
    for row in epochs.values():
        if TRAIN in row:
            row[SHOWN_AS] = row.pop(TRAIN)
    return (reason + "an error, as gluoncv prints with mixup; --metric-names metric shows it",)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _trend(numbers: Sequence[float]) -> float:
    """The correlation of the numbers with their places: 1 for a line that rises, -1 for one that falls, 0 for none."""
    middle, mean = (len(numbers) - 1) / 2, _mean(numbers)
    together = math.fsum((place - middle) * (number - mean) for place, number in enumerate(numbers))
    places = math.fsum((place - middle) ** 2 for place in range(len(numbers)))
    spread = math.fsum((number - mean) ** 2 for number in numbers)
    return together / math.sqrt(places * spread) if spread > 0 else 0.0
