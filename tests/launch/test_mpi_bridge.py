"""Bridge, reception and channel together, as under mpirun but without one; commands stand in for agents."""

import ast
import contextlib
import json
import os
import queue
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges import bridge
from dmltrain_launch.channels.bridges.channel import BridgeChannel
from dmltrain_launch.channels.bridges.engine import bridge_command, choice
from dmltrain_launch.channels.bridges.reception import GREETING_SECONDS, Caller, Reception
from dmltrain_launch.channels.bridges.tls import certificate
from dmltrain_launch.job.host import Host
from tests.launch.conftest import DEADLINE
from tests.launch.ssh_connect import silent_port
from tests.waiting import wait_for


class Desk:
    """A reception on loopback, and the bridges that tests send to it."""

    def __init__(self):
        self.reception = Reception("127.0.0.1")
        self.came: queue.Queue[Caller] = queue.Queue()
        self.token = self.reception.expect(self._take)
        self.bridges: list[subprocess.Popen] = []

    def _take(self, caller: Caller) -> bool:
        self.came.put(caller)
        return True

    def start(self, beneath: Callable[..., list[str]] = lambda *words: [*words], **told: object) -> subprocess.Popen:
        """A bridge, which is told the truth but for `told`. `beneath`: the command line for that of the bridge."""
        reception = self.reception
        call = {"program": Path(bridge.__file__).read_text(), "addresses": ["127.0.0.1"], "seconds": DEADLINE}
        call |= {"port": reception.port, "certificate": reception.certificate, "token": self.token, **told}
        environment = dict(os.environ, OMPI_COMM_WORLD_RANK="7", **{bridge.VARIABLE: json.dumps(call)})
        command = beneath(*bridge_command(choice(Host("here", python=sys.executable), 7)))
        self.bridges.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return self.bridges[-1]

    def over(self) -> bool:
        """Whether the bridge ends as it should: mpirun must see no failure, or it would end the other hosts."""
        return self.bridges[-1].wait(DEADLINE) == 0

    def channel(self, command: str, text: bytes = b"", **told: object) -> BridgeChannel:
        """A channel to `command` behind a new bridge."""
        self.start(**told)
        self.caller = self.came.get(timeout=DEADLINE)
        return BridgeChannel(self.caller.stream, str(self.caller), command, text, lambda seconds: "")

    def end(self) -> None:
        self.reception.close()
        while not self.came.empty():
            self.came.get().stream.close()
        for process in self.bridges:
            try:
                process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                pytest.fail("a process has not ended")


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    if hasattr(made, "caller"):
        made.caller.stream.close()
    made.end()


def read_all(channel: BridgeChannel) -> bytes:
    data = b""
    while more := channel.read(DEADLINE):
        data += more
    return data


def busy_seconds(*pids: int) -> float:
    """What processes that should only wait use of a core within 0.4 s: the busiest of them."""
    processes = [psutil.Process(pid) for pid in pids]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(0.4)
    return max(sum(process.cpu_times()[:2]) - used for process, used in zip(processes, before, strict=True))


# -- the contract of a channel -----------------------------------------------------------------------------------------


def test_messages_of_several_threads_do_not_cut_each_other(desk):
    lines = [bytes([letter]) * 300_000 + b"\n" for letter in b"abcdef"]
    total = sum(map(len, lines))
    channel = desk.channel(f"exec head -c {total}")
    writers = [threading.Thread(target=channel.write, args=(line,)) for line in lines]
    for writer in writers:
        writer.start()
    assert sorted(read_all(channel).splitlines(keepends=True)) == lines
    for writer in writers:
        writer.join(DEADLINE)
    channel.close()


@pytest.mark.parametrize(
    ("command", "printed", "words"),
    [
        ("exit 3", b"", "exited with 3"),
        ("echo one >&2; echo two >&2; exit 125", b"", "exited with 125: two"),
        ("kill -9 $$", b"", "was killed by SIGKILL"),
        ("exec no-such-python", b"", r"exited with 127: .*no-such-python.*"),
        ("printf ' no \\377text \\n' >&2; exit 1", b"", "exited with 1: no \ufffdtext"),
        ("head -c 5000 /dev/zero | tr '\\0' x >&2; exit 1", b"", "exited with 1: x{2000}"),
        ("head -c 5000000 /dev/zero; echo oh >&2; kill -TERM $$", bytes(5_000_000), "was killed by SIGTERM"),
        ("yes a | head -c 3000000 >&2; echo last >&2; echo done; exit 4", b"done\n", "exited with 4: last"),
    ],
)
def test_the_exit_of_the_command_is_reported_after_its_last_output(desk, command, printed, words):
    channel = desk.channel(command)
    assert read_all(channel) == printed
    assert channel.read(DEADLINE) == b""
    for _ in range(2):
        with pytest.raises(OSError):
            channel.write(b"x")
        closed = channel.close()
        assert re.fullmatch(words, closed), closed


