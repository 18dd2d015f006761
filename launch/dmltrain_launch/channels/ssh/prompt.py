"""Ask for a secret on the terminal, from any thread. A question can be cancelled; the terminal is restored."""

from __future__ import annotations

import os
import select
import termios
import threading

LOOK_SECONDS = 0.2  # between checks whether the question has been cancelled
LEAVE_SECONDS = 2.0


class TerminalPrompt:
    """`ask` asks one question at a time, and none after `close`. OSError without a terminal."""

    def __init__(self, path: str = "/dev/tty"):
        self._path = path
        self._turn = threading.Lock()
        self._closed = threading.Event()

    def ask(self, question: str) -> str:
        """The answer without its newline; EOFError if it was cancelled or the terminal is gone."""
        with self._turn:
            terminal = os.open(self._path, os.O_RDWR | os.O_NOCTTY)
            try:
                before = termios.tcgetattr(terminal)
                quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
                termios.tcsetattr(terminal, termios.TCSAFLUSH, quiet)
                try:
                    os.write(terminal, question.encode())
                    return self._line(terminal)
                finally:
                    termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
                    os.write(terminal, b"\n")
            except termios.error as error:
                raise OSError(*error.args) from None
            finally:
                os.close(terminal)

    def _line(self, terminal: int) -> str:
        typed, wait = b"", select.poll()  # select.select refuses descriptors above 1023
        wait.register(terminal, select.POLLIN)
        while not self._closed.is_set():
            if wait.poll(1000 * LOOK_SECONDS):
                more = os.read(terminal, 1024)
                if not more:
                    break
                typed += more
                if typed.endswith(b"\n"):
                    return typed[:-1].decode(errors="replace")
        raise EOFError

    def close(self) -> None:
        """Cancel the question. Returns after the terminal echoes again."""
        self._closed.set()
        if self._turn.acquire(timeout=LEAVE_SECONDS):
            self._turn.release()
