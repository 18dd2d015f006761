"""How many bytes a TCP link may have queued in the kernel: more urgent frames cannot overtake them, and they delay all
other traffic on the wire.

A sender fills its path with as many bytes as the path carries in one round trip (the bandwidth-delay product). The
window is twice that, so that it can grow while it limits the rate, as in BBR (Cardwell et al. 2016, "BBR:
Congestion-Based Congestion Control", cwnd_gain), plus a constant, so that the wire stays busy while the sending thread
waits for a core. Rate and shortest round trip are the kernel's own (tcp_info in linux/tcp.h).

Flows that queue for one network card share it in proportion to their queued bytes. Pushes get a larger constant than
answers: an answer needs the pushes of all workers, so a late push delays all workers, a late answer only one.
"""

from __future__ import annotations

import contextlib
import socket
import struct

PUSHES, ANSWERS = 1 << 16, 1 << 15  # bytes on top; 0.5 and 0.25 ms at 1 Gbit/s
SEGMENTS = 4  # at least, else receivers delay their acknowledgements; on IP over InfiniBand one is 64 KiB
MOST = 1 << 30  # bytes; what setsockopt takes
UPDATE_BYTES = 1 << 18  # sent between two looks at the path
_INFO = struct.Struct("=148x I 8x Q")  # tcpi_min_rtt (us), tcpi_delivery_rate (bytes/s)


class SendWindow:
    """The window of one connected TCP socket; `size` in bytes. `least`: on top of what the path holds."""

    def __init__(self, sock: socket.socket, least: int) -> None:
        self._sock = sock
        self._least = max(least, SEGMENTS * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
        self._since = 0  # bytes, since the last look
        self.size = self._least
        self._set(self._least)

    def sent(self, count: int) -> None:
        """So many bytes more have been given to the kernel."""
        self._since += count
        if self._since >= UPDATE_BYTES:
            self._since = 0
            self._update()

    def _update(self) -> None:
        with contextlib.suppress(OSError, struct.error):  # an old kernel tells less: the window stays as it is
            shortest, rate = _INFO.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
            wanted = min(self._least + int(2 * rate * shortest * 1e-6), MOST)
            if not 0.8 < wanted / self.size < 1.25:
                self._set(wanted)

    def _set(self, size: int) -> None:
        self.size = size
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)  # at most net.core.wmem_max
