"""A channel to an agent on another host through the system's ssh, with the user's configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.process import CLOSE_SECONDS, ENDED, ProcessChannel
from dmltrain_launch.channels.ssh.greeting import NoAgent, explain, label, start_agent, timed_out
from dmltrain_launch.job.host import Host

SSH_FAILED = 255  # ssh's exit code for its own errors; any other is the remote command's
STALL_SECONDS = 8.0  # the same as in stream.py
RETRY_SECONDS = (0.1, 1.0)  # first and longest pause before a retry with a busy sshd
UNREACHABLE = 125
# These override the user's configuration of terminals and forwardings, which would disturb the pipe to an agent.
# BatchMode, because ssh has no terminal here to ask on. 4 x 2 s: a lost host is detected as fast as in stream.py.
OPTIONS = (
    "-T",
    "-e",
    "none",
    "-o",
    "BatchMode=yes",
    "-o",
    "ServerAliveInterval=2",
    "-o",
    "ServerAliveCountMax=4",
    "-o",
    "ClearAllForwardings=yes",
    "-o",
    "RemoteCommand=none",
)
BUSY = r"kex_exchange_identification: (read: )?Connection (closed|reset)|Exceeded MaxStartups|Not allowed at this time"
NO_WAY = "open failed|stdio forwarding failed"  # from a jump host, before the connection through it is closed


@dataclass(frozen=True)
class Ssh:
    """How ssh is called: `command` and its options. `port` is for hosts without a port of their own."""

    command: Sequence[str] = ("ssh",)
    port: int = 0
    identity: str = ""
    accept_new: bool = False
    stall: float = STALL_SECONDS  # how long a write may stall
    starting: set[SystemChannel] = field(default_factory=set, compare=False)
    over: threading.Event = field(default_factory=threading.Event, compare=False)

    def close(self) -> None:
        """End every ssh that is still connecting, and start no others."""
        self.over.set()
        until = time.monotonic() + CLOSE_SECONDS
        while self.starting and time.monotonic() < until:
            for channel in list(self.starting):
                channel.terminate()
            time.sleep(0.01)

    def argv(self, host: Host, seconds: float, command: str) -> list[str]:
        """The command line that runs `command` on `host`."""
        timeout = ["-o", f"ConnectTimeout={max(1, round(seconds))}"]
        trust = ["-o", "StrictHostKeyChecking=accept-new"] if self.accept_new else []
        return [*self.command, *OPTIONS, *timeout, *trust, *self.host_options(host), "--", host.target, command]

    def host_options(self, host: Host) -> list[str]:
        """The options of the hosts file and the command line for the host."""
        options = [("-p", str(host.port or self.port or "")), ("-l", host.user), ("-i", self.identity)]
        return [word for option in options if option[1] for word in option]


def connect(host: Host, mark: str, ssh: Ssh, seconds: float) -> SystemChannel:
    """A channel to a new agent within `seconds`; LaunchError if that fails."""
    if not shutil.which(ssh.command[0]):
        raise LaunchError(f"{ssh.command[0]} is not installed here: install openssh-client, or use --ssh paramiko")
    until, pause = time.monotonic() + seconds, RETRY_SECONDS[0]
    while True:
        try:
            return SystemChannel(host, mark, ssh, until, seconds)
        except NoAgent as failure:
            output = "\n".join(failure.err)
            wait = pause * random.uniform(0.5, 1)
            if ssh.over.is_set():
                raise LaunchError(f"{label(host)}: the job is over", UNREACHABLE) from None
            if not re.search(BUSY, output) or re.search(NO_WAY, output) or time.monotonic() + wait >= until:
                raise _login_error(output, host, ssh, seconds) from None
        time.sleep(wait)
        pause = min(2 * pause, RETRY_SECONDS[1])


class SystemChannel(ProcessChannel):
    """See `dmltrain_launch.channels`. NoAgent if ssh itself failed, LaunchError for any other failure to start."""

    def __init__(self, host: Host, mark: str, ssh: Ssh, until: float, seconds: float):
        command, text = channels.remote_command(host, mark)
        self._ahead, self._stall = b"", ssh.stall
        super().__init__(ssh.argv(host, until - time.monotonic(), command), text[:1])  # which ssh reads when connected
        os.set_blocking(self._to, False)
        ssh.starting.add(self)
        if ssh.over.is_set():  # `close` was called after ssh was started and missed this one
            self.terminate()
        try:
            self._ahead = start_agent(self, text[1:], until)
        except NoAgent as failure:
            if time.monotonic() >= until and not self.ended:
                raise _late(host, seconds, "\n".join(failure.err)) from None
            if failure.code == SSH_FAILED:
                raise
            raise explain(failure, host) from None
        except TimeoutError:
            raise timed_out(host, seconds) from None
        finally:
            ssh.starting.discard(self)

    def wait_for_end(self, until: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, until - time.monotonic()))

    def end_input(self) -> None:
        unread = struct.unpack("i", fcntl.ioctl(self._to, termios.FIONREAD, bytes(4)))[0] if self._to != ENDED else 0
        if unread:
            self.terminate()  # it has not connected; otherwise it would seem that it had
        else:
            self._end_input()

    @property
    def exit_code(self) -> int | None:
        return self._child.returncode

    def write(self, data: bytes) -> None:
        self._send(data, self._stall)

    def _send(self, data: bytes, stall: float) -> None:
        """Write; TimeoutError if nothing can be sent for `stall` seconds."""
        if not self._lock.acquire(timeout=stall):
            raise TimeoutError(f"another write has stalled for {stall:g} s")
        try:
            if self._to == ENDED:
                raise BrokenPipeError("the channel is closed")
            view, room = memoryview(data), select.poll()
            room.register(self._to, select.POLLOUT)
            while view:
                if not room.poll(stall * 1000):
                    raise TimeoutError(f"nothing could be sent for {stall:g} s")
                view = view[os.write(self._to, view) :]
        finally:
            self._lock.release()

    def read(self, timeout: float) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        return super().read(timeout)

    def close(self) -> str:
        try:
            self._child.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.terminate()
            super().close()
            return "did not answer and was cut off"
        how = super().close()
        if self._child.returncode != SSH_FAILED:
            return how
        if self.ended:
            return "was killed by a signal"  # ssh does not report which
        return f"was lost with its connection ({self.stderr_lines()[-1]})"

    @property
    def ended(self) -> bool:
        """ssh prints the reason of every lost connection, and is terminated where it does not end."""
        code = self._child.returncode
        return code is not None and code >= 0 and not (code == SSH_FAILED and self.stderr_lines())

    def terminate(self) -> None:
        """End ssh and its children, which SIGKILL would leave running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGTERM)


