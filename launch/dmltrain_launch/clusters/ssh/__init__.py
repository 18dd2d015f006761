"""Hosts reached by SSH."""

from __future__ import annotations

from dmltrain_launch.clusters.launcher import HOSTS, Launcher, own_options
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.options.option import FILE, Record, absolute, choice, number, option, switch, text


def _wrong_path(path: str) -> str:
    relative = "a path that starts with /, because this command may run in another folder"
    return "" if path.startswith("/") else relative


@own_options
class SshOptions(Options):
    """The options of --launcher ssh."""

    ssh: str = option(
        "paramiko|system",
        "SSH client (default: paramiko); system: the ssh command with its full configuration",
        choice(("paramiko", "system")),
        "paramiko",
        after="--subnet",
        record=Record(),
    )
    ssh_port: int = option(
        "PORT",
        "port of sshd unless the hosts file gives one (default: from the SSH configuration)",
        number(int, 1, 65535),
        0,
        record=Record(most=65535),
    )
    identity: str = option(
        "FILE",
        "private key for SSH",
        text(FILE),
        short="-i",
        record=Record(lambda options: absolute(options.identity), _wrong_path),
        file=True,
    )
    accept_new_host_keys: bool = switch("accept and store unknown host keys", reaches=True)


LAUNCHER = Launcher("hosts reached by SSH", SshOptions, HOSTS, cluster="hosts")
