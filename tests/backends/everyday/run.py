"""Small trainings, as users write them, each in one process with the whole batch and as the workers of a job."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import dmltrain
from dmltrain.base.errors import JobLost, UserError

SAMPLES, INPUTS, HIDDEN = 12, 6, 5
LONGEST_PAUSE = 0.01  # s
TOLERANCE = 1e-9  # of float64


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that are the same in all processes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Run:
    """One process of a training. `rank` is None in the one that has the whole batch."""

    def __init__(self, rank: int | None, workers: int, options: dict[str, Any], pauses: random.Random | None) -> None:
        self.rank, self.workers, self._options, self._pauses = rank, workers, options, pauses
        self.notes: list[list[torch.Tensor]] = []

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        if self.rank is not None:
            return dmltrain.distribute(model, optimizer, **{**self._options, **options})
        optimizer.accumulate = contextlib.nullcontext  # type: ignore[attr-defined]
        return optimizer

    @property
    def ranks(self) -> list[int]:
        """Of the workers whose parts this process computes."""
        return list(range(self.workers)) if self.rank is None else [self.rank]

    def part(self, batch: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """This process's part of a batch, or a worker's. All workers have equally many samples."""
        rank = self.rank if rank is None else rank
        return batch if rank is None else batch[rank :: self.workers]

    def mean(self, of_worker: Callable[..., torch.Tensor], *more: Any) -> torch.Tensor:
        """`of_worker(rank, *more)`; in the process with the whole batch the mean over the workers."""
        return torch.stack([of_worker(rank, *more) for rank in self.ranks]).mean()

    def pause(self) -> None:
        """A moment in which another worker may be ahead; only where pauses are wanted."""
        if self._pauses is not None:
            time.sleep(self._pauses.random() ** 4 * LONGEST_PAUSE)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        self.pause()
        loss.backward(**options)
        self.pause()

    def note(self, *found: Any) -> None:
        """What must be the same in all processes: of a model its weights and buffers."""
        self.notes.append([tensor for each in found for tensor in _noted(each)])


def _noted(each: Any) -> Iterator[torch.Tensor]:
    tensors = each.state_dict().values() if isinstance(each, nn.Module) else [torch.as_tensor(each)]
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        yield real.detach().to_dense().to(torch.float64, copy=True)


class Pausing(nn.Module):
    """Pauses in the middle of backward, when the gradients of the later layers are there."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.pause = run.pause  # copies of the model are paused, too

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: self.pause())
        return x

    def __deepcopy__(self, memo: Any) -> Pausing:
        return self

    def __reduce__(self) -> Any:
        return nn.Identity, ()


def mlp(run: Run, seed: int = 0, hidden: int = HIDDEN) -> nn.Sequential:
    """Each worker begins with other weights."""
    made = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), Pausing(run), nn.Linear(hidden, 1)).double()
    return started(run, made, seed)


def started(run: Run, model: Any, seed: int = 0) -> Any:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(1000 * (run.rank or 0) + 100 * seed + number, *parameter.shape) / 2)
    return model


def batch(step: int) -> torch.Tensor:
    return draw(5000 + step, SAMPLES, INPUTS)


def loss_of(run: Run, model: Callable[..., torch.Tensor], step: int, rank: int | None = None) -> torch.Tensor:
    """Of the batch of a step: of this process's part, or a worker's."""
    return mse_loss(model(run.part(batch(step), rank)), run.part(draw(7000 + step, SAMPLES, 1), rank))


def whole_numbers(run: Run, *weights: torch.Tensor, step: int) -> torch.Tensor:
    """A loss whose gradients are small whole numbers, which no type rounds: sums over all samples, but for a factor."""
    values = run.part(draw(step, SAMPLES, 6)).round() * 2 * run.workers
    share = 1 if run.rank is None else run.workers
    return share * sum((values.to(weight.dtype) * weight).sum().double() for weight in weights)


def only_distributed(run: Run, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
    """What is refused at once."""
    if run.rank is not None:
        run.distribute(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), **options)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`on`: where the optimizer runs, a key of OPTIONS. `refused`: what the error says in a job, a pattern; empty where
    it trains. `races`: what it does could come before or after something that others do."""

    train: Callable[[Run], None]
    on: str
    refused: str
    races: bool


OPTIONS: dict[str, dict[str, Any]] = {
    "workers": {},
    "workers, compressed": {"compression": "bf16"},
    "servers": {"update_on_kvstore": True},
    "async": {"kvstore": "dist_async"},
}
CASES: dict[str, Case] = {}


def case(on: str = "workers", refused: str = "", races: bool = False) -> Callable[[Callable[[Run], None]], Any]:
    """A training of this name. What it notes must be the same in all processes; where it is `refused`, all of its notes
    in the job come before."""

    def add(train: Callable[[Run], None]) -> Callable[[Run], None]:
        assert train.__name__ not in CASES
        CASES[train.__name__] = Case(train, on, refused, races)
        return train

    return add


def judged(name: str, rank: int, workers: int, pauses: random.Random | None = None) -> str:
    """Run a case as a worker of a job and in one process: "right", or what is wrong."""
    wanted = CASES[name]
    alone = Run(None, workers, {}, None)
    wanted.train(alone)
    worker, error = Run(rank, workers, OPTIONS[wanted.on], pauses), ""
    try:
        wanted.train(worker)
    except UserError as refusal:
        error = str(refusal)
    except JobLost:
        raise
    except Exception as raised:  # no refusal, but the other cases are to be seen, too
        return f"{type(raised).__name__}: {raised}"
    if found := _difference(worker.notes, alone.notes):
        return found
    if not wanted.refused:
        return f"refused: {error}" if error else _whole(worker.notes, alone.notes)
    return "right" if error and re.search(wanted.refused, error) else f"not refused, or for another reason: {error}"


def _whole(notes: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> str:
    return "right" if notes and len(notes) == len(expected) else f"{len(notes)} notes, expected {len(expected)}"


def _difference(notes: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> str:
    for number, (mine, its) in enumerate(zip(notes, expected, strict=False)):
        for one, other in zip(mine, its, strict=True):
            if not torch.allclose(one, other, TOLERANCE, TOLERANCE, equal_nan=True):
                return f"note {number} differs by {(one - other).abs().max():.1e}"
    return ""
