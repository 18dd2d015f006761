"""The end of the control socket in `dmltrain job`."""

from __future__ import annotations

import contextlib
import socket
import time

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.alone.attach import is_ours, peer
from dmltrain_launch.agent.process import process
from dmltrain_launch.control.listener import STILL_THERE, read_line
from dmltrain_launch.control.message import MOST_BYTES, Answer, ControlError, Request, decode_answer, encode_request

SILENT_SECONDS = 20.0  # without a sign that the launcher is there, which it gives once a second
GONE = "the job's launcher does not answer: it has ended, or was killed"
FAULT_CODE = 125


def ask(name: str, request: Request) -> Answer:
    """The answer of the launcher that listens at the socket `name`. LaunchError if it cannot be asked."""
    try:
        line = encode_request(request)
    except ControlError as error:
        raise LaunchError(f"{request.do}: {error}") from None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SILENT_SECONDS)
            connection.connect(f"\0{name}")
            if not is_ours(connection):
                raise LaunchError("another user listens at the control socket of the job's launcher", FAULT_CODE)
            with contextlib.suppress(BrokenPipeError):  # the launcher may have refused already, and closed its end
                connection.sendall(line)
            return decode_answer(_answer(connection))
    except ControlError as error:
        raise LaunchError(str(error), FAULT_CODE) from None
    except BlockingIOError:  # so many wait for its answer already
        raise LaunchError(_silent("the job's launcher"), FAULT_CODE) from None
    except OSError:
        raise LaunchError(GONE, FAULT_CODE) from None


def _answer(connection: socket.socket) -> bytes:
    """The line, after signs that the launcher is still there. LaunchError without these; ControlError, OSError."""
    try:
        while (came := connection.recv(MOST_BYTES, socket.MSG_PEEK)).startswith(STILL_THERE):
            connection.recv(len(came) - len(came.lstrip(STILL_THERE)))
        return read_line(connection, time.monotonic() + SILENT_SECONDS)
    except TimeoutError:
        pid = peer(connection)[0]
        launcher = process(pid)
        stopped = " (it is stopped)" if launcher and launcher.state in "Tt" else ""
        what = f"the job's launcher, process {pid} of this machine,"
        raise LaunchError(f"{_silent(what)}{stopped}; kill -CONT {pid} lets it go on", FAULT_CODE) from None


def _silent(launcher: str) -> str:
    return f"{launcher} has not answered for {SILENT_SECONDS:g} s"
