"""Which parameters form a bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dmltrain.backends.torch.distributed.buckets import Bucket
from dmltrain.backends.torch.distributed.factors import FactoredBucket
from dmltrain.errors import UserError

BUCKET_BYTES = 1 << 20  # small enough to be pushed early in backward, large enough for the cost of a frame
DTYPES = (torch.float32, torch.float64)


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
    open_lists: dict[tuple[int, torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    lists: list[tuple[int, list[torch.nn.Parameter]]] = []
    for name, parameter in _in_order(model, group_of):
        _check(name, parameter)
        if parameter in rows:
            lists.append((group_of[parameter], [parameter]))
            continue
        kind = (group_of[parameter], parameter.dtype, parameter.device)
        current = open_lists.get(kind)
        if current is None or single or _bytes(current) + _bytes([parameter]) > BUCKET_BYTES:
            current = open_lists[kind] = []
            lists.append((group_of[parameter], current))
        current.append(parameter)
    return [
        FactoredBucket(f"{prefix}.{number}", group, len(lists) - number, parameters[0], rows[parameters[0]])
        if parameters[0] in rows
        else Bucket(f"{prefix}.{number}", group, len(lists) - number, parameters)
        for number, (group, parameters) in enumerate(lists)
    ]


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
    dense = parameter.is_contiguous() or any(
        parameter.dim() == dim and parameter.is_contiguous(memory_format=layout)
        for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    if not dense:
        parameter.data = parameter.data.contiguous()


def _bytes(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