STANDS_STILL = """
import selectors, time
look = selectors.DefaultSelector.select

def select(self, timeout=None):
    found = look(self, timeout)
    if not found and timeout == 1.0:  # nothing came from the command: now it writes and ends, before it is looked for
        open({go!r}, "w").close()
        time.sleep(1.0)
    return found

selectors.DefaultSelector.select = select
"""


def test_what_the_command_wrote_last_is_not_lost_by_a_bridge_that_stood_still(desk, tmp_path):
    program = STANDS_STILL.format(go=str(tmp_path / "go")) + Path(bridge.__file__).read_text().replace(
        "from __future__ import annotations", ""
    )
    channel = desk.channel(f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo done; exit 4", program=program)
    assert read_all(channel) == b"done\n"
    assert channel.close() == "exited with 4"


def test_output_that_another_process_holds_open_does_not_delay_the_end(desk):
    channel = desk.channel("sleep 600 & echo $!; kill -9 $$")
    sleeper = psutil.Process(int(read_all(channel)))
    assert channel.close() == "was killed by SIGKILL"
    sleeper.kill()  # which it outlives: it is still there


# -- what the command finds --------------------------------------------------------------------------------------------


def test_the_command_has_a_session_of_its_own_and_inherits_neither_the_token_nor_mpiruns_variables(desk):
    channel = desk.channel("echo $$; cut -d' ' -f6 /proc/$$/stat; env; tr '\\0' '\\n' < /proc/self/environ")
    pid, session, found = read_all(channel).split(b"\n", 2)
    assert pid == session and b"PATH=" in found
    assert desk.token.encode() not in found and bridge.VARIABLE.encode() not in found
    assert b"OMPI_COMM_WORLD_RANK" not in found
    channel.close()


# -- the life line -----------------------------------------------------------------------------------------------------


def is_connected(pid: int) -> bool:
    return bool(psutil.Process(pid).net_connections("tcp"))


def test_what_a_command_has_not_taken_when_the_connection_ends_is_dropped(desk, tmp_path):
    """It ends with its launcher: it needs nothing more of it."""
    sent = 3 * bridge.READ_BYTES
    waits = f"echo up; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; wc -c > {tmp_path}/counted"
    channel = desk.channel(waits, bytes(sent))
    assert channel.read(DEADLINE) == b"up\n"
    desk.caller.stream.abort()
    wait_for(lambda: not is_connected(desk.caller.pid), "the bridge's end of the connection")
    (tmp_path / "go").touch()
    assert desk.bridges[0].wait(DEADLINE) == 0
    assert int((tmp_path / "counted").read_text()) < sent
    channel.close()


def test_what_a_command_does_not_read_any_more_is_dropped_without_work(desk, tmp_path):
    waits = f"exec <&-; echo closed; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; echo done"
    channel = desk.channel(waits)
    assert channel.read(DEADLINE) == b"closed\n"
    for _ in range(8):
        channel.write(bytes(bridge.BACKLOG_BYTES))
    wait_for(lambda: busy_seconds(desk.caller.pid) < 0.12, "the bridge to rest: trying again and again takes a core")
    (tmp_path / "go").touch()
    assert read_all(channel) == b"done\n"
    assert channel.close() == "exited with 0"


def test_output_that_nobody_reads_is_left_in_the_commands_pipe(desk):
    """The bridge keeps a limited backlog, whatever a command prints."""
    channel = desk.channel("exec yes")
    (command,) = wait_for(psutil.Process(desk.caller.pid).children, "its command")
    seen = [-1]

    def waits() -> bool:
        seen.append(command.io_counters().write_chars)
        return seen[-1] == seen[-2] and command.status() == psutil.STATUS_SLEEPING

    wait_for(waits, "that it cannot print any more")
    assert busy_seconds(desk.caller.pid) < 0.16, "and waits for the launcher without work"
    assert channel.read(DEADLINE).startswith(b"y\ny\n")
    wait_for(lambda: channel.read(DEADLINE) and command.io_counters().write_chars > seen[-1], "more of it")
    desk.caller.stream.abort()
    command.kill()
    channel.close()


# -- unauthenticated peers -----------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_a_bridge_that_is_never_asked_for_anything_ends_with_its_connection(desk):
    """Everything that the bridge sends is correct except the token."""
    for wrong in ("0" * 64, desk.token[:-1], desk.token + "0", desk.token.upper()):
        assert_disconnected(desk, json.dumps({**HELLO, "token": wrong}).encode() + b"\n")
    assert desk.start(token="0" * 64).wait(DEADLINE) == 0
    assert desk.came.empty()
    desk.start()
    desk.came.get(timeout=DEADLINE).stream.close()
    assert desk.over()


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE)


