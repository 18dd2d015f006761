"""One agent's channel at work: a thread that writes, and beats when there is nothing to write, and one that reads.

What comes goes to `take(host, kind, task, payload)`, on the reading thread; what happens to the channel itself goes
to `tell(event)`: Quiet when nothing has come for a while, Lost at its end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from launch import channels
from launch.agent.commands import Beat, Command
from launch.agent.protocol import ProtocolError, encode_command
from launch.channels import Channel
from launch.run.event import Event, Lost, Quiet

BEAT_SECONDS = 1.0
QUIET_SECONDS = 3.0  # three beats of the agent
Take = Callable[[str, int, int, bytes], None]


class Connection:
    """`start` starts both threads. `silence`: seconds after which the agent is given up."""

    def __init__(self, host: str, channel: Channel, silence: float, take: Take, tell: Callable[[Event], None]):
        self.host, self.channel, self.silence, self.take, self.tell = host, channel, silence, take, tell
        self._messages: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._quiet = False
        self.reader = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        threading.Thread(target=self._write, daemon=True).start()
        self.reader.start()

    def send(self, message: Command) -> None:
        """Queue a message; never blocks. Once the agent is gone, its reader says so."""
        self._messages.put(message)

    def finish(self) -> None:
        """Write what is queued, and no more beats."""
        self._messages.put(None)

    def _write(self) -> None:
        beat = min(BEAT_SECONDS, self.silence / 5)
        with contextlib.suppress(OSError):
            while True:
                try:
                    message = self._messages.get(timeout=beat)
                except queue.Empty:
                    message = Beat()
                if message is None:
                    return
                self.channel.write(encode_command(message))

    # -- the reading end -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for kind, task, payload in channels.frames(self, self.silence):
                self.take(self.host, kind, task, payload)
            reason = self.channel.close()
        except TimeoutError:
            self._end(f"said nothing for {self.silence:g} s")
            self.channel.close()  # afterwards, as it waits for a word that will hardly come
            return
        except Exception as error:  # what came is no agent's, or a fault of ours: nobody else would notice this end
            told = isinstance(error, (channels.ChannelError, ProtocolError, OSError))
            reason = f"{self.channel.close()}: {error if told else repr(error)}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.finish()
        self.tell(Lost(self.host, reason))

    def read(self, timeout: float) -> bytes:
        """The channel's, with word of long pauses."""
        began, silent = time.monotonic(), 0.0
        while True:
            try:
                data = self.channel.read(min(QUIET_SECONDS, max(0.0, timeout - silent)))
            except TimeoutError:
                silent = time.monotonic() - began
                if silent >= timeout:
                    raise
                self._note(silent)
            else:
                self._note(0.0)
                return data

    def _note(self, silent: float) -> None:
        if silent or self._quiet:
            self._quiet = silent > 0
            self.tell(Quiet(self.host, silent))
