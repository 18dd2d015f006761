"""known_hosts files as values: whose lines mean a host, and what is said of a key. ssh itself is asked elsewhere."""

import base64
import fcntl
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.ssh.config import Settings
from dmltrain_launch.channels.ssh.known_hosts import Key, KnownHost, entries, known, listed_name, matches, verify
from tests.waiting import SECONDS, wait_for

ED, OTHER, RSA = Key("ssh-ed25519", b"one"), Key("ssh-ed25519", b"two"), Key("ssh-rsa", b"three")
PLAIN = "SHA256:dpLDrTVAu4A8Ags67mbNiIcSMjTqDG5xQ8Ct1z/0Me0"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    mine, all_users = tmp_path / "ssh/known_hosts", tmp_path / "etc/known_hosts"
    return Settings("Node1", 22, "anna", (), False, (), "", "", (mine,), (all_users,), False, 0.0)


def list_in(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def refusal(key: Key, settings: Settings, accept_new: bool = False) -> str:
    with pytest.raises(LaunchError) as caught:
        verify(key, settings, "h1 (hosts:1)", accept_new)
    assert caught.value.code == 2
    return str(caught.value)


def test_a_fingerprint_is_the_one_that_ssh_prints_and_a_host_is_listed_by_its_name_or_alias(settings):
    assert ED.fingerprint == PLAIN and ED.line == "ssh-ed25519 b25l"
    assert listed_name(settings) == "node1"
    assert listed_name(replace(settings, port=2222)) == "[node1]:2222"
    assert listed_name(replace(settings, port=2222, known_as="Alias")) == "alias"


@pytest.mark.parametrize(
    ("names", "name", "meant"),
    [
        ("node1", "node1", True),
        ("NODE1", "node1", True),
        ("node1", "node10", False),
        ("a,node1,b", "node1", True),
        ("node?", "node1", True),
        ("node*", "node", True),
        ("*.org,!bad.org", "good.org", True),
        ("*.org,!bad.org", "bad.org", False),
        ("!bad.org,*.org", "bad.org", False),
        ("!node1", "node2", False),
        ("[node1]:2222", "[node1]:2222", True),
        ("[node1]:2222", "n:2222", False),
        ("[node*]:2222", "[node7]:2222", True),
        ("|1|c2FsdHNhbHRzYWx0c2FsdHNhbHQ=|fxOExNNfRubACIaeIp53Pi3czKY=", "node1", True),
        ("|1|c2FsdHNhbHRzYWx0c2FsdHNhbHQ=|fxOExNNfRubACIaeIp53Pi3czKY=", "node2", False),
        ("|1|c2FsdA==", "node1", False),
        ("|1|no base64|x", "node1", False),
        ("|1|", "node1", False),
    ],
)
def test_which_names_mean_a_host(names, name, meant):
    assert matches(names, name) is meant


def test_lines_that_cannot_be_understood_are_passed_over(tmp_path):
    path = tmp_path / "known"
    lines = ["# words", "", "h1", "h1 ssh-rsa", "h1 ssh-rsa not=base64", f"  h1 {ED.line} a comment", "@revoked"]
    list_in(path, *lines, f"@revoked * {OTHER.line}", f"@revoked {OTHER.line}")
    path.write_bytes(path.read_bytes().replace(b"words", b"caf\xe9"))  # which is not UTF-8
    expected = [KnownHost("", "h1", ED, path, 6), KnownHost("@revoked", "*", OTHER, path, 8)]
    assert entries([tmp_path / "none", path]) == expected


def test_a_port_of_its_own_is_asked_for_first_and_then_the_bare_name(settings):
    (mine,), (all_users,) = settings.user_known_hosts, settings.global_known_hosts
    at_a_port = replace(settings, port=2222)
    list_in(mine, f"node1 {ED.line}", f"@cert-authority * {RSA.line}")
    assert [each.key for each in known(settings)] == [each.key for each in known(at_a_port)] == [ED]
    list_in(all_users, f"[node1]:2222 {OTHER.line}")
    assert [each.where for each in known(at_a_port)] == [f"{all_users}:1"]
    assert [each.where for each in known(settings)] == [f"{mine}:1"]
    assert known(replace(at_a_port, known_as="alias")) == [], "an alias is meant to the letter"


def test_a_key_that_is_listed_is_trusted_unless_it_is_revoked(settings):
    (mine,) = settings.user_known_hosts
    list_in(mine, f"node1 {OTHER.line}", f"node1 {ED.line}")
    verify(ED, settings, "h1", accept_new=False)
    list_in(mine, f"node1 {ED.line}", f"@revoked * {ED.line}")
    said = refusal(ED, settings, accept_new=True)
    assert said.startswith("h1 (hosts:1): ") and PLAIN in said and said.endswith(f"revoked in {mine}:2")


def test_the_error_for_a_changed_key_has_the_listed_key_of_the_same_type(settings):
    (mine,) = settings.user_known_hosts
    list_in(mine, f"node1 {RSA.line}", f"node1 {OTHER.line}", f"@revoked node1 {RSA.line}")
    said = refusal(ED, settings, accept_new=True)
    assert said.startswith("h1 (hosts:1): its host key has changed")
    assert f"sent ssh-ed25519 {PLAIN}, but {mine}:2 has ssh-ed25519 {OTHER.fingerprint}" in said
    assert said.endswith(f"ssh-keygen -f {mine} -R node1")
    assert f"but {mine}:1 has ssh-rsa" in refusal(Key("ecdsa-sha2-nistp256", b"x"), settings), "it has none of the kind"


def test_the_error_for_an_unknown_host_has_the_command_that_accepts_it(settings):
    (mine,) = settings.user_known_hosts
    said = refusal(ED, settings)
    assert said.startswith("h1 (hosts:1): ") and f"not known here: node1 sent ssh-ed25519 {PLAIN}" in said
    assert f"ssh-keyscan -t ed25519 Node1 >> {mine} or with --accept-new-host-keys" in said
    at_a_port = replace(settings, port=2222)
    assert "ssh-keyscan -p 2222 -t rsa Node1 >>" in refusal(RSA, at_a_port)
    assert "ssh-keyscan -p 2222 -t ecdsa Node1 >>" in refusal(Key("ecdsa-sha2-nistp256", b"x"), at_a_port)
    assert ">> ~/.ssh/known_hosts or" in refusal(ED, replace(settings, user_known_hosts=()))
    for way in ({"hops": ("a",)}, {"proxy_command": "nc %h"}, {"known_as": "alias"}):
        assert refusal(ED, replace(settings, **way)).endswith("then add --accept-new-host-keys"), "it cannot be scanned"


def test_a_new_key_is_saved_if_requested(settings):
    (mine,) = settings.user_known_hosts
    verify(ED, replace(settings, port=2222), "h1", accept_new=True)
    assert mine.read_text() == f"[node1]:2222 {ED.line}\n"
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600 and stat.S_IMODE(mine.parent.stat().st_mode) == 0o700
    mine.write_text("# mine")
    verify(RSA, settings, "h1", accept_new=True)
    assert mine.read_text() == f"# mine\nnode1 {RSA.line}\n"
    verify(ED, replace(settings, hostname="node2", hash_known_hosts=True), "h2", accept_new=True)
    hashed = mine.read_text().splitlines()[2].split()[0]
    assert matches(hashed, "node2") and not matches(hashed, "node1") and hashed.startswith("|1|")
    assert len(base64.b64decode(hashed.split("|")[2])) == 20


def test_two_launchers_that_accept_a_key_at_once_list_it_once(settings):
    """The second waits for the file's lock, and then looks again."""
    path = settings.user_known_hosts[0]
    list_in(path)
    with ThreadPoolExecutor(1) as pool, path.open("a") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = pool.submit(verify, ED, settings, "h1 (hosts:1)", True)
        inode = str(path.stat().st_ino)
        waiting = re.compile(rf"-> FLOCK .*:{inode} ")
        wait_for(lambda: waiting.search(Path("/proc/locks").read_text()), "the second launcher's wait for the lock")
        first.write(f"node1 {ED.line}\n")
        first.flush()
        fcntl.flock(first, fcntl.LOCK_UN)
        second.result(SECONDS)
    assert path.read_text().count(ED.line) == 1


def test_a_new_key_that_cannot_be_saved(settings, tmp_path):
    assert "UserKnownHostsFile is none" in refusal(ED, replace(settings, user_known_hosts=()), accept_new=True)
    (tmp_path / "ssh").write_text("a file")
    said = refusal(ED, settings, accept_new=True)
    assert said.startswith("h1 (hosts:1): ") and f"cannot be added to {tmp_path}/ssh/known_hosts: " in said
