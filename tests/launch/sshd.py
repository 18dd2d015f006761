"""Real sshds on loopback, each with a port, a host key and a configuration of its own; and a user's ~/.ssh for them.

`sshds` is a fixture: call it for each sshd a test wants. `home` is an empty home folder, and $HOME of the test.
`ssh_agent` runs an ssh-agent: call it for each key to add.
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmltrain_launch.job.host import Host
from tests.waiting import wait_for

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
PRIVSEP = Path("/run/sshd")  # Debian's sshd wants it when root starts it
STARTS = 5  # tries to get a port that nobody else takes meanwhile


def generate_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new private key at `path` and its public one beside it; of the kinds and passphrases that are quick to use."""
    quick = ["-a", "1", *(["-b", "2048"] if kind == "rsa" else [])]
    command = ["ssh-keygen", "-q", "-t", kind, *quick, "-N", passphrase, "-f", str(path), "-C", path.name]
    subprocess.run(command, check=True, timeout=60)
    return path


def fingerprint(public: Path) -> str:
    """As ssh-keygen prints it: SHA256:..."""
    command = ["ssh-keygen", "-lf", str(public)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Sshd:
    """A running sshd. `more` are further lines of its configuration."""

    def __init__(self, folder: Path, authorized: Path, more: tuple[str, ...] = (), key: Path | None = None):
        folder.mkdir(parents=True)
        self.folder, self.log = folder, folder / "log"
        self.key = key or generate_key(folder / "host_key")
        self.config = folder / "sshd_config"
        for _ in range(STARTS):
            self.port = free_port()
            self._configure(authorized, more)
            if self._start():
                return
        pytest.fail(f"sshd does not start: {self.log.read_text()}")

    def _configure(self, authorized: Path, more: tuple[str, ...]) -> None:
        given = {line.split()[0] for line in more}
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.key}",
            f"AuthorizedKeysFile {authorized}",
            f"PidFile {self.folder / 'pid'}",
            "AllowUsers *",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "StrictModes no",
            "UsePAM no",
            "MaxStartups 100",
            f"SetEnv HOME={self.folder}",  # this user's .bashrc is none of the tests' business
        ]
        lines = [*more, *(line for line in lines if line.split()[0] not in given)]
        self.config.write_text("\n".join(lines) + "\n")

    def _start(self) -> bool:
        assert SSHD
        command = [SSHD, "-D", "-e", "-f", str(self.config)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: self.process.poll() is not None or b"Server listening" in self.log.read_bytes(), "its port")
        return self.process.poll() is None

    @property
    def logins(self) -> int:
        """How many logins it has accepted."""
        return self.log.read_bytes().count(b"Accepted publickey")

    def children(self) -> list[int]:
        """The pids of its connections."""
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def host(self, name: str = "here", **more: object) -> Host:
        """This sshd as a host of a job."""
        return Host(name, hostname="127.0.0.1", port=self.port, python=str(more.pop("python", sys.executable)), **more)

    def listing(self, name: str | None = None) -> str:
        """Its line in known_hosts."""
        kind, blob = Path(f"{self.key}.pub").read_text().split()[:2]
        return f"{name or f'[127.0.0.1]:{self.port}'} {kind} {blob}\n"

    def stop(self) -> None:
        """End it, its connections, and what they run: the agents end when their input does."""
        children = self.children() if self.process.poll() is None else []
        self.process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Home:
    """A user's home folder with ~/.ssh: a key, known hosts and a configuration, which `ssh -F` is to be given."""

    def __init__(self, folder: Path):
        self.folder, self.ssh = folder, folder / ".ssh"
        self.ssh.mkdir(mode=0o700)
        self.config, self.known_hosts = self.ssh / "config", self.ssh / "known_hosts"
        self.key = generate_key(self.ssh / "id_ed25519")
        self.authorized = folder / "authorized_keys"
        self.authorized.write_text(Path(f"{self.key}.pub").read_text())
        self.configure()

    def configure(self, *blocks: str, identity: str = "") -> None:
        """Write ~/.ssh/config: `blocks`, and for all hosts what ssh would look for in the real home."""
        identity = identity or f"IdentityFile {self.key}"
        general = f"Host *\n  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n  {identity}\n"
        self.config.write_text("\n".join([*blocks, general]))

    def know(self, *sshds: Sshd) -> None:
        self.known_hosts.write_text("".join(sshd.listing() for sshd in sshds))

    @property
    def user(self) -> str:
        return getpass.getuser()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    if not shutil.which("ssh-keygen"):
        pytest.skip("needs ssh-keygen (Debian: openssh-client)")
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return Home(folder)


@pytest.fixture
def sshds(tmp_path: Path, home: Home) -> Iterator[Callable[..., Sshd]]:
    if not SSHD:
        pytest.skip("needs sshd (Debian: openssh-server)")
    if os.geteuid() == 0 and not PRIVSEP.exists():
        PRIVSEP.mkdir(mode=0o755)
    made: list[Sshd] = []

    def make(*more: str, key: Path | None = None, known: bool = True) -> Sshd:
        made.append(Sshd(tmp_path / f"sshd-{len(made)}", home.authorized, more, key))
        if known:
            with home.known_hosts.open("a") as file:
                file.write(made[-1].listing())
        return made[-1]

    yield make
    for sshd in made:
        sshd.stop()


@pytest.fixture
def ssh_agent(home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Path], object]]:
    """A running ssh-agent at $SSH_AUTH_SOCK; call it with a key to add."""
    if not shutil.which("ssh-agent"):
        pytest.skip("needs ssh-agent (Debian: openssh-client)")
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    wait_for(path.exists, "its socket")
    yield lambda key: subprocess.run(["ssh-add", "-q", str(key)], check=True, timeout=60)
    process.kill()
    process.wait()
