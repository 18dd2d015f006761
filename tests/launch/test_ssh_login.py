"""A login through paramiko by itself: ciphers, deadlines, the way there, the keys that are tried, and every refusal."""

import contextlib
import os
import pty
import queue
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import psutil
import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.ssh.config import Config, Settings, Target
from dmltrain_launch.channels.ssh.key import Keys
from dmltrain_launch.channels.ssh.login import Access, Deadline
from dmltrain_launch.channels.ssh.prompt import TerminalPrompt
from dmltrain_launch.channels.ssh.stream import ProxyCommand, tcp
from tests.descriptors import descriptors
from tests.launch.conftest import ROOT
from tests.launch.ssh_connect import PASSPHRASE, SECONDS, access, block, nobody, refusal, silent_port, target
from tests.launch.sshd import Home, generate_key, home, ssh_agent, sshds  # noqa: F401  fixtures
from tests.readable import readable
from tests.waiting import wait_for


@pytest.fixture
def silent() -> Iterator[int]:
    with silent_port() as port:
        yield port


@pytest.fixture
def closed() -> int:
    """A port of loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ("", "aes128-gcm@openssh.com"),
        ("aes128-ctr,aes256-gcm@openssh.com", "aes256-gcm@openssh.com"),
        ("aes256-ctr,aes128-ctr", "aes128-ctr"),
        ("aes192-ctr,aes256-ctr", "aes256-ctr"),
    ],
)
def test_the_fastest_cipher_of_both_is_used(sshds, home, offered, chosen):  # noqa: F811
    sshd = sshds(*([f"Ciphers {offered}"] if offered else []))
    transport, deadline = access(home).log_in(target(sshd), "h", SECONDS)
    assert transport.remote_cipher == transport.local_cipher == chosen
    assert transport.default_window_size == 1 << 21
    assert deadline.seconds == SECONDS and 0 < deadline.left <= SECONDS and not deadline.passed
    transport.close()


def test_a_passed_deadline_leaves_ten_milliseconds():
    """Some calls take 0 for no timeout."""
    late = Deadline(5.0, time.monotonic() - 1)
    assert late.passed and late.left == 0.01
    assert 999 < Deadline.after(1000.0).left <= 1000 and not Deadline.after(1000.0).passed


@pytest.mark.parametrize(("connect_timeout", "seconds"), [("0.2", 600.0), ("600", 0.2)])
def test_a_silent_address_is_given_up_at_the_earlier_of_two_deadlines(home, silent, connect_timeout, seconds):  # noqa: F811
    home.configure(block("far", None, f"ConnectTimeout {connect_timeout}", f"Port {silent}"))
    began = time.monotonic()
    error = refusal(access(home), Target("far"), seconds)
    assert time.monotonic() - began < 300
    assert f"h (hosts:3): no answer from 127.0.0.1 port {silent} within {seconds:g} s" in str(error)
    assert "--connect-timeout" in str(error) and error.code == 125


def test_an_unreachable_network_is_named(home):  # noqa: F811
    error = refusal(access(home), Target("255.255.255.255"))
    assert "h (hosts:3): no connection to 255.255.255.255 port 22: Network is unreachable" in str(error)
    assert error.code == 125


def test_an_address_is_tried_after_others_that_refuse(closed):
    with socket.create_server(("127.0.0.1", closed)), socket.socket() as probe:
        line = tcp("localhost", closed, SECONDS)  # ::1 first, where there is IPv6
        assert probe.connect_ex(("127.0.0.1", closed)) == 0
        line.close()


def test_a_hop_that_is_not_reached_invalid_or_the_host_itself_is_named(home, closed):  # noqa: F811
    hops = {"last": f"127.0.0.1:{closed}", "invalid": "h:port", "loop": "loop"}
    home.configure(*(block(name, None, f"ProxyJump {jump}") for name, jump in hops.items()))
    last, invalid, loop = (refusal(access(home), Target(name)) for name in hops)
    assert f"h (hosts:3), through 127.0.0.1: no connection to 127.0.0.1 port {closed}: Connection refused" in str(last)
    assert "ProxyJump h:port: expected [user@]host[:port]" in str(invalid) and invalid.code == 2
    assert "through itself" in str(loop)


def test_a_host_that_a_hop_cannot_reach_is_named_and_no_connection_is_left(sshds, home, silent, closed):  # noqa: F811
    gate = sshds()
    ports = {"refused": closed, "silent": silent}
    jump = f"ProxyJump 127.0.0.1:{gate.port}"
    home.configure(*(block(name, None, f"Port {port}", jump) for name, port in ports.items()))
    refused = refusal(access(home), Target("refused"))
    assert f"127.0.0.1 cannot connect to 127.0.0.1 port {closed}: Connect" in str(refused)
    for seconds in (2.0, 60.0):  # with more time if this machine was too busy for the login at the hop
        late = refusal(access(home), Target("silent"), seconds)
        if f"port {silent}" in str(late):
            break
    assert f"127.0.0.1 port {silent} through 127.0.0.1 within {seconds:g} s" in str(late)
    assert refused.code == late.code == 125
    wait_for(lambda: not gate.children(), "the end of its connections")


LATE = "did not answer as an SSH server"  # if the deadline is during the last try


@pytest.mark.parametrize(
    ("command", "said"),
    [("true", ""), ("sh -c 'echo no way >&2; exit 255'", "exited with 255: no way")],
    ids=["ends well", "an ssh that fails"],
)
def test_a_proxy_command_that_ends_at_once_is_retried_until_the_deadline(home, tmp_path, command, said):  # noqa: F811
    counted = f"sh -c 'echo x >> {tmp_path}/tries; exec {command}'" if command == "true" else command
    home.configure(block("far", None, f"ProxyCommand {counted}"))
    error = refusal(access(home), Target("far"), 1.0)
    assert f"the host behind {counted}" in str(error) and "1 s" in str(error) and error.code == 125
    assert LATE in str(error) or ("before its identification" in str(error) and said in str(error))
    if command == "true":
        tries = (tmp_path / "tries").read_text().count("x")
        assert (tries > 1 or LATE in str(error)) and tries < 12, "with a pause before each"


@pytest.mark.parametrize(
    ("said", "words"),
    [(b"", "closed every connection before its identification"), (b"SSH-1.5-old\r\n", "no common .*1.5|SSH.*1.5")],
    ids=["nothing", "an old version"],
)
def test_a_port_without_an_ssh_server_is_named(home, said, words):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed
                while True:
                    connection, _ = server.accept()
                    connection.sendall(said)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        error = refusal(access(home), Target("127.0.0.1", port=port), 0.5)
        server.shutdown(socket.SHUT_RDWR)
    assert f"127.0.0.1 port {port}" in str(error) and error.code in (2, 125)
    assert re.search(f"{words}|{LATE}", str(error))


def test_without_a_common_cipher_the_error_suggests_the_systems_ssh(sshds, home):  # noqa: F811
    sshd = sshds("Ciphers chacha20-poly1305@openssh.com")
    error = str(refusal(access(home), target(sshd)))
    assert f"no common algorithm with 127.0.0.1 port {sshd.port}" in error and "--ssh system" in error


def test_paramiko_prints_nothing_to_the_terminal(home):  # noqa: F811
    home.configure(block("far", None, "ProxyCommand echo nonsense"))
    program = (
        "import sys\nfrom dmltrain_launch import LaunchError\n"
        "from dmltrain_launch.channels.ssh.config import Config, Target\n"
        "from dmltrain_launch.channels.ssh.key import Keys\nfrom dmltrain_launch.channels.ssh.login import Access\n"
        "try: Access(Config((sys.argv[1],)), Keys(input)).log_in(Target('far'), 'h', 0.2)\n"
        "except LaunchError: print('refused')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, home.config], cwd=ROOT, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("refused\n", "")


def test_the_end_of_all_logins_kills_every_command_at_once(home, tmp_path):  # noqa: F811
    home.configure(block("far", None, f"ProxyCommand sh -c 'echo $$ > {tmp_path}/pid; exec sleep 300'"))
    shared = access(home)
    assert f"{LATE} within 3 s" in str(refusal(shared, Target("far"), 3.0))
    pid = int((tmp_path / "pid").read_text())
    shared.close()
    assert not psutil.pid_exists(pid)
    assert shared.proxies and all(isinstance(proxy, ProxyCommand) for proxy in shared.proxies)


def settings(home: Home, *identities: Path, only: bool = False) -> Settings:  # noqa: F811
    lines = [f"IdentityFile {identity}" for identity in identities] + ["IdentitiesOnly yes"] * only
    home.config.write_text("\n".join(lines) + "\n")
    return Config((str(home.config),)).settings(Target("h"))


def offered(found: Settings) -> list[str]:
    return [what for what, _ in Keys(nobody).offers(found)]


def test_keys_are_offered_in_the_same_order_as_ssh(home, ssh_agent, tmp_path):  # noqa: F811
    """The agent's that are configured, its others, and then those of files that it does not have."""
    other, both, file = (generate_key(tmp_path / name) for name in ("other", "both", "file"))
    for key in (other, both):
        ssh_agent(key)
    agents = [f"the agent's ssh-ed25519 {name}" for name in ("both", "other")]
    assert offered(settings(home, file, both)) == [*agents, str(file)]
    assert offered(settings(home, file, both, only=True)) == [agents[0], str(file)]
    assert offered(settings(home, file, only=True)) == [str(file)]
    both.unlink()
    assert offered(settings(home, both, only=True)) == [agents[0]], "its public key names the agent's"


