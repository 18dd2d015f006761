"""A channel over the pipes of a child process, which has its own session so that Ctrl-C does not reach it.

`LocalChannel` is one to an agent on this machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.exit_text import exit_text
from dmltrain_launch.job.host import Host

READ_BYTES = 1 << 18
ENDED = -1  # no descriptor
LOCK_SECONDS = 0.1
CLOSE_SECONDS = 1.0  # an agent that has sent its last message exits within this time


class ProcessChannel:
    """See `dmltrain_launch.channels`. Starts `command` and first writes `text` to it; LaunchError if it cannot be
    started."""

    def __init__(self, command: Sequence[str], text: bytes, environment: Mapping[str, str] | None = None):
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the channel
        try:
            self._child = child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error.strerror}", 125) from None
        assert child.stdin and child.stdout
        self._to, self._from = child.stdin.fileno(), child.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._from, select.POLLIN)
        with contextlib.suppress(OSError):  # if it exits at once, the reader reports it
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

    def _end_input(self) -> None:
        """Close the agent's input, so that it ends. A write that blocks on a stopped agent keeps the input open."""
        if self._lock.acquire(timeout=LOCK_SECONDS):
            if self._child.stdin:
                self._child.stdin.close()
            self._to = ENDED  # writes fail from now on
            self._lock.release()

    def close(self) -> str:
        if self._to != ENDED:
            self._end_input()
        try:
            code = self._child.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return "did not answer and was killed"
        return exit_text(code, self.stderr_lines())

    @property
    def ended(self) -> bool:
        return self._child.returncode is not None

    def stderr_lines(self) -> list[str]:
        """The last lines of the child's standard error so far."""
        start = max(0, os.fstat(self._stderr.fileno()).st_size - READ_BYTES)
        return os.pread(self._stderr.fileno(), READ_BYTES, start).decode(errors="replace").strip().splitlines()


class LocalChannel(ProcessChannel):
    """See `dmltrain_launch.channels`."""

    def __init__(self, host: Host, mark: str):
        command, text = channels.agent_command(host.python or sys.executable)
        super().__init__(command, text, dict(os.environ, DMLTRAIN_AGENT=mark))
