"""The processes of a job on other hosts, each reached by SSH."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

from dmltrain_launch import LaunchError
from dmltrain_launch.channels import Channel
from dmltrain_launch.channels.ssh.prompt import TerminalPrompt
from dmltrain_launch.clusters.named_hosts import named_hosts
from dmltrain_launch.clusters.ssh import SshOptions
from dmltrain_launch.job.host import Host

Connect = Callable[[Host, str, float], Channel]  # host, mark of the job, seconds
Close = Callable[[], None]  # ends connections that are not yet established


class Cluster:
    """See `dmltrain_launch.clusters`. The user is asked for a passphrase once, for all hosts."""

    def __init__(self, options: SshOptions, hosts: Sequence[Host] | None = None, prompt: TerminalPrompt | None = None):
        self.hosts = named_hosts(options) if hosts is None else list(hosts)
        if options.identity and not os.path.isfile(os.path.expanduser(options.identity)):
            raise LaunchError(f"the key {options.identity} does not exist")
        self._seconds = options.connect_timeout
        self._prompt = prompt or TerminalPrompt()
        self._connect, self._close = CHANNELS[options.ssh](options, self._prompt)

    def connect(self, host: Host, mark: str, timeout: float | None = None) -> Channel:
        """A channel to a new agent for the job `mark` within `timeout` seconds; LaunchError if that fails."""
        return self._connect(host, mark, self._seconds if timeout is None else timeout)

    def close(self) -> None:
        """Cancel open prompts, restore the terminal, and end the processes that connect to hosts."""
        with contextlib.suppress(OSError):
            self._prompt.close()
        self._close()


def _paramiko(options: SshOptions, prompt: TerminalPrompt) -> tuple[Connect, Close]:
    from dmltrain_launch.channels.ssh import paramiko as ssh_paramiko  # takes a moment to import
    from dmltrain_launch.channels.ssh.config import Config
    from dmltrain_launch.channels.ssh.key import Keys
    from dmltrain_launch.channels.ssh.login import Access

    identity = os.path.expanduser(options.identity)
    access = Access(Config(), Keys(prompt.ask), options.accept_new_host_keys, options.ssh_port, identity)
    return lambda host, mark, seconds: ssh_paramiko.connect(host, mark, access, seconds), access.close


def _system(options: SshOptions, prompt: TerminalPrompt) -> tuple[Connect, Close]:
    from dmltrain_launch.channels.ssh import system as ssh_system

    ssh = ssh_system.Ssh(("ssh",), options.ssh_port, options.identity, options.accept_new_host_keys)
    return lambda host, mark, seconds: ssh_system.connect(host, mark, ssh, seconds), ssh.close


# The values of --ssh.
Channels = Callable[[SshOptions, TerminalPrompt], tuple[Connect, Close]]
CHANNELS: dict[str, Channels] = {"paramiko": _paramiko, "system": _system}
