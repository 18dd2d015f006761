"""A launcher that goes on in the background when its job runs, and the process that waits for that in the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from dmltrain_launch.agent.ending import open_log

LOG = "launcher.log"  # what a launcher in the background says


def in_background(act: Callable[[Callable[[str], None]], int], say: Callable[[str], None]) -> int:
    """Call `act(started)` in a child process. When the child calls `started(text)`, the parent says the text and
    returns 0, and the child goes on alone. If the child ends before that, the parent returns the child's exit code.
    In the child, this function returns what `act` returns.

    Call it before a thread is started: fork(2) copies only the calling thread. Until the child calls `started`, it
    belongs to the terminal: it may ask for a passphrase, and gets Ctrl-C.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        os.close(receiving)
        return act(lambda text: _tell(sending, text))
    os.close(sending)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    text = b""
    while more := os.read(receiving, 1 << 16):
        text += more
    if text:
        say(text.decode(errors="replace"))
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256


def _tell(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode(errors="replace"))
    os.close(descriptor)


def into_background(folder: Path) -> None:
    """Leave the terminal. From now on messages go to the file LOG in `folder`, or nowhere if it cannot be opened."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    with contextlib.suppress(OSError), open_log(str(folder / LOG)) as log:
        os.dup2(log.fileno(), 2)
