"""Training on the GPU in this process: dmltrain's trainer, a plain loop beside it, and the time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from dmltrain import kvstore, models
from dmltrain.backends.torch import devices
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.base.normalisation import Normalisation
from dmltrain.kvstore.base import KVStore
from dmltrain.options import parse

GPU = devices.find("gpu:0")
NORMALISATION = Normalisation((127.0,), (64.0,))
RATE = 0.01


@dataclass(frozen=True)
class Case:
    """A network, the samples of a batch, and its type. `shape`: of an image; None: the network's own."""

    network: str
    batch: int
    dtype: str = "float32"
    depth: int | None = None
    shape: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.network}-{self.depth}" if self.depth else self.network

    def made(self) -> models.Network:
        shape = self.shape or models.NETWORKS[self.network].image_shape
        return models.create(self.network, self.depth, None, shape)

    def trainer(self, options: str = "--gpus 0", store: KVStore | None = None) -> TorchTrainer:
        line = f"--network {self.network} --batch-size {self.batch} --dtype {self.dtype} {options}"
        return TorchTrainer(self.made(), parse(line.split()), store or kvstore.create("local"), None, NORMALISATION)

    def samples(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Images (batch, ...) uint8 and labels (batch,)."""
        draw, made = np.random.default_rng(seed), self.made()
        images = draw.integers(0, 256, (self.batch, *made.input_shape), np.uint8)
        return images, draw.integers(0, made.num_classes, self.batch)


def seconds(call: Callable[[], object], at_least: float, times: int = 3) -> float:
    """Median seconds of a call, for which the GPU is waited."""
    found: list[float] = []
    end = time.perf_counter() + at_least
    while len(found) <= times or time.perf_counter() < end:
        since = time.perf_counter()
        call()
        devices.wait(GPU)
        found.append(time.perf_counter() - since)
    return statistics.median(found[1:])  # the first one warms up


class PlainLoop:
    """The same module as a script would train it: pinned input that stays, autocast, fused SGD."""

    def __init__(self, module: torch.nn.Module, dtype: str) -> None:
        self._module, self._dtype = module, getattr(torch, dtype)
        self._optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9, fused=True)
        self._pinned: list[torch.Tensor] = []  # images and labels
        self._copied = torch.cuda.Event()

    def step(self, images: np.ndarray, labels: np.ndarray) -> None:
        x, y = self._placed([torch.from_numpy(each) for each in (images, labels)])
        x = x.contiguous(memory_format=torch.channels_last).float().sub_(127.0).div_(64.0)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(GPU.type, self._dtype, enabled=self._dtype != torch.float32):
            found = self._module(x)
        logits = found[0] if isinstance(found, tuple) else found
        functional.cross_entropy(logits.float(), y).backward()
        self._optimizer.step()

    def _placed(self, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        if [each.shape for each in self._pinned] != [each.shape for each in arrays]:
            self._pinned = [torch.empty_like(each, pin_memory=True) for each in arrays]
        self._copied.synchronize()  # of the step before
        for kept, array in zip(self._pinned, arrays, strict=True):
            kept.copy_(array)
        placed = [kept.to(GPU, non_blocking=True) for kept in self._pinned]
        self._copied.record()
        return placed
