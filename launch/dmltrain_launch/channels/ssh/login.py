"""Log in to a host through paramiko: the connection, the host key, the user's keys, and retries while sshd is busy.

One login has one deadline. A server that closes the connection before its identification has too many pending logins
(MaxStartups in sshd_config(5)), so the login retries until the deadline. Other failures are permanent: no retry.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import paramiko
from paramiko.ssh_exception import BadAuthenticationType, IncompatiblePeer

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.ssh.config import Config, Target, hop
from dmltrain_launch.channels.ssh.key import Keys
from dmltrain_launch.channels.ssh.known_hosts import Key, known, verify
from dmltrain_launch.channels.ssh.stream import STALL_SECONDS, ProxyCommand, SshStream, tcp

logging.getLogger("paramiko").addHandler(
    logging.NullHandler()
)  # without it, paramiko's tracebacks go to standard error

UNREACHABLE = 125  # exit code: not a user error
# The fastest first (benchmarks/channels.py, two busy cores): gcm 250 MB/s and 1.8 s of CPU for a GB, ctr 160 and 2.9.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
WINDOW_BYTES = 1 << 21  # 1 Gbit/s over 16 ms; also the largest buffer for a slow reader
KEEPALIVE_SECONDS = 3
RETRY_SECONDS = (0.1, 1.0)  # first and longest pause; each is shortened at random, to spread the retries of all hosts
HOPS_MAX = 8
BANNER_ERROR = (
    "Error reading SSH protocol banner"  # paramiko's error if the connection ends before the server's first line
)
OTHER_WAY = "try the system's ssh with --ssh system"


class Busy(Exception):
    """The server closed the connection before its identification."""


class Locked(Exception):
    """Only keys that are still encrypted are left to try."""

    def __init__(self, paths: list[str]):
        super().__init__(*paths)
        self.paths = paths


@dataclass(frozen=True)
class Deadline:
    """A point in time, and the time limit in seconds, for messages."""

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0.01, because some calls take 0 for no timeout."""
        return max(0.01, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


@dataclass(frozen=True)
class Access:
    """The settings and keys that all logins of a launcher share."""

    config: Config
    keys: Keys
    accept_new: bool = False
    port: int = 0  # for hosts without a port of their own
    identity: str = ""  # path of a key to try first
    stall: float = STALL_SECONDS  # how long a write may stall
    proxies: list[ProxyCommand] = field(default_factory=list, compare=False)

    def close(self) -> None:
        """End every ProxyCommand. One that does not read its input would outlive this process."""
        for proxy in self.proxies:
            proxy.kill()

    def log_in(self, target: Target, label: str, seconds: float) -> tuple[paramiko.Transport, Deadline]:
        """An authenticated connection and its deadline; LaunchError, about `label`, if the login fails."""
        while True:
            deadline = Deadline.after(seconds)
            try:
                return _Login(self, target, label, deadline).with_retries(), deadline
            except Locked as error:  # the time for typing does not count
                for path in error.paths:
                    self.keys.unlock(path)


class _Login:
    def __init__(self, access: Access, target: Target, label: str, deadline: Deadline, depth: int = 0):
        self.access, self.label, self.deadline, self.depth = access, label, deadline, depth
        self.settings = access.config.settings(target)

    def with_retries(self) -> paramiko.Transport:
        pause = RETRY_SECONDS[0]
        while True:
            try:
                return self._once()
            except Busy as error:
                wait = pause * random.uniform(0.5, 1)
                if self.deadline.left <= wait:
                    tried = f"for {self.deadline.seconds:g} s {error}"
                    fix = "raise MaxStartups in its sshd_config, or is that port another program's?"
                    raise LaunchError(f"{self.label}: {tried}; {fix}", UNREACHABLE) from None
            time.sleep(wait)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _once(self) -> paramiko.Transport:
        proxy = ProxyCommand(self.settings.proxy_command) if self.settings.proxy_command else None
        self.access.proxies.extend([proxy] if proxy else ())
        stream = proxy.stream if proxy else self._through_hops() if self.settings.hops else self._direct()
        stream.stall = self.access.stall
        # paramiko accepts any object with a socket's methods, but its annotations do not
        transport = paramiko.Transport(stream, default_window_size=WINDOW_BYTES)  # type: ignore[arg-type]
        try:
            with self._explained(proxy):
                self._negotiate(transport)
            self._check_host_key(transport)
            self._authenticate(transport)
            transport.set_keepalive(KEEPALIVE_SECONDS)
            return transport
        except BaseException:
            transport.close()
            stream.close()
            raise

    # -- the connection -----------------------------------------------------------------------------------------

    def _direct(self) -> SshStream:
        settings, seconds = self.settings, self.deadline.left
        if settings.connect_timeout:
            seconds = min(seconds, settings.connect_timeout)
        try:
            return tcp(settings.hostname, settings.port, seconds)
        except TimeoutError:
            raise self._late(f"no answer from {settings.destination}") from None
        except socket.gaierror as error:
            fix = "correct the name in the hosts file, or give its address with HostName in ~/.ssh/config"
            why = f"the name {settings.hostname} is not known: {error.strerror}"
            raise LaunchError(f"{self.label}: {why}; {fix}") from None
        except OSError as error:
            fix = {
                errno.ECONNREFUSED: "is sshd running there, and on that port?",
                errno.ECONNRESET: "is sshd running there, and on that port?",
            }.get(error.errno or 0, "is the host up and on this network?")
            message = f"{self.label}: no connection to {settings.destination}: {error.strerror or error}; {fix}"
            raise LaunchError(message, UNREACHABLE) from None

    def _through_hops(self) -> SshStream:
        """A channel of the last hop, which is connected through the hops before it."""
        *before, last = self.settings.hops
        if self.depth >= HOPS_MAX:
            raise LaunchError(
                f"{self.label}: ProxyJump has more than {HOPS_MAX} hops; does a host jump through itself?"
            )
        try:
            target = hop(last)
        except ValueError:
            raise LaunchError(f"{self.label}: ProxyJump {last}: expected [user@]host[:port]") from None
        label = f"{self.label}, through {target.name}"
        login = _Login(self.access, target, label, self.deadline, self.depth + 1)
        if before:
            login.settings = replace(login.settings, hops=tuple(before), proxy_command="")
        transport = login.with_retries()
        try:
            address = (self.settings.hostname, self.settings.port)
            channel = transport.open_channel("direct-tcpip", address, ("127.0.0.1", 0), timeout=self.deadline.left)
        except (paramiko.SSHException, EOFError, OSError) as error:
            transport.close()
            if self.deadline.passed:
                raise self._late(f"no answer from {self.settings.destination} through {target.name}") from None
            why = getattr(error, "text", "") or str(error) or "it closed the connection"
            message = f"{self.label}: {target.name} cannot connect to {self.settings.destination}: {why}"
            raise LaunchError(message, UNREACHABLE) from None
        return SshStream(channel, transport.close)

    # -- handshake and login -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _explained(self, proxy: ProxyCommand | None) -> Iterator[None]:
        """Classify failures of the handshake: Busy is retried, LaunchError is final."""
        try:
            yield
        except IncompatiblePeer as error:
            raise LaunchError(f"{self.label}: no common algorithm with {self._there}: {error}; {OTHER_WAY}") from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            failure = proxy.failure() if proxy else ""
            ended = f"ProxyCommand {proxy.command} {failure}" if proxy and failure else ""
            if ended and not failure.startswith("exited with 255"):  # 255: an ssh that may have met a busy server
                raise LaunchError(f"{self.label}: {ended}", UNREACHABLE) from None
            if self.deadline.passed:
                raise self._late(f"{self._there} did not answer as an SSH server") from None
            if isinstance(error, paramiko.SSHException) and not str(error).startswith(BANNER_ERROR):
                text = str(error).strip()
                message = f"{self.label}: no usable SSH server answers at {self._there}: {text}"
                raise LaunchError(message, UNREACHABLE) from None
            why = ended and f"; {ended}"
            raise Busy(f"{self._there} closed every connection before its identification{why}") from None

    @property
    def _there(self) -> str:
        command = self.settings.proxy_command
        return f"the host behind {command}" if command else self.settings.destination

    def _negotiate(self, transport: paramiko.Transport) -> None:
        offered = transport.get_security_options()
        ranks = {cipher: rank for rank, cipher in enumerate(CIPHERS)}
        offered.ciphers = sorted(offered.ciphers, key=lambda cipher: ranks.get(cipher, len(ranks)))
        listed = {entry.key.kind for entry in known(self.settings)}
        kinds = listed | ({"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in listed else set())
        offered.key_types = sorted(
            offered.key_types, key=lambda kind: kind not in kinds
        )  # prefer types that are listed
        transport.banner_timeout = transport.handshake_timeout = transport.channel_timeout = self.deadline.left
        transport.start_client(timeout=self.deadline.left)
        if not transport.is_active() or not transport.initial_kex_done:
            raise EOFError

    def _check_host_key(self, transport: paramiko.Transport) -> None:
        key = transport.get_remote_server_key()
        verify(Key(key.get_name(), key.asbytes()), self.settings, self.label, self.access.accept_new)

    def _authenticate(self, transport: paramiko.Transport) -> None:
        tried = []
        locked = self.access.keys.locked(self.settings)  # asked first: another host's login may unlock one meanwhile
        for what, key in self.access.keys.offers(self.settings):
            transport.auth_timeout = self.deadline.left
            try:
                if not transport.auth_publickey(self.settings.user, key):
                    return
                tried.append(f"{what} (accepted, but the server wants more than a key)")
            except BadAuthenticationType as error:
                raise self._denied(f"the server accepts no keys, only {', '.join(error.allowed_types)}") from None
            except (paramiko.SSHException, EOFError, OSError):
                if self.deadline.passed:
                    raise self._late(f"{self._there} did not answer to the login") from None
                tried.append(what)
                if not transport.is_active():
                    raise self._denied(f"it closed the connection after {', '.join(tried)}") from None
        if locked:
            raise Locked(locked)
        raise self._denied(f"it accepts none of: {', '.join(tried)}" if tried else "there is no key to offer")

    def _denied(self, why: str) -> LaunchError:
        what = f"{self._there} refused the login of {self.settings.user}: {why}"
        fix = (
            "put your public key there with ssh-copy-id, or give another key with --identity or another user with user@"
        )
        return LaunchError(f"{self.label}: {what}; {fix}; {OTHER_WAY}")

    def _late(self, what: str) -> LaunchError:
        fix = "is the host up and on this network? --connect-timeout gives it more time"
        return LaunchError(f"{self.label}: {what} within {self.deadline.seconds:g} s; {fix}", UNREACHABLE)
