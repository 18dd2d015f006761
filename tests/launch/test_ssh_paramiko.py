"""What only the paramiko channel does itself: keys and passphrases, known_hosts files, ~/.ssh/config."""

import contextlib
import getpass
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.ssh import paramiko as ssh_paramiko
from dmltrain_launch.channels.ssh.config import Config, Settings, Target, hop
from dmltrain_launch.channels.ssh.key import ATTEMPTS
from dmltrain_launch.channels.ssh.login import Access
from tests.launch.ssh_connect import KINDS, PASSPHRASE, SECONDS, access, connector, refusal, target
from tests.launch.sshd import Home, Sshd, fingerprint, generate_key, home, ssh_agent, sshds  # noqa: F401  fixtures


class Typist:
    """Answers questions with `answers`, in order, and keeps the questions."""

    def __init__(self, *answers: str):
        self.answers, self.questions = list(answers), []

    def __call__(self, question: str) -> str:
        self.questions.append(question)
        return self.answers.pop(0)


def connect(home: Home, sshd: Sshd, shared: Access | None = None) -> None:  # noqa: F811
    ssh_paramiko.connect(sshd.host(), "m", shared or access(home), SECONDS)


def public(key: Path) -> str:
    """Kind and key, as a line of known_hosts has them."""
    return " ".join(Path(f"{key}.pub").read_text().split()[:2])


def encrypt(home: Home) -> Path:  # noqa: F811
    """Make the home's only key an encrypted one, which is authorized."""
    path = generate_key(home.ssh / "locked", "ed25519", PASSPHRASE)
    home.authorized.write_text(Path(f"{path}.pub").read_text())
    home.configure(identity=f"IdentityFile {path}")
    return path


def test_a_passphrase_is_asked_once_for_all_hosts(sshds, home):  # noqa: F811
    path = encrypt(home)
    made = [sshds() for _ in range(3)]
    typist = Typist("wrong", PASSPHRASE)
    shared = access(home, typist)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda sshd: connect(home, sshd, shared), made))
    assert typist.questions == [f"Passphrase for key {path}: "] * 2, "once more, as the first answer was wrong"
    connect(home, made[0], shared)  # as after a loss
    assert len(typist.questions) == 2


def test_the_time_in_which_a_passphrase_is_typed_does_not_count(sshds, home):  # noqa: F811
    encrypt(home)
    typed: list[float] = []

    def ask(question: str) -> str:
        typed.append(time.monotonic())
        return PASSPHRASE

    transport, deadline = access(home, ask).log_in(target(sshds()), "h", SECONDS)
    assert deadline.at >= typed[0] + SECONDS
    transport.close()


def test_an_encrypted_key_without_its_passphrase_is_refused_for_all_hosts(sshds, home):  # noqa: F811
    path = encrypt(home)
    typist = Typist(*["wrong"] * ATTEMPTS)
    shared, sshd = access(home, typist), sshds()
    for each in (sshd, sshds()):
        assert "passphrases were wrong" in str(refusal(shared, target(each)))
    assert not typist.answers
    without_terminal = refusal(access(home), target(sshd))
    assert f"ssh-add {path}" in str(without_terminal) and without_terminal.code == 2
    with pytest.raises(LaunchError, match="ssh-add"):
        connector("system", home)(sshd.host())


def test_no_passphrase_is_asked_if_another_key_works(sshds, home):  # noqa: F811
    locked = generate_key(home.ssh / "locked", "ed25519", PASSPHRASE)
    home.configure(f"IdentityFile {locked}")
    connect(home, sshds())


def test_the_agents_keys_are_tried_first(sshds, home, ssh_agent, tmp_path):  # noqa: F811
    others = [generate_key(tmp_path / f"other-{number}") for number in range(4)]
    right = generate_key(tmp_path / "right")
    home.authorized.write_text(Path(f"{right}.pub").read_text())
    for key in (*others, right):
        ssh_agent(key)
    connect(home, sshds("MaxAuthTries 6"))
    narrow = sshds("MaxAuthTries 2")
    said = str(refusal(access(home), target(narrow)))
    assert "closed the connection after the agent's ssh-ed25519 other-0, " in said, "too many keys for the server"
    home.configure(f"IdentityFile {right}.pub\nIdentitiesOnly yes")  # a public key names one of the agent's
    right.unlink()
    connect(home, narrow)


def test_no_key_and_a_server_that_takes_none_are_named(sshds, home):  # noqa: F811
    sshd = sshds("PubkeyAuthentication no", "PasswordAuthentication yes")
    said = str(refusal(access(home), target(sshd)))
    assert "accepts no keys, only password" in said and "--ssh system" in said
    home.configure(identity=f"IdentityFile {home.ssh / 'none'}")
    said = str(refusal(access(home), target(sshds())))
    assert "there is no key to offer" in said and "ssh-copy-id" in said


