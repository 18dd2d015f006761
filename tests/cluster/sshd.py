"""The sshd of a living host: its listener, and its sessions."""

import subprocess

from tests.cluster import host, processes, ssh_files
from tests.cluster.command import ENVIRONMENT, TestbedError
from tests.cluster.layout import Layout
from tests.cluster.processes import Process, wait


def is_sshd(process: Process) -> bool:
    """The listener or a session, whose program newer versions call sshd-session."""
    return process.name.startswith("sshd")


def listener(layout: Layout, name: str) -> Process | None:
    """The sshd that accepts connections."""
    try:
        inner = int((layout.own(name) / "sshd.pid").read_text())
    except (OSError, ValueError):
        return None
    return next((each for each in host.everything(layout, name) if is_sshd(each) and each.inner == inner), None)


def kill(layout: Layout, name: str) -> None:
    """The listener and all sessions go; what they started lives on."""
    processes.kill(lambda: [each for each in host.everything(layout, name) if is_sshd(each)], f"sshd on {name}")


def start(layout: Layout, name: str) -> None:
    """Start the listener unless it is there."""
    if listener(layout, name) is None:
        (layout.own(name) / "sshd.pid").unlink(missing_ok=True)
        command = host.command(layout, name, ssh_files.start_command(layout, name))
        streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd="/", env=ENVIRONMENT, check=False, **streams)
        if done.returncode:
            raise TestbedError(f"sshd on {name}: {done.stderr}")
        wait(lambda: listener(layout, name), lambda: f"sshd listens on {name}")


def logins(layout: Layout, name: str) -> int:
    """How many SSH connections have logged in, by sshd's log, since the host has its folder."""
    try:
        return (layout.own(name) / "sshd.log").read_text(errors="replace").count("Accepted publickey")
    except FileNotFoundError:
        return 0
