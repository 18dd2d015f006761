"""An agent that connects its launcher with an older agent of the job on the same host, whose launcher is lost.

It copies bytes between its own channel and the socket of the older agent (attach.py). If the older agent has ended, it
sends the spool that this one left.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable

from dmltrain_launch.agent.alone import attach
from dmltrain_launch.agent.alone.spool import LeftSpool
from dmltrain_launch.agent.channel import READ_BYTES, Channel
from dmltrain_launch.agent.commands import Attach, Kept
from dmltrain_launch.agent.events import Refused, Resumed
from dmltrain_launch.agent.protocol import encode_command

BRIDGE_BYTES = 1 << 20  # that are read and not written yet
LEFT_SECONDS = 20.0  # without a message of a launcher that gets the spool of an agent that has ended


def connect(channel: Channel, command: Attach) -> str:
    """Connect the launcher with the agent that it asks for, or send it the spool of that agent, until one side ends.

    Returns the text to print at the exit.
    """
    if connection := attach.connect(command.door):
        rest = encode_command(command) + bytes(channel.incoming.data)
        bridge(channel.stdin, channel.stdout, connection, rest, bytes(channel.backlog))
        return ""
    return serve_left(channel, command)


def serve_left(channel: Channel, command: Attach) -> str:
    """Send the launcher the spool of an agent that has ended. Remove it when the launcher has confirmed all of it.

    Returns the text to print at the exit.
    """
    channel.host, channel.silence = command.host, LEFT_SECONDS
    channel.received_at = time.monotonic()
    channel.selector.modify(channel.stdin, selectors.EVENT_READ, lambda: _take_kept(channel))
    try:
        left = LeftSpool(command.spool)
    except (OSError, ValueError):
        channel.send(Refused(command.host, f"no agent of the job is left on {command.host}", 125))
        _send_all(channel, lambda: True)
        return ""
    channel.send(Resumed(command.host, left.first, left.last, 0, alive=False))
    channel.spool = left
    _send_all(channel, lambda: left.done)
    left.close()
    return "it had ended while no launcher was attached"


def _send_all(channel: Channel, done: Callable[[], bool]) -> None:
    channel.watch_output()
    while not channel.lost and not (channel.unsent == 0 and done()):
        for key, _ in channel.selector.select(max(0.0, channel.deadline - time.monotonic())):
            key.data()
        channel.check_silence(time.monotonic())
        channel.watch_output()


def _take_kept(channel: Channel) -> None:
    channel.read()
    for received in channel.incoming:
        if isinstance(received, Kept) and channel.spool:
            channel.spool.confirm(received.frame)


class _Pipe:
    """Copies bytes from one descriptor to another; `over` when the source has ended and all is written."""

    def __init__(self, source: int, target: int, data: bytes):
        self.source, self.target, self.data = source, target, bytearray(data)
        self.ended = False

    @property
    def over(self) -> bool:
        return self.ended and not self.data

    @property
    def reads(self) -> bool:
        return not self.ended and len(self.data) < BRIDGE_BYTES

    def read(self) -> None:
        try:
            more = os.read(self.source, READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            more = b""
        self.data += more
        self.ended = not more

    def write(self) -> None:
        try:
            written = os.write(self.target, bytes(self.data[:READ_BYTES]))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.ended = True
            self.data.clear()
        else:
            del self.data[:written]


def bridge(stdin: int, stdout: int, connection: socket.socket, first: bytes, greeting: bytes) -> None:
    """Copy between the launcher (`stdin`, `stdout`) and the agent at the other end of the `connection`, until one of
    them ends. `first` is sent to the agent before all else, and `greeting` to the launcher."""
    connection.setblocking(False)
    to_agent = _Pipe(stdin, connection.fileno(), first)
    to_launcher = _Pipe(connection.fileno(), stdout, greeting)
    with selectors.PollSelector() as selector, contextlib.suppress(KeyboardInterrupt):
        while not to_agent.over and not to_launcher.over:
            wanted: dict[int, int] = {}
            for pipe in (to_agent, to_launcher):
                if pipe.reads:
                    wanted[pipe.source] = wanted.get(pipe.source, 0) | selectors.EVENT_READ
                if pipe.data:
                    wanted[pipe.target] = wanted.get(pipe.target, 0) | selectors.EVENT_WRITE
            for descriptor, events in wanted.items():
                selector.register(descriptor, events)
            ready = dict((key.fd, mask) for key, mask in selector.select())
            for descriptor in wanted:
                selector.unregister(descriptor)
            for pipe in (to_agent, to_launcher):
                if ready.get(pipe.source, 0) & selectors.EVENT_READ and pipe.reads:
                    pipe.read()
                if ready.get(pipe.target, 0) & selectors.EVENT_WRITE and pipe.data:
                    pipe.write()
    connection.close()
