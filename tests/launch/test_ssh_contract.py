"""Both SSH channels keep the contract of `dmltrain_launch.channels`, through a real sshd."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.agent import protocol
from dmltrain_launch.agent.process import living
from dmltrain_launch.channels import Channel, frames
from dmltrain_launch.channels.ssh import greeting, paramiko
from dmltrain_launch.job.host import Host
from tests.launch.conftest import carriers
from tests.launch.ssh_connect import KINDS, SECONDS, block, connector
from tests.launch.sshd import fingerprint, generate_key, home, sshds  # noqa: F401  fixtures
from tests.launch.test_agent import Conversation
from tests.scripts import shell_script
from tests.waiting import wait_for

BLOCK = 3_000_000  # more than a window


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


class Counting(Conversation):
    """Counts the bytes that are printed, and keeps none."""

    count = 0  # of bytes

    def _hear(self) -> Iterator[dict]:
        for kind, _, payload in frames(self.channel, SECONDS):
            if kind == protocol.OUTPUT:
                self.count += len(payload)
            else:
                yield json.loads(payload)

    def beat(self, size: int) -> None:
        """A beat of `size` bytes: white space means nothing in JSON."""
        self.channel.write(b'{"do": "beat"}'.ljust(size) + b"\n")


@pytest.fixture
def talk(connect, sshds, tmp_path):  # noqa: F811
    """An agent that has a job; its sshd is `talk.sshd`."""
    sshd = sshds()
    made = Counting(tmp_path, channel=connect(sshd.host()))
    made.sshd = sshd
    return made


def test_three_megabytes_each_way_over_one_login(talk):
    talk.start(["sh", "-c", f"head -c {BLOCK} /dev/zero; exit 3"])
    assert talk.until("exited")["code"] == 3
    assert talk.count == BLOCK
    for _ in range(50):
        talk.beat(BLOCK // 50)  # 3 MB that the agent has to read
    assert talk.until("beat")
    assert talk.stop()["left"] == []
    assert talk.channel.read(SECONDS) == b""
    assert talk.channel.close() == "exited with 0"
    assert talk.sshd.logins == 1


def test_reading_and_writing_at_once_do_not_wait_for_each_other(talk):
    """The agent prints without end while it is sent more than all buffers hold."""
    talk.start(["sh", "-c", "while :; do head -c 1000000 /dev/zero; done"])
    sent = threading.Event()

    def send() -> None:
        sent_beats = 0
        while sent_beats < 50 or talk.count <= 1_000_000:  # however slow one of the two is
            talk.beat(100_000)
            sent_beats += 1
        talk.send(do="stop", grace=0.0)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    assert talk.until("ended")["left"] == []
    assert sent.wait(SECONDS)


def to_the_end(channel: Channel) -> None:
    while channel.read(SECONDS):
        pass


def test_a_flood_on_standard_error_stops_nothing_and_is_bounded(connect, sshds, tmp_path):  # noqa: F811
    """A Python that floods standard error while it runs, and says its last words there."""
    flood = "head -c 3000000 /dev/zero | tr '\\0' e >&2\necho >&2\n"
    waits, greets = (f"printf '\\0{each[1:-1].decode()}\\n'\n" for each in (channels.READY, protocol.HELLO))
    hello = f"{waits}read line\n{greets}read line\n"
    channel = connect(
        sshds().host(python=shell_script(tmp_path / "python", f"{flood}{hello}{flood}echo the end >&2; exit 9"))
    )
    channel.write(b"\n")
    to_the_end(channel)
    assert channel.close() == "exited with 9: the end"


def test_reads_have_a_timeout_and_an_end_after_which_writes_fail(talk):
    for timeout in (0.0, 0.3):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            talk.channel.read(timeout)
        assert timeout <= time.monotonic() - began < SECONDS
    os.kill(talk.ready["pid"], signal.SIGKILL)

    def fails() -> bool:
        try:
            talk.send(do="beat")
        except OSError:
            return True

    wait_for(fails, "the failure of a write")
    to_the_end(talk.channel)
    assert talk.channel.read(SECONDS) == b"", "the end stays"
    assert talk.channel.close() in ("was killed by a signal", "was lost with its connection")
    assert talk.channel.ended


def test_closing_ends_the_agent_and_its_processes(talk):
    talk.start(["sleep", "300"])
    assert talk.channel.close() == "did not answer and was cut off"
    wait_for(lambda: not carriers(f"DMLTRAIN_JOB={talk.mark}"), "the end of the process")
    wait_for(lambda: talk.ready["pid"] not in living(), "the end of the agent")


def test_a_killed_connection_is_named(talk):
    (child,) = talk.sshd.children()
    os.kill(child, signal.SIGKILL)
    to_the_end(talk.channel)
    assert talk.channel.close().startswith("was lost with its connection (") and not talk.channel.ended
    with pytest.raises(OSError):
        talk.send(do="beat")
    wait_for(lambda: talk.ready["pid"] not in living(), "the end of the agent, whose input has ended")


def test_a_write_that_moves_nothing_fails_in_time(connect, sshds, tmp_path):  # noqa: F811
    """Neither the agent nor its sshd read any more: no end comes, and no window opens."""
    sshd = sshds()
    talk = Counting(tmp_path, channel=connect(sshd.host(), stall=1.0))
    frozen = [talk.ready["pid"], *sshd.children()]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(OSError):
            talk.channel.write(bytes(100_000_000))
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


def refused(connect: Callable[..., Channel], host: Host, code: int, *said: str, **more: object) -> str:
    with pytest.raises(LaunchError) as caught:
        connect(host, **more)
    text = str(caught.value)
    assert "\n" not in text and caught.value.code == code
    assert all(each in text for each in said), text
    return text


def test_no_python_there(connect, sshds):  # noqa: F811
    host = sshds().host(python="/no/such/python", where="hosts:3")
    refused(connect, host, 2, "here (hosts:3): /no/such/python was not found there", "python=PATH in the hosts file")
    bare = sshds('ForceCommand env -i PATH=/nowhere /bin/sh -c "$SSH_ORIGINAL_COMMAND"')
    refused(connect, bare.host(python="python3"), 2, "python3 was not found there")


SLOW_END = "exec >&- 2>&-; sleep 1.2"  # longer than an agent may take that has said its last word


@pytest.mark.parametrize(
    "script, code, said",
    [
        ("echo 'Unknown option: -I' >&2; exit 2", 2, "is Python 2, too old"),
        (f"echo '{channels.TOO_OLD} 3.6' >&2; exit 1", 2, "is Python 3.6, too old"),
        (f"echo no luck >&2; {SLOW_END}; exit 9", 125, "the agent did not start: it exited with 9: no luck"),
        ("echo This account is not available.; exit 1", 125, "the output was: This account is not available."),
        ("exec sleep 300", 125, "within 1 s"),
    ],
)
def test_what_is_no_python_for_an_agent(connect, sshds, tmp_path, script, code, said):  # noqa: F811
    host = sshds().host(python=shell_script(tmp_path / "python", script))
    seconds = 1.0 if "sleep 300" in script else SECONDS
    refused(connect, host, code, said, seconds=seconds)
    Path(host.python).chmod(0o644)
    refused(connect, host, 2, "cannot be executed")


def test_another_shell_gets_no_commands(connect, sshds, tmp_path, monkeypatch):  # noqa: F811
    """A start-up file has started one, which waits for commands on standard input, where the agent's text would come.
    With more time if this machine was too busy for the login."""
    for module in (greeting, paramiko):
        monkeypatch.setattr(module, "END_SECONDS", SECONDS)
    seen = tmp_path / "seen"
    sshd = sshds(f"ForceCommand tee -a {seen} | sh")
    for seconds in (3.0, 30.0):
        with pytest.raises(LaunchError) as caught:
            connect(sshd.host(), seconds=seconds)
        if "start-up file" in str(caught.value):
            break
    assert "ssh 127.0.0.1 echo hello print hello? if not, a start-up file" in str(caught.value)
    assert not seen.read_bytes().strip(b"\n"), "an empty line is nothing to any shell"


def test_a_login_that_is_not_allowed_or_nobody_listens_to(connect, sshds, home):  # noqa: F811
    sshd = sshds()
    refused(connect, sshd.host(user="nobody-of-that-name"), 2, "ssh-copy-id")
    home.authorized.write_text("")
    refused(connect, sshd.host(), 2, "ssh-copy-id")
    sshd.stop()
    refused(connect, sshd.host(), 125, "onnection refused; is sshd running there, and on that port?", seconds=600.0)


def test_an_unknown_name(connect):
    refused(connect, Host("here", hostname="no-such-host.invalid"), 2, "no-such-host.invalid", "hosts file")


HTTP = b"HTTP/1.1 400 Bad Request\r\n" * 200


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-silent\r\n", HTTP], ids=["no word", "one line", "HTTP"])
def test_what_answers_is_no_ssh_server(connect, greeting):
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept() -> None:
            opened.enter_context(server.accept()[0]).sendall(greeting)

        threading.Thread(target=accept, daemon=True).start()
        began = time.monotonic()
        host = Host("here", hostname="127.0.0.1", port=server.getsockname()[1])
        refused(connect, host, 125, *(["within 1 s"] if greeting != HTTP else []), seconds=1.0)
        assert greeting == HTTP or time.monotonic() - began > 0.5


@pytest.mark.thorough
def test_five_at_once_get_in_where_two_may_knock(connect, sshds):  # noqa: F811
    sshd = sshds("MaxStartups 2:100:2")
    idle = [socket.create_connection(("127.0.0.1", sshd.port)) for _ in range(2)]
    for each in idle:
        each.recv(1)  # its place is taken
    with ThreadPoolExecutor(5) as pool:
        opening = [pool.submit(connect, sshd.host(), seconds=SECONDS) for _ in range(5)]
        wait_for(lambda: b"MaxStartups throttling" in sshd.log.read_bytes(), "a refusal")
        for each in idle:
            each.close()
        assert all(each.result() for each in opening)


def test_an_unknown_host_is_refused_or_kept_when_asked(connect, sshds, home):  # noqa: F811
    sshd = sshds(known=False)
    refused(connect, sshd.host(), 2, "its host key is not known here", "--accept-new-host-keys")
    wait_for(lambda: not sshd.children(), "the end of its connection")
    assert not home.known_hosts.exists()
    connect(sshd.host(), accept_new=True)
    assert sshd.listing().split()[2] in home.known_hosts.read_text()
    connect(sshd.host())


def test_a_changed_key_is_refused_whatever_is_asked(connect, sshds, home, tmp_path):  # noqa: F811
    sshd = sshds(known=False)
    old = generate_key(tmp_path / "old_key")
    kind, blob = (tmp_path / "old_key.pub").read_text().split()[:2]
    home.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    said = (fingerprint(sshd.key), fingerprint(old), f"{home.known_hosts}:1", "ssh-keygen -f", "-R")
    refused(connect, sshd.host(), 2, "its host key has changed", *said, accept_new=True)


def test_the_configuration_and_before_it_options_and_hosts_file_say_the_way(connect, sshds, home, tmp_path):  # noqa: F811
    sshd = sshds()
    other = generate_key(tmp_path / "other_key")
    home.authorized.write_text((tmp_path / "other_key.pub").read_text())
    lines = [f"User {home.user}", f"IdentityFile {other}", "IdentitiesOnly yes"]
    home.configure(block("alias", sshd, *lines), identity="User nobody-of-that-name")
    connect(Host("alias"))
    assert sshd.logins == 1
    home.configure()
    connect(Host("127.0.0.1"), port=sshd.port, identity=str(other))
    home.configure(block("alias", None, "Port 1", "User nobody-of-that-name"))
    connect(Host("a", hostname="alias", port=sshd.port, user=home.user), identity=str(other))


def test_jumps_over_several_hosts_of_which_one_may_have_a_jump_of_its_own(connect, sshds, home):  # noqa: F811
    outer, inner, last = made = [sshds() for _ in range(3)]
    home.configure(
        block("outer", outer),
        block("inner", inner, "ProxyJump outer"),
        block("second", inner, "ProxyCommand false"),  # which is for who connects to it directly
        block("last", last, "ProxyJump inner"),
        block("listed", last, "ProxyJump outer,second"),
        block("nowhere", None, "Port 1", "ProxyJump outer"),
    )
    for logins, name in enumerate(("last", "listed"), 1):
        connect(Host(name))
        assert [sshd.logins for sshd in made] == [logins] * 3
    refused(connect, Host("nowhere"), 125)


def test_a_command_as_the_way(connect, sshds, home):  # noqa: F811
    way = f"bash -c 'exec 3<>/dev/tcp/%h/%p; cat <&3 & cat >&3; :' {home.folder}"
    home.configure(
        block("127.0.0.1", sshds(), f"ProxyCommand {way}"),
        block("broken", None, "ProxyCommand sh -c 'echo no way >&2; exit 3'"),
    )
    connect(Host("127.0.0.1")).close()

    def running() -> bool:
        return any(str(home.folder) in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))

    wait_for(lambda: not running(), "the end of the command")
    # the system's ssh does not tell that from a busy server, and is tried until the deadline
    said = refused(connect, Host("broken"), 125, seconds=3.0 if connect.kind == "system" else SECONDS)
    assert "exited with 3: no way" in said or connect.kind == "system"