def dial_tls(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(dial(port))


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.0\r\n\r\n", os.urandom(100_000), b"\x16\x03\x01\xff\xff" + bytes(9)])
def test_invalid_data_is_disconnected_and_disturbs_no_other(desk, noise):
    with dial(desk.reception.port) as peer:
        try:
            peer.sendall(noise)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1000):
                pass
        except OSError:
            pass  # disconnected while sending
        assert desk.channel("exit 0").read(DEADLINE) == b""
    assert desk.came.empty()


HELLO = {"token": "x", "index": 7, "host": "here", "pid": 1}


def assert_disconnected(desk: Desk, data: bytes, ends: bool = False) -> None:
    """Send `data` over TLS, and end the stream if `ends`. The launcher disconnects before GREETING_SECONDS."""
    with dial_tls(desk.reception.port) as peer:
        peer.settimeout(GREETING_SECONDS - 1)
        peer.sendall(data)
        if ends:
            peer.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
            assert peer.recv(1000) == b""
    assert desk.came.empty()


@pytest.mark.parametrize(
    "line",
    [
        *(b"\n", b"[]\n", b"[" * 998 + b"\n", b"x" * 5000, b"{}\n"),
        *(json.dumps({**HELLO, "token": token}).encode() + b"\n" for token in ("x", "", 3, None, [], {})),
    ],
)
def test_a_tls_peer_without_the_token_is_disconnected(desk, line):
    assert_disconnected(desk, line)


def test_an_invalid_line_with_the_token_is_disconnected(desk):
    hello = {**HELLO, "token": desk.token}
    for wrong in ({**hello, "host": "h" * 2000}, {**hello, "more": 1}, {"token": desk.token}):
        assert_disconnected(desk, json.dumps(wrong).encode() + b"\n")
    assert_disconnected(desk, json.dumps(hello).encode(), ends=True)
    with dial_tls(desk.reception.port) as friend:
        friend.sendall(json.dumps(hello).encode() + b"\n")
        assert desk.came.get(timeout=DEADLINE).host == "here", "this is one"


def test_a_bridge_sends_nothing_to_a_peer_with_another_certificate(desk):
    context, _ = certificate()
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        started = desk.start(port=listener.getsockname()[1])
        with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as secured:
            heard = secured.recv(1000)
        _, said = started.communicate(timeout=DEADLINE)
    assert (started.returncode, heard) == (1, b""), "mpirun is to end"
    assert "127.0.0.1: another program with another certificate" in said


def test_an_address_that_does_not_answer_holds_up_no_other(desk):
    """Nor does one at which nobody listens."""
    with silent_port("127.0.0.9", desk.reception.port):
        channel = desk.channel("echo hello", addresses=["127.0.0.9", "::1", "127.0.0.1"])
        assert read_all(channel) == b"hello\n"
        channel.close()


def test_a_bridge_that_reaches_no_launcher_reports_what_it_tried_and_does_not_wait(desk):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    started = desk.start(port=port, addresses=["127.0.0.1", "127.0.0.9"], seconds=1000)
    _, said = started.communicate(timeout=DEADLINE)
    assert started.returncode == 1
    assert f"port {port}: 127.0.0.1: Connection refused; 127.0.0.9: " in said


# -- odds and ends -----------------------------------------------------------------------------------------------------


def test_the_bridge_is_python_3_8():
    ast.parse(Path(bridge.__file__).read_text(), feature_version=(3, 8))


def test_an_address_of_another_machine_cannot_be_listened_at():
    with pytest.raises(LaunchError, match=r"192\.0\.2\.77: Cannot assign requested .*--host-ip"):
        Reception("192.0.2.77")


@pytest.mark.parametrize(
    ("address", "reached", "not_reached"),
    [("", ["127.0.0.1", "::1"], []), ("127.0.0.1", ["127.0.0.1"], ["127.0.0.2"]), ("::1", ["::1"], ["127.0.0.1"])],
)
def test_where_a_reception_listens_until_it_is_closed(address, reached, not_reached):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    reception = Reception(address)
    for each in reached:
        socket.create_connection((each, reception.port), DEADLINE).close()
    for each in not_reached:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((each, reception.port), DEADLINE)
    reception.close()
    for each in reached:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((each, reception.port), DEADLINE)
