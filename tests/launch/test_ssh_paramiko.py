"""What only the paramiko channel does itself: keys and passphrases, known_hosts files, the deadline of a resolver."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launch import LaunchError
from launch.channels.ssh import paramiko as ssh_paramiko
from launch.channels.ssh.config import Config, Target, hop
from launch.channels.ssh.key import ATTEMPTS, Keys
from launch.channels.ssh.line import Line, addresses
from launch.channels.ssh.login import Access
from launch.job.host import Host
from tests.launch.ssh_connect import SECONDS, connector, nobody
from tests.launch.sshd import Home, fingerprint, generate_key, home, ssh_agent, sshds  # noqa: F401  fixtures

PASSPHRASE = "correct horse"


class Typist:
    """Answers questions with `answers`, in order, and keeps the questions."""

    def __init__(self, *answers: str):
        self.answers, self.questions = list(answers), []

    def __call__(self, question: str) -> str:
        self.questions.append(question)
        return self.answers.pop(0)


def access(home: Home, ask=nobody, **more: object) -> Access:  # noqa: F811
    return Access(Config((str(home.config),)), Keys(ask), **more)


def encrypt(home: Home, kind: str = "ed25519") -> Path:  # noqa: F811
    """Make the home's only key an encrypted one, which is authorized."""
    path = generate_key(home.ssh / f"locked_{kind}", kind, PASSPHRASE)
    home.authorized.write_text(Path(f"{path}.pub").read_text())
    home.configure(identity=f"IdentityFile {path}")
    return path


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_passphrase_is_asked_once_for_five_hosts(sshds, home):  # noqa: F811
    path = encrypt(home)
    hosts = [sshds().host(f"h{number}") for number in range(5)]
    typist = Typist("wrong", PASSPHRASE)
    shared = access(home, typist)
    with ThreadPoolExecutor(5) as pool:
        channels = list(pool.map(lambda host: ssh_paramiko.connect(host, "m", shared, SECONDS), hosts))
    assert typist.questions == [f"Passphrase for key {path}: "] * 2, "once more, as the first answer was wrong"
    channels.append(ssh_paramiko.connect(hosts[0], "m", shared, SECONDS))  # as after a loss
    assert len(typist.questions) == 2
    assert len(channels) == 6


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_encrypted_keys_of_every_kind(sshds, home, kind):  # noqa: F811
    encrypt(home, kind)
    ssh_paramiko.connect(sshds().host(), "m", access(home, Typist(PASSPHRASE)), SECONDS)


def test_a_slow_typist_does_not_use_up_the_deadline(sshds, home):  # noqa: F811
    encrypt(home)

    def ask(question: str) -> str:
        time.sleep(3.2)
        return PASSPHRASE

    shared = access(home, ask)
    ssh_paramiko.connect(sshds().host(), "m", shared, 3.0)


def test_an_encrypted_key_without_a_terminal(sshds, home):  # noqa: F811
    path = encrypt(home)
    with pytest.raises(LaunchError) as caught:
        ssh_paramiko.connect(sshds().host(), "m", access(home), SECONDS)
    assert f"ssh-add {path}" in str(caught.value)
    assert caught.value.code == 2
    with pytest.raises(LaunchError, match="ssh-add"):
        connector("system", home)(sshds().host())


def test_wrong_passphrases_end_it_for_all_hosts(sshds, home):  # noqa: F811
    encrypt(home)
    typist = Typist(*["wrong"] * ATTEMPTS)
    shared = access(home, typist)
    for sshd in (sshds(), sshds()):
        with pytest.raises(LaunchError, match="passphrases were wrong"):
            ssh_paramiko.connect(sshd.host(), "m", shared, SECONDS)
    assert not typist.answers


def test_no_passphrase_is_asked_if_another_key_works(sshds, home):  # noqa: F811
    locked = generate_key(home.ssh / "locked", "ed25519", PASSPHRASE)
    home.configure(f"IdentityFile {locked}")
    ssh_paramiko.connect(sshds().host(), "m", access(home), SECONDS)


def test_the_agents_keys_are_tried_first(sshds, home, ssh_agent, tmp_path):  # noqa: F811
    others = [generate_key(tmp_path / f"other-{number}") for number in range(4)]
    right = generate_key(tmp_path / "right")
    home.authorized.write_text(Path(f"{right}.pub").read_text())
    for key in (*others, right):
        ssh_agent(key)
    sshd = sshds("MaxAuthTries 6")
    ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)
    home.configure(f"IdentityFile {right}.pub\nIdentitiesOnly yes")  # a public key names one of the agent's
    right.unlink()
    narrow = sshds("MaxAuthTries 2")
    ssh_paramiko.connect(narrow.host(), "m", access(home), SECONDS)


