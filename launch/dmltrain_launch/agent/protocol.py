"""The protocol between the launcher and its agents: the one place that encodes, decodes and checks their messages.

To an agent: one JSON object per line, {"do": NAME, FIELD: VALUE, ...}, see `dmltrain_launch.agent.commands`. The bytes
of a file follow the line of a `File`. From an agent: HELLO, which names the protocol's version, and then frames: kind
(1 byte), task (2), length (4), payload. An OUTPUT frame is what a process wrote, byte for byte; an EVENT frame is a
JSON object {"event": NAME, FIELD: VALUE, ...}, see `dmltrain_launch.agent.events`.

From a scheduler to its agent: {"op": NAME, FIELD: VALUE, ...}, see `dmltrain_launch.agent.reports`; a Reported has the
same object. From the agent to its scheduler: the message "change" of dmltrain (docs/protocol.md).

Any other message raises ProtocolError, which says what was expected. Lengths are checked before memory is taken: a
message has at most MESSAGE_BYTES and takes about MESSAGE_MEMORY as Python objects, an OUTPUT frame has at most
OUTPUT_BYTES. Facts about a host (`facts`, `rows`) are JSON
objects, described by the modules that collect them.

In Python 3.8 the annotation of a field is text. READERS has the check for each text.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeVar

from dmltrain_launch.agent.commands import COMMANDS, AnnouncedEntry, Change, Command, Peer, Spawn
from dmltrain_launch.agent.events import (
    EVENTS,
    Event,
    Exited,
    Frozen,
    Noticed,
    Reported,
    Started,
    Stopped,
    StoppedProcess,
)
from dmltrain_launch.agent.reports import ASKED, MADE, REFUSED, REPORT_BYTES, REPORTS, Report
from dmltrain_launch.agent.text import one_line, one_line_each

GREETING, VERSION = b"\0dmltrain-agent ", 6  # a login script's output may precede it
HELLO = b"%b%d\n" % (GREETING, VERSION)
HEADER = struct.Struct("!BHI")  # kind, task, length of the payload in bytes
OUTPUT, EVENT = 1, 2  # kinds of frames
NO_TASK = 0xFFFF
OUTPUT_BYTES = 1 << 16  # a pipe's default capacity
MESSAGE_BYTES = 4 << 20  # of a line to an agent, and of an event
MESSAGE_MEMORY = 24 << 20
MAX_BYTES = {OUTPUT: OUTPUT_BYTES, EVENT: MESSAGE_BYTES}
MAX_DIGITS = 40  # of a whole number: reading a long one takes time that is quadratic in its length
LIST_BYTES = 1 << 16  # approximate size of a message that is one of several with parts of a list
FILLER_BYTES = 1536
NAMES = {kind: name for table in (COMMANDS, EVENTS, REPORTS) for name, kind in table.items()}
Item = TypeVar("Item")


class ProtocolError(ValueError):
    """The data is not a valid message of the protocol."""


def filler() -> str:
    """2 KiB for a heartbeat, so that it needs a full packet of Ethernet and also shows a path that drops large packets
    only. Random, because SSH may compress."""
    return base64.b64encode(os.urandom(FILLER_BYTES)).decode()


# -- encoding and decoding -------------------------------------------------------------------------------------------


def encode_command(command: Command) -> bytes:
    """The line for an agent; ProtocolError if it is too long."""
    name = NAMES[type(command)]
    line = json.dumps({"do": name, **vars(command)}, default=vars).encode() + b"\n"
    check_size(line, f"message {name!r}")
    return line


def decode_command(line: bytes | bytearray) -> Command:
    command: Command = _decode(line, "do", COMMANDS, {})
    return command


def encode_event(event: Event) -> bytes:
    """The payload of an event's frame; ProtocolError if it is too long."""
    values = {name: value for name, value in vars(event).items() if name != "host"}
    payload = json.dumps({"event": NAMES[type(event)], **values}, default=_tagged).encode()
    check_size(payload, f"message {NAMES[type(event)]!r}")
    return payload


def decode_event(payload: bytes | bytearray, host: str) -> Event:
    """The event in a frame from the agent of `host`."""
    event: Event = _decode(payload, "event", EVENTS, {"host": host})
    return event


def encode_change(change: Change) -> bytes:
    """The message for a scheduler."""
    values = {name: value for name, value in vars(change).items() if name != "task"}
    return json.dumps({"op": "change", **values, "after": 0}).encode()


def decode_report(message: bytes) -> Report:
    """A message of a scheduler."""
    if len(message) > REPORT_BYTES:
        raise ProtocolError(f"{_shown(message)} has more than {REPORT_BYTES} bytes")
    report: Report = _decode(message, "op", REPORTS, {})
    return report


