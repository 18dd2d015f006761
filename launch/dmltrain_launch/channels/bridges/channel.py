"""A channel to an agent behind a bridge (`dmltrain_launch.channels.bridges.bridge`), which runs on the agent's host."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dmltrain.base import json_text, schema
from dmltrain_launch.channels.bridges.bridge import FRAME_BYTES, LENGTH
from dmltrain_launch.channels.bridges.tls import TlsStream
from dmltrain_launch.channels.exit_text import exit_text

CLOSE_SECONDS = 1.0  # an agent that has sent its last message exits within this time
WRITE_BYTES = 1 << 18  # of a frame


def frame(payload: bytes) -> bytes:
    """A frame of the bridge's protocol."""
    return LENGTH.pack(len(payload)) + payload


@dataclass(frozen=True)
class LastWords:
    """The bridge's last frame: the agent's exit code, and its last lines on stderr."""

    code: int
    said: str


class BridgeChannel:
    """See `dmltrain_launch.channels`. The bridge starts `command`, to which `text` is written first.

    `bridge` names the bridge in messages. `fate(seconds)` says how the engine ended, "" while it runs.
    """

    def __init__(self, stream: TlsStream, bridge: str, command: str, text: bytes, fate: Callable[[float], str]):
        self._stream, self._bridge, self._fate = stream, bridge, fate
        self._writing = threading.Lock()  # messages do not interleave
        self._received = bytearray()
        self._output_ended = self._closed = False
        self._lost = ""  # why the connection was lost
        self._last: LastWords | None = None
        with contextlib.suppress(OSError):  # if it exits at once, the reader reports it
            stream.write(frame(command.encode()))
            self.write(text)

    @property
    def ended(self) -> bool:
        """Whether the bridge has reported the agent's end; False if the connection was lost before."""
        return self._last is not None

    def write(self, data: bytes) -> None:
        if self._last is not None or self._lost or self._closed:
            raise BrokenPipeError("the agent has ended")
        with self._writing:
            for start in range(0, len(data), WRITE_BYTES):
                self._stream.write(frame(data[start : start + WRITE_BYTES]))

    def read(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        output = self._take()
        while not output and self._last is None and not self._lost:
            try:
                data = self._stream.read(max(0.0, deadline - time.monotonic()))
                self._lost = "" if data else "it ended without a message"
            except TimeoutError:
                raise
            except OSError as error:
                data, self._lost = b"", error.strerror or str(error)
            self._received += data
            output = self._take()
        return output

    def _take(self) -> bytes:
        """The output in all complete frames."""
        output, start = bytearray(), 0
        while len(self._received) - start >= LENGTH.size and self._last is None:
            begin = start + LENGTH.size
            end = begin + LENGTH.unpack_from(self._received, start)[0]
            if end - begin > FRAME_BYTES:
                self._lost = f"it sent a frame of {end - begin} bytes, expected at most {FRAME_BYTES}"
                break
            if len(self._received) < end:
                break
            if self._output_ended and not self._take_last(self._received[begin:end]):
                break
            output += b"" if self._output_ended else self._received[begin:end]
            self._output_ended = self._output_ended or begin == end
            start = end
        del self._received[:start]
        return bytes(output)

    def _take_last(self, payload: bytearray) -> bool:
        """Keep the bridge's last frame, the agent's exit code and last words; False if it is none."""
        try:
            self._last = schema.read(LastWords, json_text.parse(payload))
        except schema.Invalid as error:
            self._lost = f"its last message is not valid: {error}"
        return self._last is not None

    def close(self) -> str:
        if not self._closed:
            self._closed = True
            self._await_end()
            self._stream.close()
        if self._last is not None:
            return exit_text(self._last.code, self._last.said.splitlines())
        if not self._lost:
            return "did not answer; it ends by itself"
        fate = self._fate(CLOSE_SECONDS)
        return f"lost {self._bridge}: {fate or self._lost}"

    def _await_end(self) -> None:
        """Close the agent's input, so that it ends, and wait up to CLOSE_SECONDS for its end."""
        deadline = time.monotonic() + CLOSE_SECONDS
        if self._last is None and not self._lost:
            with contextlib.suppress(OSError):  # its last output may still be readable
                self._stream.write(frame(b""))
        with contextlib.suppress(TimeoutError):
            while self._last is None and not self._lost:
                self.read(deadline - time.monotonic())
