"""The connection to one agent: a thread that writes commands and heartbeats, and a thread that reads.

The reading thread calls `take(host, kind, task, payload)` for each frame, and `report(event)` for the channel itself:
Quiet if nothing has arrived for a while, Lost at its end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from dmltrain_launch import channels
from dmltrain_launch.agent.commands import Beat, Command
from dmltrain_launch.agent.protocol import ProtocolError, encode_command, filler
from dmltrain_launch.channels import Channel
from dmltrain_launch.run.supervisor.event import Event, Lost, Quiet

HEARTBEAT_SECONDS = 1.0
QUIET_SECONDS = 3.0  # three heartbeats of the agent
Take = Callable[[str, int, int, bytes], None]


class Connection:
    """`start` starts both threads. `silence`: seconds without a message after which the agent counts as lost.

    `kept`: gives a command to send with each heartbeat, or None.
    """

    def __init__(
        self,
        host: str,
        channel: Channel,
        silence: float,
        take: Take,
        report: Callable[[Event], None],
        kept: Callable[[], Command | None] = lambda: None,
    ):
        self.kept = kept
        self.host, self.channel, self.silence, self.take, self.report = host, channel, silence, take, report
        self._messages: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._quiet = False
        self.reader = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        threading.Thread(target=self._write, daemon=True).start()
        self.reader.start()

    def send(self, message: Command) -> None:
        """Queue a message; never blocks. If the agent is lost, the reading thread reports it."""
        self._messages.put(message)

    def finish(self) -> None:
        """Write the queued messages, then stop writing."""
        self._messages.put(None)

    def _write(self) -> None:
        interval = min(HEARTBEAT_SECONDS, self.silence / 5)
        with contextlib.suppress(OSError):  # the reading thread reports it
            while True:
                try:
                    message = self._messages.get(timeout=interval)
                except queue.Empty:
                    message = Beat(filler())
                if message is None:
                    return
                try:
                    line = encode_command(message)
                    if isinstance(message, Beat) and (kept := self.kept()):
                        line += encode_command(kept)
                except ProtocolError as error:
                    return self.report(Lost(self.host, f"could not be sent its tasks: {error}"))
                self.channel.write(line)

    # -- the reading end -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for kind, task, payload in channels.frames(self, self.silence):
                self.take(self.host, kind, task, payload)
            reason = self.channel.close()
        except TimeoutError:
            self._end(f"sent no heartbeat for {self.silence:g} s", ended=False)
            self.channel.close()  # after the report, because it waits for the agent's exit
            return
        except Exception as error:  # invalid data, or a bug of the launcher; report it, as the thread ends here
            expected = isinstance(error, (channels.ChannelError, ProtocolError, OSError))
            reason = f"{self.channel.close()}: {error if expected else repr(error)}"
        self._end(reason, self.channel.ended)

    def _end(self, reason: str, ended: bool) -> None:
        self.finish()
        self.report(Lost(self.host, reason, ended))

    def read(self, timeout: float) -> bytes:
        """The channel's `read`, which also reports long pauses."""
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
            self.report(Quiet(self.host, silent))
