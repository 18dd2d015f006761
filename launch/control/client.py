"""The end of the control socket in `dmltrain job`."""

from __future__ import annotations

import contextlib
import socket

from launch import LaunchError
from launch.control.listener import is_ours, read_line
from launch.control.message import Answer, ControlError, Request, decode_answer, encode_request

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
            connection.connect(f"\0{name}")
            if not is_ours(connection):
                raise LaunchError("another user listens at the control socket of the job's launcher", FAULT_CODE)
            with contextlib.suppress(BrokenPipeError):  # it may have answered already, that it cannot
                connection.sendall(line)
            return decode_answer(read_line(connection))
    except ControlError as error:
        raise LaunchError(str(error), FAULT_CODE) from None
    except OSError:
        raise LaunchError(GONE, FAULT_CODE) from None
