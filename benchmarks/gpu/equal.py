"""Stage "equal": the same steps on CPU and GPU, with TF32 and without, and twice on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.running import Asked, Row, bar
from gpu.training import RATE, Case

STEPS = 5
NEAR = 1e-4  # of the largest value of an array, after a step with TF32 off
CASES = (
    Case("mlp", 64, shape=(1, 28, 28)),
    Case("lenet", 64),
    Case("resnet", 64, depth=20, shape=(3, 32, 32)),
    Case("inception-bn-28-small", 32),
)
RUNS = {
    "CPU": "",
    "GPU": "--gpus 0 --tf32 0 --deterministic 1",
    "GPU again": "--gpus 0 --tf32 0 --deterministic 1",
    "TF32": "--gpus 0 --tf32 1 --deterministic 0",
    "TF32 again": "--gpus 0 --tf32 1 --deterministic 0",
}
Arrays = dict[str, torch.Tensor]


def rows(asked: Asked) -> Iterator[Row]:
    for case in CASES[:1] if asked.small else CASES:
        runs = {name: _trained(case, options) for name, options in RUNS.items()}
        apart = {
            "1 step": _apart(runs["CPU"][0], runs["GPU"][0]),
            f"{STEPS} steps": _apart(runs["CPU"][-1], runs["GPU"][-1]),
            f"{STEPS} steps with TF32": _apart(runs["CPU"][-1], runs["TF32"][-1]),
            "repeated": _apart(runs["GPU"][-1], runs["GPU again"][-1]),
            "repeated with TF32, not deterministic": _apart(runs["TF32"][-1], runs["TF32 again"][-1]),
        }
        yield {"equal": case.name, **{name: float(f"{value:.2g}") for name, value in apart.items()}}
        yield bar(f"{case.name}: one step is within {NEAR} of the CPU's", NEAR - apart["1 step"], 0.0)
        yield bar(f"{case.name}: deterministic steps are equal", -apart["repeated"], 0.0)


def _trained(case: Case, options: str) -> list[Arrays]:
    """The weights and statistics after each step."""
    trainer, states = case.trainer(options), []
    for step in range(STEPS):
        trainer.train_step(*case.samples(step), case.batch, RATE)
        states.append({name: value.double() for name, value in trainer.state()["model"].items()})
    return states


def _apart(first: Arrays, other: Arrays) -> float:
    """The largest difference, as a share of the largest value of the array."""
    return max(
        float((first[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)) for name, value in other.items()
    )