@pytest.mark.parametrize("there", ["none", "nobody", "one that hangs up"])
def test_without_an_agent_keys_are_those_of_files(home, monkeypatch, tmp_path, there):  # noqa: F811
    path = tmp_path / "agent"
    with contextlib.ExitStack() as opened:
        if there != "none":
            server = opened.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
        if there == "one that hangs up":
            server.listen()
            threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        assert offered(settings(home, home.key)) == [str(home.key)]


def test_files_without_a_key_are_ignored(home, tmp_path):  # noqa: F811
    nothing, text, folder, cut = (tmp_path / name for name in ("nothing", "text", "folder", "cut-off"))
    nothing.touch()
    text.write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\n\xff\n-----END OPENSSH PRIVATE KEY-----\n")
    folder.mkdir()
    cut.write_text(home.key.read_text()[:150])
    found = settings(home, nothing, text, folder, cut, tmp_path / "none", home.key)
    assert offered(found) == [str(home.key)]
    assert Keys(nobody).locked(found) == []
    for said in (b"", b"ssh-ed25519", b"ssh-ed25519 #", b"ssh-ed25519 AAAA", b"ssh-rsa AAAA\xff"):
        for name in (f"{home.key}.pub", f"{home.key}-cert.pub"):
            Path(name).write_bytes(said)
        assert offered(settings(home, home.key)) == [str(home.key)], "an unreadable public key or certificate"


