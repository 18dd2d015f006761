"""Requests to a running launcher and its answers: one JSON object each, on one line. Pure.

A request is {"version": 1, "do": one of VERBS, "what": TEXT}. The answer is {"version": 1, "dmltrain": VERSION,
"code": EXIT CODE, "lines": [TEXT, ...]}: what the command prints, and its exit code. The launcher answers a request
once, when it is done, and bad input at once. Until then it sends a space each second. Both are at most MOST_BYTES long.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

VERSION = 1
MOST_BYTES = 1 << 16
MOST_LINES = 1000
ADD, REMOVE, SET = "add", "remove", "set"
ATTACH = "attach"  # another launcher wants the job
VERBS = (ADD, REMOVE, SET, ATTACH)


class ControlError(ValueError):
    """It is not a valid request or answer; the text says what was expected."""


@dataclass(frozen=True)
class Request:
    """`do` is one of VERBS; `what` are the hosts, workers or settings, as the user writes them."""

    do: str
    what: str


@dataclass(frozen=True)
class Answer:
    """`code`: the exit code of the command. `lines` are for the user."""

    code: int
    lines: tuple[str, ...]


def encode_request(request: Request) -> bytes:
    """The line; ControlError if it is too long."""
    return _line({"version": VERSION, "do": request.do, "what": request.what})


def decode_request(line: bytes) -> Request:
    """ControlError says what is wrong with it."""
    request = _object(line)
    version = request.get("version")
    if type(version) is not int or version != VERSION:
        raise ControlError(f"version {_shown(version)} of the control protocol: expected {VERSION}")
    if unknown := request.keys() - {"version", "do", "what"}:
        raise ControlError(f"unknown field {_shown(min(unknown))}: expected version, do and what")
    if request.get("do") not in VERBS:
        raise ControlError(f"do is {_shown(request.get('do'))}: expected one of {', '.join(VERBS)}")
    what = request.get("what")
    if not isinstance(what, str) or not what or not what.isprintable():
        raise ControlError(f"what is {_shown(what)}: expected text without control characters")
    return Request(request["do"], what)


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
    answer = _object(line)
    if answer.get("version") != VERSION:
        theirs = _shown(answer.get("dmltrain"))
        raise ControlError(
            f"the job's launcher is of dmltrain {theirs} and speaks version {_shown(answer.get('version'))} of the "
            f"control protocol, not {VERSION}: use that dmltrain"
        )
    code, lines = answer.get("code"), answer.get("lines")
    if type(code) is not int or not 0 <= code <= 255:
        raise ControlError(f"code is {_shown(code)}: expected 0 to 255")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ControlError(f"lines is {_shown(lines)}: expected a list of texts")
    return Answer(code, tuple(lines))


def _line(content: dict[str, Any]) -> bytes:
    line = json.dumps(content).encode() + b"\n"
    if len(line) > MOST_BYTES:
        raise ControlError(f"{len(line)} bytes: expected at most {MOST_BYTES}")
    return line


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MOST_BYTES:
        raise ControlError(f"more than {MOST_BYTES} bytes in one line")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ControlError(f"{_shown(line[:100].decode(errors='replace'))} is not a JSON object in one line")
    return value


def _shown(value: object) -> str:
    return ascii(value)[:100]