def test_the_cures_for_a_changed_key_and_for_an_unknown_host_work(sshds, home, tmp_path):  # noqa: F811
    sshd = sshds(known=False)
    home.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {public(generate_key(tmp_path / 'old'))}\n")
    changed = str(refusal(access(home), target(sshd)))
    subprocess.run(changed[changed.index("ssh-keygen -f") :], shell=True, check=True, capture_output=True)
    assert not home.known_hosts.read_text()
    unknown = str(refusal(access(home), target(sshd)))
    assert fingerprint(f"{sshd.key}.pub") in unknown
    cure = unknown[unknown.index("ssh-keyscan") : unknown.index(" or with --accept-new-host-keys")]
    subprocess.run(cure, shell=True, check=True, stderr=subprocess.DEVNULL)
    connect(home, sshd)


LINES = [  # of known_hosts, and whether the host is accepted
    ("[127.0.0.*]:{port},!*:{port} {key}\n@cert-authority * {key}\n[127.0.0.1]:1 {key}\n# * {key}", False),
    ("[127.0.0.1]:{port} {key}\n@revoked * {key}", False),
    ("127.0.0.1 {other}", False),
    ("[127.0.0.1]:{port} {other}\n\n[127.0.0.1]:{port} ssh-rsa no=\nother,[127.0.0.*]:{port} {key} comment", True),
    ("127.0.0.1 {key}", True),  # ssh tries the name without its port too
]


@pytest.mark.parametrize("line, accepted", LINES)
def test_lines_of_known_hosts(sshds, home, tmp_path, line, accepted):  # noqa: F811
    """The measure is what ssh says. tests/launch/test_known_hosts.py has each kind of line alone."""
    sshd = sshds(known=False)
    key, other = public(sshd.key), public(generate_key(tmp_path / "other"))
    home.known_hosts.write_text(line.format(port=sshd.port, key=key, other=other) + "\n")
    for kind in KINDS:
        with contextlib.nullcontext() if accepted else pytest.raises(LaunchError):
            connector(kind, home)(sshd.host())


def test_a_key_of_another_type_is_asked_for(sshds, home, tmp_path):  # noqa: F811
    """A host that is known by its RSA key shows that one, though it has one that both would rather use."""
    rsa = generate_key(tmp_path / "rsa", "rsa")
    sshd = sshds(f"HostKey {rsa}", f"HostKey {generate_key(tmp_path / 'ed')}", known=False)
    home.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {public(rsa)}\n")
    connect(home, sshd)


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
    text = f"Include {tmp_path}/config\nUser anna\n"
    assert settings(tmp_path, text).user == "anna", "files that include each other end"


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
    with contextlib.nullcontext() if target else pytest.raises(ValueError):
        assert hop(text) == target


def test_what_a_configuration_says_of_known_hosts_and_times(tmp_path, home):  # noqa: F811
    def facts(found: Settings) -> tuple:
        return found.identities_only, found.hash_known_hosts, found.connect_timeout, found.known_as

    found = settings(tmp_path, "")
    assert facts(found) == (False, False, 0, "")
    assert found.user_known_hosts == (home.ssh / "known_hosts", home.ssh / "known_hosts2")
    assert found.global_known_hosts == (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
    assert (found.port, found.destination, found.user) == (22, "h port 22", getpass.getuser())
    found = settings(
        tmp_path,
        "IdentitiesOnly yes\nHashKnownHosts TRUE\nConnectTimeout 2.5\nHostKeyAlias a\nHostName real\nPort=7\n"
        "UserKnownHostsFile '~/my hosts' none\nGlobalKnownHostsFile none\nProxyCommand nc 100%% %h\n",
    )
    assert facts(found) == (True, True, 2.5, "a")
    assert found.user_known_hosts == (Path.home() / "my hosts",) and found.global_known_hosts == ()
    assert (found.destination, found.proxy_command) == ("real port 7", "nc 100% real")
    found = Config((str(tmp_path / "none"),)).settings(Target("h"))
    assert found.identities == tuple(str(home.ssh / name) for name in ("id_ed25519", "id_ecdsa", "id_rsa"))
    assert found.user_known_hosts[0] == home.ssh / "known_hosts"


@pytest.mark.parametrize(
    "text, said",
    [
        ("Port twenty-two", "for h: port is twenty-two: expected a number"),
        ("Host h\n  ConnectTimeout soon", "for h: connecttimeout is soon: expected a number"),
        ("Host", "for h: .*Host"),
        ("IdentityFile", "for h: .*IdentityFile"),
        (b"Host \xff\n", "{path} cannot be read"),
        (None, "{path} cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, text, said):
    """The error names the word that is wrong, and both ways out."""
    path = tmp_path / "config"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LaunchError, match=said.format(path=path)) as caught:
        Config((str(path),)).settings(Target("h"))
    assert "correct it" in str(caught.value) and "--ssh system" in str(caught.value)
    assert caught.value.code == 2
