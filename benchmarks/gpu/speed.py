"""Stage "speed": one process, by network, batch and type, against a plain loop of the same module."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.running import Asked, Row, bar
from gpu.training import RATE, Case, PlainLoop, seconds

STEPS = 5  # that are timed together
LEAST = 0.95  # of the plain loop's speed
CIFAR = (3, 32, 32)
CASES = (
    Case("resnet", 256, "bfloat16", 50),
    Case("resnet", 256, "float32", 50),
    *(Case("resnet", batch, "bfloat16", 50) for batch in (32, 64, 128)),
    Case("inception-v3", 128, "bfloat16"),
    Case("resnet", 128, "float32", 20, CIFAR),
    *(Case("resnet", batch, "float32", 110, CIFAR) for batch in (64, 128, 256)),
    Case("inception-bn", 256, "bfloat16"),
    Case("alexnet", 512, "bfloat16"),
    Case("vgg", 128, "bfloat16", 16),
)
SMALL = (Case("resnet", 4, "float32", 8, CIFAR),)


def rows(asked: Asked) -> Iterator[Row]:
    for case in SMALL if asked.small else CASES:
        try:
            row = _measured(case, 0.0 if asked.small else 1.5)
        except torch.OutOfMemoryError as error:
            yield {"network": case.name, "batch": case.batch, "dtype": case.dtype, "failed": str(error)[:120]}
            continue
        yield row
        name = f"{case.name}, batch {case.batch}, {case.dtype}: share of the plain loop's speed"
        yield bar(name, row["ratio"], None if asked.small else LEAST)


def _measured(case: Case, least: float) -> Row:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer, (images, labels) = case.trainer(), case.samples()

    def own() -> None:
        for _ in range(STEPS):
            trainer.train_step(images, labels, case.batch, RATE)

    fast, memory = seconds(own, least, 2), trainer.device_memory()
    loop = PlainLoop(trainer.replicas.modules[0], case.dtype)

    def plain() -> None:
        for _ in range(STEPS):
            loop.step(images, labels)

    reference = seconds(plain, least, 2)
    return {
        "network": case.name,
        "batch": case.batch,
        "dtype": case.dtype,
        "images_per_second": round(STEPS * case.batch / fast, 1),
        "plain": round(STEPS * case.batch / reference, 1),
        "ratio": round(reference / fast, 3),
        "MiB": round(memory or 0.0),
    }
