"""The channel through the system's own ssh: its command line, and what is made of what ssh says.

A program that prints what OpenSSH 9 prints takes the place of ssh; tests/launch/test_ssh_contract.py has the real one.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.agent.process import living
from dmltrain_launch.agent.protocol import HELLO
from dmltrain_launch.channels.ssh.known_hosts import Key
from dmltrain_launch.channels.ssh.system import OPTIONS, Ssh, SystemChannel, connect
from dmltrain_launch.job.host import Host
from tests.scripts import shell_script
from tests.waiting import wait_for

HOST = Host("h1", python=sys.executable, hostname="n1", where="hosts:3")
SECONDS = 60.0
RESET = "kex_exchange_identification: read: Connection reset by peer\n"


def ssh_that(folder: Path, text: str, **more: object) -> Ssh:
    """The lines of a shell script in place of ssh; its last argument is the remote command."""
    return Ssh((str(shell_script(folder / "ssh", text)),), **more)


def refused(folder: Path, said: str, seconds: float = SECONDS) -> LaunchError:
    (folder / "said").write_text(said)
    ssh = ssh_that(folder, f"cat {folder}/said >&2; exit 255")
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


JUMP = "channel 0: open failed: connect failed: Connection refused"
BAD = "/c: line 3: Bad configuration option: prot"


@pytest.mark.parametrize(
    ("said", "shown", "fix", "code"),
    [
        ("ssh: Could not resolve hostname n1: Name or service not known\n", "", "name in the hosts file", 2),
        ("anna@n1: Permission denied (publickey).\n", "", "put your public key", 2),
        ("x: Too many authentication failures\n", "", "put your public key there", 2),
        ("ssh: connect to host n1 port 22: Connection refused\n", "", "is sshd running there", 125),
        ("ssh: connect to host n1 port 22: No route to host\n", "", "is the", 125),
        (f"{JUMP}\nstdio forwarding failed\n{RESET}", JUMP, "can the jump host reach it?", 125),
        (f"{BAD}\n/c: terminating, 1 bad configuration options\n", BAD, "correct ~/.ssh/config", 2),
        ("nc: no way\nConnection refused\n", "nc: no way: Connection refused", "is sshd", 125),
        ("ssh: connect to host n1 port 22: Connection timed out\n", "ssh got no answer from n1 within 60 s", "", 125),
        ("something new\n", "ssh failed: something new", "does {ssh} n1 true work?", 125),
        ("", "ssh failed: it printed nothing", "does {ssh} n1 true work?", 125),
        ("Host key verification failed.\n", "its host key is not known here", "run {ssh} n1 once", 2),
        ("No ED25519 host key is known for n1\n", "its host key is not known here", "run {ssh} n1 once", 2),
    ],
)
def test_what_ssh_says_is_passed_on_with_a_fix(tmp_path, said, shown, fix, code):
    error = refused(tmp_path, said)
    shown = shown or said.strip().removeprefix("ssh: ")
    assert str(error).startswith(f"h1 (hosts:3): {shown}")
    assert fix.format(ssh=tmp_path / "ssh") in str(error)
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
    changed = "h1 (hosts:3): its host key has changed: it sent"
    full = refused(tmp_path, CHANGED.format(path=path, remove=f"  ssh-keygen -f '{path}' -R 'n1'"))
    assert str(full).startswith(f"{changed} SHA256:new, but {path}:2 has {key.fingerprint}; ")
    assert str(full).endswith(f" ssh-keygen -f '{path}' -R 'n1'")
    assert str(refused(tmp_path, CHANGED.format(path=path, remove=""))).endswith(f" ssh-keygen -f {path} -R HOST")
    bare = refused(tmp_path, "HOST IDENTIFICATION HAS CHANGED\n")
    assert str(bare).startswith(f"{changed} another; ")
    assert full.code == bare.code == 2


def test_ssh_may_not_be_installed():
    with pytest.raises(LaunchError, match="no-such-ssh is not installed .*openssh-client, or use --ssh para"):
        connect(HOST, "mark", Ssh(("no-such-ssh",)), SECONDS)


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


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_still_connecting_ends_with_the_job(tmp_path, begun):
    """Also when its ssh has just been started, and when the job ends between the start of an ssh and its entry among
    those that are still connecting."""
    ssh = ssh_that(tmp_path, f"touch {tmp_path}/up; exec sleep 300")
    with ThreadPoolExecutor(1) as pool:
        if not begun:
            ssh.close()
        connecting = pool.submit(connect, HOST, "mark", ssh, 300.0)
        if begun:
            wait_for((tmp_path / "up").exists, "its ssh")
            ssh.close()
        error = connecting.exception()
    assert isinstance(error, LaunchError) and error.code == 125 and not ssh.starting


def test_a_server_that_stays_busy_and_an_ssh_that_reads_nothing_are_given_up_in_time(tmp_path):
    error = refused(tmp_path, RESET, seconds=0.5)
    assert "raise MaxStartups in its sshd_config" in str(error) or "within 0.5 s" in str(error)
    assert error.code == 125
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"^h1 \(hosts:3\): .* within 0\.3 s") as caught:
        connect(HOST, "mark", ssh_that(tmp_path, "exec sleep 300"), 0.3)
    assert time.monotonic() - began < 300 and caught.value.code == 125


def connected(folder: Path, text: str, **more: object) -> SystemChannel:
    """A channel to a script that greets as an agent does, and then runs `text`."""
    _, sent = channels.agent_command("")
    waits, greets = (f"printf '\\0{each[1:-1].decode()}\\n'" for each in (channels.READY, HELLO))
    return connect(
        HOST, "mark", ssh_that(folder, f"{waits}; head -c {len(sent)} > /dev/null; {greets}\n{text}", **more), SECONDS
    )


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
    data = channel.read(SECONDS).partition(channels.READY)[2]
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
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        errors = [each.exception() for each in [pool.submit(channel.write, bytes(1 << 20)) for _ in range(2)]]
    assert all(isinstance(error, TimeoutError) for error in errors)
    said = {str(error) for error in errors}
    assert "nothing could be sent for 0.3 s" in said
    assert said <= {"nothing could be sent for 0.3 s", "another write has stalled for 0.3 s"}
    assert 0.3 <= time.monotonic() - began < 300
    with pytest.raises(TimeoutError):
        while channel.read(0.1):
            pass
    channel.terminate()
    channel.close()