def test_keys_of_every_kind_are_read_and_encrypted_ones_wait_for_their_passphrase(home, tmp_path):  # noqa: F811
    plain = [generate_key(tmp_path / kind, kind) for kind in ("ed25519", "ecdsa", "rsa")]
    locked = [generate_key(tmp_path / f"locked-{kind}", kind, PASSPHRASE) for kind in ("ed25519", "ecdsa", "rsa")]
    found, keys = settings(home, *locked, *plain), Keys(lambda question: PASSPHRASE)
    assert [what for what, _ in keys.offers(found)] == [str(path) for path in plain]
    assert keys.locked(found) == [str(path) for path in locked]
    for path in locked:
        keys.unlock(str(path))
    assert keys.locked(found) == []
    kinds = ["ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"]
    assert [key.get_name() for _, key in keys.offers(found)] == kinds * 2


def test_three_passphrases_may_be_tried_and_a_refusal_is_kept(home, tmp_path):  # noqa: F811
    path = str(generate_key(tmp_path / "locked", "ed25519", PASSPHRASE))
    answers = ["wrong", "", PASSPHRASE]
    keys = Keys(lambda question: answers.pop(0))
    keys.unlock(path)
    assert not answers
    keys.unlock(path)

    def ends(question: str) -> str:
        raise EOFError

    answers = ["wrong"] * 4
    refused = Keys(lambda question: answers.pop(0))
    wrong, none = "3 passphrases were wrong", "no passphrase was given"
    for each, said in ((refused, wrong), (refused, wrong), (Keys(ends), none)):
        with pytest.raises(LaunchError, match=f"^key {path} .* {said}$"):
            each.unlock(path)
    assert len(answers) == 1


def test_a_key_that_another_hosts_login_unlocks_meanwhile_is_tried(sshds, home, tmp_path):  # noqa: F811
    """Hosts log in at the same time, and one question is for all of them."""
    path = generate_key(tmp_path / "locked", "ed25519", PASSPHRASE)
    home.authorized.write_text(Path(f"{path}.pub").read_text())
    home.configure(identity=f"IdentityFile {path}")

    class Shared(Keys):
        def offers(self, settings: Settings) -> Iterator[tuple[str, paramiko.PKey]]:
            yield from super().offers(settings)
            self.unlock(str(path))  # as the thread of another host does

    asked: list[str] = []
    keys = Shared(lambda question: asked.append(question) or PASSPHRASE)
    transport, _ = Access(Config((str(home.config),)), keys).log_in(target(sshds()), "h", SECONDS)
    assert transport.is_authenticated() and len(asked) == 1
    transport.close()