def test_too_many_keys_for_the_server_are_named(sshds, home, ssh_agent, tmp_path):  # noqa: F811
    for number in range(3):
        ssh_agent(generate_key(tmp_path / f"other-{number}"))
    with pytest.raises(LaunchError, match="it closed the connection after the agent's ssh-ed25519 other-0, "):
        ssh_paramiko.connect(sshds("MaxAuthTries 2").host(), "m", access(home), SECONDS)


def test_no_key_at_all(sshds, home):  # noqa: F811
    home.configure(identity=f"IdentityFile {home.ssh / 'none'}")
    with pytest.raises(LaunchError, match="there is no key to offer; put your public key there with ssh-copy-id"):
        ssh_paramiko.connect(sshds().host(), "m", access(home), SECONDS)


def test_a_server_that_takes_no_keys(sshds, home):  # noqa: F811
    sshd = sshds("PubkeyAuthentication no", "PasswordAuthentication yes")
    with pytest.raises(LaunchError, match="accepts no keys, only password.*--ssh system"):
        ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)


# -- known_hosts -------------------------------------------------------------------------------------------------------


def test_the_cure_for_an_unknown_host_works(sshds, home):  # noqa: F811
    sshd = sshds(known=False)
    with pytest.raises(LaunchError) as caught:
        ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)
    message = str(caught.value)
    assert fingerprint(f"{sshd.key}.pub") in message
    command = message[message.index("ssh-keyscan") : message.index(" or with --accept-new-host-keys")]
    subprocess.run(command, shell=True, check=True, timeout=60, stderr=subprocess.DEVNULL)
    ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)


def test_the_cure_for_a_changed_key_works(sshds, home, tmp_path):  # noqa: F811
    sshd = sshds(known=False)
    kind, blob = Path(f"{generate_key(tmp_path / 'old')}.pub").read_text().split()[:2]
    home.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    with pytest.raises(LaunchError) as caught:
        ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)
    command = str(caught.value)[str(caught.value).index("ssh-keygen -f") :]
    subprocess.run(command, shell=True, check=True, timeout=60, capture_output=True)
    assert not home.known_hosts.read_text()


@pytest.mark.parametrize(
    "line, accepted",
    [
        ("[127.0.0.1]:{port} {key}", True),
        pytest.param("other,[127.0.0.1]:{port} {key} comment", True, marks=pytest.mark.thorough),
        pytest.param("[127.0.0.*]:{port} {key}", True, marks=pytest.mark.thorough),
        pytest.param("* {key}", True, marks=pytest.mark.thorough),
        pytest.param("127.0.0.1 {key}", True, marks=pytest.mark.thorough),  # ssh tries the name without its port too
        ("[127.0.0.*]:{port},!*:{port} {key}", False),
        pytest.param("[127.0.0.1]:1 {key}", False, marks=pytest.mark.thorough),
        ("@revoked * {key}\n[127.0.0.1]:{port} {key}", False),
        pytest.param("[127.0.0.1]:{port} {key}\n@revoked * {key}", False, marks=pytest.mark.thorough),
        ("@cert-authority * {key}", False),
        pytest.param("[127.0.0.1]:{port} {other}\n[127.0.0.1]:{port} {key}", True, marks=pytest.mark.thorough),
        ("127.0.0.1 {other}", False),
        pytest.param("# [127.0.0.1]:{port} {key}", False, marks=pytest.mark.thorough),
        pytest.param(
            "[127.0.0.1]:{port} ssh-ed25519 not=base64\n\n[127.0.0.1]:{port}\n[127.0.0.1]:{port} {key}",
            True,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_lines_of_known_hosts(sshds, home, tmp_path, line, accepted):  # noqa: F811
    sshd = sshds(known=False)
    key, other = (
        " ".join(Path(f"{path}.pub").read_text().split()[:2]) for path in (sshd.key, generate_key(tmp_path / "other"))
    )
    home.known_hosts.write_text(line.format(port=sshd.port, key=key, other=other) + "\n")
    for kind in ("paramiko", "system"):  # what ssh says is the measure
        if accepted:
            connector(kind, home)(sshd.host())
        else:
            with pytest.raises(LaunchError):
                connector(kind, home)(sshd.host())


def test_a_revoked_key_is_named_with_the_line_that_revokes_it(sshds, home):  # noqa: F811
    sshd = sshds()
    key = " ".join(Path(f"{sshd.key}.pub").read_text().split()[:2])
    with home.known_hosts.open("a") as file:
        file.write(f"@revoked * {key}\n")
    with pytest.raises(LaunchError, match=f"is marked as revoked in {home.known_hosts}:2$") as caught:
        ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)
    assert fingerprint(f"{sshd.key}.pub") in str(caught.value)


def test_hashed_names(sshds, home):  # noqa: F811
    sshd = sshds()
    subprocess.run(["ssh-keygen", "-H", "-f", str(home.known_hosts)], check=True, timeout=60, capture_output=True)
    assert "127.0.0.1" not in home.known_hosts.read_text()
    ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)


def test_new_names_are_hashed_if_configured(sshds, home):  # noqa: F811
    home.configure("HashKnownHosts yes")
    sshd = sshds(known=False)
    ssh_paramiko.connect(sshd.host(), "m", access(home, accept_new=True), SECONDS)
    assert home.known_hosts.read_text().startswith("|1|")
    connector("system", home)(sshd.host())


def test_a_key_of_another_type_is_asked_for(sshds, home, tmp_path):  # noqa: F811
    """A host that is known by its RSA key shows that one, though it has one that both would rather use."""
    rsa = generate_key(tmp_path / "rsa", "rsa")
    sshd = sshds(f"HostKey {rsa}", f"HostKey {generate_key(tmp_path / 'ed')}", known=False)
    kind, blob = Path(f"{rsa}.pub").read_text().split()[:2]
    home.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)


