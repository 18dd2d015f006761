"""A channel to an agent on this machine: a child process and its pipes, in its own session so that Ctrl-C spares it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import threading

from launch import LaunchError, channels
from launch.job import Host

READ_BYTES = 1 << 18
CLOSE_SECONDS = 1.0  # an agent that has said its last word needs no longer to exit


class LocalChannel:
    """See `launch.channels`."""

    def __init__(self, host: Host, mark: str):
        command, text = channels.agent_command(host.python)
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the channel
        try:
            self._agent = agent = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env=dict(os.environ, DMLTRAIN_AGENT=mark),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {host.python} on {host.name}: {error.strerror}", 125) from None
        assert agent.stdin and agent.stdout
        self._to, self._from = agent.stdin.fileno(), agent.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._from, select.POLLIN)
        with contextlib.suppress(OSError):  # one that ended at once is named by whoever reads
            self.write(text)

    def write(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            while view:
                view = view[os.write(self._to, view) :]

    def read(self, timeout: float) -> bytes:
        if not self._poll.poll(timeout * 1000):
            raise TimeoutError
        return os.read(self._from, READ_BYTES)

    def close(self) -> str:
        try:
            code = self._agent.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
            return "did not answer and was killed"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with {code}" + "".join(f": {line}" for line in said)
