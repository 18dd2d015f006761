"""What a machine needs for a test bed."""

import os
import shutil
import subprocess

from tests.cluster.command import ENVIRONMENT

TOOLS = {
    **{"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount", "ssh": "openssh-client"},
    **{"ssh-keygen": "openssh-client", "sshd": "openssh-server"},
}  # and their Debian packages


def missing(user: int | None = None, path: str = ENVIRONMENT["PATH"]) -> str:
    """What this machine lacks for `user` (default: the current user), in a few words; "" when it has everything."""
    if (os.geteuid() if user is None else user) != 0:
        return "root"
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=path) is None:
            return f"{tool} (Debian's package {package})"
    if subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "the right to make namespaces (unshare fails, as in most containers)"
    return ""
