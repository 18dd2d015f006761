"""Both ways to connect through SSH, as tests call them: with a home folder's configuration and a deadline."""

from __future__ import annotations

from collections.abc import Callable

from launch.channels import Channel
from launch.channels.ssh import paramiko as ssh_paramiko
from launch.channels.ssh import system as ssh_system
from launch.channels.ssh.config import Config
from launch.channels.ssh.key import Keys
from launch.channels.ssh.login import Access
from launch.job.host import Host
from tests.launch.sshd import Home

KINDS = ("paramiko", "system")
SECONDS = 20.0  # generous: the machine may be busy


def nobody(question: str) -> str:
    raise OSError("there is no terminal")


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
            access = Access(Config((str(home.config),)), Keys(nobody), accept_new, port, identity, stall)
            return ssh_paramiko.connect(host, mark, access, seconds)
        ssh = ssh_system.Ssh(("ssh", "-F", str(home.config)), port, identity, accept_new, stall)
        return ssh_system.connect(host, mark, ssh, seconds)

    return connect
