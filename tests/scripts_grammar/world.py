"""What the programs of the grammar find: models, data, and `distribute`. A program runs as one process that has the
samples of all workers (the reference), or as one of several workers, each with its part of the samples."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

SAMPLES, INPUTS, HIDDEN = 6, 4, 5  # of a batch of all workers; 2 and 3 workers have equal parts
SMOOTH = ("torch.optim.SGD($groups, lr=0.1)", "torch.optim.SGD($groups, lr=0.05, momentum=0.9, weight_decay=0.01)")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}  # of weights
Distribute = Callable[[nn.Module, torch.optim.Optimizer], Any]


def draw(number: int, shape: Any = ()) -> torch.Tensor:
    """Random numbers that are the same on all workers, of this shape or like this tensor."""
    shape = shape.shape if isinstance(shape, torch.Tensor) else shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


class Net(nn.Module):
    """A small model with layers `first` and `last`. Each worker begins with other weights."""

    of_images = of_words = has_branches = dense = casts = False
    arrives_once = True  # backward reaches each weight once
    optimizers: Sequence[str] = ()  # other ones than usual

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.last = self.layers()
        self.double()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(draw(seed * 1009 + zlib.crc32(name.encode()) % 1000, parameter) / 2)

    def layers(self) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Mlp(Net):
    """Two dense layers."""

    dense = True


class Images(Net):
    """A convolution, then a dense layer."""

    of_images = True

    def layers(self) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(2, 3, 2), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).flatten(1))


class Normed(Net):
    """Batch normalization."""

    def layers(self) -> tuple[nn.Module, nn.Module]:
        return nn.Linear(INPUTS, HIDDEN, bias=False), nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).tanh()


class Tied(Net):
    """One weight in two layers."""

    def layers(self) -> tuple[nn.Module, nn.Module]:
        inner = nn.Linear(INPUTS, INPUTS)
        last = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Tanh(), nn.Linear(INPUTS, 1))
        last[0].weight = inner.weight
        return inner, last


class Words(Net):
    """An embedding."""

    of_words, sparse = True, False

    def layers(self) -> tuple[nn.Module, nn.Module]:
        return nn.Embedding(8, 3, sparse=self.sparse), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).flatten(1))


class SparseWords(Words):
    """An embedding whose gradient is sparse."""

    sparse = True
    optimizers = ("torch.optim.SGD($groups, lr=0.1)", "torch.optim.Adagrad($groups, lr=0.05, eps=1e-3)")


class Low(Net):
    """Weights of low precision, where sums of gradients differ by rounding."""

    kind, casts = torch.bfloat16, True
    optimizers = SMOOTH

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.to(self.kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)).double()


class Single(Low):
    """Weights in float32."""

    kind = torch.float32


class Branches(Net):
    """Two branches, of which a loss uses one, and a layer that none uses."""

    has_branches = True

    def layers(self) -> tuple[nn.Module, nn.Module]:
        branches = [nn.Linear(HIDDEN, 1) for _ in range(3)]
        return nn.Linear(INPUTS, HIDDEN), nn.ModuleList(branches)

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        return self.last[branch](torch.tanh(self.first(x)))


class Checkpointed(Net):
    """A layer whose forward runs again in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(True)
        inner = [checkpoint(self._inner, part, use_reentrant=self.reentrant) for part in (x, x.flip(1))]
        return self.last(inner[0] * inner[1])

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


class Reentrant(Checkpointed):
    """Backward runs within backward, and reaches the layer in two of them."""

    reentrant, arrives_once = True, False


