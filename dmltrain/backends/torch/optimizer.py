"""The optimizers in PyTorch, as their table describes them, and what the settings say of the exchange of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dmltrain import optimizers
from dmltrain.backends.backend import Settings, batches_of_a_step, decayed, samples_of_a_step
from dmltrain.backends.torch import devices, plain_step
from dmltrain.kvstore import codec
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Network

# Class name in lower case -> row; also torch.optim's classes that scripts use.
BY_CLASS = {
    row_of_framework.name.lower(): row_of_framework
    for row in optimizers.TABLE
    for row_of_framework in (row.torch, row.plain)
    if row_of_framework
}


@functools.cache
def class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer class `name`, in lower case."""
    row = BY_CLASS[name]
    optimizer_class: Callable[..., torch.optim.Optimizer] = (
        row.own(torch) if row.own else getattr(torch.optim, row.name)
    )
    return optimizer_class


def row_of(optimizer: torch.optim.Optimizer) -> optimizers.Torch | None:
    """The row of an optimizer's class; None for other classes."""
    name = type(optimizer).__name__.lower()
    return BY_CLASS[name] if name in BY_CLASS and class_of(name) is type(optimizer) else None


def make_optimizer(module: torch.nn.Module, network: Network, settings: Settings) -> torch.optim.Optimizer:
    """settings.optimizer for the module's parameters, fused if torch supports it, with the network's multipliers of
    learning rate and weight decay."""
    row = optimizers.BY_NAME[settings.optimizer].torch
    assert row, "--optimizer offers only what PyTorch has"
    groups = _groups(module, network, settings, row)
    plain_step.postpone_compiler()
    fused = {"fused": True} if devices.kind(groups[0]["params"][0].device) in row.fused else {}
    optimizer = class_of(row.name.lower())(groups, lr=settings.lr, **fused, **row.arguments(settings))
    if row.numbered:
        for number, parameter in enumerate(module.parameters()):
            optimizer.state[parameter]["number"] = number
    return optimizer


def _groups(
    module: torch.nn.Module, network: Network, settings: Settings, row: optimizers.Torch
) -> list[dict[str, Any]]:
    """Parameter groups: those that learn at the usual rate and decay as usual come first, as in files of 0.4."""
    values, learned = dict(module.named_parameters()), decayed(network, settings)
    last = [parameter.name for parameter in learned if parameter.kind == "weight"][-1:]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameter in sorted(learned, key=lambda parameter: (parameter.lr_mult != 1.0, parameter.wd_mult != 1.0)):
        of_kind = {**row.of_kind(parameter.kind), **(row.of_last if parameter.name in last else {})}
        key = (parameter.lr_mult, parameter.wd_mult, *of_kind.items())
        if key not in groups:
            groups[key] = {"params": [], "weight_decay": settings.wd * parameter.wd_mult, **of_kind}
            if parameter.lr_mult != 1.0:
                groups[key] |= {"lr_mult": parameter.lr_mult, "lr": settings.lr * parameter.lr_mult}
            if row.rate_in_momentum:
                groups[key]["rate_in_momentum"] = True
        groups[key]["params"].append(values[parameter.name])
    return list(groups.values())


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, times each group's multiplier, from the next step on."""
    for group in optimizer.param_groups:
        before, group["lr"] = group["lr"], rate * group.get("lr_mult", 1.0)
        if group.get("rate_in_momentum") and group["lr"] != before:
            follow(optimizer, group["params"], before, group["lr"])


def follow(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], before: float, now: float) -> None:
    """After a change of the learning rate, scale torch's momentum so that it acts like MXNet's. MXNet's momentum
    contains the rate: earlier gradients still count with the rate of their time. (A rate of 0 changes no weights, and
    ends the momentum.)"""
    if not now:
        return
    with torch.no_grad():
        for parameter in parameters:
            kept = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if kept is not None:
                kept.mul_(before / now)


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state_dict, also one of an older version whose groups have other options. Options that it lacks keep their
    values."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, options in zip(optimizer.param_groups, own, strict=True):
        for name in group.keys() - options.keys() - {"params"}:
            del group[name]
        for name, value in options.items():
            group.setdefault(name, value)


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """After a state was loaded: copy its arrays into the memory order of their parameters. Fused kernels read parameter
    and state as flat memory, and the state may come from a run with another memory format. (torch's load_state_dict
    keeps the memory order of the loaded arrays, and their memory.)"""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                like = parameter if value.shape == parameter.shape else value
                laid_out = torch.empty_like(like, dtype=value.dtype, device=value.device, requires_grad=False)
                state[name] = laid_out.copy_(value)


def compression(settings: Settings, store: KVStore) -> dict[str, Any]:
    """The parameters of gradient compression. Gradients are means over samples_of_a_step, so --gc-threshold is divided,
    too; in an elastic job by the workers at its start, so that it stays when members change."""
    parameter = next((row.parameter for row in codec.TABLE if row.name == settings.gc_type), None)
    value = getattr(settings, f"gc_{parameter.name}", None) if parameter else None
    if parameter is None or value is None:
        return {"type": settings.gc_type}
    divisor = samples_of_a_step(settings, store) if parameter.of_gradients else 1
    return {"type": settings.gc_type, parameter.name: value / divisor}


def factor_rows(settings: Settings, store: KVStore) -> int:
    """The number of samples of a worker's step if dense layers may send factors, else 0."""
    return 0 if settings.factors == "off" else settings.batch_size * batches_of_a_step(settings, store.num_workers)
