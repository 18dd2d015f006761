"""The keys and files of OpenSSH on a test bed: every host's ~/.ssh, and each host's own sshd.

All hosts share one ~/.ssh, which is bound over the real one on each of them: what the user has there is neither seen
nor touched. So `ssh h1` and anything else that reads ~/.ssh/config works on every host as it is.
"""

import pwd
import shutil
from pathlib import Path

from tests.cluster.command import attempt, run
from tests.cluster.layout import BASE, LOGIN, Layout, Settings, address, host_names

KEY, HOST_KEY = "id_ed25519", "ssh_host_ed25519_key"
MADE_BY_US = BASE / "made-dot-ssh"  # exists when the user had no ~/.ssh, and we made the empty one to mount over

SSHD_CONFIG = """Port 22
HostKey {own}/ssh_host_ed25519_key
PidFile {own}/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""

SSH_CONFIG = """Host {host}
    HostName {address}
    User root
    IdentityFile ~/.ssh/id_ed25519
"""


def dot_ssh() -> Path:
    """root's ~/.ssh, by the password file, as ssh finds it."""
    return Path(pwd.getpwuid(0).pw_dir, ".ssh")


def write(layout: Layout, settings: Settings) -> None:
    """All files as they should be, whatever was done to them; keys that exist are kept."""
    hosts = host_names(settings)
    make_key(layout.folder / KEY)
    for host in hosts:
        layout.own(host).mkdir(exist_ok=True)
        make_key(layout.own(host) / HOST_KEY)
        (layout.own(host) / "sshd_config").write_text(SSHD_CONFIG.format(own=layout.own(host)))
    write_dot_ssh(layout, hosts)
    etc_hosts = ["127.0.0.1 localhost", *(f"{address(host)} {host}" for host in hosts)]
    (layout.folder / "etc-hosts").write_text("\n".join(etc_hosts) + "\n")
    (layout.folder / "hosts").write_text("".join(f"{host}\n" for host in hosts if host != LOGIN))


def write_dot_ssh(layout: Layout, hosts: list[str]) -> None:
    """The hosts' ~/.ssh, and nothing else in it."""
    folder = layout.folder / "ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    shutil.copy(layout.folder / KEY, folder)
    shutil.copy(layout.folder / f"{KEY}.pub", folder)
    shutil.copy(layout.folder / f"{KEY}.pub", folder / "authorized_keys")
    (folder / "known_hosts").write_text("".join(known_host(layout, host) for host in hosts))
    (folder / "config").write_text("".join(SSH_CONFIG.format(host=host, address=address(host)) for host in hosts))


def make_key(path: Path) -> None:
    if not path.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"testbed {path.parent.name}", "-f", str(path))


def known_host(layout: Layout, host: str) -> str:
    """A line for ~/.ssh/known_hosts."""
    kind, key = (layout.own(host) / f"{HOST_KEY}.pub").read_text().split()[:2]
    return f"{host},{address(host)} {kind} {key}\n"


def change_host_key(layout: Layout, host: str) -> None:
    """The host has another key than ~/.ssh/known_hosts says, from the next start of its sshd on."""
    (layout.own(host) / HOST_KEY).unlink(missing_ok=True)
    make_key(layout.own(host) / HOST_KEY)


def start_command(layout: Layout, host: str) -> list[str]:
    """Start sshd: returns at once, and the server is there when its PidFile is."""
    return ["/usr/sbin/sshd", "-f", f"{layout.own(host)}/sshd_config", "-E", f"{layout.own(host)}/sshd.log"]


def make_mount_point() -> None:
    if not dot_ssh().exists():
        dot_ssh().mkdir(mode=0o700)
        MADE_BY_US.touch()


def remove_mount_point() -> None:
    """For the last test bed to go: remove ~/.ssh if we made it and nobody has used it."""
    if MADE_BY_US.exists():
        MADE_BY_US.unlink()
        attempt("rmdir", str(dot_ssh()))
