"""Requests to a running launcher and its answers: one JSON object each, on one line. Pure.

A request is {"version": 1, "do": one of VERBS, "what": TEXT}. The answer is {"version": 1, "dmltrain": VERSION,
"code": EXIT CODE, "lines": [TEXT, ...]}: what the command prints, and its exit code. The launcher answers a request
once, when it is done, and bad input at once. Until then it sends a space each second. Both are at most MOST_BYTES long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dmltrain.base import json_text, schema

T = TypeVar("T")
VERSION = 1
MOST_BYTES = 1 << 16
MOST_LINES = 1000
ADD, REMOVE, SET = "add", "remove", "set"
ATTACH = "attach"  # another launcher wants the job
VERBS = (ADD, REMOVE, SET, ATTACH)


class ControlError(ValueError):
    """It is not a valid request or answer; the text says what was expected."""


if TYPE_CHECKING:
    Verb = str
    What = str
    Code = int
else:
    Verb, Code = schema.choice(*VERBS), schema.whole(0, 255)
    What = schema.text().only(lambda text: text and text.isprintable(), "a text without control characters")


@dataclass(frozen=True)
class Request:
    """`do` is one of VERBS; `what` are the hosts, workers or settings, as the user writes them."""

    do: Verb
    what: What


@dataclass(frozen=True)
class Answer:
    """`code`: the exit code of the command. `lines` are for the user."""

    code: Code
    lines: tuple[str, ...]


def encode_request(request: Request) -> bytes:
    """The line; ControlError if it is too long."""
    return _line({"version": VERSION, **vars(request)})


def decode_request(line: bytes) -> Request:
    """ControlError says what is wrong with it."""
    content = _object(line)
    version = content.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ControlError(f"version {schema.shown(version)} of the control protocol: expected {VERSION}")
    return _read(Request, content)


def encode_answer(answer: Answer, dmltrain: str) -> bytes:
    """The line. `dmltrain`: the launcher's version. Lines that do not fit are left out."""
    lines = [line[:MOST_LINES] for line in answer.lines[:MOST_LINES]]
    while True:
        try:
            return _line({"version": VERSION, "dmltrain": dmltrain, "code": answer.code, "lines": lines})
        except ControlError:
            lines = lines[: len(lines) // 2]


def decode_answer(line: bytes) -> Answer:
    """ControlError says what is wrong with it, and which dmltrain speaks another version."""
    content = _object(line)
    version, dmltrain = content.pop("version", None), content.pop("dmltrain", None)
    if version != VERSION:
        raise ControlError(
            f"the job's launcher is of dmltrain {schema.shown(dmltrain)} and speaks version {schema.shown(version)} of "
            f"the control protocol, not {VERSION}: use that dmltrain"
        )
    return _read(Answer, content)


def _line(content: dict[str, object]) -> bytes:
    line = json_text.encode(content) + b"\n"
    if len(line) > MOST_BYTES:
        raise ControlError(f"{len(line)} bytes: expected at most {MOST_BYTES}")
    return line


def _object(line: bytes) -> dict[str, Any]:
    try:
        return json_text.parse_object(line, MOST_BYTES)
    except schema.Invalid as error:
        raise ControlError(str(error)) from None


def _read(kind: Callable[..., T], content: dict[str, Any]) -> T:
    try:
        return schema.read(kind, content)
    except schema.Invalid as error:
        raise ControlError(str(error)) from None
