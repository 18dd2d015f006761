"""SSH without a server: the bytes below a connection, the wait for a greeting, and the hosts that the options name."""

import errno
import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.agent import protocol
from dmltrain_launch.agent.process import living
from dmltrain_launch.agent.protocol import GREETING
from dmltrain_launch.channels import NOISE_BYTES, READY
from dmltrain_launch.channels.ssh.greeting import NoAgent, explain, label, start_agent, timed_out
from dmltrain_launch.channels.ssh.stream import (
    KEEPALIVE_PROBES,
    KEEPALIVE_SECONDS,
    ProxyCommand,
    SshStream,
    addresses,
    tcp,
)
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.named_hosts import named_hosts
from dmltrain_launch.clusters.ssh.hosts import CHANNELS, Cluster
from dmltrain_launch.job.host import Host
from tests.launch.ssh_connect import SECONDS, silent_port
from tests.launch.sshd import home, sshds  # noqa: F401  fixtures
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
    proxy.stream.close()
    wait_for(lambda: not {*pids} & living().keys() and not psutil.pid_exists(pids[1]), "the end of both, and no zombie")


def test_several_threads_kill_a_command():
    """As the end of its connection and that of all logins do."""
    with ThreadPoolExecutor(8) as threads:
        for _ in range(100):
            proxy = ProxyCommand("sleep 300")
            for killed in [threads.submit(proxy.kill) for _ in range(8)]:
                killed.result()
            proxy.stream.close()


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
    proxy.stream.close()


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
    line = SshStream(Below(TimeoutError(), first, second), lambda: None)
    for call, error in ((line.recv, TimeoutError), (line.recv, ConnectionResetError), (line.send, BrokenPipeError)):
        with pytest.raises(error):
            call(b"x")
    assert line.failure is first
    ends = []

    def end() -> None:
        ends.append(1)
        raise OSError(9, "bad descriptor")

    closed = SshStream(Below(OSError(9, "closed")), end)
    closed.close()
    closed.close()
    with pytest.raises(OSError):
        closed.recv(1)
    assert closed.failure is None and ends == [1], "it is closed once, whatever that says"


def test_a_line_that_stands_still_fails_and_one_that_moves_does_not():
    """8 s without a byte that moves; paramiko tries again after each TimeoutError."""
    now = [0.0]
    full = [TimeoutError()] * 3
    line = SshStream(Below(*full, 1, *full, TimeoutError()), lambda: None, lambda: now[0])

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


# -- the wait for an agent ends with its greeting or with one sentence that explains the failure -----------------------

HOST = Host("h1", where="hosts:3")


class Script:
    """A channel that delivers these chunks; then it ends, or stays silent, until its input ends or for ever."""

    def __init__(self, *pieces: bytes, ends: bool = True, reads: bool = False, err: tuple[str, ...] = ()):
        self.pieces, self.ends, self.reads, self.err, self.closed = list(pieces), ends, reads, list(err), False
        self.timeouts, self.given, self.written, self.over = [], b"", b"", False

    @property
    def exit_code(self) -> int | None:
        return 3 if self.closed and self.over else None

    def wait_for_end(self, until: float) -> None:
        self.over = True

    def read(self, timeout: float) -> bytes:
        self.timeouts.append(timeout)
        if not self.pieces and not self.ends:
            raise TimeoutError
        data = self.pieces.pop(0) if self.pieces else b""
        self.given += data
        return data

    def write(self, data: bytes) -> None:
        assert READY in self.given, "the agent's text goes only to a Python that waits for it"
        self.written += data

    def end_input(self) -> None:
        self.ends = self.reads

    def close(self) -> str:
        self.closed = True
        return "exited with 3"

    def stderr_lines(self) -> list[str]:
        return self.err


def test_what_a_login_script_prints_comes_before_the_greeting():
    said = b"Welcome!\n" + READY + GREETING + b"2\n"
    for pieces in ([said], [b"Welcome!\n", READY[:4], READY[4:] + GREETING[:4], GREETING[4:] + b"2\n"]):
        channel = Script(*pieces, b"more")
        assert start_agent(channel, b"text", math.inf) == said
        assert not channel.closed and channel.pieces == [b"more"] and channel.written == b"text"


def test_a_channel_that_ends_without_an_agent_is_closed_and_says_how():
    """Also when its Python has started, and as another shell does when there are no commands for it."""
    text = b" no \xff python\n"
    for channel in (Script(text), Script(text + READY), Script(text, ends=False, reads=True)):
        channel.err = ["sh: not found"]
        with pytest.raises(NoAgent) as caught:
            start_agent(channel, b"", 0.0 if channel.reads else math.inf)
        found = caught.value
        assert (found.how, found.code, found.err) == ("exited with 3", 3, ["sh: not found"])
        assert found.out == ("" if channel.reads else "no \ufffd python")


def test_noise_without_end_is_no_agent():
    channel = Script(*[b"y\n" * 4096] * 100, ends=False)
    with pytest.raises(NoAgent):
        start_agent(channel, b"", math.inf)
    assert channel.closed and len(channel.pieces) == 100 - NOISE_BYTES // 8192 - 2, "a read more than is allowed"


def test_silence_ends_at_the_deadline_with_the_channel_closed():
    for said in (b"Welcome!\n", READY):
        channel = Script(said, ends=False)
        with pytest.raises(TimeoutError):
            start_agent(channel, b"", 0.0)
        assert channel.closed and channel.timeouts[:2] == [0.01, 0.01], "a wait is never without limit"


