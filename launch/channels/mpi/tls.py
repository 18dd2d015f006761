"""Bytes over TLS between threads: one may read while others write, and every wait has a deadline.

A `ssl.SSLSocket` cannot be read and written by two threads at once, so the cipher works in memory here, under a lock,
and the socket is waited for outside it. The launcher is the server; its certificate is made for one job.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import select
import socket
import ssl
import threading
import time

READ_BYTES = 1 << 18


def certificate() -> tuple[ssl.SSLContext, str]:
    """A server's context with a fresh certificate, and the SHA-256 of that. The key stays in memory."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dmltrain-launch")])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = _context(secret + made.public_bytes(serialization.Encoding.PEM))
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()


def _context(pem: bytes) -> ssl.SSLContext:
    """`ssl` takes a key from a file only: from one in memory, which no other process can name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # no session is resumed
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


class TlsStream:
    """The server's side of one connection. Its `connection` is taken over."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext):
        self._connection = connection
        connection.setblocking(True)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._cipher, self._sending = threading.Lock(), threading.Lock()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def handshake(self, deadline: float) -> None:
        """OSError (ssl.SSLError is one) or TimeoutError when the peer does not complete it."""
        while True:
            try:
                self._tls.do_handshake()
                return self._flush()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive(deadline)

    def read(self, timeout: float) -> bytes:
        """Some bytes, b"" at any end; TimeoutError after `timeout` seconds; OSError when the connection was lost."""
        deadline = time.monotonic() + timeout
        while True:
            data = self._decipher()
            if data is not None:
                return data
            self._receive(deadline)

    def _decipher(self) -> bytes | None:
        """What has been received, or None when that is not a whole record."""
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
        except TimeoutError as error:  # the kernel reports that the peer is gone; it is no timeout of ours
            raise ConnectionAbortedError(error.errno, error.strerror) from None
        with self._cipher:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def write(self, data: bytes) -> None:
        """All of `data`; OSError when the connection is lost."""
        view = memoryview(data)
        for start in range(0, len(view), READ_BYTES):
            with self._sending:
                with self._cipher:
                    self._tls.write(view[start : start + READ_BYTES])
                self._flush()

    def _flush(self) -> None:
        self._connection.sendall(self._outgoing.read())

    def abort(self) -> None:
        """End the connection for whoever reads or writes in another thread; what has come can still be read."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        self._connection.close()
