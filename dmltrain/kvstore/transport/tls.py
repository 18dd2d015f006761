"""TLS 1.3 on a connection that two threads use: one reads, one writes.

Two threads cannot use an `ssl` object at the same time. Therefore TLS works in memory here, under a lock, and all waits
for the socket happen outside the lock. Both ends have the job's certificate with its private key, and each accepts only
this certificate from the other. (OpenSSL does not renew the keys of a long connection by itself: docs/security.md.)
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from dmltrain.base.errors import UserError
from dmltrain.kvstore.transport.wire import FrameError

READ_BYTES = 1 << 18  # of one read from the socket; a record has up to 16 KiB
WRITE_BYTES = 1 << 18  # encrypted at a time, while the reading thread waits for the lock
_SIZE = 32  # bytes of a confirmation
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME (openssl/x509_vfy.h), which `ssl` has no name for


@functools.cache
def context(path: str, listens: bool) -> ssl.SSLContext:
    """A context with the certificate and private key in the PEM file `path`. Raises UserError."""
    tls_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    tls_context.minimum_version = ssl.TLSVersion.TLSv1_3
    tls_context.check_hostname = False
    tls_context.verify_mode = ssl.CERT_REQUIRED
    tls_context.verify_flags |= _NO_CHECK_TIME  # it is the job's own: a host whose clock is wrong can take part
    if listens:
        tls_context.num_tickets = 0  # sessions are not resumed
    try:
        tls_context.load_cert_chain(path)
        tls_context.load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        raise UserError(
            f"DMLTRAIN_CERTIFICATE_FILE={path}: {error.strerror or error}; expected a PEM file with a certificate and "
            "its private key, as dmltrain-launch --wire tls makes it for each job"
        ) from error
    return tls_context


class TlsStream:
    """Takes over a connected socket, which blocks."""

    def __init__(
        self, sock: socket.socket, using: ssl.SSLContext, listens: bool, limit_wait: Callable[[], None]
    ) -> None:
        """`limit_wait` is called before each wait for bytes: it may limit it, or raise OSError instead."""
        self._sock, self._limit_wait = sock, limit_wait
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = using.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._lock = threading.Lock()  # guards _tls and both of its buffers

    def handshake(self, key: bytes, listens: bool) -> None:
        """Agree on keys, and confirm that both ends know `key`. Raises FrameError or OSError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if not self._receive():
                    raise FrameError("the peer closed the connection during the TLS handshake") from None
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):  # tell the peer why
                    self._flush()
                raise FrameError(f"TLS: {error.reason or error}{_fix(error)}") from error
        own, other = (b"listener", b"caller") if listens else (b"caller", b"listener")
        self.send([memoryview(hmac.digest(key, own, "sha256"))])
        if not hmac.compare_digest(self._confirmation(), hmac.digest(key, other, "sha256")):
            raise FrameError("the other end of the TLS connection is not the peer of the handshake")

    def _confirmation(self) -> bytes:
        target = memoryview(bytearray(_SIZE))
        done = 0
        while done < _SIZE:
            got = self.receive_into(target[done:])
            if not got:
                raise FrameError("the peer closed the connection at the end of the TLS handshake: its log says why")
            done += got
        return bytes(target)

    def receive_into(self, target: memoryview) -> int:
        """Some bytes, as many as have arrived and fit; 0 at the end. Raises OSError (such as ssl.SSLError)."""
        while True:
            done = self._decrypt(target)
            if done is not None:
                return done
            self._receive()

    def _decrypt(self, target: memoryview) -> int | None:
        """Decrypt what has arrived into `target`; returns how many bytes; None if no whole record has arrived."""
        done = 0
        with self._lock:
            try:
                while done < len(target):
                    got = int(self._tls.read(len(target) - done, target[done:]))
                    if not got:
                        break
                    done += got
            except ssl.SSLWantReadError:
                return done or None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return done
        return done

    def _receive(self) -> bool:
        """Wait for bytes from the socket; False at its end."""
        self._limit_wait()
        data = self._sock.recv(READ_BYTES)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        return bool(data)

    def send(self, views: Sequence[memoryview]) -> int:
        """Send a part of `views`, from the start; returns how many bytes of them. Call this on one thread at a time."""
        data: bytes | memoryview = views[0][:WRITE_BYTES]
        if len(views) > 1 and len(views[0]) < WRITE_BYTES:
            data = _joined(views)
        with self._lock:
            self._tls.write(data)
        self._flush()
        return len(data)

    def _flush(self) -> None:
        with self._lock:
            data = self._outgoing.read()
        self._sock.sendall(data)


def _fix(error: ssl.SSLError) -> str:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return ""
    return (
        ": the peer has another certificate than this one; set the same DMLTRAIN_CERTIFICATE_FILE for all processes "
        "of the job (dmltrain-launch --wire tls does)"
    )


def _joined(views: Sequence[memoryview]) -> bytes:
    """The first WRITE_BYTES of `views`: a record for each small frame would cost more than this copy."""
    parts, size = [], 0
    for view in views:
        parts.append(view[: WRITE_BYTES - size])
        size += len(parts[-1])
        if size == WRITE_BYTES:
            break
    return b"".join(parts)