def tasks_of(event: Event) -> list[int]:
    """The numbers of the tasks that the event is about."""
    if isinstance(event, Stopped):
        return [process.task for process in event.processes if process.task is not None]
    if isinstance(event, Noticed):
        return list(event.tasks)
    return [event.task] if isinstance(event, (Started, Exited, Reported, Frozen)) else []


def check_frame(kind: int, length: int) -> None:
    """ProtocolError unless an agent may send such a frame."""
    if kind not in MAX_BYTES or length > MAX_BYTES[kind]:
        raise ProtocolError(
            f"a frame of kind {kind} with {length} bytes; expected kind {OUTPUT} with at most {OUTPUT_BYTES} bytes, "
            f"or kind {EVENT} with at most {MESSAGE_BYTES}"
        )


def check_size(text: bytes | bytearray, what: str) -> None:
    """ProtocolError if the JSON text is too long, or would take too much memory when it is read."""
    if len(text) > MESSAGE_BYTES:
        raise ProtocolError(f"{what} has {len(text)} bytes; expected at most {MESSAGE_BYTES}")
    if len(text) <= LIST_BYTES:
        return
    values = text.count(b",") + text.count(b":")
    memory = 64 * values + 96 * text.count(b"[") + 256 * text.count(b"{")  # bytes of CPython's objects, about
    if memory > MESSAGE_MEMORY:
        raise ProtocolError(f"{what} takes about {memory >> 20} MiB; expected at most {MESSAGE_MEMORY >> 20}")


def batches(items: Iterable[Item]) -> Iterator[tuple[tuple[Item, ...], bool]]:
    """The items in parts for messages of about LIST_BYTES, and whether a part is the last. The last may be empty."""
    part: list[Item] = []
    size = 0
    for item in items:
        more = len(json.dumps(item)) + 2
        if part and size + more > LIST_BYTES:
            yield tuple(part), False
            part, size = [], 0
        part.append(item)
        size += more
    yield tuple(part), True


def _decode(text: bytes | bytearray, tag: str, table: Mapping[str, Callable[..., Any]], known: dict[str, str]) -> Any:
    check_size(text, "the message")
    try:
        message = json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, nested too deeply
        raise ProtocolError(f"{_shown(text)} is not JSON; expected an object with {tag!r}") from None
    name = message.pop(tag, None) if isinstance(message, dict) else None
    if not isinstance(name, str) or name not in table:
        raise ProtocolError(f"{_shown(text)} is not a message; expected {tag!r} to be one of {', '.join(table)}")
    try:
        return _object(table[name], message, f"message {name!r}", known)
    except RecursionError:
        raise ProtocolError(f"{_shown(text)} is nested too deeply; expected a message of a few levels") from None


def _tagged(report: Report) -> dict[str, Any]:
    return {"op": NAMES[type(report)], **vars(report)}


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError
    return int(text)


def _shown(text: bytes | bytearray) -> str:
    return ascii(bytes(text[:100]).decode("utf-8", "replace")) + "..." * (len(text) > 100)


def _object(kind: Callable[..., Any], fields_given: Mapping[str, Any], what: str, known: Mapping[str, str]) -> Any:
    """A dataclass from a JSON object. `known`: fields that are not in the object."""
    expected = SHAPES[kind]
    values: dict[str, Any] = dict(known)
    for name, value in fields_given.items():
        if name not in expected or name in known:
            names = ", ".join(each for each in expected if each not in known) or "none"
            raise ProtocolError(
                f"{what} has the unknown field {_shown(name.encode('utf-8', 'replace'))}; its fields are: {names}"
            )
        try:
            values[name] = expected[name].read(value)
        except ProtocolError:
            raise
        except (TypeError, ValueError):
            raise ProtocolError(
                f"field {name!r} of {what} is {_brief(value)}; expected {expected[name].meaning}"
            ) from None
    missing = [name for name, each in expected.items() if each.required and name not in values]
    if missing:
        raise ProtocolError(f"{what} lacks the field {missing[0]!r}: expected {expected[missing[0]].meaning}")
    return kind(**values)


def _brief(value: object) -> str:
    return _shown(json.dumps(value).encode())


# -- the check of each field -----------------------------------------------------------------------------------------


class Reader(NamedTuple):
    """`read` checks and converts a JSON value, or raises TypeError or ValueError; `meaning` is what it expects."""

    meaning: str
    read: Callable[[Any], Any]


class Shape(NamedTuple):
    """A field of a message."""

    meaning: str
    read: Callable[[Any], Any]
    required: bool


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # isinstance would take True for a number
            raise TypeError
        return value

    return read


