"""The launcher's end of the control socket: an abstract unix socket, which leaves no file behind if the launcher is
killed. Only processes of this user, or of root, get answers.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.alone.attach import is_ours, listening
from dmltrain_launch.control.message import MOST_BYTES, Answer, ControlError, Request, decode_request, encode_answer

MOST_CONNECTIONS = 16  # at the same time
REQUEST_SECONDS = 10.0  # for a request to arrive
ANSWER_SECONDS = 2.0  # at the end of the job: for the last answers to be read
LOOK_SECONDS = 1.0  # between two looks whether somebody still waits for an answer
USAGE_CODE, FAULT_CODE = 2, 125
ENDED = Answer(FAULT_CODE, ("the job has ended",))
BUSY = Answer(FAULT_CODE, (f"the job's launcher works on {MOST_CONNECTIONS} requests: try again when one is done",))
STILL_THERE = b" "  # sent once a second until the answer; readers skip spaces before the answer
Reply = Callable[[Answer], None]


class Listener:
    """Listens until `close`. `ask(request, reply)` is called by several threads; `reply` may be called later, once.

    `name` is the socket's. LaunchError if it cannot be made.
    """

    def __init__(self, mark: str, ask: Callable[[Request, Reply], None], dmltrain: str):
        self._ask, self._dmltrain = ask, dmltrain
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: set[queue.SimpleQueue[Answer]] = set()
        self._threads: set[threading.Thread] = set()
        self.name = f"dmltrain-{mark}.control-{secrets.token_hex(8)}"
        try:
            self._socket = listening(self.name)
        except OSError as error:
            raise LaunchError(f"cannot listen for dmltrain job: {error.strerror}", FAULT_CODE) from None
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Answer all requests that wait, and listen no more."""
        with self._lock:
            self._closed = True
            waiting, threads = list(self._waiting), list(self._threads)
        for connection in waiting:
            connection.put(ENDED)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends accept
        self._socket.close()
        until = time.monotonic() + ANSWER_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed; or there is no free descriptor or memory for a moment
                if self._closed:
                    return
                time.sleep(LOOK_SECONDS)
                continue
            if not is_ours(connection):
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                busy = len(self._threads) >= MOST_CONNECTIONS or self._closed
                if not busy:
                    self._threads.add(thread)
                    thread.start()
            if busy:
                with connection, contextlib.suppress(OSError):
                    connection.setblocking(False)
                    connection.sendall(encode_answer(BUSY, self._dmltrain))

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(REQUEST_SECONDS)
            connection.sendall(encode_answer(self._answer(connection), self._dmltrain))
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _answer(self, connection: socket.socket) -> Answer:
        try:
            request = decode_request(read_line(connection, time.monotonic() + REQUEST_SECONDS))
        except ControlError as error:
            return Answer(USAGE_CODE, (f"the launcher cannot read the request: {error}",))
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                return ENDED
            self._waiting.add(answers)
        self._ask(request, answers.put)
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return answers.get(timeout=LOOK_SECONDS)
                if _hung_up(connection):
                    return ENDED
                connection.send(STILL_THERE)
        finally:
            with self._lock:
                self._waiting.discard(answers)


def read_line(connection: socket.socket, until: float = float("inf")) -> bytes:
    """One line without its end, of at most MOST_BYTES. ControlError if it is longer or is not there at `until`
    (time.monotonic()); OSError."""
    data = b""
    while b"\n" not in data:
        if time.monotonic() > until:
            raise ControlError(f"no whole line after {len(data)} bytes; expected a JSON object and a line end")
        try:
            more = connection.recv(MOST_BYTES)
        except TimeoutError:
            continue
        data += more
        if len(data) > MOST_BYTES:
            raise ControlError(f"more than {MOST_BYTES} bytes in one line")
        if not more:
            raise ControlError(f"the connection ended after {len(data)} bytes; expected a JSON object and a line end")
    return data.partition(b"\n")[0]


def _hung_up(connection: socket.socket) -> bool:
    """Whether nobody waits for the answer any more."""
    look = select.poll()  # recv would wait for the connection's timeout
    look.register(connection, select.POLLRDHUP)
    return bool(look.poll(0))
