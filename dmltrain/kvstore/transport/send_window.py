"""The send window: how many bytes of a TCP link may be queued in the kernel. More urgent frames cannot overtake these
bytes, and they delay all other traffic on the wire.

A path is full when it carries as many bytes as it transfers in one round trip (the bandwidth-delay product). The window
is twice that, so that it can grow while it limits the rate, as in BBR (Cardwell et al. 2016, "BBR: Congestion-Based
Congestion Control", cwnd_gain), plus a constant, so that the wire stays busy while the sending thread waits for a core.
The kernel measures the rate and the shortest round trip (tcp_info in linux/tcp.h).

Flows that queue for one network card share it in proportion to their queued bytes. The constant is larger for pushes
than for answers, because a late push delays all workers and a late answer only one.
"""

from __future__ import annotations

import contextlib
import socket
import struct

PUSHES, ANSWERS = 1 << 16, 1 << 15  # bytes, the constant; 0.5 and 0.25 ms at 1 Gbit/s
SEGMENTS = 4  # minimum: with fewer, receivers delay their acknowledgements; on IP over InfiniBand one is 64 KiB
MAX_BYTES = 1 << 30  # that setsockopt accepts
UPDATE_BYTES = 1 << 18  # sent between two measurements of the path
_INFO = struct.Struct("=148x I 8x Q")  # tcpi_min_rtt (us), tcpi_delivery_rate (bytes/s)


class SendWindow:
    """The window of one connected TCP socket; `size` in bytes. `constant`: bytes in addition to those on the path."""

    def __init__(self, sock: socket.socket, constant: int) -> None:
        self._sock = sock
        self._constant = max(constant, SEGMENTS * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
        self._since = 0  # bytes since the last measurement
        self.size = self._constant
        self._set(self._constant)

    def sent(self, count: int) -> None:
        """Count bytes that were passed to the kernel."""
        self._since += count
        if self._since >= UPDATE_BYTES:
            self._since = 0
            self._update()

    def _update(self) -> None:
        with contextlib.suppress(OSError, struct.error):  # an old kernel has no such values: keep the window
            shortest, rate = _INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
            wanted = min(self._constant + int(2 * rate * shortest * 1e-6), MAX_BYTES)
            if not 0.8 < wanted / self.size < 1.25:
                self._set(wanted)

    def _set(self, size: int) -> None:
        self.size = size
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)  # at most net.core.wmem_max
