"""Both SSH channels keep the contract of `launch.channels`, through a real sshd."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from launch import LaunchError, channels
from launch.agent import protocol
from launch.agent.process import living
from launch.channels import Channel, frames
from launch.job.host import Host
from tests.launch.conftest import carriers, wait_for
from tests.launch.ssh_connect import KINDS, connector
from tests.launch.sshd import Home, fingerprint, generate_key, home, sshds  # noqa: F401  fixtures

SECONDS = 20.0  # a deadline for what takes a tenth of a second
BLOCK = 5_000_000


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.thorough if kind == "system" else ()) for kind in KINDS])
def connect(request, home) -> Iterator[Callable[..., Channel]]:  # noqa: F811
    """connect(host, ...) -> channel, which is closed at the end of the test."""
    made = []

    def call(host: Host, **more: object) -> Channel:
        made.append(connector(request.param, home)(host, **more))
        return made[-1]

    call.kind = request.param
    yield call
    for channel in made:
        channel.close()


class Conversation:
    """A job with one agent over `channel`."""

    def __init__(self, channel: Channel, mark: str, folder: str):
        self.channel, self.printed = channel, 0
        self.heard = self._hear()
        job = {"do": "job", "mark": mark, "host": "here", "key": "00", "grace": 0.5, "silence": 10}
        self.send(**job, log_folder=folder)
        self.pid = self.until("ready")["pid"]

    def send(self, **message: object) -> None:
        self.channel.write(json.dumps(message).encode() + b"\n")

    def beat(self, size: int) -> None:
        """A beat of `size` bytes: white space means nothing in JSON."""
        self.channel.write(b'{"do": "beat"}'.ljust(size) + b"\n")

    def start(self, *argv: str, environment: dict[str, str] | None = None) -> None:
        row = {"task": 0, "argv": argv, "environment": environment or {}, "workdir": "/"}
        self.send(do="start", unset=[], tasks=[row])

    def _hear(self):
        for kind, _, payload in frames(self.channel, SECONDS):
            if kind == protocol.OUTPUT:
                self.printed += len(payload)
            else:
                yield json.loads(payload)

    def until(self, event: str) -> dict:
        return next(each for each in self.heard if each["event"] == event)


@pytest.fixture
def talk(connect, sshds, tmp_path):  # noqa: F811
    """An agent that has a job; its sshd is `talk.sshd`."""
    sshd = sshds()
    mark = f"ssh-{os.getpid()}-{time.monotonic_ns()}"
    conversation = Conversation(connect(sshd.host()), mark, str(tmp_path))
    conversation.sshd = sshd
    return conversation


def test_five_megabytes_each_way_over_one_login(talk):
    talk.start("sh", "-c", f"head -c {BLOCK} /dev/zero; exit ${{#ANSWER}}", environment={"ANSWER": "123"})
    assert talk.until("exited")["code"] == 3
    assert talk.printed == BLOCK
    for _ in range(50):
        talk.beat(BLOCK // 50)  # 5 MB that the agent has to read
    assert talk.until("beat")
    talk.send(do="stop", grace=0.5)
    assert talk.until("ended")["left"] == []
    assert talk.channel.read(SECONDS) == b""
    assert talk.channel.close() == "exited with 0"
    assert talk.sshd.logins == 1


def test_reading_and_writing_at_once_do_not_wait_for_each_other(talk):
    """The agent prints without end while it is sent more than all buffers hold."""
    talk.start("sh", "-c", "while :; do head -c 1000000 /dev/zero; done")
    talk.until("started")
    sent = threading.Event()

    def send() -> None:
        for _ in range(100):
            talk.beat(100_000)
        talk.send(do="stop", grace=0.0)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert talk.until("ended")["left"] == []
    assert sent.is_set()
    assert talk.printed > 1_000_000


def test_a_flood_on_standard_error_stops_nothing_and_is_bounded(connect, sshds, tmp_path):  # noqa: F811
    """A Python that floods standard error while it runs, and says its last words there."""
    flood = tmp_path / "python"
    flood.write_text(
        "#!/bin/sh\nhead -c 5000000 /dev/zero | tr '\\0' e >&2\necho >&2\n"
        f"printf '\\0{protocol.HELLO[1:-1].decode()}\\n'\nread line\n"
        "head -c 5000000 /dev/zero | tr '\\0' e >&2\necho >&2; echo the end >&2; exit 9\n"
    )
    flood.chmod(0o755)
    channel = connect(sshds().host(python=flood))
    channel.write(b"\n")
    while channel.read(SECONDS):
        pass
    assert channel.close() == "exited with 9: the end"


def test_reads_have_a_timeout_and_an_end(talk):
    for timeout in (0.0, 0.3):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            talk.channel.read(timeout)
        assert timeout <= time.monotonic() - began < timeout + 5
    os.kill(talk.pid, signal.SIGKILL)
    while talk.channel.read(SECONDS):
        pass
    assert talk.channel.read(SECONDS) == b"", "the end stays"
    assert talk.channel.close() in ("was killed by a signal", "was lost with its connection")
    assert talk.channel.ended


def test_writes_after_the_end_fail(talk):
    os.kill(talk.pid, signal.SIGKILL)
    end = time.monotonic() + SECONDS
    with pytest.raises(OSError):
        while time.monotonic() < end:
            talk.send(do="beat")
            time.sleep(0.01)


def test_closing_ends_the_agent_and_its_processes(talk):
    talk.start("sleep", "120", environment={"DMLTRAIN_TEST": str(talk.pid)})
    talk.until("started")
    began = time.monotonic()
    assert talk.channel.close() == "did not answer and was cut off"
    assert time.monotonic() - began < 5
    wait_for(lambda: not carriers(f"DMLTRAIN_TEST={talk.pid}"), "the end of the process")
    wait_for(lambda: talk.pid not in living(), "the end of the agent")


def test_a_killed_connection_is_named(talk):
    (child,) = talk.sshd.children()
    os.kill(child, signal.SIGKILL)
    began = time.monotonic()
    while talk.channel.read(SECONDS):
        pass
    how = talk.channel.close()
    assert time.monotonic() - began < 5
    assert how.startswith("was lost with its connection (") and not talk.channel.ended
    with pytest.raises(OSError):
        talk.send(do="beat")
    wait_for(lambda: talk.pid not in living(), "the end of the agent, whose input has ended")


def test_a_write_that_moves_nothing_fails_in_time(connect, sshds, tmp_path):  # noqa: F811
    """Neither the agent nor its sshd read any more: no end comes, and no window opens."""
    sshd = sshds()
    talk = Conversation(connect(sshd.host(), stall=1.0), "test", str(tmp_path))
    frozen = [talk.pid, *sshd.children()]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(OSError):
            talk.channel.write(bytes(100_000_000))
        assert time.monotonic() - began < 10  # some is taken at first
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


# -- how it does not come about ---------------------------------------------------------------------------------------


def refused(connect: Callable[..., Channel], host: Host, **more: object) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        connect(host, **more)
    assert "\n" not in str(caught.value)
    return caught.value


def test_no_python_there(connect, sshds):  # noqa: F811
    error = refused(connect, sshds().host(python="/no/such/python", where="hosts:3"))
    assert str(error).startswith("here (hosts:3): /no/such/python was not found there")
    assert "python=PATH in the hosts file" in str(error)
    assert error.code == 2
    bare = sshds('ForceCommand env -i PATH=/nowhere /bin/sh -c "$SSH_ORIGINAL_COMMAND"')
    assert "python3 was not found there" in str(refused(connect, bare.host(python="python3")))


@pytest.mark.parametrize(
    "script, said",
    [
        ("echo 'Unknown option: -I' >&2; exit 2", "is Python 2, too old"),
        (f"echo '{channels.TOO_OLD} 3.6' >&2; exit 1", "is Python 3.6, too old"),
        ("echo out of luck >&2; exit 9", "the agent did not start: it exited with 9: out of luck"),
        ("echo This account is not available.; exit 1", "the output was: This account is not available."),
    ],
)
def test_what_is_no_python_for_an_agent(connect, sshds, tmp_path, script, said):  # noqa: F811
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert said in str(refused(connect, sshds().host(python=python)))
    python.chmod(0o644)
    assert "cannot be executed" in str(refused(connect, sshds().host(python=python)))


def test_an_agent_that_does_not_start_in_time(connect, sshds, tmp_path):  # noqa: F811
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 120\n")
    python.chmod(0o755)
    began = time.monotonic()
    error = refused(connect, sshds().host(python=python), seconds=1.0)
    assert time.monotonic() - began < 10
    assert "within 1 s" in str(error)
    assert error.code == 125


def test_a_key_that_is_not_authorized(connect, sshds, home):  # noqa: F811
    sshd = sshds()
    home.authorized.write_text("")
    error = refused(connect, sshd.host())
    assert "ssh-copy-id" in str(error)
    assert error.code == 2


def test_a_user_who_may_not_log_in(connect, sshds):  # noqa: F811
    assert "ssh-copy-id" in str(refused(connect, sshds().host(user="nobody-of-that-name")))


def test_nothing_listens(connect, sshds):  # noqa: F811
    sshd = sshds()
    sshd.stop()
    began = time.monotonic()
    error = refused(connect, sshd.host())
    assert "onnection refused; is sshd running there, and on that port?" in str(error)
    assert error.code == 125
    assert time.monotonic() - began < 5, "that is not tried again"


def test_an_unknown_name(connect):
    error = refused(connect, Host("here", hostname="no-such-host.invalid"))
    assert "no-such-host.invalid" in str(error)
    assert "hosts file" in str(error)
    assert error.code == 2


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-silent\r\n"], ids=["no word", "one line"])
def test_a_port_that_accepts_and_never_answers(connect, greeting):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            kept.append(server.accept()[0])
            kept[0].sendall(greeting)

        kept: list[socket.socket] = []
        threading.Thread(target=accept, daemon=True).start()
        began = time.monotonic()
        host = Host("here", hostname="127.0.0.1", port=server.getsockname()[1])
        error = refused(connect, host, seconds=1.0)
        assert 0.5 < time.monotonic() - began < 10
        assert "within 1 s" in str(error)
        assert error.code == 125
        for each in kept:
            each.close()


def test_what_answers_is_no_ssh_server(connect):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 200)
            kept.append(connection)

        kept: list[socket.socket] = []
        threading.Thread(target=accept, daemon=True).start()
        error = refused(connect, Host("here", hostname="127.0.0.1", port=server.getsockname()[1]), seconds=1.0)
        assert error.code == 125
        for each in kept:
            each.close()


@pytest.mark.thorough
def test_a_dozen_at_once_get_in_where_two_may_knock(connect, sshds):  # noqa: F811
    sshd = sshds("MaxStartups 2:100:2")
    opened, failed = [], []
    idle = [socket.create_connection(("127.0.0.1", sshd.port)) for _ in range(2)]
    for each in idle:
        each.recv(1)  # its place is taken

    def knock() -> None:
        try:
            opened.append(connect(sshd.host(), seconds=30.0))
        except LaunchError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=knock) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_for(lambda: b"MaxStartups throttling" in sshd.log.read_bytes(), "a refusal")
    for each in idle:
        each.close()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(opened) == 12


# -- host keys -------------------------------------------------------------------------------------------------------


def test_an_unknown_host_is_refused(connect, sshds, home):  # noqa: F811
    error = refused(connect, sshds(known=False).host())
    assert "its host key is not known here" in str(error)
    assert "--accept-new-host-keys" in str(error)
    assert error.code == 2
    assert not home.known_hosts.exists()


def test_an_unknown_host_is_accepted_and_kept_when_asked(connect, sshds, home):  # noqa: F811
    sshd = sshds(known=False)
    connect(sshd.host(), accept_new=True)
    assert sshd.listing().split()[2] in home.known_hosts.read_text()
    connect(sshd.host())


def test_a_changed_key_is_refused_whatever_is_asked(connect, sshds, home, tmp_path):  # noqa: F811
    sshd = sshds(known=False)
    old = generate_key(tmp_path / "old_key")
    kind, blob = (tmp_path / "old_key.pub").read_text().split()[:2]
    home.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    error = refused(connect, sshd.host(), accept_new=True)
    assert "its host key has changed" in str(error)
    assert fingerprint(sshd.key) in str(error)
    assert fingerprint(old) in str(error)
    assert f"{home.known_hosts}:1" in str(error)
    assert "ssh-keygen -f" in str(error) and "-R" in str(error)
    assert error.code == 2


# -- ~/.ssh/config ---------------------------------------------------------------------------------------------------


def test_the_configuration_names_host_user_port_and_key(connect, sshds, home: Home, tmp_path):  # noqa: F811
    sshd = sshds()
    other = generate_key(tmp_path / "other_key")
    home.authorized.write_text((tmp_path / "other_key.pub").read_text())
    block = f"Host alias\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {home.user}\n  IdentityFile {other}\n"
    home.configure(f"{block}  IdentitiesOnly yes\n", identity="User nobody-of-that-name")
    connect(Host("alias"))
    assert sshd.logins == 1


def test_the_hosts_file_goes_before_the_configuration(connect, sshds, home):  # noqa: F811
    sshd = sshds()
    home.configure("Host alias\n  HostName 127.0.0.1\n  Port 1\n  User nobody-of-that-name\n")
    connect(Host("a", hostname="alias", port=sshd.port, user=home.user))


def test_options_of_the_command_line(connect, sshds, home, tmp_path):  # noqa: F811
    sshd = sshds()
    key = generate_key(tmp_path / "given")
    home.authorized.write_text((tmp_path / "given.pub").read_text())
    connect(Host("127.0.0.1"), port=sshd.port, identity=str(key))


def test_a_jump_over_two_hosts(connect, sshds, home):  # noqa: F811
    first, second, last = sshds(), sshds(), sshds()
    home.configure(
        f"Host first\n  HostName 127.0.0.1\n  Port {first.port}\n",
        f"Host last\n  HostName 127.0.0.1\n  Port {last.port}\n  ProxyJump first,127.0.0.1:{second.port}\n",
    )
    connect(Host("last"))
    assert [sshd.logins for sshd in (first, second, last)] == [1, 1, 1]


def test_a_jump_host_that_has_a_jump_of_its_own(connect, sshds, home):  # noqa: F811
    outer, inner, last = sshds(), sshds(), sshds()
    home.configure(
        f"Host outer\n  HostName 127.0.0.1\n  Port {outer.port}\n",
        f"Host inner\n  HostName 127.0.0.1\n  Port {inner.port}\n  ProxyJump outer\n",
        f"Host last\n  HostName 127.0.0.1\n  Port {last.port}\n  ProxyJump inner\n",
    )
    connect(Host("last"))
    assert [sshd.logins for sshd in (outer, inner, last)] == [1, 1, 1]


def test_a_jump_that_leads_nowhere(connect, sshds, home):  # noqa: F811
    gate, last = sshds(), sshds()
    last.stop()
    home.configure(f"Host last\n  HostName 127.0.0.1\n  Port {last.port}\n  ProxyJump 127.0.0.1:{gate.port}\n")
    error = refused(connect, Host("last"), seconds=5.0)
    assert error.code == 125


def test_a_command_as_the_way(connect, sshds, home):  # noqa: F811
    sshd = sshds()
    pipe = (
        "import socket,sys,threading,os;s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "threading.Thread(target=lambda:[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')],daemon=True)"
        ".start();[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')]"
    )
    script = home.folder / "pipe.py"
    script.write_text(pipe)
    home.configure(
        f"Host 127.0.0.1\n  Port {sshd.port}\n  ProxyCommand python3 {script} %h %p\n",
        "Host broken\n  ProxyCommand sh -c 'echo no way >&2; exit 3'\n",
    )
    channel = connect(Host("127.0.0.1"))
    channel.close()
    wait_for(lambda: not any(str(script) in c for c in commands()), "the end of the command")
    error = refused(connect, Host("broken"), seconds=3.0)
    assert "no way" in str(error) or connect.kind == "system"


def commands() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found.append(file.read().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
