"""Dataclasses from JSON values, checked: of messages between processes, and of files that have a fixed structure.

    registration = read(Register, json_text.parse(received))

The annotations of a class say what its fields may have: bool, int, float, str, `dict[str, T]` or `Mapping[str, T]`,
`tuple[T, ...]`, `tuple[A, B]`, `T | None`, Any, a dataclass (a JSON object with exactly its fields), a NamedTuple (a
JSON array), or a Type, which also has a range or a length:

    if TYPE_CHECKING:
        Port = int
    else:
        Port = whole(0, 65535)

(Type checkers know no ranges, and `Annotated` is Python 3.9's.)

What does not fit raises Invalid, which says where, what came and what was expected. Agents use this: standard library
only, and Python 3.8, which evaluates neither `int | None` nor `tuple[int, ...]`. So annotations are texts here (`from
__future__ import annotations`), and the names in them are those of the module of their class.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
WIDEST = 1 << 63
LARGEST = 1e15  # of a float: a microsecond in 30 years
SHOWN = 100  # characters of what came


class Invalid(ValueError):
    """`said`: what is wrong with the value at `path`, such as "tasks[2].port", of what was read; "": with all of it."""

    def __init__(self, said: str, path: str = ""):
        super().__init__(said, path)
        self.said, self.path = said, path

    def __str__(self) -> str:
        return f"{self.path.lstrip('.') or 'it'} {self.said}"

    def within(self, path: str) -> Invalid:
        """The same error, of a part of a larger value."""
        return Invalid(self.said, path + self.path)


def unexpected(value: object, meaning: str) -> Invalid:
    return Invalid(f"is {shown(value)}, expected {meaning}")


def shown(value: object) -> str:
    """What came, in short, without a character that controls a terminal."""
    try:
        text = ascii(value)
    except RecursionError:
        return f"a {type(value).__name__} with too many levels"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# -- what a field may have ---------------------------------------------------------------------------------------------


class Type:
    """`meaning`: what is expected, for messages. `read(value)`: the checked value of a JSON value, or Invalid.

    `salvage`: the same for what others may have written, see `salvaged`. `are(values)`: whether `read` returns each of
    them as it is, found out at once.
    """

    def __init__(
        self,
        meaning: str,
        read: Callable[[Any], Any],
        salvage: Callable[[Any], Any] | None = None,
        are: Callable[[list[Any]], bool] | None = None,
    ):
        self.meaning, self.read = meaning, read
        self.salvage, self.are = salvage or read, are

    def __or__(self, none: None) -> Type:
        """`Type | None`"""

        def optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda value: None if value is None else read(value)

        return Type(f"{self.meaning}, or null", optional(self.read), optional(self.salvage))

    def then(self, convert: Callable[[Any], Any]) -> Type:
        """The same, with the value that `convert` makes of what was read."""
        return Type(self.meaning, lambda value: convert(self.read(value)), lambda value: convert(self.salvage(value)))

    def only(self, right: Callable[[Any], Any], meaning: str) -> Type:
        """Of these values the `right` ones."""

        def checked(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def read_right(value: Any) -> Any:
                found = read(value)
                if not right(found):
                    raise unexpected(value, meaning)
                return found

            return read_right

        return Type(meaning, checked(self.read), checked(self.salvage))


def _value(meaning: str, kind: type, right: Callable[[Any], bool] | None = None) -> Type:
    """Of a type of JSON the `right` values."""

    def read(value: Any) -> Any:
        if type(value) is not kind or right and not right(value):  # isinstance would take True for a number
            raise unexpected(value, meaning)
        return value

    return Type(meaning, read)


OBJECT = _value("an object", dict)


def whole(least: int = 0, most: int = WIDEST, meaning: str = "") -> Type:
    """A whole number; `least` and `most` are in the range."""
    meaning = meaning or f"a whole number {f'from {least} to {most}' if most < WIDEST else f'>= {least}'}"
    made = _value(meaning, int, lambda value: least <= value <= most)
    made.are = lambda values: set(map(type, values)) == {int} and least <= min(values) and max(values) <= most
    return made


def number(least: float = -LARGEST, most: float = LARGEST, meaning: str = "a number") -> Type:
    """A float, which may come as a whole number; NaN is none. `least` and `most` are in the range."""

    def read(value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise unexpected(value, meaning)
        return float(value)

    return Type(meaning, read)


def text(most: float = math.inf) -> Type:
    """A text of at most so many characters."""
    if most == math.inf:
        made = _value("a text", str)
        made.are = lambda values: set(map(type, values)) == {str}
        return made
    return _value(f"a text of at most {most} characters", str, lambda value: len(value) <= most)


def choice(*names: str) -> Type:
    """One of these texts."""
    return _value(f"one of {', '.join(names)}", str, names.__contains__)


def _many(item: Type) -> Type:
    """`tuple[item, ...]`. Wrong items cannot be salvaged: they are left out."""
    meaning, reads = f"a list of {item.meaning}", itertools.repeat(item.read)

    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise unexpected(value, meaning)
        if item.are and value and item.are(value):
            return tuple(value)
        return tuple(_items(reads, value))

    def salvage(value: Any) -> tuple[Any, ...]:
        return tuple(_right(item, value if type(value) is list else ()))

    return Type(meaning, read, salvage)


def _right(item: Type, values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        with contextlib.suppress(Invalid):
            yield item.salvage(value)


def _row(items: list[Type], meaning: str, made: Callable[[list[Any]], Any]) -> Type:
    """A list of so many values."""
    reads = [item.read for item in items]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(reads):
            raise unexpected(value, meaning)
        return made(_items(reads, value))

    return Type(meaning, read)


def _map(item: Type) -> Type:
    """`dict[str, item]`"""

    def read(value: Any) -> dict[str, Any]:
        return _fields([(name, item.read) for name in OBJECT.read(value)], value)

    def salvage(value: Any) -> dict[str, Any]:
        return {name: found for name, each in OBJECT.read(value).items() for found in _right(item, [each])}

    return Type(f"an object of {item.meaning}", read, salvage)


def either(types: Mapping[str, Type]) -> Type:
    """A JSON object with one of these fields."""

    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) != 1 or not value.keys() <= types.keys():
            raise unexpected(value, meaning)
        return _fields([(name, types[name].read) for name in value], value)

    meaning = "an object with " + " or ".join(f"{name!r}: {each.meaning}" for name, each in types.items())
    return Type(meaning, read)


def tagged(tag: str, table: Mapping[str, Any]) -> Type:
    """A JSON object of one of the classes in `table`, whose name there is in the field `tag`."""
    meaning = f"an object with {tag!r}, one of {', '.join(table)}"

    def read(value: Any) -> Any:
        name = OBJECT.read(value).get(tag)
        if type(name) is not str or name not in table:
            raise unexpected(value, meaning)
        return type_of(table[name]).read({field: each for field, each in value.items() if field != tag})

    return Type(meaning, read)


def _dataclass(kind: Any) -> Type:
    """A JSON object with exactly the fields of the class, which may check in its __post_init__ what is of several. If
    it has `MAY_OMIT`, a field with a default may be missing; with `MAY_HAVE_MORE` other fields are ignored."""
    types = {field.name: _of(field.type, kind) for field in fields(kind)}
    may_omit, has_more = getattr(kind, "MAY_OMIT", False), getattr(kind, "MAY_HAVE_MORE", False)
    needed = {field.name for field in fields(kind) if not may_omit or field.default is field.default_factory is MISSING}
    reads = [(name, each.read) for name, each in types.items()]

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise unexpected(value, "an object")
        given = reads
        if value.keys() != types.keys():
            _check_names(value.keys() & types.keys() if has_more else value.keys(), list(types), needed)
            given = [each for each in reads if each[0] in value]
        found = _fields(given, value)
        try:
            return kind(**found)
        except ValueError as error:
            raise Invalid(f"is wrong: {error}") from None

    def salvage(value: Any) -> Any:
        content = OBJECT.read(value)
        given = [(name, each) for name, each in types.items() if name in content]
        return kind(**{name: found for name, each in given for found in _right(each, [value[name]])})

    return Type(f"an object with {', '.join(types)}", read, salvage)


def _items(reads: Iterable[Callable[[Any], Any]], values: list[Any]) -> list[Any]:
    found: list[Any] = []
    try:
        for read_one, value in zip(reads, values):  # noqa: B905  strict= is Python 3.10's
            found.append(read_one(value))
    except Invalid as error:
        raise error.within(f"[{len(found)}]") from None
    return found


def _fields(reads: Iterable[tuple[str, Callable[[Any], Any]]], values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name = ""
    try:
        for name, read_one in reads:
            found[name] = read_one(values[name])
    except Invalid as error:
        raise error.within(f".{name}" if name.isidentifier() else f"[{shown(name)}]") from None
    return found


def _check_names(given: AbstractSet[str], names: list[str], needed: AbstractSet[str]) -> None:
    expected = ", ".join(names) or "no field"
    for name in sorted(needed - given, key=names.index):
        raise Invalid(f"lacks the field {name!r}, expected {expected}")
    for name in sorted(given - set(names)):
        raise Invalid(f"has the unknown field {shown(name)}, expected {expected}")


# -- annotations -------------------------------------------------------------------------------------------------------


class _Generic:
    """What stands before [...] in an annotation."""

    def __init__(self, made: Callable[[Any], Type]):
        self.made = made

    def __getitem__(self, of: Any) -> Type:
        return self.made(of)


def _tuple(of: Any) -> Type:
    items = list(of) if isinstance(of, tuple) else [of]
    return _many(items[0]) if items[-1] is ... else _row(items, f"a list of {len(items)} values", tuple)


ANYTHING = Type("any value", lambda value: value)
_DICT = _Generic(lambda of: OBJECT if of[1] is ANYTHING else _map(of[1]))
_NAMES = {
    "bool": _value("true or false", bool),
    "int": whole(-WIDEST, WIDEST, "a whole number"),
    "float": number(),
    "str": text(),
    "Any": ANYTHING,
    "tuple": _Generic(_tuple),
    "dict": _DICT,
    "Mapping": _DICT,
}


class _Scope(dict):  # type: ignore[type-arg]
    """The names in the annotations of a module."""

    def __init__(self, module: str):
        super().__init__(_NAMES)
        self._module = vars(sys.modules[module])

    def __missing__(self, name: str) -> Type:
        return type_of(self._module[name])


def _of(annotation: Any, kind: type) -> Type:
    if isinstance(annotation, Type):
        return annotation
    found: Type = eval(getattr(annotation, "__forward_arg__", annotation), {}, _Scope(kind.__module__))
    return found


@lru_cache(maxsize=None)  # noqa: UP033  functools.cache is Python 3.9's
def type_of(kind: Any) -> Type:
    """The Type of a dataclass or NamedTuple; a Type itself."""
    if isinstance(kind, Type):
        return kind
    if is_dataclass(kind):
        return _dataclass(kind)
    names: tuple[str, ...] = kind._fields
    items = [_of(annotation, kind) for annotation in kind.__annotations__.values()]
    return _row(items, f"[{', '.join(names)}]", kind._make)


def read(kind: Callable[..., T], value: Any) -> T:
    """The instance of a dataclass that a JSON value describes; Invalid if it is none."""
    try:
        made: T = type_of(kind).read(value)
        return made
    except RecursionError:
        raise Invalid("is nested too deeply, expected a few levels") from None


def salvaged(kind: Callable[..., T], value: Any) -> T:
    """The same for a file that others may have written: a field that is missing or wrong has its default, other fields
    are ignored, and wrong items of lists are left out. Invalid if the value is no JSON object."""
    made: T = type_of(kind).salvage(value)
    return made
