"""Which dense layers send sufficient factors (factors.py): decided before the first step, the same on all workers.

For n workers, each on a host with a server, and K samples of each, the layer's weights being (M, N):

- gradients: a host sends 2 (n - 1) / n M N elements in a step, half of them as a worker, half as a server;
- factors: it sends its K (M + N) elements to n - 1 others.

A layer sends factors on three conditions. The factors have fewer elements. The network saves more seconds than the
larger product costs, which has n K samples instead of K; both products are timed on all workers, and the slowest
counts. The products of all workers are equal bit for bit: each worker computes the sum of the gradients itself, and
processors of different makes may round differently.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from dmltrain.backends.torch import devices
from dmltrain.backends.torch.distributed import parameter_hooks
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules
from dmltrain.kvstore.base import KVStore

BYTES = 4  # of an element
TIMES = 3  # of a product; the fastest counts


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer: its weight's name and shape (M, N)."""

    name: str
    outputs: int
    inputs: int


@dataclass(frozen=True)
class ProductTrial:
    """What was measured for a layer on all workers. rate: bytes/s that the slowest host can send; 0: no network is
    used; below 0: not known."""

    own_product: float  # s, of one worker's samples
    product: float  # s, of all workers' samples
    equal: bool  # whether all workers' products are equal bit for bit
    rate: float


@dataclass(frozen=True)
class Choice:
    """Whether a layer sends factors, and why (one line for the log). The bytes are those that a host sends in a
    step."""

    layer: DenseLayer
    as_factors: bool
    gradient_bytes: float
    factor_bytes: float
    reason: str

    def __str__(self) -> str:
        sends = f"{self.factor_bytes / 1e6:.1f} MB of factors a step, {self.gradient_bytes / 1e6:.1f} MB of gradients"
        verb = "sends factors" if self.as_factors else "sends gradients"
        return f"{self.layer.name} ({self.layer.outputs} x {self.layer.inputs}) {verb}: {self.reason} ({sends})"


def sizes(layer: DenseLayer, rows: int, workers: int, ratio: float) -> tuple[float, float]:
    """Bytes that a host sends in a step: of gradients, and of factors. `rows`: K. `ratio`: bytes of a compressed
    gradient over those of float32."""
    gradients = 2 * (workers - 1) / workers * layer.outputs * layer.inputs * BYTES * ratio
    return gradients, float((workers - 1) * rows * (layer.outputs + layer.inputs) * BYTES)


def decide(layer: DenseLayer, rows: int, workers: int, ratio: float, trial: ProductTrial) -> Choice:
    """See the module."""
    gradients, factors = sizes(layer, rows, workers, ratio)
    longer = trial.product - trial.own_product
    if factors >= gradients:
        return Choice(layer, False, gradients, factors, "factors are not smaller")
    if not trial.equal:
        return Choice(layer, False, gradients, factors, "the workers' processors round products differently")
    if trial.rate == 0.0:
        return Choice(layer, False, gradients, factors, "workers and servers share memory, without a network")
    if trial.rate < 0.0:
        return Choice(layer, True, gradients, factors, "they are smaller; the network's rate is not known")
    saved = (gradients - factors) / trial.rate
    times = f"the product takes {longer * 1e3:.1f} ms longer, the network {saved * 1e3:.1f} ms less"
    return Choice(layer, longer < saved, gradients, factors, times)


def measure(layer: DenseLayer, rows: int, store: KVStore, device: torch.device, rate: float) -> ProductTrial:
    """Multiply random factors as a step would. Every worker must call it."""
    draw = torch.Generator().manual_seed(layer.outputs * 31 + layer.inputs)
    outputs = torch.randn(store.num_workers * rows, layer.outputs, generator=draw, device="cpu").to(device)
    inputs = torch.randn(store.num_workers * rows, layer.inputs, generator=draw, device="cpu").to(device)
    product = torch.empty(layer.outputs, layer.inputs, device=device)
    own, whole = _seconds(outputs[:rows], inputs[:rows], product), _seconds(outputs, inputs, product)
    table = np.zeros((store.num_workers, 4))
    table[store.rank] = own, whole, _digest(product), rate
    table = store.all_reduce(f"product {layer.outputs} {layer.inputs}", table)
    return ProductTrial(
        float(table[:, 0].max()), float(table[:, 1].max()), len(set(table[:, 2])) == 1, float(table[:, 3].min())
    )


def _digest(product: torch.Tensor) -> int:
    """48 bits of a digest: a float64 holds them exactly."""
    return int.from_bytes(hashlib.sha256(product.cpu().numpy().tobytes()).digest()[:6], "big")


def _seconds(outputs: torch.Tensor, inputs: torch.Tensor, product: torch.Tensor) -> float:
    times = []
    for _ in range(TIMES):
        since = time.perf_counter()
        torch.mm(outputs.t(), inputs, out=product)
        devices.wait(product.device)
        times.append(time.perf_counter() - since)
    return min(times)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The choices of all dense layers, and the rows of the factors of those that send factors."""

    choices: tuple[Choice, ...] = ()
    rows: Mapping[torch.nn.Parameter, int] = field(default_factory=dict)


NOTHING_CHOSEN = Chosen()


def choose(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    store: KVStore,
    rows: int,
    factored: Collection[str] | None = None,
) -> Chosen:
    """Choose for all dense layers of `model` that `optimizer` trains. `factored`: names of the weights to send as
    factors; nothing is measured then. Every worker must call this with the same model. Raises UserError."""
    rules.check_rows(rows)
    if not parameter_hooks.can_have(model):
        raise UserError("factors are not kept in TorchScript: train without factors")
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    weights = {
        name: weight
        for name, weight in parameter_hooks.dense_weights(model).items()
        if weight in trained and weight.requires_grad and weight.dtype == torch.float32
    }
    unknown = sorted(set(factored or ()) - set(weights))
    if unknown:
        raise UserError(
            f"{unknown[0]} is no float32 weight of a dense layer that is used once; those are "
            f"{', '.join(weights) or 'none'}"
        )
    all_rows = np.zeros(store.num_workers)
    all_rows[store.rank] = rows
    all_rows = store.all_reduce("rows of factors", all_rows)
    if len(set(all_rows.tolist())) > 1:
        raise UserError(
            f"the workers gave factors={', '.join(f'{row:.0f}' for row in all_rows)}: give all the largest number of "
            "samples of any worker's step"
        )
    store.measure_limits()
    choices = [_choice(name, weight, rows, store, factored) for name, weight in weights.items()]
    chosen = {weights[choice.layer.name]: rows for choice in choices if choice.as_factors}
    return Chosen(tuple(choices), chosen)


def _choice(
    name: str, weight: torch.nn.Parameter, rows: int, store: KVStore, factored: Collection[str] | None
) -> Choice:
    outputs, inputs = weight.shape
    layer, workers = DenseLayer(name, outputs, inputs), store.num_workers
    ratio = store.wire_ratio(weight.numel())
    if factored is not None:
        reason = "as told" if name in factored else "not among those that were named"
        return Choice(layer, name in factored, *sizes(layer, rows, workers, ratio), reason)
    if sizes(layer, rows, workers, ratio)[0] <= sizes(layer, rows, workers, ratio)[1]:  # no need to measure
        return decide(layer, rows, workers, ratio, ProductTrial(0.0, 0.0, True, 0.0))
    return decide(layer, rows, workers, ratio, measure(layer, rows, store, weight.device, _rate(store)))


def _rate(store: KVStore) -> float:
    rate = store.link_rate()
    return -1.0 if rate is None else rate
