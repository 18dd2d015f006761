"""JSON texts: their limits, and messages of several classes. `schema` checks the values.

Agents use this, too: standard library only, Python 3.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from dmltrain.base.schema import Invalid, read, shown, unexpected

MAX_DIGITS = 40  # of a whole number: Python before 3.11 reads a long one in a time that is quadratic in its length
SMALL_BYTES = 1 << 16  # texts up to this cannot take much memory
SEPARATORS = (", ", ": ")
MARK = b"\xef\xbb\xbf"  # Windows' editors write it before a text in UTF-8


def parse(content: bytes | bytearray, most: float = math.inf, memory: float = math.inf) -> Any:
    """The JSON value in `content`, which is UTF-8 and may have a byte order mark. Invalid if it is none, if it has more
    than `most` bytes, or if it would take more than about `memory` bytes as Python's objects; both are known before
    memory is taken."""
    if len(content) > SMALL_BYTES or len(content) > most:
        check_size(content, most, memory)
    decoder = _CAREFUL if _LONG in content.translate(_ZEROS) else _DECODER
    try:
        return decoder.decode(str(content, "utf-8-sig" if content.startswith(MARK) else "utf-8"))
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise Invalid(f"is not JSON ({said}): {shown(bytes(content[:100]))[1:]}") from None


def parse_object(content: bytes | bytearray, most: float = math.inf, memory: float = math.inf) -> dict[str, Any]:
    """The JSON object in `content`; see `parse`."""
    value = parse(content, most, memory)
    if type(value) is not dict:
        raise unexpected(value, "an object")
    return value


def check_size(content: bytes | bytearray, most: float, memory: float) -> None:
    """Invalid if the JSON text is longer, or would take more memory when it is read; see `parse`."""
    if len(content) > most:
        raise Invalid(f"has {len(content)} bytes, expected at most {most}")
    if len(content) <= SMALL_BYTES:
        return
    values = content.count(b",") + content.count(b":")
    needed = 64 * values + 96 * content.count(b"[") + 256 * content.count(b"{")  # of CPython's objects, about
    if needed > memory:
        raise Invalid(f"takes about {needed >> 20} MiB, expected at most {int(memory) >> 20}")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, expected at most {MAX_DIGITS}")
    return int(digits)


_DECODER, _CAREFUL = json.JSONDecoder(), json.JSONDecoder(parse_int=_whole)  # the first one is twice as fast
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"0" * 9), b"0" * (MAX_DIGITS + 1)


def encode(value: Any, separators: tuple[str, str] = SEPARATORS) -> bytes:
    """A dataclass as a JSON object of its fields, ASCII, and of its class's `TAG` (schema.tagged); a NamedTuple as an
    array. `separators`: see json.dumps."""
    return json.dumps(value, separators=separators, default=_sent).encode()


def _sent(value: Any) -> dict[str, Any]:
    return {**getattr(value, "TAG", {}), **vars(value)}


class Messages:
    """Dataclasses as JSON objects, in which the field `tag` has the name of the class in `table`.

    `error`: what both ways raise, with the text of Invalid. `known`: fields that are not sent, because both ends know
    them. `most` and `memory`: see `parse`. `separators`: see json.dumps.
    """

    def __init__(
        self,
        tag: str,
        table: Mapping[str, Callable[..., Any]],
        error: Callable[[str], Exception],
        *,
        known: tuple[str, ...] = (),
        most: float = math.inf,
        memory: float = math.inf,
        separators: tuple[str, str] = SEPARATORS,
    ):
        self.tag, self.table, self.error = tag, table, error
        self._names = {kind: name for name, kind in table.items()}
        self._known, self._most, self._memory, self._separators = known, most, memory, separators

    def encode(self, message: Any) -> bytes:
        """`error` if it is so large that it could not be decoded."""
        name = self._names[type(message)]
        sent = {field: value for field, value in vars(message).items() if field not in self._known}
        content = encode({self.tag: name, **sent}, self._separators)
        try:
            check_size(content, self._most, self._memory)
        except Invalid as error:
            raise self.error(f"{name}: {error}") from None
        return content

    def decode(self, content: bytes | bytearray, **known: Any) -> Any:
        """The message; `known`: the fields that are not sent. `error`, which names the message, if it is none."""
        where = ""
        try:
            value = parse_object(content, self._most, self._memory)
            name = value.pop(self.tag, None)
            if type(name) is not str or name not in self.table:
                raise Invalid(f"is {shown(name)}, expected one of {', '.join(self.table)}", self.tag)
            where = f"{name}: "
            for field in value.keys() & known.keys():
                raise Invalid(f"has the unknown field {field!r}: it is not sent")
            return read(self.table[name], {**value, **known} if known else value)
        except Invalid as error:
            raise self.error(f"{where}{error}") from None
