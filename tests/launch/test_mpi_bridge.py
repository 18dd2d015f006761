"""Bridge, reception and channel together, as under mpirun but without one; commands stand in for agents."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import LaunchError
from launch.channels.bridges import bridge
from launch.channels.bridges.channel import BridgeChannel
from launch.channels.bridges.engine import bridge_command, choice
from launch.channels.bridges.reception import CALLERS, GREETING_SECONDS, Caller, Reception
from launch.channels.bridges.tls import certificate
from launch.job.host import Host

DEADLINE = 30.0  # s; for what takes a fraction of a second on an idle machine
FIVE_MB = bytes(range(256)) * (5_000_000 // 256)


def wait_for(condition, what: str):
    end = time.monotonic() + DEADLINE
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        time.sleep(0.01)
    return found


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

    def start(self, **told: object) -> subprocess.Popen:
        """A bridge, which is told the truth but for `told`."""
        call = {
            "program": Path(bridge.__file__).read_text(),
            "addresses": ["127.0.0.1"],
            "port": self.reception.port,
            "certificate": self.reception.certificate,
            "token": self.token,
            "seconds": 5,
        }
        environment = dict(os.environ, OMPI_COMM_WORLD_RANK="7", **{bridge.VARIABLE: json.dumps({**call, **told})})
        command = bridge_command(choice(Host("here", python=sys.executable), 7))
        self.bridges.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
        return self.bridges[-1]

    def channel(self, command: str, text: bytes = b"", **told: object) -> BridgeChannel:
        """A channel to `command` behind a new bridge."""
        self.start(**told)
        self.caller = self.came.get(timeout=DEADLINE)
        return BridgeChannel(self.caller.stream, str(self.caller), command, text, lambda seconds: "")

    def end(self) -> None:
        self.reception.close()
        while not self.came.empty():
            self.came.get().stream.close()
        for each in self.bridges:
            try:
                each.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
                pytest.fail("a bridge has not ended")


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


# -- the contract of a channel -----------------------------------------------------------------------------------------


def test_the_text_is_the_first_that_the_command_reads_and_what_it_writes_comes_back(desk):
    channel = desk.channel("exec cat", b"text ")
    channel.write(b"and more")
    got = b""
    while len(got) < 13:
        got += channel.read(DEADLINE)
    assert got == b"text and more"
    assert channel.close() == "exited with 0"


def test_five_megabytes_both_ways_at_once_arrive_unchanged(desk):
    channel = desk.channel(f"exec head -c {len(FIVE_MB)}")
    writer = threading.Thread(target=channel.write, args=(FIVE_MB,))
    writer.start()
    assert read_all(channel) == FIVE_MB
    writer.join(DEADLINE)
    assert channel.close() == "exited with 0"


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


def test_silence_is_a_timeout_and_nothing_is_lost_by_it(desk):
    channel = desk.channel("read line; echo got $line")
    with pytest.raises(TimeoutError):
        channel.read(0.05)
    channel.write(b"it\n")
    assert read_all(channel) == b"got it\n"
    assert channel.close() == "exited with 0"


def test_writing_after_the_end_is_an_error(desk):
    channel = desk.channel("exit 0")
    assert read_all(channel) == b""
    assert channel.read(DEADLINE) == b""
    with pytest.raises(OSError):
        channel.write(b"x")
    channel.close()
    with pytest.raises(OSError):
        channel.write(b"x")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 3", "exited with 3"),
        ("echo one >&2; echo two >&2; exit 125", "exited with 125: two"),
        ("kill -9 $$", "was killed by SIGKILL"),
        ("exec no-such-python", "exited with 127: "),
    ],
)
def test_the_exit_of_the_command_is_reported(desk, command, words):
    channel = desk.channel(command)
    read_all(channel)
    closed = channel.close()
    assert closed == words or (words.endswith(": ") and closed.startswith(words) and "no-such-python" in closed)


def test_the_last_output_comes_before_the_end(desk):
    channel = desk.channel(f"head -c {len(FIVE_MB)} /dev/zero; echo oh >&2; kill -TERM $$")
    assert len(read_all(channel)) == len(FIVE_MB)
    assert channel.close() == "was killed by SIGTERM"


def test_output_that_another_process_holds_open_does_not_delay_the_end(desk):
    channel = desk.channel("sleep 20 & echo $!; kill -9 $$")
    began = time.monotonic()
    sleeper = int(read_all(channel))
    assert channel.close() == "was killed by SIGKILL"
    assert time.monotonic() - began < 15
    os.kill(sleeper, signal.SIGKILL)


def test_much_standard_error_does_not_block(desk):
    channel = desk.channel("yes words | head -c 3000000 >&2; echo last >&2; echo done; exit 4")
    assert read_all(channel) == b"done\n"
    assert channel.close() == "exited with 4: last"


def test_close_ends_the_input_of_a_command_that_still_runs(desk):
    assert desk.channel("cat; exit 9").close() == "exited with 9"


def test_close_does_not_wait_for_a_running_command(desk):
    channel = desk.channel("read line; exec sleep 2")
    began = time.monotonic()
    assert channel.close() == "did not answer; it ends by itself"
    assert time.monotonic() - began < 1.9
    with pytest.raises(OSError):
        channel.write(b"x")


# -- what the command finds --------------------------------------------------------------------------------------------


def test_the_command_inherits_neither_the_token_nor_mpiruns_variables(desk):
    channel = desk.channel("env; tr '\\0' '\\n' < /proc/self/environ")
    found = read_all(channel)
    assert b"PATH=" in found
    assert desk.token.encode() not in found and bridge.VARIABLE.encode() not in found
    assert b"OMPI_COMM_WORLD_RANK" not in found
    channel.close()


def test_the_token_is_in_no_command_line(desk):
    channel = desk.channel("exec cat")
    seen = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        seen += b"dmltrain-bridge" in words
        assert desk.token.encode() not in words
    assert seen, "the bridge's own command line was looked at"
    channel.close()


def test_the_command_is_in_a_session_of_its_own(desk):
    channel = desk.channel("echo $$; cut -d' ' -f6 /proc/$$/stat")
    pid, session = read_all(channel).split()
    assert pid == session
    channel.close()


# -- the life line -----------------------------------------------------------------------------------------------------


def ends_by_its_input(folder: Path) -> str:
    """A command that says in a file that its input has ended."""
    return f"echo up; cat; echo input ended > {folder}/end"


def test_a_bridge_that_is_killed(desk, tmp_path):
    channel = desk.channel(ends_by_its_input(tmp_path))
    assert channel.read(DEADLINE) == b"up\n"
    os.kill(desk.caller.pid, signal.SIGKILL)
    assert channel.read(DEADLINE) == b""
    assert channel.close().startswith(f"lost its bridge (pid {desk.caller.pid} on ")
    wait_for((tmp_path / "end").exists, "the end of the command's input")
    assert desk.bridges[0].wait(DEADLINE) == 0, "mpirun must see no failure, or it would end the other hosts"


def test_a_connection_that_ends(desk, tmp_path):
    channel = desk.channel(ends_by_its_input(tmp_path))
    assert channel.read(DEADLINE) == b"up\n"
    desk.caller.stream.abort()
    assert desk.bridges[0].wait(DEADLINE) == 0
    assert (tmp_path / "end").read_text() == "input ended\n", "the bridge has waited for the command"
    with pytest.raises(OSError):
        channel.write(b"x")
    assert channel.close().startswith("lost its bridge")


def test_a_connection_that_ends_while_output_waits(desk):
    channel = desk.channel("exec yes")
    channel.read(DEADLINE)
    desk.caller.stream.abort()
    channel.close()
    command = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(desk.caller.pid)], capture_output=True, text=True)
    for line in command.stdout.splitlines():  # nobody has told `yes`, which does not read, to end
        os.kill(int(line.split()[0]), signal.SIGKILL)
    assert desk.bridges[0].wait(DEADLINE) == 0


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
    bridged = psutil.Process(desk.caller.pid)
    before = sum(bridged.cpu_times()[:2])
    time.sleep(1.0)  # in which a bridge that tries again and again takes a whole core
    assert sum(bridged.cpu_times()[:2]) - before < 0.3
    (tmp_path / "go").touch()
    assert read_all(channel) == b"done\n"
    assert channel.close() == "exited with 0"


def test_output_that_nobody_reads_is_left_in_the_commands_pipe(desk):
    """The bridge keeps a limited backlog, whatever a command prints."""
    channel = desk.channel("exec yes")
    bridged = psutil.Process(desk.caller.pid)
    (command,) = wait_for(bridged.children, "its command")
    written = -1
    while written != (written := command.io_counters().write_chars) or command.status() != psutil.STATUS_SLEEPING:
        time.sleep(0.1)  # it prints on
    before = sum(bridged.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(bridged.cpu_times()[:2]) - before < 0.2, "and waits for the launcher without work"
    assert channel.read(DEADLINE).startswith(b"y\ny\n")
    wait_for(lambda: channel.read(DEADLINE) and command.io_counters().write_chars > written, "more of it")
    desk.caller.stream.abort()
    command.kill()
    channel.close()


def test_a_bridge_that_was_never_asked_for_anything_ends_with_its_connection(desk):
    started = desk.start()
    desk.came.get(timeout=DEADLINE).stream.close()
    assert started.wait(DEADLINE) == 0


# -- unauthenticated peers -----------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(desk):
    """Everything that the bridge sends is correct except the token."""
    for wrong in ("0" * 64, desk.token[:-1], desk.token[:8], desk.token + "0", desk.token.upper(), ""):
        assert desk.start(token=wrong).wait(DEADLINE) == 0
        assert desk.came.empty(), wrong
    desk.start()
    desk.came.get(timeout=DEADLINE).stream.close()


def test_a_forgotten_token_is_refused(desk):
    desk.reception.forget(desk.token)
    assert desk.start().wait(DEADLINE) == 0
    assert desk.came.empty()


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
    assert_disconnected(desk, json.dumps({**hello, "host": "h" * 2000}).encode() + b"\n")
    assert_disconnected(desk, json.dumps({**hello, "more": 1}).encode() + b"\n")
    assert_disconnected(desk, json.dumps({"token": desk.token}).encode() + b"\n")
    assert_disconnected(desk, json.dumps(hello).encode(), ends=True)
    with dial_tls(desk.reception.port) as friend:
        friend.sendall(json.dumps(hello).encode() + b"\n")
        assert desk.came.get(timeout=DEADLINE).host == "here", "this is one"


def test_unauthenticated_peers_that_disconnect_free_their_slots(desk):
    for _ in range(CALLERS + 2):
        dial(desk.reception.port).close()
    channel = desk.channel("echo hello", seconds=DEADLINE)
    assert read_all(channel) == b"hello\n"
    channel.close()


def test_silent_unauthenticated_peers_do_not_block_others(desk):
    silent = [dial(desk.reception.port) for _ in range(50)]
    channel = desk.channel("echo hello")
    assert read_all(channel) == b"hello\n"
    channel.close()
    for each in silent:
        each.close()


class Impostor:
    """Somebody else who answers TLS, with a certificate of his own, and keeps what he hears."""

    def __init__(self):
        self.context, _ = certificate()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard = b""
        self.over = threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        connection, _ = self.listener.accept()
        try:
            with self.context.wrap_socket(connection, server_side=True) as secured:
                while data := secured.recv(1000):
                    self.heard += data
        except OSError:
            pass
        self.over.set()


def test_a_bridge_sends_nothing_to_a_peer_with_another_certificate(desk):
    impostor = Impostor()
    started = desk.start(port=impostor.listener.getsockname()[1])
    _, said = started.communicate(timeout=DEADLINE)
    assert started.returncode == 1, "mpirun is to end"
    assert "127.0.0.1: another program with another certificate answers there" in said
    assert impostor.over.wait(DEADLINE)
    assert impostor.heard == b""
    impostor.listener.close()


def test_a_bridge_tries_every_address(desk):
    channel = desk.channel("echo hello", addresses=["127.0.0.9", "::1", "127.0.0.1"])  # one listens at the last only
    assert read_all(channel) == b"hello\n"
    channel.close()


def test_an_address_that_does_not_answer_holds_up_no_other(desk):
    with contextlib.ExitStack() as opened:
        silent = opened.enter_context(socket.socket())
        silent.bind(("127.0.0.9", desk.reception.port))
        silent.listen(0)
        for _ in range(3):  # fill the queue of connections that nobody accepts: further ones get no answer
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        channel = desk.channel("echo hello", addresses=["127.0.0.9", "127.0.0.1"], seconds=DEADLINE)
        assert read_all(channel) == b"hello\n"
        channel.close()


def test_a_bridge_that_reaches_no_launcher_reports_what_it_tried(desk):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    started = desk.start(port=port, addresses=["127.0.0.1", "127.0.0.9"])
    _, said = started.communicate(timeout=DEADLINE)
    assert started.returncode == 1
    assert f"cannot reach the launcher at port {port}: 127.0.0.1: Connection refused; 127.0.0.9: " in said


# -- odds and ends -----------------------------------------------------------------------------------------------------


def test_the_bridge_is_python_3_8():
    ast.parse(Path(bridge.__file__).read_text(), feature_version=(3, 8))


def test_an_address_of_another_machine_cannot_be_listened_at():
    with pytest.raises(LaunchError, match="192.0.2.77.*--host-ip"):
        Reception("192.0.2.77")


@pytest.mark.parametrize(
    ("address", "reached", "not_reached"),
    [("", ["127.0.0.1", "::1"], []), ("127.0.0.1", ["127.0.0.1"], ["127.0.0.2"]), ("::1", ["::1"], ["127.0.0.1"])],
)
def test_where_a_reception_listens(address, reached, not_reached):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    reception = Reception(address)
    for each in reached:
        socket.create_connection((each, reception.port), DEADLINE).close()
    for each in not_reached:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((each, reception.port), DEADLINE)
    reception.close()


def test_the_port_is_free_when_the_reception_is_closed():
    reception = Reception("127.0.0.1")
    reception.close()
    with pytest.raises(ConnectionRefusedError):
        dial(reception.port)
