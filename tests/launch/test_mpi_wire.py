"""The bridge's protocol with a peer that a test writes byte by byte; what a bridge and the launcher do while they wait.

tests/launch/test_mpi_bridge.py has both ends together.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dmltrain_launch.channels.bridges import bridge
from dmltrain_launch.channels.bridges.channel import CLOSE_SECONDS, BridgeChannel, frame
from dmltrain_launch.channels.bridges.reception import CALLERS, GREETING_BYTES, GREETING_SECONDS, TOKEN_BYTES, Reception
from dmltrain_launch.channels.bridges.tls import TlsStream, certificate
from tests.launch.conftest import DEADLINE
from tests.launch.ssh_connect import silent_port
from tests.launch.test_agent import waits
from tests.launch.test_mpi_bridge import HELLO, Desk, assert_disconnected, busy_seconds, dial_tls, read_all
from tests.launch.test_mpi_bridge import desk as desk
from tests.launch.test_reach import reset
from tests.scripts import shell_script
from tests.waiting import wait_for


def next_frame(file) -> bytes:  # what ssl.SSLSocket.makefile returns has no public type
    (length,) = struct.unpack("!I", file.read(4))
    return file.read(length)


def hello_of(desk: Desk, token: str = "") -> bytes:  # noqa: F811
    return json.dumps({**HELLO, "token": token or desk.token}).encode() + b"\n"


# -- the launcher's end ----------------------------------------------------------------------------------------------


class ScriptedBridge:
    """A peer that knows the token, and the channel that the launcher has to it."""

    def __init__(self, desk: Desk, fate: Callable[[float], str] = lambda seconds: ""):  # noqa: F811
        self.tls = dial_tls(desk.reception.port)
        self.tls.sendall(hello_of(desk))
        desk.caller = desk.came.get(timeout=DEADLINE)
        assert self.tls.recv(1) == bridge.WELCOME
        self.channel = BridgeChannel(desk.caller.stream, "its bridge", "the command", b"text", fate)
        self.file = self.tls.makefile("rb")
        assert [next_frame(self.file) for _ in range(2)] == [b"the command", b"text"]


@pytest.mark.parametrize("size", [1, 7])
def test_output_and_its_end_arrive_whole_in_fragments_of_any_size(desk, size):  # noqa: F811
    peer = ScriptedBridge(desk)
    last = json.dumps({"code": 3, "said": "one\ntwo"}).encode()
    sent, got = b"".join(map(frame, (b"out", b"put\0", b"", last))), b""
    with pytest.raises(TimeoutError):
        peer.channel.read(0.05)
    for start in range(0, len(sent), size):
        assert not peer.channel.ended
        peer.tls.sendall(sent[start : start + size])
        with contextlib.suppress(TimeoutError):
            got += peer.channel.read(0.01)
    assert got + read_all(peer.channel) == b"output\0"
    assert peer.channel.ended and peer.channel.read(DEADLINE) == b""
    assert [peer.channel.close() for _ in range(2)] == ["exited with 3: two"] * 2
    assert peer.tls.recv(100) == b"", "it asks nothing more of an agent that has ended"


def test_closing_ends_the_agents_input_and_then_the_connection(desk):  # noqa: F811
    peer = ScriptedBridge(desk)
    assert [peer.channel.close() for _ in range(2)] == ["did not answer; it ends by itself"] * 2
    assert next_frame(peer.file) == b"" and peer.file.read(1) == b""
    with pytest.raises(BrokenPipeError):
        peer.channel.write(b"x")


def test_output_that_arrives_during_close_is_dropped(desk):  # noqa: F811
    peer = ScriptedBridge(desk)
    said = b"".join(map(frame, (b"late", b"", b'{"code": 0, "said": ""}')))
    closing = threading.Thread(target=lambda: (next_frame(peer.file), peer.tls.sendall(said)))
    closing.start()
    assert peer.channel.close() == "exited with 0"
    closing.join(DEADLINE)


@pytest.mark.parametrize(
    "sent, reason",
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes, expected at most 1048576"),
        (b"\x00\x10\x00\x01", "a frame of 1048577 bytes, expected at most 1048576"),
        (frame(b"") + frame(b"[5]"), "its last message is not valid: it is [5], expected an object"),
        (frame(b"") + frame(b'{"code": "x", "said": ""}'), "code is 'x', expected a whole number"),
    ],
)
def test_what_no_bridge_sends_ends_the_channel_before_it_is_read(desk, sent, reason):  # noqa: F811
    peer = ScriptedBridge(desk)
    peer.tls.sendall(frame(b"output") + sent)
    assert read_all(peer.channel) == b"output"
    closed = peer.channel.close()
    assert closed.startswith("lost its bridge: ") and closed.endswith(reason)


def test_a_connection_that_is_lost_is_named_by_its_error(desk):  # noqa: F811
    peer = ScriptedBridge(desk)
    peer.file.close()
    reset(peer.tls)
    assert peer.channel.read(DEADLINE) == b"" and peer.channel.read(DEADLINE) == b""
    assert peer.channel.close() == "lost its bridge: Connection reset by peer"
    assert not peer.channel.ended


def test_a_bridge_that_ends_without_a_message_is_reported_with_mpiruns_exit(desk):  # noqa: F811
    asked = []
    for fate, words in (("", "it ended without a message"), ("mpirun exited with 3", "mpirun exited with 3")):
        peer = ScriptedBridge(desk, lambda seconds, fate=fate: asked.append(seconds) or fate)
        peer.tls.shutdown(socket.SHUT_RDWR)
        assert peer.channel.read(DEADLINE) == b""
        assert peer.channel.close() == f"lost its bridge: {words}"
        desk.caller.stream.close()
    assert asked == [CLOSE_SECONDS] * 2


# -- the reception ---------------------------------------------------------------------------------------------------


def test_a_line_of_the_greatest_length_is_read_and_a_longer_one_is_not(desk):  # noqa: F811
    hello = json.dumps({**HELLO, "token": desk.token}).encode()
    assert_disconnected(desk, hello.ljust(GREETING_BYTES) + b"\n")
    with dial_tls(desk.reception.port) as peer:
        peer.sendall(hello.ljust(GREETING_BYTES - 1) + b"\n")
        assert desk.came.get(timeout=DEADLINE).pid == HELLO["pid"]
    assert GREETING_BYTES == 1000 and len(bytes.fromhex(desk.token)) == TOKEN_BYTES == 32


def test_an_unexpected_peer_is_disconnected(desk):  # noqa: F811
    refusing = desk.reception.expect(lambda caller: False)
    with dial_tls(desk.reception.port) as peer:
        peer.settimeout(GREETING_SECONDS - 1)
        peer.sendall(hello_of(desk, refusing))
        assert [peer.recv(1000) for _ in range(2)] == [bridge.WELCOME, b""]


def test_unauthenticated_peers_do_not_keep_a_bridge_out(desk):  # noqa: F811
    """However many hold connections: random ones end."""
    with contextlib.ExitStack() as unauthenticated:
        for _ in range(CALLERS + 20):
            unauthenticated.enter_context(socket.create_connection(("127.0.0.1", desk.reception.port)))
        with dial_tls(desk.reception.port) as peer:
            peer.sendall(hello_of(desk))
            assert desk.came.get(timeout=GREETING_SECONDS - 1).pid == HELLO["pid"]


@pytest.mark.parametrize("where", ["in its handshake", "before its line is read", "before it is welcomed"])
def test_a_bridge_that_is_dropped_connects_again(desk, where):  # noqa: F811
    """After its handshake, it cannot tell whether the launcher has read its line."""
    context, digest = certificate()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        started = desk.start(port=listener.getsockname()[1], certificate=digest)
        for _ in range(2):
            connection, _ = listener.accept()
            if where == "in its handshake":
                connection.recv(1000)
                reset(connection)
                continue
            dropped = context.wrap_socket(connection, server_side=True)
            if where == "before it is welcomed":
                dropped.recv(GREETING_BYTES)
            dropped.shutdown(socket.SHUT_RDWR)
            dropped.close()
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as taken:
            assert json.loads(taken.recv(GREETING_BYTES))["token"] == desk.token
            taken.sendall(bridge.WELCOME + frame(b"exit 3"))
            file = taken.makefile("rb")
            assert next_frame(file) == b"" and json.loads(next_frame(file))["code"] == 3
    assert started.wait(DEADLINE) == 0


def test_a_bridge_that_is_dropped_at_one_address_still_tries_the_others(desk):  # noqa: F811
    """Also if nothing listens there any more."""
    port = desk.reception.port
    with socket.create_server(("127.0.0.9", port)) as listener:
        threading.Thread(target=lambda: (listener.accept()[0].close(), listener.close()), daemon=True).start()
        reached = bridge.reach(["127.0.0.9", "127.0.0.1"], port, desk.reception.certificate, hello_of(desk), DEADLINE)
    assert desk.came.get(timeout=DEADLINE).pid == HELLO["pid"]
    reached.close()


def test_a_token_is_forgotten_at_once_and_more_than_once(desk):  # noqa: F811
    for _ in range(2):
        desk.reception.forget(desk.token)
    assert_disconnected(desk, hello_of(desk))


def test_a_caller_that_has_not_greeted_when_the_reception_closes_is_refused(desk):  # noqa: F811
    with dial_tls(desk.reception.port) as peer:
        for _ in range(2):
            desk.reception.close()
        peer.settimeout(GREETING_SECONDS - 1)
        peer.sendall(hello_of(desk))
        with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
            assert peer.recv(1000) == b""
    assert desk.came.empty()


def test_no_thread_of_a_reception_keeps_the_launcher_alive():
    before = set(threading.enumerate())
    reception = Reception("127.0.0.1")
    with dial_tls(reception.port):
        threads = set(threading.enumerate()) - before
        assert len(threads) == 2 and all(thread.daemon for thread in threads)
    reception.close()


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def streams() -> Iterator[tuple[TlsStream, ssl.SSLSocket, socket.socket]]:
    """The launcher's end of a connection, the other end, and the other end without TLS."""
    context, _ = certificate()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        dialing = pool.submit(dial_tls, listener.getsockname()[1])
        stream = TlsStream(listener.accept()[0], context)
        stream.handshake(time.monotonic() + DEADLINE)
    with dialing.result() as peer, socket.socket(fileno=os.dup(peer.fileno())) as raw:
        yield stream, peer, raw
    stream.close()


