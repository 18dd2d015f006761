"""Who sends the gradients of a parameter. A later `distribute` of a model replaces what an earlier one left there."""

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
        """Send nothing any more."""


_OWNERS = WeakIdKeyDictionary()  # parameter -> a weak reference to its owner


def claim(owner: Owner, parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on `owner` sends the gradients of these parameters. Those who did so are released."""
    for parameter in parameters:
        before = owner_of(parameter)
        if before is not None and before is not owner:
            before.release()
        _OWNERS[parameter] = weakref.ref(owner)


def owner_of(parameter: torch.nn.Parameter) -> Owner | None:
    found = _OWNERS.get(parameter)
    owner: Owner | None = found() if found else None
    return owner


def disown(owner: Owner) -> None:
    """It owns no parameter any more."""
    for reference in _OWNERS.keyrefs():  # a list, where other threads may add parameters
        parameter = reference()
        if parameter is not None and owner_of(parameter) is owner:
            del _OWNERS[parameter]
