"""The agent's end of its connection with a scheduler that it starts.

A pair of sockets that keep messages apart: each is one JSON object of at most REPORT_BYTES. The scheduler reports on it
(reports.py), and gets what the launcher tells it. A process that is no scheduler of dmltrain leaves it alone.
"""

from __future__ import annotations

import contextlib
import socket

from dmltrain_launch.agent.protocol import ProtocolError, decode_report
from dmltrain_launch.agent.reports import REPORT_BYTES, Report


class SchedulerLink:
    """`inherited` is the scheduler's end, or None once it is closed here. `over`: nothing more comes from there."""

    def __init__(self) -> None:
        """OSError if there are no descriptors left."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inherited: socket.socket | None = theirs
        self.over = False
        self._explained = False
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def started(self) -> None:
        """The scheduler has its end."""
        if self.inherited:
            self.inherited.close()
            self.inherited = None

    def receive(self) -> Report | None:
        """The next report; None if there is none now. ProtocolError for another message, which is skipped."""
        try:
            data = self._socket.recv(REPORT_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:  # it has ended without reading all; what it had sent is still there
            return self.receive()
        except OSError:
            data = b""
        self.over = not data
        return decode_report(data) if data else None

    def explain(self, error: ProtocolError) -> bytes:
        """A line for the log of a scheduler that has sent another message; b"" after the first one."""
        line = b"" if self._explained else f"the agent has ignored a message of this process: {error}\n".encode()
        self._explained = True
        return line

    def tell(self, message: str) -> None:
        """Pass on a message. Who reads nothing is not waited for: the launcher notices that no answer comes."""
        with contextlib.suppress(OSError):
            self._socket.send(message.encode())

    def close(self) -> None:
        self.started()
        self._socket.close()