def test_data_before_the_end_of_tls_is_read_first(streams):
    stream, peer, _ = streams
    peer.sendall(b"last words")
    peer.settimeout(0.0)
    with contextlib.suppress(ssl.SSLWantReadError):  # it does not wait for an answer
        peer.unwrap()
    assert [stream.read(DEADLINE) for _ in range(3)] == [b"last words", b"", b""]


INVALID = b"\x17\x03\x03\x00\x05wrong"  # a record that nobody has encrypted


@pytest.mark.parametrize("before", [b"last words", b""])
def test_invalid_data_is_an_error_and_data_before_it_is_read_first(streams, before):
    stream, peer, raw = streams
    peer.sendall(before)
    raw.sendall(INVALID)
    assert not before or stream.read(DEADLINE) == before
    with contextlib.suppress(ssl.SSLError) if before else pytest.raises(ssl.SSLError):
        assert stream.read(DEADLINE) == b""


def test_a_stalled_handshake_times_out():
    context, _ = certificate()
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(TimeoutError):
        TlsStream(ours, context).handshake(time.monotonic() + 0.05)


def test_closing_wakes_a_reading_thread_and_frees_the_descriptor(streams):
    stream, peer, _ = streams
    results: list[object] = []

    def read() -> None:
        try:
            results.append(stream.read(DEADLINE))
        except OSError as error:
            results.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    wait_for(lambda: waits(reading), "its wait")
    stream.close()
    reading.join(DEADLINE)
    assert results and not isinstance(results[0], TimeoutError)
    assert peer.recv(1) == b""
    stream.close()


