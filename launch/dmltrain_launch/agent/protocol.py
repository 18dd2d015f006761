"""The protocol between the launcher and its agents: the one place that encodes, decodes and checks their messages.

To an agent: one JSON object per line, {"do": NAME, FIELD: VALUE, ...}, see `dmltrain_launch.agent.commands`. The bytes
of a file follow the line of a `File`. From an agent: HELLO, which names the protocol's version, and then frames: kind
(1 byte), task (2), length (4), payload. An OUTPUT frame is what a process wrote, byte for byte; an EVENT frame is a
JSON object {"event": NAME, FIELD: VALUE, ...}, see `dmltrain_launch.agent.events`.

From a scheduler to its agent: {"op": NAME, FIELD: VALUE, ...}, see `dmltrain_launch.agent.reports`; a Reported has the
same object. From the agent to its scheduler: what a Tell has.

Any other message raises ProtocolError, which says what was expected. Lengths are checked before memory is taken: a
message has at most MESSAGE_BYTES and takes about MESSAGE_MEMORY as Python objects, an OUTPUT frame has at most
OUTPUT_BYTES. Facts about a host (`facts`, `rows`) are JSON
objects, described by the modules that collect them.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterable, Iterator
from typing import TypeVar

from dmltrain.base.json_text import Messages
from dmltrain_launch.agent.commands import COMMANDS, Command
from dmltrain_launch.agent.events import EVENTS, Event, Exited, Frozen, Noticed, Reported, Started, Stopped
from dmltrain_launch.agent.reports import REPORT_BYTES, REPORTS, Report

GREETING, VERSION = b"\0dmltrain-agent ", 7  # a login script's output may precede it
HELLO = b"%b%d\n" % (GREETING, VERSION)
HEADER = struct.Struct("!BHI")  # kind, task, length of the payload in bytes
OUTPUT, EVENT = 1, 2  # kinds of frames
NO_TASK = 0xFFFF
OUTPUT_BYTES = 1 << 16  # a pipe's default capacity
MESSAGE_BYTES = 4 << 20  # of a line to an agent, and of an event
MESSAGE_MEMORY = 24 << 20
MAX_BYTES = {OUTPUT: OUTPUT_BYTES, EVENT: MESSAGE_BYTES}
LIST_BYTES = 1 << 16  # approximate size of a message that is one of several with parts of a list
FILLER_BYTES = 1536
Item = TypeVar("Item")


class ProtocolError(ValueError):
    """The data is not a valid message of the protocol."""


_COMMANDS = Messages("do", COMMANDS, ProtocolError, most=MESSAGE_BYTES, memory=MESSAGE_MEMORY)
_REPORTS = Messages("op", REPORTS, ProtocolError, most=REPORT_BYTES)
_EVENTS = Messages("event", EVENTS, ProtocolError, known=("host",), most=MESSAGE_BYTES, memory=MESSAGE_MEMORY)


def filler() -> str:
    """2 KiB for a heartbeat, so that it needs a full packet of Ethernet and also shows a path that drops large packets
    only. Random, because SSH may compress."""
    return base64.b64encode(os.urandom(FILLER_BYTES)).decode()


def encode_command(command: Command) -> bytes:
    """The line for an agent; ProtocolError if it is too long."""
    return _COMMANDS.encode(command) + b"\n"


def decode_command(line: bytes | bytearray) -> Command:
    command: Command = _COMMANDS.decode(line)
    return command


def encode_event(event: Event) -> bytes:
    """The payload of an event's frame; ProtocolError if it is too long."""
    return _EVENTS.encode(event)


def decode_event(payload: bytes | bytearray, host: str) -> Event:
    """The event in a frame from the agent of `host`."""
    event: Event = _EVENTS.decode(payload, host=host)
    return event


def decode_report(message: bytes) -> Report:
    """A message of a scheduler."""
    report: Report = _REPORTS.decode(message)
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
