"""The scheduler's connection with the agent that has started it, on which it reports to the launcher (reports.py), and
is asked for changes of the kvstore.

It is a pair of sockets that keep messages apart. The agent has one of them; the scheduler inherits the other one. A
scheduler that was started in another way has none, and tells nobody but the readers of its log.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from dmltrain.base.errors import UserError
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler import reports
from dmltrain.kvstore.scheduler.reports import Report
from dmltrain.kvstore.transport import message
from dmltrain.kvstore.transport.message.changes import Change
from dmltrain.kvstore.transport.wire import FrameError, FrameKind

KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Agent:
    """`descriptor`: of the inherited socket; None: there is no agent. UserError if it is another file.

    `asked(change)` is called in a thread of its own for each change that the user wants.
    """

    def __init__(self, descriptor: int | None, asked: Callable[[Change], None]) -> None:
        self._socket = None if descriptor is None else _inherited(descriptor)
        self._asked = asked
        if self._socket:
            threading.Thread(target=self._listen, args=(self._socket,), name="agent", daemon=True).start()

    def report(self, report: Report) -> None:
        """Tell the launcher. Waits while the agent does not read; does nothing once it has ended."""
        if not self._socket:
            return
        try:
            self._socket.send(reports.encode(report))
        except ValueError as error:
            log(f"the launcher is not told of a {report.op!r}: the message has {error}")
        except OSError:  # the agent has ended: the next one starts another scheduler
            self.close()

    def close(self) -> None:
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `_listen`, which closes it
            self._socket = None

    def _listen(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(reports.MESSAGE_BYTES + 1):
                try:
                    self._asked(decode(data))
                except FrameError as error:
                    log(f"ignored a message of the agent: {error}")


def decode(data: bytes) -> Change:
    """The agent's message. FrameError if it is another one."""
    if len(data) > reports.MESSAGE_BYTES:
        raise FrameError(f"more than {reports.MESSAGE_BYTES} bytes")
    change = message.expect(message.decode(FrameKind.CONTROL, data), Change)
    if change.number < 1 or change.after:
        raise FrameError(f"change {change.number} after step {change.after}: expected a new one, with after=0")
    return change


def _inherited(descriptor: int) -> socket.socket:
    try:
        found = socket.socket(fileno=descriptor)
        if (found.family, found.type) == KIND:
            found.set_inheritable(False)
            return found
        found.detach()
        why = "it is of another kind"
    except OSError as error:
        why = str(error.strerror)
    raise UserError(
        f"DMLTRAIN_AGENT_FD={descriptor} is not a connection with an agent: {why}; "
        "unset it, or start this program with dmltrain-launch"
    )
