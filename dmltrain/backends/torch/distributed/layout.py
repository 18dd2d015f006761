"""Which parameters form a bucket, and the buckets as keys of a kvstore."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmltrain.backends.torch.distributed import same
from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.backends.torch.distributed.flat import dense_strides
from dmltrain.backends.torch.gpu import pinned
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore

BUCKET_BYTES = 1 << 20  # small enough to be pushed early in backward, large enough for the cost of a frame
DTYPES = (torch.float32, torch.float64)


def declared(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    store: KVStore,
    whole: bool = False,
    mean: bool = False,
    factored: Mapping[torch.nn.Parameter, int] | None = None,
) -> list[Bucket]:
    """Buckets of all parameters of `optimizer`, as keys of `store`. All workers start from worker 0's weights and
    buffers. `whole`: each parameter is a key of its own, on one server. `mean`: see KVStore.init. `factored`: see
    make_buckets. Raises UserError also for models that differ between workers."""
    same.check(store, list(model.named_parameters()), list(model.named_buffers()))
    buckets = make_buckets(model, optimizer, store.new_name("bucket"), whole, factored)
    of_factors = [bucket for bucket in buckets if isinstance(bucket, FactoredBucket)]
    _declare(store, [bucket for bucket in buckets if bucket not in of_factors], whole, mean)
    for bucket in of_factors:
        bucket.prepare(store)
    trained = {parameter for bucket in buckets for parameter in bucket.parameters}
    same.share(store, [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor not in trained])
    return buckets


def _declare(store: KVStore, buckets: list[Bucket], whole: bool, mean: bool) -> None:
    """Declare the buckets' keys, and take worker 0's weights."""
    keys = [bucket.name for bucket in buckets]
    store.init(keys, [bucket.weights.on_host() for bucket in buckets], whole=whole, mean=mean)
    lay_out(store, buckets, keep=store.elastic)
    for bucket in buckets:
        weights = bucket.weights.on_host()
        store.pull(bucket.name, weights)
        bucket.weights.set(torch.from_numpy(weights))


def lay_out(store: KVStore, buckets: Sequence[Bucket], keep: bool = False) -> None:
    """Give each bucket memory from which its key is pushed: for a GPU registered with the driver if servers of this
    host read it. A GPU encodes its gradients if it can. `keep`: see Bucket.lay_out."""
    encodings = {bucket: pinned.encodings(store, bucket.name) for bucket in buckets if bucket.on_gpu}
    plain = [bucket for bucket in buckets if not encodings.get(bucket)]
    memories = dict(zip(plain, store.buffers([bucket.name for bucket in plain]), strict=True))
    pushed = [memory for bucket, memory in memories.items() if bucket.on_gpu]
    pinned.register(store, pushed, [each for found in encodings.values() for each in found])
    for bucket in buckets:
        bucket.lay_out(memories.get(bucket, np.empty(0, np.float32)), keep, encodings.get(bucket, ()))


def make_buckets(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    prefix: str,
    single: bool = False,
    factored: Mapping[torch.nn.Parameter, int] | None = None,
) -> list[Bucket]:
    """Buckets of all parameters of `optimizer`, in the model's order; names start with `prefix`. `single`: one for each
    parameter. `factored`: weights whose gradients are sent as factors, with the rows of these. Raises UserError for
    unsupported types of weights."""
    rows = factored or {}
    groups = enumerate(optimizer.param_groups)
    group_of = {parameter: number for number, group in groups for parameter in group["params"]}
    named = _in_order(model, group_of)
    for name, parameter in named:
        _check(name, parameter)
    lists = split(
        named,
        lambda parameter: (
            None if single or parameter in rows else (group_of[parameter], parameter.dtype, parameter.device)
        ),
    )
    buckets = [
        FactoredBucket(f"{prefix}.{number}", group_of[first], len(lists) - number, first, rows[first])
        if first in rows
        else Bucket(f"{prefix}.{number}", group_of[first], len(lists) - number, [first, *more])
        for number, (first, *more) in enumerate(lists)
    ]
    names = {parameter: name for name, parameter in named}
    for bucket in buckets:
        bucket.names = [names[parameter] for parameter in bucket.parameters]
    return buckets


def split(
    named: Iterable[tuple[str, torch.nn.Parameter]], kind_of: Callable[[torch.nn.Parameter], Hashable]
) -> list[list[torch.nn.Parameter]]:
    """The parameters of each bucket: consecutive ones of the same kind. One of kind None has its own bucket."""
    open_lists: dict[Hashable, list[torch.nn.Parameter]] = {}
    lists: list[list[torch.nn.Parameter]] = []
    for _, parameter in named:
        kind = kind_of(parameter)
        current = open_lists.get(kind)
        if kind is None or current is None or _bytes(current) + _bytes([parameter]) > BUCKET_BYTES:
            current = open_lists[kind] = []
            lists.append(current)
        current.append(parameter)
    return lists


def wire_type(dtype: torch.dtype) -> np.dtype[Any]:
    """What gradients of this type are summed in."""
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def check_trainable(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise UserError for a parameter whose gradients cannot be sent."""
    if not parameter.is_floating_point():
        raise UserError(
            f"parameter {name} is {parameter.dtype}, expected floating-point numbers: keep real and imaginary parts in "
            "one float parameter (torch.view_as_complex makes complex numbers of it)"
        )


def _in_order(model: torch.nn.Module, wanted: dict[torch.nn.Parameter, int]) -> list[tuple[str, torch.nn.Parameter]]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter in wanted]
    missing = set(wanted) - {parameter for _, parameter in named}
    if missing:
        raise UserError(
            f"the optimizer has {len(missing)} parameters that are not the model's: "
            "call dmltrain.distribute with the model that the optimizer was made for"
        )
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _check(name: str, parameter: torch.nn.Parameter) -> None:
    if parameter.dtype not in DTYPES:
        raise UserError(
            f"parameter {name} is {parameter.dtype}, expected float32 or float64: keep the weights in "
            "float32, and use torch.autocast for lower precision"
        )
    if parameter.stride() != dense_strides(parameter):
        parameter.data = parameter.data.clone()  # without gaps in memory, as the optimizer's state will be


def _bytes(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