def test_new_hosts_that_come_all_at_once(sshds, home):  # noqa: F811
    """The file has no newline at its end; every host gets a line, and one of two names for one host too."""
    home.known_hosts.write_text("# mine")
    made = [sshds(known=False) for _ in range(6)]
    shared = access(home, accept_new=True)
    hosts = [sshd.host(f"h{port}") for port, sshd in enumerate(made)]
    with ThreadPoolExecutor(12) as pool:
        opened = list(pool.map(lambda host: ssh_paramiko.connect(host, "m", shared, SECONDS), hosts * 2))
    assert len(opened) == 12
    lines = home.known_hosts.read_text().splitlines()
    assert lines[0] == "# mine"
    assert sorted(lines[1:]) == sorted(sshd.listing().strip() for sshd in made)


def test_a_known_hosts_file_that_cannot_be_written(sshds, home):  # noqa: F811
    home.configure(f"UserKnownHostsFile {home.key}/known_hosts")
    with pytest.raises(LaunchError, match="cannot be added to"):
        ssh_paramiko.connect(sshds(known=False).host(), "m", access(home, accept_new=True), SECONDS)


# -- the way there -----------------------------------------------------------------------------------------------------


def test_a_jump_to_itself_ends(sshds, home):  # noqa: F811
    home.configure("Host loop\n  ProxyJump loop\n")
    with pytest.raises(LaunchError, match="does a host jump through itself"):
        ssh_paramiko.connect(Host("loop"), "m", access(home), SECONDS)


def test_the_message_of_a_jump_host_for_a_closed_port(sshds, home):  # noqa: F811
    gate, last = sshds(), sshds()
    last.stop()
    home.configure(f"Host last\n  HostName 127.0.0.1\n  Port {last.port}\n  ProxyJump 127.0.0.1:{gate.port}\n")
    with pytest.raises(LaunchError, match=f"127.0.0.1 cannot connect to 127.0.0.1 port {last.port}: Connect"):
        ssh_paramiko.connect(Host("last"), "m", access(home), SECONDS)


def test_the_message_of_a_proxy_command_that_fails(home):  # noqa: F811
    command = "sh -c 'echo no way >&2; exit 3'"
    home.configure(f"Host far\n  ProxyCommand {command}\n")
    with pytest.raises(LaunchError) as caught:
        ssh_paramiko.connect(Host("far"), "m", access(home), SECONDS)
    assert str(caught.value) == f"far: ProxyCommand {command} exited with 3: no way"


def test_a_connection_is_cut_when_its_data_is_not_taken(sshds, home):  # noqa: F811
    sshd = sshds()
    channel = ssh_paramiko.connect(sshd.host(), "m", access(home), SECONDS)
    own = psutil.Process().net_connections("tcp4")
    (descriptor,) = (each.fd for each in own if each.raddr and each.raddr.port == sshd.port)
    with socket.socket(fileno=os.dup(descriptor)) as below:
        assert below.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert 5000 < below.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 9000
        assert below.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    channel.close()


