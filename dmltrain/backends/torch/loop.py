"""What a script's State and loader need of PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import DataLoader, IterableDataset

from dmltrain.backends import weights
from dmltrain.backends.torch import state
from dmltrain.backends.torch.distributed import DistributedOptimizer
from dmltrain.backends.torch.distributed.local_steps import OUTER
from dmltrain.backends.torch.optimizer import load_state
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

# -- samples ----------------------------------------------------------------------------------------------------------


def length(dataset: Any) -> int:
    """The number of samples. Raises UserError for a data set without numbers of samples."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"dmltrain.loader: {type(dataset).__name__} is no map-style data set: give one with __len__ and __getitem__"
        )
    return len(dataset)


class Batches:
    """The batches that torch's DataLoader makes of lists of indices; `batches` may change between two iterations."""

    def __init__(self, dataset: Any, batches: list[list[int]], options: Mapping[str, Any]) -> None:
        """Raises UserError for options that torch's DataLoader does not have."""
        self._generator = torch.Generator()
        given = dict(options)
        if given.get("num_workers"):
            given["worker_init_fn"] = partial(_begin, os.getpid(), given.get("worker_init_fn"))
        try:
            self._loader = DataLoader(dataset, batch_sampler=batches, generator=self._generator, **given)
        except (TypeError, ValueError) as error:
            raise UserError(f"dmltrain.loader: {error}") from error

    def seed(self, number: int) -> None:
        """Seed the random numbers of the loader's worker processes, from the next iteration on."""
        self._generator.manual_seed(number)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _begin(parent: int, then: Callable[[int], None] | None, number: int) -> None:
    """In a worker process of the loader: let it end together with its parent. It has inherited the parent's
    connections; while it holds them open, the job does not notice that the parent was killed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call, which then sends no signal
        os._exit(1)
    if then:
        then(number)


# -- batch-norm statistics --------------------------------------------------------------------------------------------


class Statistics:
    """The running means and variances of a model's normalisation layers, and how many batches are in them."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, _NormBase)]
        tensors = [getattr(layer, name) for layer in layers for name in _STATISTICS]
        self._tensors: list[torch.Tensor] = [tensor for tensor in tensors if tensor is not None]

    @property
    def present(self) -> bool:
        return bool(self._tensors)

    def merge(self, seen: int, all_reduce: Callable[[str, Array], Array]) -> None:
        """Replace the statistics by their mean over all workers, weighted by the samples that each has `seen`."""
        flat = np.concatenate([tensor.double().cpu().numpy().ravel() for tensor in self._tensors])
        merged = weights.merged_statistics([flat], [seen], all_reduce)
        if merged is not None:
            parts = weights.split(merged, [tensor.shape for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                mean = torch.from_numpy(part)
                tensor.copy_(mean if tensor.is_floating_point() else mean.round())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A context after which the statistics are as before it."""
        before = [tensor.clone() for tensor in self._tensors]
        try:
            yield
        finally:
            for tensor, value in zip(self._tensors, before, strict=True):
                tensor.copy_(value)


# -- states -----------------------------------------------------------------------------------------------------------


def check(model: Any, optimizer: Any) -> None:
    """Raises UserError unless these are a model and an optimizer of `distribute`."""
    if not isinstance(model, nn.Module):
        raise UserError(f"dmltrain.State: model is a {type(model).__name__}, expected a torch.nn.Module")
    if not isinstance(optimizer, DistributedOptimizer):
        raise UserError(
            f"dmltrain.State: optimizer is a {type(optimizer).__name__}, expected what dmltrain.distribute returns"
        )


def check_value(name: str, value: Any) -> None:
    """Raises UserError for a value that `decode` would not take."""
    wrong = _wrong(value)
    if wrong is not None:
        raise UserError(
            f"state.{name} has a {type(wrong).__name__}: expected numbers, texts, tensors, None, and lists, tuples and "
            "dictionaries of these, or an object with state_dict and load_state_dict"
        )


def _wrong(value: Any) -> Any:
    """The first part of the value that `decode` would refuse; None if there is none."""
    if type(value) in (dict, list, tuple):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return next((wrong for wrong in map(_wrong, parts) if wrong is not None), None)
    known = value is None or type(value) in (bool, int, float, str, torch.Tensor)
    return None if known else value


def encode(content: Mapping[str, Any]) -> bytes:
    """Raises UserError for a state that `decode` would not take."""
    encoded = state.encode(content)
    try:
        state.check_names(encoded)
    except ValueError as error:
        raise UserError(
            f"dmltrain.State keeps tensors, numbers, texts, and lists and dictionaries of these, but {error}: one of "
            f"{', '.join(content['states'])} has something else in its state_dict; keep that in another way"
        ) from error
    return encoded


def decode(content: bytes, source: str) -> dict[str, Any]:
    """The inverse of `encode`; runs no code from the content. Raises UserError, which names the `source`, for other
    content."""
    try:
        return state.decode(content)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def load(target: Any, state_dict: Any, where: str) -> None:
    """Load a state_dict into the object. Raises UserError if it does not fit."""
    try:
        if isinstance(target, DistributedOptimizer):
            load_state(target, state_dict)
        else:
            target.load_state_dict(state_dict)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} does not fit: {str(error).splitlines()[0][:200]}") from error


def load_step(model: nn.Module, optimizer: Any, states: Mapping[str, Any], where: str) -> None:
    """Load the weights and the optimizer's state; the model's buffers and the optimizer's options stay, and with
    dist_local the state of the inner optimizer. Raises UserError if they do not fit."""
    own = {name: buffer.clone() for name, buffer in model.named_buffers() if name in states["model"]}
    load(model, {**states["model"], **own}, f"{where}: model")
    inner = optimizer.inner.state_dict()  # it does not ask the servers
    kept = inner if OUTER in states["optimizer"] else {"param_groups": inner["param_groups"]}
    load(optimizer, {**states["optimizer"], **kept}, f"{where}: optimizer")


def digest(model: nn.Module) -> str:
    return state.digest(
        {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    )


def array(value: Any) -> Array:
    """Numbers, also of a tensor, as float64."""
    numbers = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
    return np.array(numbers, np.float64)
