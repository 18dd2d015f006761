"""The channel through the system's own ssh: its command line, and what is made of what ssh says.

A program that prints what OpenSSH 9 prints takes the place of ssh; tests/launch/test_ssh_contract.py has the real one.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from launch import LaunchError, channels
from launch.agent.process import living
from launch.agent.protocol import HELLO
from launch.channels.ssh.known_hosts import Key
from launch.channels.ssh.system import OPTIONS, Ssh, SystemChannel, connect
from launch.job.host import Host
from tests.launch.conftest import wait_for

HOST = Host("h1", python=sys.executable, hostname="n1", where="hosts:3")
SECONDS = 30.0
RESET = "kex_exchange_identification: read: Connection reset by peer\n"


def ssh_that(folder: Path, text: str, **more: object) -> Ssh:
    """The lines of a shell script in place of ssh; its last argument is the remote command."""
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return Ssh((str(path),), **more)


def refused(folder: Path, said: str, code: int = 255, seconds: float = SECONDS, **more: object) -> LaunchError:
    (folder / "said").write_text(said)
    ssh = ssh_that(folder, f"cat {folder}/said >&2; exit {code}", **more)
    with pytest.raises(LaunchError) as caught:
        connect(HOST, "mark", ssh, seconds)
    return caught.value


def test_the_command_line_has_what_was_said_of_the_host():
    assert Ssh().argv(Host("h1"), 9.6, "run") == ["ssh", *OPTIONS, "-o", "ConnectTimeout=10", "--", "h1", "run"]
    ssh = Ssh(("ssh", "-F", "mine"), port=22, identity="/key", accept_new=True)
    trust = ["-o", "StrictHostKeyChecking=accept-new"]
    words = ["-p", "2222", "-l", "anna", "-i", "/key", "--", "n1", "run"]
    found = ssh.argv(Host("h1", hostname="n1", user="anna", port=2222), 0.2, "run")
    assert found == ["ssh", "-F", "mine", *OPTIONS, "-o", "ConnectTimeout=1", *trust, *words]
    assert ssh.host_options(Host("h1")) == ["-p", "22", "-i", "/key"], "the port of the command line is for the others"


@pytest.mark.parametrize(
    ("said", "message", "code"),
    [
        (
            "ssh: Could not resolve hostname n1: Name or service not known\n",
            "Could not resolve hostname n1: Name or service not known; correct the name in the hosts file, or give",
            2,
        ),
        (
            "anna@n1: Permission denied (publickey).\n",
            "anna@n1: Permission denied (publickey).; put your public key",
            2,
        ),
        ("x: Too many authentication failures\n", "x: Too many authentication failures; put your public key there", 2),
        (
            "ssh: connect to host n1 port 22: Connection refused\n",
            "connect to host n1 port 22: Connection refused; is sshd running there, and on that port?",
            125,
        ),
        (
            "ssh: connect to host n1 port 22: No route to host\n",
            "connect to host n1 port 22: No route to host; is the",
            125,
        ),
        (
            "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n" + RESET,
            "channel 0: open failed: connect failed: Connection refused; can the jump host reach it?",
            125,
        ),
        (
            "/c: line 3: Bad configuration option: prot\n/c: terminating, 1 bad configuration options\n",
            "/c: line 3: Bad configuration option: prot; correct ~/.ssh/config",
            2,
        ),
        ("nc: no way\nConnection refused\n", "nc: no way: Connection refused; is sshd", 125),
        (
            "ssh: connect to host n1 port 22: Connection timed out\n",
            "ssh got no answer from n1 within 30 s (ssh: con",
            125,
        ),
        ("something new\n", "ssh failed: something new; does {ssh} n1 true work?", 125),
        ("", "ssh failed: it printed nothing; perhaps the remote command was killed; does {ssh} n1 true work?", 125),
        ("Host key verification failed.\n", "its host key is not known here: run {ssh} n1 once, which shows", 2),
        ("No ED25519 host key is known for n1\n", "its host key is not known here: run {ssh} n1 once, which shows", 2),
    ],
)
def test_what_ssh_says_is_passed_on_with_a_fix(tmp_path, said, message, code):
    error = refused(tmp_path, said)
    assert str(error).startswith(f"h1 (hosts:3): {message.format(ssh=tmp_path / 'ssh')}")
    assert error.code == code


CHANGED = """@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @
The fingerprint for the ED25519 key sent by the remote host is
SHA256:new.
Add correct host key in {path} to get rid of this message.
Offending ED25519 key in {path}:2
{remove}
Host key verification failed.
"""


def test_the_error_for_a_changed_key_has_both_fingerprints_and_the_command_that_removes_the_old_key(tmp_path):
    path, key = tmp_path / "known", Key("ssh-ed25519", b"one")
    path.write_text(f"other {Key('ssh-rsa', b'x').line}\nn1 {key.line}\n")
    changed = "h1 (hosts:3): its host key has changed: it sent SHA256:new"
    full = refused(tmp_path, CHANGED.format(path=path, remove=f"  ssh-keygen -f '{path}' -R 'n1'"))
    assert str(full).startswith(f"{changed}, but {path}:2 has {key.fingerprint}; this may be an attack")
    assert str(full).endswith(f"remove the old key with ssh-keygen -f '{path}' -R 'n1'")
    assert str(refused(tmp_path, CHANGED.format(path=path, remove=""))).endswith(f"ssh-keygen -f {path} -R HOST")
    bare = refused(tmp_path, "HOST IDENTIFICATION HAS CHANGED\n")
    assert str(bare).startswith("h1 (hosts:3): its host key has changed: it sent another; if the host was reinstalled")
    assert full.code == bare.code == 2


def test_other_exit_codes_are_those_of_the_shell_there(tmp_path):
    error = refused(tmp_path, "sh: 1: python: not found\n", code=127)
    assert str(error).startswith(
        f"h1 (hosts:3): {sys.executable} was not found there (sh: 1: python: not found): install"
    )


def test_a_login_to_a_busy_server_is_retried_until_it_succeeds(tmp_path):
    (tmp_path / "said").write_text(RESET)
    busy = f"[ $(wc -l < {tmp_path}/tries) -lt 3 ] && {{ cat {tmp_path}/said >&2; exit 255; }}"
    remote = 'for last; do :; done; exec /bin/sh -c "$last"'
    ssh = ssh_that(tmp_path, f"echo x >> {tmp_path}/tries\n{busy}\n{remote}")
    channel = connect(HOST, "mark", ssh, SECONDS)
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    channel.terminate()
    channel.close()
    assert not ssh.starting


def test_a_server_that_stays_busy_is_an_error_at_the_deadline(tmp_path):
    error = refused(tmp_path, RESET, seconds=0.5)
    assert "raise MaxStartups in its sshd_config" in str(error) or "no answer from n1 within 0.5 s" in str(error)
    assert error.code == 125


def test_what_is_still_connecting_ends_with_the_job(tmp_path):
    """Also when its ssh has just been started."""
    ssh = ssh_that(tmp_path, f"touch {tmp_path}/up; exec sleep 120")
    told: list[LaunchError] = []

    def run() -> None:
        try:
            connect(HOST, "mark", ssh, 120.0)
        except LaunchError as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not (tmp_path / "up").exists():
        thread.join(0.01)
    ssh.close()
    thread.join(SECONDS)
    assert [each.code for each in told] == [125] and not ssh.starting


def test_what_begins_when_the_job_is_over_ends_at_once(tmp_path):
    """As when the job ends between the start of an ssh and its entry among those that are still connecting."""
    ssh = ssh_that(tmp_path, "exec sleep 120")
    ssh.close()
    with pytest.raises(LaunchError) as caught:
        connect(HOST, "mark", ssh, 120.0)
    assert caught.value.code == 125 and not ssh.starting


def test_an_ssh_that_reads_nothing_is_given_up_in_time(tmp_path):
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"^h1 \(hosts:3\): .* within 0\.3 s") as caught:
        connect(HOST, "mark", ssh_that(tmp_path, "exec sleep 120"), 0.3)
    assert time.monotonic() - began < SECONDS and caught.value.code == 125


# -- an agent that is connected --------------------------------------------------------------------------------------


def connected(folder: Path, text: str, **more: object) -> SystemChannel:
    """A channel to a script that greets as an agent does, and then runs `text`."""
    _, sent = channels.agent_command("")
    greets = f"head -c {len(sent)} > /dev/null; printf '\\0{HELLO[1:-1].decode()}\\n'"
    return connect(HOST, "mark", ssh_that(folder, f"{greets}\n{text}", **more), SECONDS)


@pytest.mark.parametrize(
    ("text", "words", "ended"),
    [
        ("echo one >&2; echo two >&2; exit 255", "was lost with its connection (two)", False),
        ("exit 255", "was killed by a signal", True),
        ("echo one >&2; echo two >&2; exit 3", "exited with 3: two", True),
        ("exit 0", "exited with 0", True),
    ],
)
def test_how_an_agent_ended_is_told_by_its_ssh(tmp_path, text, words, ended):
    channel = connected(tmp_path, f'read line; echo "got $line"; {text}')
    data = channel.read(SECONDS)
    channel.write(b"it\n")
    while more := channel.read(SECONDS):
        data += more
    assert data == HELLO + b"got it\n"
    assert channel.close() == channel.close() == words
    assert channel.ended is ended
    with pytest.raises(OSError):
        channel.write(b"x")


def test_closing_ends_ssh_and_what_it_has_started(tmp_path):
    channel = connected(tmp_path, f"sleep 300 & echo $! $$ > {tmp_path}/pids; wait")
    pids = wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split(), "its pids")
    assert channel.close() == "did not answer and was cut off" and not channel.ended
    wait_for(lambda: not {int(pid) for pid in pids} & living().keys(), "the end of both")
    with pytest.raises(OSError):
        channel.write(b"x")


def test_a_write_that_stalls_fails_and_so_does_one_behind_it(tmp_path):
    channel = connected(tmp_path, "exec sleep 300", stall=0.3)
    began, errors = time.monotonic(), []

    def write() -> None:
        try:
            channel.write(bytes(1 << 20))
        except TimeoutError as error:
            errors.append(str(error))

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(SECONDS)
    assert "nothing could be sent for 0.3 s" in errors and len(errors) == 2
    assert set(errors) <= {"nothing could be sent for 0.3 s", "another write has stalled for 0.3 s"}
    assert 0.3 <= time.monotonic() - began < SECONDS
    with pytest.raises(TimeoutError):
        while channel.read(0.1):
            pass
    channel.terminate()
    channel.close()


def test_no_ssh_is_installed():
    with pytest.raises(
        LaunchError, match="no-such-ssh is not installed here: install openssh-client, or use --ssh para"
    ):
        connect(HOST, "mark", Ssh(("no-such-ssh",)), SECONDS)
