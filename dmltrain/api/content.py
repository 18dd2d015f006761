"""What a State holds, as bytes and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.base import bounded
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import seal

FORMAT = 1  # of the content of state.save's files: `_parts` refuses another one
RESERVED = ("model", "optimizer")
ARCHIVE = ".pt"  # what the file is, whatever its name


class Content:
    """The model, the optimizer, and named objects and values; see State."""

    def __init__(self, model: Any, optimizer: Any, values: Mapping[str, Any]) -> None:
        from dmltrain.backends.torch import loop

        loop.check(model, optimizer)
        keeping = {name: value for name, value in values.items() if _keeps_state(value)}
        self._objects: dict[str, Any] = {"model": model, "optimizer": optimizer, **keeping}
        self._values: dict[str, Any] = {}
        self.names = frozenset([*RESERVED, *values])
        for name, value in values.items():
            if name not in keeping:
                self[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._objects[name] if name in self._objects else self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Raises UserError for a value that cannot be kept."""
        from dmltrain.backends.torch import loop

        if name in self._objects:
            raise UserError(f"state.{name} keeps its state itself: change the object, not the state")
        value = value.item() if isinstance(value, np.generic) else value
        loop.check_value(name, value)
        self._values[name] = value

    def synchronize(self) -> None:
        self._objects["optimizer"].synchronize()

    def give(self, place: Mapping[str, Any]) -> bytes:
        """All states and values, and the `place` where the training is, as bytes. Raises UserError for a value that
        cannot be kept."""
        from dmltrain.backends.torch import loop

        states = {name: holder.state_dict() for name, holder in self._objects.items()}
        return loop.encode({"format": FORMAT, "states": states, "values": self._values, "place": dict(place)})

    def take(self, content: bytes, source: str) -> dict[str, Any]:
        """The inverse of `give`: load everything, and return the place. Raises UserError for other content."""
        from dmltrain.backends.torch import loop

        states, values, place = self._parts(content, source)
        for name, holder in self._objects.items():
            loop.load(holder, states[name], f"{source}: {name}")
        self._values.update(values)
        return place

    def take_step(self, content: bytes, source: str) -> dict[str, Any]:
        """Like `take`, but load only what a step of the optimizer changes: weights and the optimizer's state.
        Statistics, learning rates and all named values stay."""
        from dmltrain.backends.torch import loop

        states, _, place = self._parts(content, source)
        loop.load_step(self._objects["model"], self._objects["optimizer"], states, source)
        return place

    def _parts(self, content: bytes, source: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The states, the values and the place."""
        from dmltrain.backends.torch import loop

        decoded = loop.decode(content, source)
        states, values = decoded.get("states"), decoded.get("values")
        if decoded.get("format") != FORMAT or not isinstance(states, dict) or not isinstance(values, dict):
            raise UserError(f"{source}: not a file of state.save")
        self._check_names(states, self._objects, source)
        self._check_names(values, self._values, source)
        place: dict[str, Any] = decoded["place"]
        return states, values, place

    def _check_names(self, given: Mapping[str, Any], own: Mapping[str, Any], source: str) -> None:
        if given.keys() != own.keys():
            raise UserError(
                f"{source} has the names {', '.join(sorted(given)) or 'none'}, this State has "
                f"{', '.join(sorted(own)) or 'none'}: name the same in dmltrain.State"
            )

    def digest(self) -> str:
        from dmltrain.backends.torch import loop

        return loop.digest(self._objects["model"])


def _keeps_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def read(path: Path) -> bytes:
    """A checkpoint's file; b"" if there is none. Raises UserError if it cannot be read, or is damaged."""
    try:
        content = bounded.read(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"state.load: {path}: {error.strerror}") from error
    if damage := seal.examine(content, ARCHIVE).damage:
        raise UserError(
            f"state.load: {path} is damaged or truncated: {damage}; load another file, or remove this one to begin "
            "with the first epoch"
        )
    return content