def test_a_session_cannot_be_resumed_and_the_key_is_in_no_open_file(streams):
    stream, peer, _ = streams
    stream.write(b"x")
    assert peer.recv(10) == b"x"
    assert peer.session is None or not peer.session.has_ticket
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(path))
    assert not [name for name in names if name.startswith("/memfd:certificate")]


# -- a bridge's end --------------------------------------------------------------------------------------------------


class ScriptedLauncher:
    """A launcher at which a real bridge calls; it sends what a test writes."""

    def __init__(self, desk: Desk):  # noqa: F811
        context, digest = certificate()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(DEADLINE)
            self.bridge = desk.start(port=listener.getsockname()[1], certificate=digest)
            connection, _ = listener.accept()
        connection.settimeout(DEADLINE)
        self.tls = context.wrap_socket(connection, server_side=True)
        self.file = self.tls.makefile("rb")
        self.hello = json.loads(self.file.readline())
        self.tls.sendall(bridge.WELCOME)

    def say(self, *payloads: bytes, size: int = 1 << 20) -> None:
        data = b"".join(map(frame, payloads))
        for start in range(0, len(data), size):
            self.tls.sendall(data[start : start + size])

    def hear(self) -> tuple[bytes, dict]:
        """All output, and the last message."""
        output = b""
        while more := next_frame(self.file):
            output += more
        return output, json.loads(next_frame(self.file))

    def heard_all(self) -> bool:
        return self.file.read(1) == b"" and self.bridge.wait(DEADLINE) == 0