class Permuted(Net):
    """Buffers that each worker begins with in another way: an order, and a scale."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("order", draw(seed, INPUTS).argsort())
        self.register_buffer("scale", draw(seed + 1, INPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, self.order] * self.scale)


class Unaligned(Net):
    """A weight that is no contiguous memory, one without elements, and one without dimensions."""

    def layers(self) -> tuple[nn.Module, nn.Module]:
        first = nn.Linear(INPUTS, HIDDEN)
        first.weight = nn.Parameter(torch.zeros(INPUTS, HIDDEN).t())
        first.empty, first.scale = nn.Parameter(torch.zeros(0, 2)), nn.Parameter(torch.zeros(()))
        return first, nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) * (1 + self.first.scale)))


MODELS = [
    Mlp,
    Images,
    Normed,
    Tied,
    Words,
    SparseWords,
    Branches,
    Checkpointed,
    Reentrant,
    Permuted,
    Unaligned,
    Low,
    Single,
]


class World:
    """One process of a program's run. `rank` is None in the reference. `notes`: what the program has noted. `nudge`: by
    how much the samples' targets are moved."""

    def __init__(
        self, distribute: Distribute, workers: int, rank: int | None, nudge: float = 0.0, elastic: bool = False
    ) -> None:
        self._elastic, self._optimizers = elastic, list[Any]()
        self._distribute, self._workers, self._rank, self._nudge = distribute, workers, rank, nudge
        self.notes: list[list[torch.Tensor]] = []
        self.tolerance = 0.0  # of the notes so far

    def names(self) -> dict[str, Any]:
        """The global names of a program."""
        own = ("made", "distribute", "loss", "each_worker", "part_loss", "note", "first_worker")
        found = {name: getattr(self, name) for name in own}
        modules = {
            "torch": torch,
            "threading": threading,
            "nn": nn,
            "copy": copy,
            "io": io,
            "pickle": pickle,
            "functools": functools,
            "contextlib": contextlib,
        }
        helpers = {"draw": draw, "graded": graded, "trained": trained, "norm": norm, "fail": fail}
        return {**modules, **helpers, **found, **{each.__name__: each for each in MODELS}}

    def made(self, kind: type[Net], seed: int) -> Net:
        """A model; the workers' weights differ until `distribute`."""
        return kind(seed + 100 * (self._rank or 0))

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        made = self._distribute(model, optimizer)
        self._optimizers.append(made)
        return made

    def each_worker(self, function: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """`function(rank)`; in the reference, the mean of that over the workers."""
        if self._rank is not None:
            return function(self._rank)
        return torch.stack([function(rank) for rank in range(self._workers)]).mean()

    def first_worker(self) -> bool:
        return not self._rank

    def loss(self, model: Callable[..., torch.Tensor], number: int, **options: Any) -> torch.Tensor:
        """Of the batch with this number: of this worker's part, or in the reference of all. Batch normalization has the
        statistics of a worker's part."""
        if self._elastic:
            self._begin_round()
        if self._rank is None and not isinstance(net_of(model), Normed):
            return self._loss_of(model, number, slice(None), **options)
        return self.each_worker(lambda rank: self.part_loss(model, number, rank, **options))

    def _begin_round(self) -> None:
        """What a loader of dmltrain tells each optimizer with a batch."""
        for optimizer in self._optimizers:
            optimizer.round(SAMPLES, np.array([SAMPLES / self._workers, 0.0, 0.0]))

    def part_loss(self, model: Callable[..., torch.Tensor], number: int, rank: int, **options: Any) -> torch.Tensor:
        """Of the part of the batch that the worker `rank` has."""
        return self._loss_of(model, number, slice(rank, None, self._workers), **options)

    def _loss_of(self, model: Callable[..., torch.Tensor], number: int, part: slice, **options: Any) -> torch.Tensor:
        net = net_of(model)
        if torch.is_autocast_enabled("cpu"):
            self.tolerance = max(self.tolerance, TOLERANCES[torch.bfloat16])
        x = draw(number, (SAMPLES, 2, 3, 3) if net.of_images else (SAMPLES, INPUTS))
        if net.of_words:
            x = draw(number, (SAMPLES, 2)).mul(3).long().remainder(8)
        target = draw(number + 500, (SAMPLES, 1)) * (1 + self._nudge)
        return mse_loss(model(x[part], **options), target[part])

    def note(self, *found: Any) -> None:
        """Something that must be equal in the reference and on all workers: of a model its weights and buffers."""
        self.notes.append([tensor for each in found for tensor in noted(each)])
        types = [p.dtype for each in found if isinstance(each, nn.Module) for p in each.parameters()]
        self.tolerance = max([self.tolerance, *(TOLERANCES.get(type_, 0.0) for type_ in types)])


def net_of(model: Callable[..., torch.Tensor]) -> Any:
    """The model, which a program may also call through functools.partial."""
    return model.args[0] if isinstance(model, functools.partial) else model


def noted(each: Any) -> Iterator[torch.Tensor]:
    if not isinstance(each, nn.Module):
        yield torch.as_tensor(each, dtype=torch.float64).detach().clone()
        return
    for name, tensor in each.state_dict().items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):  # each worker has its own
            yield tensor.detach().double().clone()


def graded(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fail(_: torch.Tensor) -> None:
    """A hook that ends a backward."""
    raise ArithmeticError


def norm(model: nn.Module) -> torch.Tensor:
    """Of all gradients together."""
    return torch.stack([each.grad.to_dense().square().sum() for each in graded(model)] or [draw(0) * 0]).sum().sqrt()
