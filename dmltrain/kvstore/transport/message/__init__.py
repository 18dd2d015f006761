"""Control messages: frozen values, by partner in the modules of this package; here their encoding, and the checks of
received messages. Pure.

A control frame's payload is one JSON object with exactly the fields of the message's class; that of a FrameKind.CONTROL
frame also has an "op", which names the class. Anything else raises a FrameError that states what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from dmltrain.base import json_text, schema
from dmltrain.kvstore.transport.message import changes, data, handshake, job, views  # noqa: F401  (the classes below)
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header

MAX_MEMORY = 120 << 20  # bytes of a decoded message, about: 8 MiB of empty lists would take twice as much
SEPARATORS = (",", ":")

_CLASSES = Message.__subclasses__()
BY_KIND: Mapping[int, type[Message]] = {class_.kind: class_ for class_ in _CLASSES if not class_.op}
BY_OP: Mapping[str, type[Message]] = {class_.op: class_ for class_ in _CLASSES if class_.op}
_Message = TypeVar("_Message", bound=Message)
_CONTROL = json_text.Messages("op", BY_OP, FrameError, memory=MAX_MEMORY, separators=SEPARATORS)


def encode(message: Message, view: int = 0) -> bytes:
    """The complete frame of a message; `view` is the header's."""
    control = message.kind == FrameKind.CONTROL
    payload = _CONTROL.encode(message) if control else json_text.encode(message, SEPARATORS)
    return Header(message.kind, len(payload), view).pack() + payload


def decode(kind: int, payload: bytes | bytearray) -> Message:
    """The message of a frame of `kind`. Raises FrameError, which names the field and what was expected."""
    if kind == FrameKind.CONTROL:
        return cast(Message, _CONTROL.decode(payload))
    if kind not in BY_KIND:
        raise FrameError(f"frame kind {kind} where a control message was expected")
    try:
        return schema.read(BY_KIND[kind], json_text.parse(payload, memory=MAX_MEMORY))
    except schema.Invalid as error:
        raise FrameError(f"{FrameKind(kind).name}: {error}") from None


def expect(message: Message, wanted: type[_Message]) -> _Message:
    """The message, if it is of class `wanted`. Raises FrameError otherwise."""
    if not isinstance(message, wanted):
        raise FrameError(f"{type(message).__name__} where {wanted.__name__} was expected")
    return message
