"""What the servers are told of an optimizer that runs on them, and how a state_dict holds their states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.flat import memory_order
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore

SERVERS, ORDERS = "servers", "orders"  # in a state_dict: the servers' states, and the memory order of what is in them


def options_of_keys(store: KVStore, optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket]) -> dict[int, Any]:
    """Number of a bucket's key -> the options of its group, and of its first parameter the number, if it has one, and
    the rows of the matrix, 0 for none. (Only where each key has one parameter does an optimizer ask for these.)"""
    return {
        store.key_number(bucket.name): {
            **optimizer.param_groups[bucket.group],
            "number": optimizer.state.get(bucket.parameters[0], {}).get("number"),
            "rows": bucket.parameters[0].shape[0] if bucket.parameters[0].dim() > 1 else 0,
        }
        for bucket in buckets
    }


def orders(optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket]) -> dict[int, list[int]]:
    """Number of a parameter in the optimizer -> the order of its dimensions in the servers' state, see
    flat.memory_order."""
    numbers = {parameter: number for number, parameter in enumerate(_parameters(optimizer))}
    return {
        numbers[parameter]: memory_order(view)
        for bucket in buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    }


def check_orders(
    saved: Mapping[int, list[int]],
    optimizer: torch.optim.Optimizer,
    buckets: Iterable[Bucket],
    names: Mapping[torch.nn.Parameter, str],
) -> None:
    """Raise UserError unless the `saved` orders are those of the model here."""
    parameters = _parameters(optimizer)
    for number, order in orders(optimizer, buckets).items():
        if saved.get(number, order) != order:
            raise UserError(
                f"the servers' state of parameter {names[parameters[number]]} has its dimensions in the "
                f"order {saved[number]} in memory, and the model here {order}: load it with the memory format that "
                "it was saved with (model.to(memory_format=...) before dmltrain.distribute)"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