def test_a_resolver_that_is_silent_does_not_hold_anybody_up():
    answered = threading.Event()
    began = time.monotonic()
    with pytest.raises(socket.gaierror, match="no name server answered within 0.2 s"):
        addresses("host", 22, 0.2, lambda *names, **more: answered.wait(30))
    assert time.monotonic() - began < 10
    answered.set()


class Clogged:
    """A socket that takes nothing while it is `full`."""

    full = True

    def send(self, data: bytes) -> int:
        if self.full:
            raise TimeoutError
        return len(data)


def test_a_line_that_stands_still_fails_and_one_that_moves_does_not():
    """8 s without a byte that moves; paramiko tries again after each TimeoutError."""
    below, now = Clogged(), [0.0]
    line = Line(below, lambda: None, lambda: now[0])

    def tried_at(*seconds: float) -> None:
        for now[0] in seconds:
            with pytest.raises(TimeoutError, match="^$"):
                line.send(b"x")

    tried_at(0.0, 4.0, 7.9)
    below.full = False
    assert line.send(b"x") == 1
    below.full = True
    tried_at(8.0, 12.0, 15.9)
    assert line.failure is None
    now[0] = 16.0
    with pytest.raises(OSError, match="nothing could be sent for 8 s") as caught:
        line.send(b"x")
    assert line.failure is caught.value


def test_a_real_line_whose_other_end_does_not_read_fails():
    ours, theirs = socket.socketpair()
    line = Line(ours, ours.close)
    line.settimeout(0.01)
    line.stall = 0.05
    until = time.monotonic() + SECONDS
    while line.failure is None and time.monotonic() < until:
        with contextlib.suppress(TimeoutError):  # ETIMEDOUT, the last, is one too
            line.send(bytes(100_000))
    assert "nothing could be sent for 0.05 s" in str(line.failure)
    theirs.close()
    line.close()
    line.close()


# -- the configuration -------------------------------------------------------------------------------------------------


def settings(tmp_path: Path, text: str, name: str = "h", **target: object):
    path = tmp_path / "config"
    path.write_text(text)
    return Config((str(path),)).settings(replace(Target(name), **target))


def test_the_first_value_counts_and_the_targets_own_before_it(tmp_path):
    text = "Host h\n  User one\n  Port 2\n  IdentityFile /a\nHost *\n  User two\n  IdentityFile /b\n"
    found = settings(tmp_path, text)
    assert (found.user, found.port, found.identities, found.hostname) == ("one", 2, ("/a", "/b"), "h")
    found = settings(tmp_path, text, user="three", port=4, identity="/c")
    assert (found.user, found.port, found.identities) == ("three", 4, ("/c", "/a", "/b"))


def test_included_files_end_where_they_end(tmp_path):
    (tmp_path / "more").write_text("Host other\n  User other\n")
    text = f"Host h\n  Include {tmp_path}/mo*\n  Port 7\nInclude {tmp_path}/none\n"
    assert settings(tmp_path, text).port == 7
    assert settings(tmp_path, text, "other").port == 22
    assert settings(tmp_path, f"Include {tmp_path}/more\nPort 7\n").port == 7
    text = f"Match host other\n  Include {tmp_path}/mo*\n  Port 8\n"
    assert settings(tmp_path, text).port == 22, "the Match goes on after the Include"


def test_ways_and_their_absence(tmp_path):
    found = settings(tmp_path, "Host h\n  ProxyJump a@b:1, c\n  ProxyCommand nc %h %p\n")
    assert (found.hops, found.proxy_command) == (("a@b:1", "c"), "")
    found = settings(tmp_path, "ProxyCommand nc %h %p %r\nProxyJump a\n", user="u", port=3)
    assert (found.hops, found.proxy_command) == ((), "nc h 3 u")
    for none in ("ProxyJump none", "ProxyCommand none"):
        found = settings(tmp_path, f"Host h\n  {none}\nHost *\n  ProxyJump a\n")
        assert (found.hops, found.proxy_command) == ((), "")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("h", Target("h")),
        ("anna@h:22", Target("h", "anna", 22)),
        ("ssh://anna@h:2222/", Target("h", "anna", 2222)),
        ("a@b@h", Target("h", "a@b")),
        ("[2001:db8::1]:2222", Target("2001:db8::1", port=2222)),
        ("anna@[2001:db8::1]", Target("2001:db8::1", "anna")),
        ("2001:db8::1", Target("2001:db8::1")),
        ("h:port", None),
    ],
)
def test_a_hop_as_proxyjump_has_it(text, target):
    if target:
        assert hop(text) == target
    else:
        with pytest.raises(ValueError):
            hop(text)