def test_a_certificate_beside_a_key_is_shown(sshds, home, tmp_path):  # noqa: F811
    authority = generate_key(tmp_path / "authority")
    sign = ["ssh-keygen", "-q", "-s", str(authority), "-I", "me", "-n", home.user, f"{home.key}.pub"]
    subprocess.run(sign, check=True, timeout=60)
    home.authorized.write_text("")
    sshd = sshds(f"TrustedUserCAKeys {authority}.pub")
    transport, _ = access(home).log_in(target(sshd), "h", SECONDS)
    transport.close()
    assert b"ED25519-CERT" in sshd.log.read_bytes()


def test_a_server_that_requires_more_than_a_key_is_named(sshds, home):  # noqa: F811
    sshd = sshds("AuthenticationMethods publickey,publickey")
    error = refusal(access(home), target(sshd))
    assert f"127.0.0.1 port {sshd.port} refused the login of {home.user}" in str(error)
    assert f"{home.key} (accepted, but the server wants more than a key)" in str(error)
    assert all(cure in str(error) for cure in ("ssh-copy-id", "--identity", "user@", "--ssh system"))
    assert error.code == 2


def test_every_key_that_was_tried_is_named(sshds, home, tmp_path):  # noqa: F811
    home.authorized.write_text("")
    other = generate_key(tmp_path / "other")
    error = refusal(access(home), target(sshds(), identity=str(other)))
    assert f"none of: {other}, {home.key};" in str(error)


def test_a_server_that_stops_answering_during_login_is_given_up(sshds, home):  # noqa: F811
    sshd = sshds()

    class Stopping(Keys):
        def offers(self, settings: Settings) -> Iterator[tuple[str, paramiko.PKey]]:
            for pid in sshd.children():
                for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                    each.send_signal(signal.SIGSTOP)
                    stopped.append(each)
            yield from super().offers(settings)

    stopped: list[psutil.Process] = []
    try:
        error = refusal(Access(Config((str(home.config),)), Stopping(nobody)), target(sshd), 5.0)
    finally:
        for each in stopped:
            each.send_signal(signal.SIGCONT)
    assert f"127.0.0.1 port {sshd.port} did not answer to the login within 5 s" in str(error)


class Terminal:
    """A pseudo terminal at which threads are asked. `others` is how many more files are open."""

    def __init__(self, others: int = 0) -> None:
        self.ours, self.theirs = pty.openpty()
        self.others = [os.dup(self.ours) for _ in range(others)]
        self.prompt = TerminalPrompt(os.ttyname(self.theirs))

    def ask(self) -> Callable[[], str | type[EOFError]]:
        """Asks in a thread. Returns what waits for the answer."""
        answers: queue.SimpleQueue[str | type[EOFError]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put(self.prompt.ask("Passphrase? "))
            except EOFError:
                answers.put(EOFError)

        threading.Thread(target=run, daemon=True).start()
        return answers.get

    def shown(self) -> bytes:
        return os.read(self.ours, 100) if readable([self.ours], SECONDS) else b"nothing"


@pytest.fixture
def terminal(request) -> Iterator[Terminal]:
    made = Terminal(getattr(request, "param", 0))
    yield made
    for descriptor in (made.ours, made.theirs, *made.others):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("typed", "answer", "terminal"),
    [
        ((b"secret\n",), "secret", 0),
        ((b"secret\n",), "secret", 1100),  # more than 1024 files are open
        ((b"\n",), "", 0),
        ((b"sec\x04", b"ret\n"), "secret", 0),  # Control-D sends what has been typed
        ((b"caf\xe9\n",), "caf\ufffd", 0),
        ((b"\x04",), EOFError, 0),
    ],
    indirect=["terminal"],
)
def test_the_answer_is_the_typed_line(terminal, typed, answer):
    before = descriptors()
    asking = terminal.ask()
    assert terminal.shown() == b"Passphrase? "
    for each in typed:
        os.write(terminal.ours, each)
    assert asking() == answer
    assert terminal.shown() == b"\r\n", "nothing of it is shown"
    wait_for(lambda: descriptors() <= before, "all of them closed")  # another thread may have one for a moment


def test_close_cancels_the_question_and_no_other_is_asked(terminal):
    before = termios.tcgetattr(terminal.theirs)
    asking = terminal.ask()
    assert terminal.shown() == b"Passphrase? "
    assert termios.tcgetattr(terminal.theirs) != before
    terminal.prompt.close()
    assert termios.tcgetattr(terminal.theirs) == before, "it echoes again"
    assert [asking(), terminal.ask()()] == [EOFError] * 2


@pytest.mark.parametrize("path", ["none", "file"])
def test_what_is_no_terminal(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        TerminalPrompt(str(tmp_path / path)).ask("Passphrase? ")
