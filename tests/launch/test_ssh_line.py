"""The bytes below an SSH connection: a ProxyCommand and a TCP connection, without an SSH server."""

import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from launch.agent.process import living
from launch.channels.ssh.line import KEEPALIVE_PROBES, KEEPALIVE_SECONDS, Line, ProxyCommand, addresses, tcp
from tests.launch.ssh_connect import SECONDS, silent_port
from tests.waiting import wait_for


def pid_in(path: Path) -> int:
    return int(wait_for(lambda: path.exists() and path.read_text().strip(), "its pid"))


@pytest.mark.parametrize("killed", [False, True], ids=["at the end of its connection", "when asked to"])
def test_a_command_is_killed_with_what_it_has_started(tmp_path, killed):
    proxy = ProxyCommand(f"sh -c 'sleep 300 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/pid; wait'")
    pids = [pid_in(tmp_path / name) for name in ("child", "pid")]
    if killed:
        proxy.kill()
        assert not psutil.pid_exists(pids[1]), "reaped"
        assert proxy.failure() == "was killed by SIGKILL"
        proxy.kill()
    proxy.line.close()
    wait_for(lambda: not {*pids} & living().keys() and not psutil.pid_exists(pids[1]), "the end of both, and no zombie")


def test_several_threads_kill_a_command():
    """As the end of its connection and that of all logins do."""
    with ThreadPoolExecutor(8) as threads:
        for _ in range(100):
            proxy = ProxyCommand("sleep 300")
            for killed in [threads.submit(proxy.kill) for _ in range(8)]:
                killed.result()
            proxy.line.close()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sh -c 'echo one >&2; echo two >&2; exit 3'", "exited with 3: two"),
        ("sh -c 'exit 4'", "exited with 4"),
        ("true", ""),
        ("sleep 300", ""),
    ],
    ids=["says why", "says nothing", "ends well", "runs"],
)
def test_how_a_command_ended(command, words):
    proxy = ProxyCommand(command)
    assert proxy.failure() == words
    proxy.kill()
    proxy.line.close()


class Below:
    """A socket whose every call fails with the next of these errors, or returns the next of these values."""

    def __init__(self, *outcomes: object):
        self.outcomes = list(outcomes)

    def send(self, data: bytes) -> object:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    recv = send


def test_the_first_failure_is_kept_and_none_after_the_close():
    first, second = ConnectionResetError(104, "reset"), BrokenPipeError(32, "broken")
    line = Line(Below(TimeoutError(), first, second), lambda: None)
    for call, error in ((line.recv, TimeoutError), (line.recv, ConnectionResetError), (line.send, BrokenPipeError)):
        with pytest.raises(error):
            call(b"x")
    assert line.failure is first
    ends = []

    def end() -> None:
        ends.append(1)
        raise OSError(9, "bad descriptor")

    closed = Line(Below(OSError(9, "closed")), end)
    closed.close()
    closed.close()
    with pytest.raises(OSError):
        closed.recv(1)
    assert closed.failure is None and ends == [1], "it is closed once, whatever that says"


def test_a_line_that_stands_still_fails_and_one_that_moves_does_not():
    """8 s without a byte that moves; paramiko tries again after each TimeoutError."""
    now = [0.0]
    full = [TimeoutError()] * 3
    line = Line(Below(*full, 1, *full, TimeoutError()), lambda: None, lambda: now[0])

    def tried_at(*seconds: float) -> None:
        for now[0] in seconds:
            with pytest.raises(TimeoutError, match="^$"):
                line.send(b"x")

    tried_at(0.0, 4.0, 7.9)
    assert line.send(b"x") == 1
    tried_at(8.0, 12.0, 15.9)
    assert line.failure is None
    now[0] = 16.0
    with pytest.raises(OSError, match="nothing could be sent for 8 s") as caught:
        line.send(b"x")
    assert line.failure is caught.value


def test_a_lost_host_is_noticed_while_nothing_is_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = tcp("127.0.0.1", server.getsockname()[1], SECONDS)
        own = psutil.Process().net_connections("tcp4")
        (descriptor,) = (each.fd for each in own if each.raddr and each.raddr.port == server.getsockname()[1])
        with socket.socket(fileno=os.dup(descriptor)) as below:
            wanted = dict.fromkeys((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL), KEEPALIVE_SECONDS)
            wanted |= {socket.TCP_KEEPCNT: KEEPALIVE_PROBES, socket.TCP_USER_TIMEOUT: 8000, socket.TCP_NODELAY: 1}
            assert {each: below.getsockopt(socket.IPPROTO_TCP, each) for each in wanted} == wanted
            assert below.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert KEEPALIVE_SECONDS * (KEEPALIVE_PROBES + 1) == 8
        line.close()


def row(port: int) -> tuple:
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))


def test_the_next_address_is_tried_in_time_after_one_that_does_not_answer():
    with silent_port() as silent, socket.create_server(("127.0.0.1", 0)) as server:
        rows = [row(silent), row(server.getsockname()[1])]
        began = time.monotonic()
        tcp("host", 22, 1.0, lambda *names, **more: rows).close()
        assert 0.4 <= time.monotonic() - began < SECONDS, "half of the time is for each"
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            tcp("host", 22, 0.5, lambda *names, **more: rows[:1])
        assert 0.4 <= time.monotonic() - began < SECONDS


def test_the_error_of_the_last_address_is_that_of_all():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for answers in ((), (lambda *names, **more: [row(port)] * 2,)):
        with pytest.raises(ConnectionRefusedError):
            tcp("localhost", port, SECONDS, *answers)
    with pytest.raises(OSError, match="no address") as caught:
        tcp("host", 22, SECONDS, lambda *names, **more: [])
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_a_name_that_no_server_knows_in_time_is_an_error():
    answered = threading.Event()
    with pytest.raises(socket.gaierror, match="within 0.1 s"):
        tcp("host", 22, 0.1, lambda *names, **more: answered.wait())
    answered.set()


def test_what_the_resolver_says_is_passed_on():
    asked = []

    def answers(*names: object, **more: object) -> list:
        asked.append((names, more, threading.current_thread() is threading.main_thread()))
        return [row(7)]

    assert addresses("host", 7, SECONDS, answers) == [row(7)]
    assert asked == [(("host", 7), {"type": socket.SOCK_STREAM}, False)]

    def fails(*names: object, **more: object) -> list:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    with pytest.raises(socket.gaierror, match="no such name"):
        addresses("host", 7, SECONDS, fails)
    with pytest.raises(socket.gaierror, match="not a valid host name"):
        addresses("a..b", 7, SECONDS, lambda *names, **more: "a..b".encode("idna"))
