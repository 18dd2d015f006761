"""Frames: a fixed 68-byte header and a payload. Pure: bytes in, values out; no sockets (link.py has those).

Theory of operation. Every message of the parameter server is one frame. Control frames carry JSON of limited size
(message.py); data frames carry the raw little-endian elements of one slice. A reader first passes 68 bytes to
`Header.unpack`, which rejects invalid headers before any payload is read. Then the receiver compares the payload's
length with the length that it expects (the slice's, or at most `MAX_CONTROL`), so that no peer can make it allocate
memory. The checksum covers the header, whose corruption would misplace data; payloads rely on TCP's checksum and the
link layer's CRC (docs/decisions/0002-payload-checksum.md). docs/protocol.md shows the layout.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from dmltrain.kvstore import codec

MAGIC = b"DMLT"
VERSION = 10
MAX_CONTROL = 8 << 20  # bytes of JSON; a declaration of 100,000 slices takes 3 MB
MAX_PROBE = 1 << 20  # bytes of a frame for measuring
MAX_STATE = 1 << 34  # bytes of a server's weights and optimizer state
MAX_HELLO = 4096  # bytes of JSON before a peer has proved that it belongs to the job

# magic version kind dtype flags view key slice clock number length offset waited worked priority
_BODY = struct.Struct("!4sBBBBIIIQdQQffi")
_CRC = struct.Struct("!I")
_READ = struct.Struct("!IIQ")  # key slice offset
HEADER_SIZE = _BODY.size + _CRC.size


class FrameKind(IntEnum):
    """Kinds of frames. 1 to 15: connection, 16 to 31: control (JSON), from 32 on: data (a slice)."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    ACCEPT = 4
    REFUSE = 5
    CONTROL = 16
    DECLARE = 17
    OPTIMIZER = 18
    DONE = 19
    ERROR = 20
    LEAVE = 21
    HOLD = 23
    INIT = 32
    PUSH = 33
    PULL = 34
    VALUE = 35
    READ_STATE = 36
    STATE = 37
    RELEASE = 38
    PROBE = 39
    FLAT = 40
    READ_STEPS = 45
    READ_GONE = 46


class Flag:
    """Flags of data frames; bits. Plain integers, because an operation on an IntFlag takes a microsecond."""

    SHARED = 1  # the payload lies at `offset` in the sender's shared memory
    PULL = 2  # on a PUSH: it is also the worker's pull at the same clock


DTYPES = ("float32", "float64")  # index = the header's dtype byte; above these: codecs' numbers


class FrameError(Exception):
    """The peer sent an invalid frame; the message says what is wrong. The connection is cut."""


class VersionError(FrameError):
    """A frame of another version of the protocol."""


class Header(NamedTuple):
    """`number` is the learning rate of a PUSH, the staleness in a VALUE; `length` is in bytes.

    In seconds: `waited` in a PUSH is the time since its gradient was ready; in a VALUE the time from when this worker's
    gradient was ready until the last worker's was. `worked` in a VALUE is the time from when all pushes had arrived
    until the value was ready to be sent.
    """

    kind: int
    length: int = 0
    view: int = 0  # of an elastic job; see view.py
    key: int = 0
    slice: int = 0
    clock: int = 0  # of the worker that pushes or pulls
    number: float = 0.0
    dtype: int = 0
    flags: int = 0
    offset: int = 0  # of the payload in shared memory
    waited: float = 0.0
    worked: float = 0.0
    priority: int = 0  # of a pull: values with a higher priority are sent first

    @property
    def is_followed(self) -> bool:
        """Whether a payload comes after this header."""
        return self.length > 0 and not self.flags & Flag.SHARED

    def pack(self) -> bytes:
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.dtype,
            self.flags,
            self.view,
            self.key,
            self.slice,
            self.clock,
            self.number,
            self.length,
            self.offset,
            self.waited,
            self.worked,
            self.priority,
        )
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def unpack(data: bytes | bytearray | memoryview) -> Header:
        """Raises FrameError (VersionError) naming the field that is wrong, what it was and what was expected."""
        if len(data) != HEADER_SIZE:
            raise FrameError(f"truncated header: {len(data)} of {HEADER_SIZE} bytes")
        (
            magic,
            version,
            kind,
            dtype,
            flags,
            view,
            key,
            index,
            clock,
            number,
            length,
            offset,
            waited,
            worked,
            priority,
        ) = _BODY.unpack_from(data)
        if magic != MAGIC:
            raise FrameError(f"not a dmltrain frame: starts with {bytes(magic)!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise VersionError(f"protocol version {version}, expected {VERSION}: install the same dmltrain everywhere")
        if _CRC.unpack_from(data, _BODY.size)[0] != zlib.crc32(data[: _BODY.size]):
            raise FrameError("header checksum does not match")
        if kind not in _KINDS:
            raise FrameError(f"unknown frame kind {kind}")
        if dtype > MAX_DTYPE:
            raise FrameError(f"unknown element type {dtype}")
        if flags > MAX_FLAGS:
            raise FrameError(f"unknown flags {flags}")
        return Header(kind, length, view, key, index, clock, number, dtype, flags, offset, waited, worked, priority)


_KINDS = frozenset(int(kind) for kind in FrameKind)
MAX_FLAGS = Flag.SHARED | Flag.PULL
MAX_DTYPE = codec.MAX_NUMBER


def release(read: Iterable[tuple[int, int, int]]) -> bytes:
    """The payload of a RELEASE: (key, slice, offset) of each value that has been read."""
    return b"".join([_READ.pack(*value) for value in read])


def parse_release(payload: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """The inverse of `release`. Raises FrameError if the length is wrong."""
    if len(payload) % _READ.size:
        raise FrameError(f"a release of {len(payload)} bytes, expected a multiple of {_READ.size}")
    return _READ.iter_unpack(payload)