@pytest.mark.parametrize(
    ("code", "err", "python", "words", "exit_code"),
    [
        (1, ["too old a Python: 3.6"], "", "python3 there is Python 3.6, too old: install Python 3.8", 2),
        (1, ["Unknown option: -I", "usage: python"], "/py", "/py there is Python 2, too old: install Python 3.8", 2),
        (127, ["x", "sh: 1: p: not found"], "", "python3 was not found there (sh: 1: p: not found)", 2),
        (127, [], "/opt/py", "/opt/py was not found there: install", 2),
        (126, ["sh: /py: No"], "/py", "/py there cannot be executed (sh: /py: No)", 2),
        (1, ["x"], "", "exited with 1; the output was: some words; does ssh n1 echo", 125),
        (None, [], "", "exited with None; the output was: some words; does ssh n1 echo", 125),
    ],
)
def test_each_failure_is_explained(code, err, python, words, exit_code):
    host = Host("h1", hostname="n1", python=python, where="hosts:3")
    error = explain(NoAgent(f"exited with {code}", code, "some words", err), host)
    assert str(error).startswith("h1 (hosts:3): ") and words in str(error)
    assert error.code == exit_code


def test_the_error_shows_the_end_of_the_output_if_there_is_any_and_suspects_start_up_files():
    said = str(explain(NoAgent("exited with 1", 1, "x" * 1000 + "y", []), HOST))
    assert f"the output was: {'x' * 499}y; does" in said
    said = str(explain(NoAgent("exited with 0", 0, "", []), HOST))
    assert f"does ssh {HOST.target} echo hello print hello? if not, a start-up file there" in said
    assert "output" not in said


def test_messages_name_a_host_with_its_line():
    assert (label(HOST), label(Host("h2"))) == ("h1 (hosts:3)", "h2")
    error = timed_out(HOST, 2.5)
    assert str(error).startswith("h1 (hosts:3): the agent did not start within 2.5 s: ") and error.code == 125


# -- which hosts the options name, and how they are reached ------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("h1 slots=2\nh2\nh3\n")
    (tmp_path / "workers").write_text("w1\nboth\n")
    (tmp_path / "servers").write_text("both\ns1\n")


def names(**options: object) -> list[str]:
    return [host.name for host in named_hosts(replace(AllOptions(), **options))]


def test_the_hosts_that_the_options_name(files):
    assert names(hostfile="hosts") == ["h1", "h2", "h3"]
    assert names(hosts="a:2,b") == ["a", "b"]
    assert names(hostfile="hosts", include="h1,h3") == ["h1", "h3"]
    assert names(hostfile="hosts", exclude="h1") == ["h2", "h3"]
    by_role = named_hosts(AllOptions(worker_hostfile="workers", server_hostfile="servers"))
    found = {host.name: host.roles for host in by_role}
    assert found.keys() == {"w1", "both", "s1"}
    assert "server" not in found["w1"] and "worker" not in found["s1"]


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "no hosts given.*-H FILE.*--hosts"),
        ({"hostfile": "hosts", "hosts": "a"}, "-H and --hosts cannot be used together"),
        ({"worker_hostfile": "workers"}, "-WH and -SH need each other"),
        ({"worker_hostfile": "workers", "server_hostfile": "servers", "hosts": "a"}, "remove -H"),
        ({"hostfile": "none"}, "none: no such file"),
    ],
)
def test_wrong_options_are_refused(files, options, said):
    with pytest.raises(LaunchError, match=said) as caught:
        names(**options)
    assert caught.value.code == 2


def test_a_key_that_does_not_exist(files):
    with pytest.raises(LaunchError, match="the key /no/such/key does not exist"):
        Cluster(AllOptions(hostfile="hosts", identity="/no/such/key"))


@pytest.mark.parametrize("ssh", sorted(CHANNELS))
def test_each_way_of_ssh_reaches_the_hosts_of_a_file_as_the_options_say(ssh, sshds, home, tmp_path):  # noqa: F811
    """Three hosts at once, their ports in the file and in --ssh-port, none known before."""
    made = [sshds(known=False) for _ in range(3)]
    lines = [f"h{sshd.port} hostname=127.0.0.1 port={sshd.port}" for sshd in made[1:]]
    (tmp_path / "hosts").write_text("\n".join(["127.0.0.1", *lines]) + "\n")
    asked = AllOptions(hostfile=str(tmp_path / "hosts"), ssh=ssh, ssh_port=made[0].port, identity=str(home.key))
    asked = replace(asked, connect_timeout=120.0)
    if ssh == "paramiko":
        home.key.with_suffix(".pub").unlink()
    refused = Cluster(asked)
    with pytest.raises(LaunchError, match="^127.0.0.1 .*: its host key is not known here"):
        refused.connect(refused.hosts[0], "test")
    refused.close()
    cluster = Cluster(replace(asked, accept_new_host_keys=True))
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda host: cluster.connect(host, "test", timeout=120.0), cluster.hosts))
    assert all(protocol.HELLO in channel.read(120.0) for channel in opened)
    for channel in opened:
        channel.close()
    cluster.close()
    cluster.close()
    assert [sshd.logins for sshd in made] == [1] * 3
