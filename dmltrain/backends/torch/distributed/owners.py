"""Which object sends the gradients of a parameter. A later `distribute` of a model replaces it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

REPLACED = (
    "this optimizer was replaced by a later dmltrain.distribute of its model: use the one that the later call made"
)


class Owner(Protocol):
    """An optimizer or a reducer."""

    def release(self) -> None:
        """From now on send nothing."""


_OWNERS = WeakIdKeyDictionary()  # parameter -> a weak reference to its owner


def claim(owner: Owner, parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on `owner` sends the gradients of these parameters. Their earlier owners are released."""
    for parameter in parameters:
        before = owner_of(parameter)
        if before is not None and before is not owner:
            before.release()
        _OWNERS[parameter] = weakref.ref(owner)


def owner_of(parameter: torch.nn.Parameter) -> Owner | None:
    reference = _OWNERS.get(parameter)
    owner: Owner | None = reference() if reference else None
    return owner


def disown(owner: Owner) -> None:
    """Remove `owner` from all its parameters."""
    for reference in _OWNERS.keyrefs():  # a copy: other threads may add parameters in the meantime
        parameter = reference()
        if parameter is not None and owner_of(parameter) is owner:
            del _OWNERS[parameter]
