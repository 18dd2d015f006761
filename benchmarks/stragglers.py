"""What stragglers cost each kvstore at best: the steps a second that waiting alone allows, from the draws of
--stragglers. Nothing is trained, and communication takes no time.

    python benchmarks/stragglers.py [--workers 5] [--emulate-step 0.1] [--stragglers 0.05:10] [--slow-worker 4:3]
        [--staleness 0,1,3,10,infinity] [--epoch 150] [--epochs 10] [--seed 0] [--format table|json]

A worker begins its next step when the slowest worker has made all but `staleness` of the steps that this one has made
(Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", section 3): 0 is
dist_sync, infinity dist_async. After each epoch all workers wait for the last one, as in the training programs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the dmltrain of this checkout

from report import facts, installed, show

from dmltrain.base.errors import UserError
from dmltrain.options import Options, parse
from dmltrain.train import emulation


def epoch_seconds(durations: Sequence[Sequence[float]], staleness: float) -> float:
    """The seconds until the last worker has made its steps. durations: seconds of each step, of each worker."""
    finished: list[list[float]] = [[0.0] for _ in durations]  # by worker, when it had made so many steps
    for step in range(len(durations[0])):
        allowed = max(each[step - int(staleness)] for each in finished) if step >= staleness else 0.0
        for own, seconds in zip(finished, durations, strict=True):
            own.append(max(own[-1], allowed) + seconds[step])
    return max(own[-1] for own in finished)


def durations(options: Options, workers: int, first: int, steps: int) -> list[list[float]]:
    """Seconds of each worker's steps from `first` on, where the own computing takes no time."""
    slow = [emulation.slowness(options, rank) for rank in range(workers)]
    return [[each.target(step)(0.0) if each else 0.0 for step in range(first, first + steps)] for each in slow]


def steps_per_second(options: Options, workers: int, staleness: float, steps: int, epochs: int) -> float:
    """Of each worker, over the whole run."""
    drawn = [durations(options, workers, epoch * steps, steps) for epoch in range(epochs)]
    return steps * epochs / sum(epoch_seconds(each, staleness) for each in drawn)


def bounds(text: str) -> list[float]:
    found = [math.inf if word == "infinity" else float(word) for word in text.split(",")]
    if not all(each >= 0 and (each == math.inf or each.is_integer()) for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers or infinity, separated by commas")
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--staleness", type=bounds, default="0,1,3,10,infinity")
    parser.add_argument("--epoch", type=int, default=150, help="steps in an epoch (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    found, words = parser.parse_known_args(argv)
    if min(found.workers, found.epoch, found.epochs) < 1:
        parser.error("--workers, --epoch and --epochs must be at least 1")
    try:
        defaults = {"emulate_step": 0.1, "stragglers": (0.05, 10.0)}
        found.options = parse(words, parser.prog, defaults=defaults)
    except UserError as error:
        parser.error(str(error))
    return found


def table(result: dict) -> str:
    lines = ["| staleness | steps/s | to the first |", "| --- | ---: | ---: |"]
    first = result["rates"][0]["steps_per_second"]
    for each in result["rates"]:
        rate = each["steps_per_second"]
        lines.append(f"| {each['staleness']} | {rate:.2f} | {rate / first:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    found = arguments(argv)
    rates = [
        {
            "staleness": "infinity" if staleness == math.inf else int(staleness),
            "steps_per_second": steps_per_second(found.options, found.workers, staleness, found.epoch, found.epochs),
        }
        for staleness in found.staleness
    ]
    versions = {"dmltrain": installed("dmltrain")}
    show({"rates": rates, **facts("stragglers.py", argv, versions)}, found.format, table)


if __name__ == "__main__":
    main()