def test_what_a_configuration_says_of_known_hosts_and_times(tmp_path, home):  # noqa: F811
    found = settings(tmp_path, "")
    assert (found.identities_only, found.hash_known_hosts, found.connect_timeout, found.known_as) == (
        False,
        False,
        0,
        "",
    )
    assert found.user_known_hosts == (home.ssh / "known_hosts", home.ssh / "known_hosts2")
    assert found.global_known_hosts == (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
    assert (found.port, found.destination, found.user) == (22, "h port 22", getpass.getuser())
    found = settings(
        tmp_path,
        "IdentitiesOnly yes\nHashKnownHosts TRUE\nConnectTimeout 2.5\nHostKeyAlias a\nHostName real\nPort=7\n"
        "UserKnownHostsFile '~/my hosts' none\nGlobalKnownHostsFile none\nProxyCommand nc 100%% %h\n",
    )
    assert (found.identities_only, found.hash_known_hosts, found.connect_timeout, found.known_as) == (
        True,
        True,
        2.5,
        "a",
    )
    assert found.user_known_hosts == (Path.home() / "my hosts",) and found.global_known_hosts == ()
    assert (found.destination, found.proxy_command) == ("real port 7", "nc 100% real")


def test_files_that_include_each_other_end(tmp_path):
    text = f"Include {tmp_path}/config\nUser anna\n"
    assert settings(tmp_path, text).user == "anna"


@pytest.mark.parametrize(
    "text, said",
    [
        ("Port twenty-two", "for h: port is twenty-two: expected a number;"),
        ("Host h\n  ConnectTimeout soon", "for h: connecttimeout is soon: expected a number;"),
        ("Host", "for h: .*Host"),
        ("IdentityFile", "for h: .*IdentityFile"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, text, said):
    """The error names the word that is wrong, and both ways out."""
    with pytest.raises(LaunchError, match=said) as caught:
        settings(tmp_path, text)
    assert "correct it, or " in str(caught.value) and "--ssh system" in str(caught.value)
    assert caught.value.code == 2


def test_a_configuration_that_is_no_text_or_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "config"
    path.write_bytes(b"Host \xff\n")
    with pytest.raises(LaunchError, match=f"{path} cannot be read: .*--ssh system"):
        Config((str(path),))
    path.unlink()
    path.mkdir()
    with pytest.raises(LaunchError, match=f"{path} cannot be read: .*--ssh system"):
        Config((str(path),))


def test_no_configuration_at_all(tmp_path, home):  # noqa: F811
    found = Config((str(tmp_path / "none"),)).settings(Target("h"))
    assert found.identities == tuple(str(home.ssh / name) for name in ("id_ed25519", "id_ecdsa", "id_rsa"))
    assert found.user_known_hosts[0] == home.ssh / "known_hosts"


# -- the terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptors", [0, 1100], ids=["few files open", "more than 1024"])
def test_a_question_on_a_terminal_is_answered_unseen_or_called_off(descriptors):
    import pty
    import termios

    from launch.channels.ssh.prompt import TerminalPrompt

    ours, theirs = pty.openpty()
    others = [os.dup(ours) for _ in range(descriptors)]
    prompt = TerminalPrompt(os.ttyname(theirs))
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(prompt.ask("Passphrase? "))
        except EOFError:
            answers.append("called off")

    before = termios.tcgetattr(theirs)
    asking = threading.Thread(target=ask)
    asking.start()
    assert os.read(ours, 100) == b"Passphrase? "
    os.write(ours, b"secret\n")
    asking.join(SECONDS)
    assert answers == ["secret"]
    assert os.read(ours, 100) == b"\r\n", "nothing of it is shown"
    asking = threading.Thread(target=ask)
    asking.start()
    os.read(ours, 100)
    prompt.close()
    asking.join(SECONDS)
    assert answers == ["secret", "called off"]
    assert termios.tcgetattr(theirs) == before
    for descriptor in (ours, theirs, *others):
        os.close(descriptor)


def test_what_is_no_terminal(tmp_path):
    from launch.channels.ssh.prompt import TerminalPrompt

    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(OSError):
            TerminalPrompt(str(path)).ask("Passphrase? ")
