"""The control socket of a launcher: requests and answers, bad input, who may connect, and several at once."""

import contextlib
import json
import os
import queue
import re
import resource
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.alone.attach import CREDENTIALS
from dmltrain_launch.control import client, listener, message
from dmltrain_launch.control.listener import BUSY, ENDED, MOST_CONNECTIONS, Listener
from dmltrain_launch.control.message import MOST_BYTES, Answer, ControlError, Request
from tests.launch.conftest import wait_for

ASKED = Request("add", "h6,h7:2")
DONE = Answer(0, ("worker 3 has joined", "worker 4 has joined"))


class Asked:
    """A listener whose requests wait in `requests` with their reply."""

    def __init__(self):
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        self.listener = Listener("a-mark", lambda request, reply: self.requests.put((request, reply)), "0.5")

    def ask(self, request: Request = ASKED) -> queue.SimpleQueue:
        """Ask in a thread; its answer or error will be in the queue."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put(client.ask(self.listener.name, request))
            except LaunchError as error:
                answers.put(error)

        threading.Thread(target=run, daemon=True).start()
        return answers

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(f"\0{self.listener.name}")
        return connection

    def says(self, data: bytes) -> dict:
        """The answer to these bytes."""
        with self.connect() as connection:
            with contextlib.suppress(BrokenPipeError):  # it is busy, and has said so
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            return json.loads(connection.makefile("rb").readline())


@pytest.fixture
def asked():
    made = Asked()
    yield made
    made.listener.close()


def test_a_request_is_answered_when_it_is_done(asked, monkeypatch):
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.01)
    answers = asked.ask()
    request, reply = asked.requests.get(timeout=60)
    assert request == ASKED
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.1)
    reply(DONE)
    assert answers.get(timeout=60) == DONE


def test_after_a_moment_without_free_descriptors_it_answers_again(asked, monkeypatch):
    """accept fails as long as there is none."""
    failed = threading.Event()
    monkeypatch.setattr(listener, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: failed.set()))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection = socket.socket(socket.AF_UNIX)
    free = os.dup(connection.fileno())
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        connection.connect(f"\0{asked.listener.name}")
        assert failed.wait(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        connection.close()
    assert asked.says(b"{}\n")["code"] == 2


def test_two_requests_at_once_get_each_its_own_answer(asked):
    first, second = asked.ask(Request("add", "h6")), asked.ask(Request("remove", "h2"))
    waiting = dict(asked.requests.get(timeout=60) for _ in range(2))
    waiting[Request("remove", "h2")](Answer(0, ("removed",)))
    assert second.get(timeout=60) == Answer(0, ("removed",))
    waiting[Request("add", "h6")](Answer(125, ("no",)))
    assert first.get(timeout=60) == Answer(125, ("no",))


def test_another_user_gets_no_answer(asked, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(listener, "is_ours", lambda connection, real=listener.is_ours: real(_Foreign(connection)))
    with asked.connect() as connection:
        assert connection.makefile("rb").read() == b""
    assert asked.requests.empty()


class _Foreign:
    """A connection from user 4712."""

    def __init__(self, connection: socket.socket):
        self.connection = connection

    def getsockopt(self, *arguments: int) -> bytes:
        pid, _, gid = CREDENTIALS.unpack(self.connection.getsockopt(*arguments))
        return CREDENTIALS.pack(pid, 4712, gid)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *((data, "it is not JSON (") for data in (b"\n", b"[" * 5000 + b"\n", b"\xff\xfe\n")),
        (b"", "the connection ended after 0 bytes; expected a JSON object and a line end"),
        (b'{"version": 1', "the connection ended after 13 bytes"),
        (b'{"do": "add", "what": "h"}\n', "version None of the control protocol: expected 1"),
        (b'{"version": 2, "do": "add", "what": "h"}\n', "version 2 of the control protocol: expected 1"),
        (b'{"version": true, "do": "add", "what": "h"}\n', "version True of the control protocol: expected 1"),
        (b'{"version": 1, "do": "sing", "what": "h"}\n', "do is 'sing', expected one of add, remove, set"),
        (b'{"version": 1, "do": "add"}\n', "it lacks the field 'what', expected do, what"),
        (b'{"version": 1, "do": "add", "what": ""}\n', "what is '', expected a text without"),
        (b'{"version": 1, "do": "add", "what": "a\\u0007"}\n', "without control characters"),
        (b'{"version": 1, "do": "add", "what": "h", "why": 1}\n', "it has the unknown field 'why', expected do, what"),
        (b"x" * (MOST_BYTES + 1) + b"\n", "more than 65536 bytes in one line"),
    ],
)
def test_bad_input_is_answered_with_an_error_and_reaches_nobody(asked, data, said):
    answer = asked.says(data)
    assert (answer["version"], answer["dmltrain"], answer["code"]) == (1, "0.5", 2)
    (line,) = answer["lines"]
    assert line.startswith("the launcher cannot read the request: ") and said in line
    assert asked.requests.empty()
    answers = asked.ask()
    asked.requests.get(timeout=60)[1](DONE)
    assert answers.get(timeout=60) == DONE, "the next request is served"


def test_a_request_that_never_ends_is_given_up(asked, monkeypatch):
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 0.05)
    with asked.connect() as connection:
        connection.sendall(b'{"version"')
        answer = json.loads(connection.makefile("rb").readline())
    assert re.search("no whole line after (0|10) bytes; expected a JSON object and a line end", answer["lines"][0])


def test_too_many_at_once_are_refused_and_those_who_hang_up_make_room(asked, monkeypatch):
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.01)
    waiting = [asked.connect() for _ in range(MOST_CONNECTIONS)]
    for each in waiting:
        each.sendall(message.encode_request(ASKED))
        asked.requests.get(timeout=60)
    assert tuple(asked.says(message.encode_request(ASKED))["lines"]) == BUSY.lines
    for each in waiting:
        each.close()

    def served() -> bool:
        answers = asked.ask()
        wait_for(lambda: not (asked.requests.empty() and answers.empty()), "a request or an answer")
        if not asked.requests.empty():
            asked.requests.get()[1](DONE)
        answer = answers.get(timeout=60)
        assert answer in (DONE, BUSY)
        return answer == DONE

    wait_for(served, "room")


def test_what_waits_at_the_end_of_the_job_is_answered(asked):
    answers = asked.ask()
    asked.requests.get(timeout=60)
    asked.listener.close()
    assert answers.get(timeout=60) == ENDED
    gone = asked.ask().get(timeout=60)
    assert str(gone) == client.GONE and gone.code == 125


def test_a_launcher_that_is_slow_is_waited_for_and_one_that_says_nothing_is_not(asked, monkeypatch):
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(client, "SILENT_SECONDS", 60.0)
    answers = asked.ask()
    _, reply = asked.requests.get(timeout=60)
    with asked.connect() as connection:
        connection.sendall(message.encode_request(ASKED))
        _, reply_to_it = asked.requests.get(timeout=60)
        assert connection.recv(1) == b" "
        reply_to_it(DONE)
        assert json.loads(connection.makefile("rb").readline())["code"] == 0
    reply(DONE)
    assert answers.get(timeout=60) == DONE
    monkeypatch.setattr(client, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(listener, "LOOK_SECONDS", 60.0)
    silent = str(asked.ask().get(timeout=60))
    assert f"process {os.getpid()} of this machine, has not answered for 0.01 s; kill -CONT {os.getpid()}" in silent
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as waiting:
        full.bind("\0full-of-requests")
        full.listen(0)
        waiting.enter_context(socket.socket(socket.AF_UNIX)).connect("\0full-of-requests")
        with pytest.raises(LaunchError, match="has not answered for"):
            client.ask("full-of-requests", ASKED)


def test_neither_another_users_socket_nor_that_of_an_ended_launcher_is_asked(asked, monkeypatch):
    monkeypatch.setattr(client, "is_ours", lambda connection: False)
    assert "another user listens" in str(asked.ask().get(timeout=60))
    assert asked.requests.empty()
    with pytest.raises(LaunchError, match="does not answer"):
        client.ask("dmltrain-no-such-mark.control-0", ASKED)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"version": 7, "dmltrain": "9.1", "code": 0}', "'9.1' .* version 7 .* not 1"),
        (b"", None),
        (b"{}", None),
        (b'{"version": 1}', None),
        (b'{"version": 1, "code": 1}', None),
        (b'{"version": 1, "code": 999, "lines": []}', None),
    ],
)
def test_an_answer_that_is_none_or_of_another_version_is_an_error(line, said):
    with pytest.raises(ControlError, match=said):
        message.decode_answer(line)


def test_an_answer_that_is_too_long_is_cut():
    line = message.encode_answer(Answer(3, ("x" * 900,) * 1000), "1")
    assert len(line) <= MOST_BYTES
    found = message.decode_answer(line)
    assert found.code == 3 and found.lines and set(found.lines) == {"x" * 900}
