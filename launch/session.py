"""The I/O around a `Supervisor`: channels, one reading thread for each, heartbeats, signals, and the one event queue.

The readers hand output straight to `Output` and events to the queue, so a terminal that blocks slows the processes
and never the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launch import LaunchError, agent, channels
from launch.channels import Channel
from launch.event import Event, Interrupted, Lost, OutputFailed, Started, Tick, from_agent
from launch.host import Host
from launch.output import Output
from launch.supervise import Action, Recover, Send, Supervisor

READER_SECONDS = 2.0  # for the last output to reach the logs
KEY_BYTES = 32
BEATS = 5  # heartbeats in the time after which silence means death
Connect = Callable[[Host, str], Channel]  # opens a channel to a new agent for the job of that mark
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Session:
    """Runs one job to its end. `on_all_started` is called when every process has a pid; it may raise LaunchError."""

    def __init__(self, supervisor: Supervisor, connect: Connect, output: Output, on_all_started: Callable[[], None]):
        self.supervisor, self.connect, self.output, self.on_all_started = supervisor, connect, output, on_all_started
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # whose put may interrupt itself
        self.channels: dict[str, Channel] = {}
        self.readers: list[threading.Thread] = []
        self.closing = threading.Event()

    def run(self, log_folder: Path | None) -> None:
        """From the first connection to the last agent's last word; `log_folder` is one that the agents can write to."""
        key = secrets.token_hex(KEY_BYTES)
        with self._signals():
            threading.Thread(target=self._beat, daemon=True).start()
            try:
                for host in self.supervisor.hosts.values():
                    self._open(host)
                self._do(self.supervisor.begin(key, str(log_folder) if log_folder else None, time.monotonic()))
                while not self.supervisor.over:
                    event = self._next()
                    self._do(self.supervisor.handle(event, time.monotonic()))
                    if self.supervisor.ending:
                        self.output.hurry()
                    if isinstance(event, Started) and self.supervisor.started:
                        self._tell_started()
            finally:
                self.closing.set()
                for reader in self.readers:
                    reader.join(READER_SECONDS)

    def _next(self) -> Event:
        deadline = self.supervisor.deadline
        try:
            return self.events.get(timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return Tick()

    def _tell_started(self) -> None:
        try:
            self.on_all_started()
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(host, message):
                    self._send(host, message)
                case Recover(host):
                    self._recover(self.supervisor.hosts[host])

    def _open(self, host: Host) -> None:
        try:
            channel = self.connect(host, self.supervisor.job.mark)
        except LaunchError as error:
            return self.events.put(Lost(host.name, f"could not be started: {error}"))
        self.channels[host.name] = channel
        reader = threading.Thread(target=self._read, args=(host.name, channel), daemon=True)
        self.readers.append(reader)
        reader.start()

    def _recover(self, host: Host) -> None:
        self._open(host)
        self._send(host.name, self.supervisor.job_message(host.name))
        self._send(host.name, {"do": "stop", "grace": self.supervisor.grace})

    def _send(self, host: str, message: dict) -> None:
        if host in self.channels:
            with contextlib.suppress(OSError):  # its reader reports the agent's end
                channels.send(self.channels[host], message)

    def _beat(self) -> None:
        while not self.closing.wait(self.supervisor.silence / BEATS):
            for host in list(self.channels):
                self._send(host, {"do": "beat"})

    def _read(self, host: str, channel: Channel) -> None:
        try:
            for kind, task, payload in channels.frames(channel, self.supervisor.silence):
                if kind == agent.OUTPUT:
                    self._take(task, payload)
                elif event := from_agent(host, json.loads(payload)):
                    self.events.put(event)
            reason = channel.close()
        except TimeoutError:
            channel.close()
            reason = f"said nothing for {self.supervisor.silence:g} s"
        except (channels.ChannelError, ValueError, KeyError, TypeError, OSError) as error:
            reason = f"{channel.close()}: {error}"
        self.events.put(Lost(host, reason))

    def _take(self, task: int, payload: bytes) -> None:
        try:
            self.output.write(task, payload)
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def interrupted(number: int, frame: object) -> None:
            self.events.put(Interrupted(number))

        # nohup's wish is kept; a shell that starts background jobs with SIGINT ignored is not obeyed
        numbers = [n for n in ENDING_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, interrupted) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