def _number(least: float, most: float, *kinds: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in kinds or not least <= value <= most:
            raise ValueError
        return value

    return read


def _optional(reader: Reader) -> Reader:
    return Reader(f"{reader.meaning}, or null", lambda value: None if value is None else reader.read(value))


def _many(reader: Reader) -> Reader:
    def read(value: Any) -> tuple[Any, ...]:
        return tuple(map(reader.read, LIST(value)))

    return Reader(f"a list of {reader.meaning}", read)


def _by_name(reader: Reader) -> Reader:
    def read(value: Any) -> dict[str, Any]:
        return {name: reader.read(each) for name, each in DICT(value).items()}

    return Reader(f"an object of {reader.meaning}", read)


def _row(kind: Any) -> Reader:
    """A NamedTuple from a JSON array."""
    reads = [READERS[text].read for text in _annotations(kind).values()]

    def read(value: Any) -> Any:
        if len(LIST(value)) != len(reads):
            raise ValueError
        return kind._make([check(each) for check, each in zip(reads, value)])  # noqa: B905  strict= is Python 3.10's

    return Reader(f"[{', '.join(kind._fields)}]", read)


def _annotations(kind: Any) -> dict[str, str]:
    """By field, as text: Python 3.8 wraps a NamedTuple's."""
    return {
        name: getattr(annotation, "__forward_arg__", annotation) for name, annotation in kind.__annotations__.items()
    }


def _path(value: Any) -> Any:
    """{"ms": number} or {"error": text}."""
    (name,) = DICT(value)
    if name not in PATH:
        raise ValueError
    return {name: READERS[PATH[name]].read(value[name])}


def _outcome(value: Any) -> str:
    if value not in (ASKED, REFUSED, MADE):
        raise ValueError
    return str(value)


def _report(value: Any) -> Any:
    """What `_tagged` makes of a report."""
    values = dict(DICT(value))
    name = values.pop("op", None)
    if not isinstance(name, str) or name not in REPORTS:
        raise ValueError
    return _object(REPORTS[name], values, f"report {name!r}", {})


PATH = {"ms": "float", "error": "Text"}
LIST, DICT = _exactly(list), _exactly(dict)
WIDEST = 1 << 63
READERS = {
    "str": Reader("text", _exactly(str)),
    "Text": Reader("text", lambda value: one_line(_exactly(str)(value))),
    "bool": Reader("true or false", _exactly(bool)),
    "int": Reader("a whole number", _number(-WIDEST, WIDEST, int)),
    "float": Reader("a number", _number(-1e15, 1e15, int, float)),
    "Seconds": Reader("a number of seconds, 0 or more", _number(0, 1e9, int, float)),
    "Share": Reader("a number from 0 to 1", _number(0, 1, int, float)),
    "Amount": Reader("a number, 0 or more", _number(0, 1e15, int, float)),
    "Count": Reader("a whole number, 0 or more", _number(0, WIDEST, int)),
    "Port": Reader("a port, 0 to 65535", _number(0, 65535, int)),
    "Number": Reader("the number of a task, 0 to 65535", _number(0, 65535, int)),
    "Outcome": Reader(f"{ASKED}, {REFUSED} or {MADE}", _outcome),
    "Report": Reader(f"an object with 'op', one of {', '.join(REPORTS)}", _report),
    "dict[str, Any]": Reader("an object", DICT),
    "Facts": Reader("an object", lambda value: one_line_each(DICT(value))),
}
for _name in ("str", "Port", "Number", "Share", "Amount"):
    READERS[f"{_name} | None"] = _optional(READERS[_name])
for _kind in (Peer, AnnouncedEntry, StoppedProcess):
    READERS[_kind.__name__] = _row(_kind)
READERS["Spawn"] = Reader("a process", lambda value: _object(Spawn, DICT(value), "a process to start", {}))
for _name in (
    "str",
    "Text",
    "Count",
    "Number",
    "Peer",
    "AnnouncedEntry",
    "StoppedProcess",
    "Spawn",
    "dict[str, Any]",
    "Facts",
):
    READERS[f"tuple[{_name}, ...]"] = _many(READERS[_name])
READERS["dict[str, str]"], READERS["dict[str, Port]"] = _by_name(READERS["str"]), _by_name(READERS["Port"])
READERS["dict[str, dict[str, Any]]"] = _by_name(Reader('{"ms": number} or {"error": text}', _path))


def _shape(kind: Any) -> dict[str, Shape]:
    return {
        field.name: Shape(*READERS[str(field.type)], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


SHAPES: dict[Callable[..., Any], dict[str, Shape]] = {kind: _shape(kind) for kind in (*NAMES, Spawn)}
