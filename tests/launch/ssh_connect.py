"""Both ways to connect through SSH, as tests call them: with a home folder's configuration and a deadline."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels import Channel
from dmltrain_launch.channels.ssh import paramiko as ssh_paramiko
from dmltrain_launch.channels.ssh import system as ssh_system
from dmltrain_launch.channels.ssh.config import Config, Target
from dmltrain_launch.channels.ssh.key import Keys
from dmltrain_launch.channels.ssh.login import Access
from dmltrain_launch.job.host import Host
from tests.launch.sshd import Home, Sshd

KINDS = ("paramiko", "system")
SECONDS = 120.0  # generous: the machine may be busy
PASSPHRASE = "correct horse"


def nobody(question: str) -> str:
    raise OSError("there is no terminal")


def access(home: Home, ask: Callable[[str], str] = nobody, **more: object) -> Access:
    return Access(Config((str(home.config),)), Keys(ask), **more)


def target(sshd: Sshd, **more: object) -> Target:
    return Target("127.0.0.1", port=sshd.port, **more)


def refusal(access: Access, target: Target, seconds: float = SECONDS) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        access.log_in(target, "h (hosts:3)", seconds)
    return caught.value


def block(name: str, sshd: Sshd | None, *lines: str) -> str:
    """Of ~/.ssh/config."""
    where = [f"Port {sshd.port}"] if sshd else []
    return "\n  ".join([f"Host {name}", "HostName 127.0.0.1", *where, *lines]) + "\n"


@contextlib.contextmanager
def silent_port(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port that does not answer."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind((address, port))
        server.listen(0)
        for _ in range(3):  # fill the queue of connections that nobody accepts: further ones get no answer
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]


def connector(kind: str, home: Home) -> Callable[..., Channel]:
    """connect(host, seconds, accept_new, port, identity, mark, stall) -> Channel by the channel `kind`."""

    def connect(
        host: Host,
        seconds: float = SECONDS,
        accept_new: bool = False,
        port: int = 0,
        identity: str = "",
        mark: str = "test",
        stall: float = 8.0,
    ) -> Channel:
        if kind == "paramiko":
            shared = access(home, accept_new=accept_new, port=port, identity=identity, stall=stall)
            return ssh_paramiko.connect(host, mark, shared, seconds)
        ssh = ssh_system.Ssh(("ssh", "-F", str(home.config)), port, identity, accept_new, stall)
        return ssh_system.connect(host, mark, ssh, seconds)

    return connect