def test_a_bridge_introduces_itself_and_takes_frames_in_fragments_of_any_size(desk):  # noqa: F811
    talk = ScriptedLauncher(desk)
    pid = talk.hello.pop("pid")
    assert talk.hello == {"token": desk.token, "index": 7, "host": socket.gethostname()}
    assert b"dmltrain-bridge" in Path(f"/proc/{pid}/cmdline").read_bytes()
    talk.say(b"cat; exit 3", b"ab", b"cd", b"", b"after the end", size=1)
    assert talk.hear() == (b"abcd", {"code": 3, "said": ""})
    assert talk.heard_all()


@pytest.mark.parametrize("length, taken", [(1 << 20, True), ((1 << 20) + 1, False), ((1 << 32) - 1, False)])
def test_a_frame_that_is_too_long_for_a_bridge_ends_its_connection(desk, tmp_path, length, taken):  # noqa: F811
    talk = ScriptedLauncher(desk)
    talk.say(f"echo up; cat >{tmp_path}/end".encode())
    assert next_frame(talk.file) == b"up\n"
    with contextlib.suppress(OSError):
        talk.tls.sendall(length.to_bytes(4, "big") + bytes(1 << 20))
        if taken:
            talk.say(b"")
            assert talk.hear() == (b"", {"code": 0, "said": ""})
    assert talk.bridge.wait(DEADLINE) == 0
    assert (tmp_path / "end").read_bytes() == bytes(length) * taken


@pytest.mark.parametrize("prints", ["echo up", "head -c 30000000 /dev/zero"], ids=["input waits", "output waits"])
def test_a_connection_that_is_reset_ends_the_commands_input(desk, tmp_path, prints):  # noqa: F811
    """What it still prints is read, so that it comes to its end."""
    talk = ScriptedLauncher(desk)
    talk.say(f"{prints}; cat; echo over > {tmp_path}/end".encode())
    assert next_frame(talk.file)
    talk.file.close()
    reset(talk.tls)
    assert talk.bridge.wait(DEADLINE) == 0
    assert (tmp_path / "end").read_text() == "over\n"


def test_a_command_may_close_its_output_long_before_it_ends(desk):  # noqa: F811
    talk = ScriptedLauncher(desk)
    talk.say(b"exec >&- 2>&-; read line; exit $line")
    assert next_frame(talk.file) == b""
    talk.say(b"5\n")
    assert json.loads(next_frame(talk.file)) == {"code": 5, "said": ""}
    assert talk.heard_all()


@pytest.mark.parametrize("exists", [True, False])
def test_a_command_starts_in_the_users_home_if_there_is_one(desk, tmp_path, monkeypatch, exists):  # noqa: F811
    home = tmp_path if exists else tmp_path / "none"
    monkeypatch.setenv("HOME", str(home))
    channel = desk.channel("pwd")
    assert read_all(channel).decode() == f"{home if exists else '/'}\n"
    channel.close()


def test_a_bridge_that_waits_does_no_work(desk):  # noqa: F811
    talks = [ScriptedLauncher(desk) for _ in range(4)]
    commands = [b"echo up; exec cat", b"exec 2>&-; echo up; exec cat", b"echo up; exec >&-; read line"]
    for talk, command in zip(talks[1:], commands, strict=True):  # the first is asked for nothing
        talk.say(command)
        assert next_frame(talk.file) == b"up\n"
    assert busy_seconds(*(talk.hello["pid"] for talk in talks)) < 0.1
    for talk in talks:
        talk.tls.shutdown(socket.SHUT_RDWR)
        assert talk.bridge.wait(DEADLINE) == 0


