"""YAML as plain values, each with the file and line where it stands. Pure, except for `bytes_of`.

A subset that has no surprises: scalars are null, true, false, numbers and text (`on`, `no`, `1:30` and dates are text;
1e-3 is a number), no tags, no merge keys, no key twice. Size, depth and number of values are limited, aliases included.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dmltrain.base.errors import UserError

MOST_BYTES = 128 << 10
MOST_DEPTH = 16
MOST_VALUES = 20_000  # an alias counts as all values that it stands for
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # what no file name and no UTF-8 text can hold
WORDS: Mapping[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")

Place = tuple["str | int", ...]  # the keys and indexes from the top of the file to a value


@dataclass(frozen=True)
class Content:
    """`value`: the whole file. `marks`: the file and line of each value, such as x.yaml:7."""

    name: str
    value: Any
    marks: Mapping[Place, str]

    def error(self, place: Place, text: str) -> UserError:
        """The error with file, line and place: `x.yaml:7: grid.devices: ...`."""
        known = (self.marks[place[:end]] for end in range(len(place), -1, -1) if place[:end] in self.marks)
        return UserError(f"{next(known, f'{self.name}:1')}: {place_text(place)}{text}")


def place_text(place: Place) -> str:
    """('grid', 'devices', 0) -> 'grid.devices[0]: '."""
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")
    return f"{words}: " if words else ""


def bytes_of(path: str | os.PathLike[str], expected: str) -> bytes:
    """What `read` takes of the file. UserError if it cannot be read; `expected` says what should be there."""
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{os.fspath(path)}: {reason}: expected {expected}") from None


def read(data: bytes, name: str) -> Content:
    """The content of the file `name`. UserError with file and line if it is not such a file."""
    if len(data) > MOST_BYTES:
        raise UserError(f"{name} is larger than {MOST_BYTES >> 10} KiB: expected a smaller file")
    try:
        root = _compose(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}: expected a YAML file") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(
            f"{name}:{mark.line + 1 if mark else 1}: invalid YAML: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise UserError(f"{name}: invalid YAML: {str(error).splitlines()[0]}") from None
    plain = _Plain(name)
    value = plain.value(root, ()) if root else None
    return Content(name, value, plain.marks)


class _Loader(yaml.SafeLoader):
    """Composes nodes, which are not deep."""

    depth = 0

    def upcoming(self) -> Any:
        return self.peek_event()  # type: ignore[no-untyped-call]

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MOST_DEPTH} levels", problem_mark=self.upcoming().start_mark
            )
        event = self.upcoming()
        if getattr(event, "tag", None) is not None:  # an alias has none
            raise yaml.MarkedYAMLError(problem=f"unexpected tag {event.tag}", problem_mark=event.start_mark)
        if NO_TEXT.search(getattr(event, "value", "")):
            raise yaml.MarkedYAMLError(
                problem="a text with NUL or half a character, which no command can have", problem_mark=event.start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


class _Plain:
    """Nodes as plain values."""

    def __init__(self, name: str):
        self.name, self.marks, self.count = name, dict[Place, str](), 0

    def value(self, node: Any, place: Place) -> Any:
        self.marks[place] = f"{self.name}:{node.start_mark.line + 1}"
        self.count += 1
        if self.count > MOST_VALUES or len(place) > MOST_DEPTH:
            raise self._error(place, f"more than {MOST_VALUES} values or {MOST_DEPTH} levels, aliases included")
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, place))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(element, (*place, index)) for index, element in enumerate(node.value)]
        return self._scalar(node, place)

    def _items(self, node: Any, place: Place) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for key, value in node.value:
            mark = f"{self.name}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{mark}: {place_text(place)}a key is a list or a mapping: expected a name")
            if key.value in seen:
                raise UserError(f"{mark}: {place_text((*place, key.value))}given twice: remove one")
            if key.value == "<<":
                raise UserError(f"{mark}: {place_text(place)}merge keys (<<) are not supported: write it out")
            seen.add(key.value)
            at = (*place, key.value)
            yield key.value, self.value(value, at)
            self.marks[at] = mark

    def _scalar(self, node: Any, place: Place) -> Any:
        text: str = node.value
        if node.style is not None:
            return text
        if text in WORDS:
            return WORDS[text]
        if INTEGER.fullmatch(text):
            return int(text)
        if NUMBER.fullmatch(text):
            if not math.isfinite(float(text)):
                raise self._error(place, f"{text[:40]} is too large a number")
            return float(text)
        return text

    def _error(self, place: Place, text: str) -> UserError:
        return Content(self.name, None, self.marks).error(place, text)


def plain(value: Any) -> Sequence[Any]:
    """A list as it is, anything else as a list of one."""
    return value if isinstance(value, list) else [value]