def _late(host: Host, seconds: float, output: str) -> LaunchError:
    last = "".join(f" ({line})" for line in output.splitlines()[-1:])
    fix = "is the host up and on this network? --connect-timeout gives it more time"
    what = f"ssh got no answer from {host.target} within {seconds:g} s{last}"
    return LaunchError(f"{label(host)}: {what}; {fix}", UNREACHABLE)


def _login_error(output: str, host: Host, ssh: Ssh, seconds: float) -> LaunchError:
    """The output of ssh on standard error as one sentence with a fix."""
    where = label(host)
    by_hand = shlex.join([*ssh.command, *ssh.host_options(host), host.target])
    if "HOST IDENTIFICATION HAS CHANGED" in output:
        return LaunchError(f"{where}: {_changed(output)}")
    if "Host key verification failed" in output or "host key is known for" in output:
        return LaunchError(
            f"{where}: its host key is not known here: run {by_hand} once, which shows its fingerprint and asks, "
            "or add --accept-new-host-keys"
        )
    for pattern, fix, code in FAILURES:
        if match := re.search(rf"^.*(?:{pattern}).*$", output, re.MULTILINE):
            before = output[: match.start()].strip().splitlines()[-1:]  # may be the output of a ProxyCommand
            what = ": ".join([*before, match[0].removeprefix("ssh: ").strip()])
            return LaunchError(f"{where}: {what}; {fix}", code)
    if re.search("timed out|Timeout", output):
        return _late(host, seconds, output)
    last = output.splitlines()[-1:] or ["it printed nothing; perhaps the remote command was killed"]
    return LaunchError(f"{where}: ssh failed: {last[0]}; does {by_hand} true work?", UNREACHABLE)


# (pattern of ssh's output, fix, exit code)
FAILURES = (
    (
        "Could not resolve hostname",
        "correct the name in the hosts file, or give its address with HostName in ~/.ssh/config",
        2,
    ),
    (
        "Permission denied|Too many authentication failures",
        "put your public key there with ssh-copy-id, or, if your key is encrypted, add it to an SSH agent with ssh-add",
        2,
    ),
    (NO_WAY, "can the jump host reach it?", UNREACHABLE),
    ("Connection refused", "is sshd running there, and on that port?", UNREACHABLE),
    ("No route to host|Network is unreachable", "is the host up and on this network?", UNREACHABLE),
    (BUSY, "raise MaxStartups in its sshd_config, or is that port another program's?", UNREACHABLE),
    ("Bad configuration option|Bad owner or permissions|terminating, [0-9]+ bad", "correct ~/.ssh/config", 2),
)


def _changed(output: str) -> str:
    """The two fingerprints, and the command that removes the old key, from ssh's long warning."""
    from dmltrain_launch.channels.ssh.known_hosts import entries

    new = re.search(r"SHA256:\S+?(?=\.?$)", output, re.MULTILINE)
    offending = re.search(r"Offending .*key in (.+):(\d+)$", output, re.MULTILINE)
    changed = f"its host key has changed: it sent {new[0] if new else 'another'}"
    if not offending:
        return f"{changed}; if the host was reinstalled, remove the old key with ssh-keygen -R"
    path, number = Path(offending[1]), int(offending[2])
    old = "".join(entry.key.fingerprint for entry in entries([path]) if entry.number == number)
    forget = re.search(r"ssh-keygen .*-R .*", output)
    fix = forget[0].strip() if forget else f"ssh-keygen -f {path} -R HOST"
    return (
        f"{changed}, but {path}:{number} has {old}; this may be an attack (man in the middle), or the host was "
        f"reinstalled: in that case remove the old key with {fix}"
    )
