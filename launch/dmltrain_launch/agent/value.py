"""Frozen dataclasses with inherited methods.

`dataclass(frozen=True)` generates and compiles six methods per class. For the messages of the protocol that took
10 ms of CPU at each start of the launcher and of an agent; this takes 2 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["Value", "value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value  # so that a type checker knows the constructors
else:

    def value(*, frozen: bool) -> Callable[[type], type]:
        """Make a subclass of Value a dataclass without generated methods. `frozen` must be True."""
        if not frozen:
            raise TypeError("a Value is always frozen: use frozen=True")
        return dataclass(init=False, repr=False, eq=False)


class Value:
    """Base of the classes that `value` decorates."""

    MAY_OMIT = True  # see dmltrain.base.schema

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **named: Any) -> None:
            known = self.__dataclass_fields__
            given = dict(zip(known, args))  # noqa: B905  strict= is Python 3.10's
            if len(args) > len(known) or named.keys() - known.keys() or named.keys() & given.keys():
                raise TypeError(f"{type(self).__name__} takes each of ({', '.join(known)}) once: {args}, {named}")
            given.update(named)
            vars(self).update((name, given[name] if name in given else _default(known[name])) for name in known)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={var!r}' for name, var in vars(self).items())})"

    def __setattr__(self, name: str, new: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise TypeError(f"field {field.name!r} is missing")
    return field.default
