"""A TLS stream for several threads: one may read while others write, and every wait has a deadline.

Two threads cannot read and write a `ssl.SSLSocket` at the same time. Therefore TLS works in memory here, under a lock,
and waiting for the socket happens outside the lock. The launcher is the server; it makes a certificate for each job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import ssl
import threading
import time

from dmltrain_launch.certificate import new

READ_BYTES = 1 << 18


def certificate() -> tuple[ssl.SSLContext, str]:
    """A server's context with a new certificate, and the certificate's SHA-256. The key stays in memory."""
    pem, der = new()
    return _context(pem), hashlib.sha256(der).hexdigest()


def _context(pem: bytes) -> ssl.SSLContext:
    """`ssl` reads keys only from files, so this is a file in memory, which no other process can open by name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # no session resumption
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


class TlsStream:
    """The server's side of one connection. It takes over `connection`, which blocks."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext):
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._cipher, self._sending = threading.Lock(), threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def handshake(self, deadline: float) -> None:
        """OSError (such as ssl.SSLError) or TimeoutError if the peer does not complete the handshake."""
        while True:
            try:
                self._tls.do_handshake()
                return self._flush()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive(deadline)

    def read(self, timeout: float) -> bytes:
        """Some bytes, b"" at the end; TimeoutError after `timeout` seconds; OSError if the connection was lost."""
        deadline = time.monotonic() + timeout
        while True:
            data = self._decrypt()
            if data is not None:
                return data
            self._receive(deadline)

    def _decrypt(self) -> bytes | None:
        """The received data, or None without a complete record."""
        data = bytearray()
        with self._cipher:
            try:
                while len(data) < READ_BYTES:
                    record = self._tls.read(READ_BYTES)
                    if not record:
                        break
                    data += record
            except ssl.SSLWantReadError:
                return bytes(data) or None
            except ssl.SSLEOFError:
                return bytes(data)
            except ssl.SSLError:
                if not data:
                    raise
        return bytes(data)

    def _receive(self, deadline: float) -> None:
        if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        try:
            data = self._connection.recv(READ_BYTES)
        except TimeoutError as error:  # ETIMEDOUT of the kernel: the peer is gone; not the deadline
            raise ConnectionAbortedError(error.errno, error.strerror) from None
        with self._cipher:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def write(self, data: bytes) -> None:
        """Send all of `data`; OSError if the connection is lost."""
        view = memoryview(data)
        for start in range(0, len(view), READ_BYTES):
            with self._sending:
                with self._cipher:
                    self._tls.write(view[start : start + READ_BYTES])
                self._flush()

    def _flush(self) -> None:
        self._connection.sendall(self._outgoing.read())

    def end(self) -> None:
        """Tell the peer that TLS ends here: so it can tell this from a lost connection."""
        with contextlib.suppress(OSError):
            try:
                self._tls.unwrap()
            except ssl.SSLWantReadError:  # the peer's own end, which nobody waits for
                self._flush()

    def abort(self) -> None:
        """End the connection for all threads; data that has arrived can still be read."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()
