"""Whether a TCP link still carries data: the kernel's counters, and the decision from them. `Stall` is pure.

TCP itself gives up after minutes. TCP_USER_TIMEOUT would be shorter, but it also ends a link whose peer is alive and
has only stopped reading: its receive window is zero, so sent data stays unacknowledged. Therefore the kernel's counters
are sampled (struct tcp_info in linux/tcp.h). A link stalls while

- data is unacknowledged, nothing more is acknowledged, and the peer's window is open. So it does on a path that drops
  large packets only, although small ones still pass; or
- the window is closed, and the kernel's probes, or retransmissions, remain unanswered: a peer that is alive answers.

An idle link has nothing unacknowledged. There the kernel's keepalive probes find a cut (`keep_alive`).
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

PROBES = 2  # unanswered ones; a single one may be on its way
MAX_SECONDS = 4.0 * 32767  # that the kernel takes for keepalive
# tcpi_probes, tcpi_unacked, tcpi_last_data_sent, tcpi_last_ack_recv (ms ago), tcpi_bytes_acked, tcpi_snd_wnd
_INFO = struct.Struct("=3x B 20x I 16x I 8x I 60x Q 100x I")


@dataclass(frozen=True)
class Sample:
    """The kernel's counters for what a link sends. `answered`: the last acknowledgement came after the last data was
    sent."""

    unacknowledged: int  # packets
    acknowledged: int  # bytes so far
    window: int  # bytes that the peer can receive
    probes: int  # of a closed window, unanswered
    answered: bool

    @property
    def waits(self) -> bool:
        """Whether an answer of the peer's host is due."""
        return self.probes >= PROBES or (self.unacknowledged > 0 and (self.window > 0 or not self.answered))


def sample(sock: socket.socket) -> Sample | None:
    """The counters of a socket. None before Linux 5.4, which does not have them: there only keepalive finds a cut.
    Raises OSError."""
    data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(data) < _INFO.size:
        return None
    probes, unacknowledged, sent, received, acknowledged, window = _INFO.unpack(data)
    return Sample(unacknowledged, acknowledged, window, probes, received <= sent)


@dataclass
class Stall:
    """Since when a link has waited for an answer without any progress. Times are seconds of any monotonic clock."""

    since: float | None = None
    acknowledged: int = -1

    def seconds(self, sample: Sample, now: float) -> float:
        """How long the link has stalled, given this new sample; 0 if it does not stall, or did not at the last one."""
        if not sample.waits:
            self.since = None
        elif self.since is None or sample.acknowledged != self.acknowledged:
            self.since = now
        self.acknowledged = sample.acknowledged
        return 0.0 if self.since is None else now - self.since

    def pause(self) -> None:
        """This process was suspended: what has been acknowledged meanwhile is not known."""
        self.since = None


def keep_alive(sock: socket.socket, seconds: float) -> None:
    """End the link when it is idle and its peer's host has been silent for about `seconds`: a quarter of that, then six
    probes, so that an outage shorter than three quarters of it is survived."""
    seconds = min(seconds, MAX_SECONDS)
    idle, interval = max(1, round(seconds / 4)), max(1, round(seconds / 8))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round((seconds - idle) / interval)))