def test_unread_input_of_a_command_is_queued_within_limits(desk, tmp_path):  # noqa: F811
    sent = 32_000_000
    waits = f"echo up; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; head -c {sent} | wc -c"
    channel = desk.channel(waits)
    assert channel.read(DEADLINE) == b"up\n"
    writer = threading.Thread(target=channel.write, args=(bytes(sent),))
    writer.start()
    wait_for(lambda: busy_seconds(desk.caller.pid) < 0.2, "the bridge to rest")
    assert writer.is_alive() and psutil.Process(desk.caller.pid).memory_info().rss < 100_000_000
    (tmp_path / "go").touch()
    assert read_all(channel) == f"{sent}\n".encode()
    writer.join(DEADLINE)
    assert channel.close() == "exited with 0"


# -- the way to the launcher -----------------------------------------------------------------------------------------

LOST_AFTER = {  # 14 s on an idle connection, 12 s with data that nobody acknowledges; an outage of 5 s is survived
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 3,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 12_000,
    socket.TCP_NODELAY: 1,
}


def assert_kept_alive(connection: socket.socket) -> None:
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert {option: connection.getsockopt(socket.IPPROTO_TCP, option) for option in LOST_AFTER} == LOST_AFTER


def test_both_ends_notice_a_lost_connection(desk):  # noqa: F811
    port = desk.reception.port
    with bridge.reach(["127.0.0.1"], port, desk.reception.certificate, hello_of(desk), DEADLINE) as link:
        assert_kept_alive(link)
        desk.caller = desk.came.get(timeout=DEADLINE)
        own = psutil.Process().net_connections("tcp4")
        (descriptor,) = (each.fd for each in own if each.laddr.port == port and each.raddr)
        with socket.socket(fileno=os.dup(descriptor)) as below:
            assert_kept_alive(below)


def test_a_launcher_is_reached_over_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    reception = Reception("::1")
    hello = json.dumps({**HELLO, "token": reception.expect(lambda caller: True)}).encode() + b"\n"
    bridge.reach(["127.0.0.1", "::1"], reception.port, reception.certificate, hello, DEADLINE).close()
    reception.close()


def test_each_address_that_was_tried_is_in_the_error():
    with silent_port("127.0.0.9") as port, pytest.raises(OSError) as caught:
        bridge.reach(["127.0.0.9", "127.0.0.1", "no:address"], port, "", b"", 0.3)
    assert str(caught.value).startswith("127.0.0.9: no answer in 0.3 s; 127.0.0.1: Connection refused; ")
    assert "no:address: " in str(caught.value)


# -- mpirun's daemon -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("daemon", "silence", "code"),
    [
        *((name, 6.5, -signal.SIGTERM) for name in ("orted", "prted", "hydra_pmi_proxy")),
        ("mpirun", 6.5, 9),
        ("orted", 0.0, 9),
    ],
)
def test_a_bridge_whose_launcher_was_silent_ends_its_daemon(desk, tmp_path, daemon, silence, code):  # noqa: F811
    """The daemon would wait for minutes. `silence`: how much later the bridge's clock is after the last message."""
    (tmp_path / "later").write_text("0")
    text = Path(bridge.__file__).read_text()
    program = f"import time\nmonotonic = time.monotonic\nlater = {str(tmp_path / 'later')!r}\n"
    program += f"time.monotonic = lambda: monotonic() + float(open(later).read() or 0)\nexec({text!r})"
    named = tmp_path / "a) shell"  # names may have any character
    started = shell_script(tmp_path / daemon, '"$@" &\nwait $!\nexit 9')

    def beneath(shell: str, *words: str) -> list[str]:
        named.symlink_to(shell)
        return [str(started), str(named), *words]

    process = desk.start(beneath, program=program)
    caller = desk.came.get(timeout=DEADLINE)
    channel = BridgeChannel(caller.stream, "its bridge", "echo up; cat", b"", lambda seconds: "")
    assert channel.read(DEADLINE) == b"up\n"
    (tmp_path / "draft").write_text(str(silence))
    (tmp_path / "draft").rename(tmp_path / "later")
    caller.stream.close()
    assert process.wait(DEADLINE) == code
