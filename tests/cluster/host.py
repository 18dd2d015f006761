"""A host of a test bed: its namespaces, its file system and its PID 1.

A host is alive while its PID 1 is. That is a `sleep` which ignores SIGCHLD, so that orphans leave no zombies. The file
system is the machine's, but for what `mounts` puts over it; nothing of that is seen outside of the host.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import network, processes, ssh_files
from tests.cluster.command import ENVIRONMENT, TestbedError, namespaces, run
from tests.cluster.layout import Layout, Settings, inside
from tests.cluster.processes import Process, send, wait

UNSHARE = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
ENTER = str(Path(__file__).with_name("enter.py"))


def mounts(layout: Layout, host: str, settings: Settings) -> list[list[str]]:
    """The commands that make the host's file system.

    ~/.bashrc is hidden since bash reads it for every command of ssh, however long that takes.
    """
    own, private = layout.own(host), settings.private_folders
    outermost = [folder for folder in private if not any(inside(folder, other) for other in private)]
    commands = [command for folder in outermost for command in private_mounts(layout, host, settings, folder)]
    commands.append(["mount", "-t", "proc", "proc", "/proc"])
    dot_ssh = ssh_files.dot_ssh()
    binds = {
        str(dot_ssh): f"{layout.folder}/ssh",
        "/etc/hosts": f"{layout.folder}/etc-hosts",
        "/etc/hostname": f"{own}/hostname",
        str(dot_ssh.with_name(".bashrc")): "/dev/null",
    }
    return commands + [["mount", "--bind", what, place] for place, what in binds.items() if Path(place).exists()]


def private_mounts(layout: Layout, host: str, settings: Settings, folder: str) -> list[list[str]]:
    """The commands that put an empty folder over `folder`, with what is shared in it, and what is private in that.

    It is made aside, where shared folders are bound into it while they can still be seen, and then moved to its place.
    """
    aside, commands = f"{layout.own(host)}/aside", []
    shared = {str(layout.folder), *settings.share}
    for each in sorted({folder, *shared, *settings.private_folders}):
        if each == folder or inside(each, folder):
            place = os.path.normpath(f"{aside}/{os.path.relpath(each, folder)}")
            what = ["--rbind", each] if each in shared else ["-t", "tmpfs", "-o", "mode=1777", "tmpfs"]
            commands += [["mkdir", "-p", place], ["mount", *what, place]]
    return [*commands, ["mount", "--move", aside, folder]]


def boot_script(layout: Layout, host: str, settings: Settings) -> str:
    """What the host's PID 1 does, for sh. Until it is mounted anew, /proc says its pid as the machine sees it."""
    own = layout.own(host)
    commands = [["hostname", host], *mounts(layout, host, settings), ssh_files.start_command(layout, host)]
    return "\n".join(
        [
            "set -eu",
            "read -r pid rest < /proc/self/stat",
            *(shlex.join(command) for command in commands),
            f"while [ ! -s {own}/sshd.pid ]; do sleep 0.01; done",
            f"echo $pid > {own}/pid.new; mv {own}/pid.new {own}/pid",
            "cd /",
            "exec env --ignore-signal=CHLD sleep infinity",
        ]
    )


def boot(layout: Layout, host: str, settings: Settings) -> subprocess.Popen[bytes]:
    """Start the host; `wait_booted` tells when it is there. Its link and namespaces are new."""
    power_off(layout, host)
    own, namespace = layout.own(host), layout.namespace(host)
    (own / "aside").mkdir(exist_ok=True)
    (own / "hostname").write_text(f"{host}\n")
    (own / "sshd.pid").unlink(missing_ok=True)
    run("ip", "netns", "add", namespace)
    network.plug_in(layout, host)
    network.shape(layout, [host], settings.rate)
    with open(own / "console.log", "wb") as console:  # `ip netns exec` shows the namespace's own devices in /sys
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *UNSHARE, "sh", "-c", boot_script(layout, host, settings)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )


def wait_booted(layout: Layout, host: str, booting: subprocess.Popen[bytes]) -> None:
    """Until the host's sshd listens; TestbedError with what the host said when it does not come to that."""

    def said() -> str:
        return f"{host} boots; it said: {(layout.own(host) / 'console.log').read_text().strip() or 'nothing'}"

    def over() -> bool:
        return pid_1(layout, host) is not None or booting.poll() is not None

    wait(over, said)
    if booting.poll() is not None:
        raise TestbedError(f"{said()}; it ended with exit code {booting.returncode}")


def power_off(layout: Layout, host: str) -> None:
    """Power loss. The link goes first: the kernel closes a dying process's connections, and peers would hear that."""
    network.remove_link(layout, host)
    (layout.own(host) / "pid").unlink(missing_ok=True)
    namespace = layout.namespace(host)
    if namespace in namespaces():
        end_inside(namespace)
        run("ip", "netns", "delete", namespace)


def end_inside(namespace: str, patience: float = 1.0) -> None:
    """Kill what lives in a network namespace: the host's processes, whether PID 1 is there or not.

    What only looks in from outside (`unshare`, enter.py) ends by itself and says how; it is killed after `patience` s.
    """
    begin = time.monotonic()

    def gone() -> bool:
        pids = [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]
        for pid in pids:
            if time.monotonic() > begin + patience or processes.namespace(pid) != processes.namespace(os.getpid()):
                send(pid, signal.SIGKILL)
        return not pids

    wait(gone, lambda: f"the end of the processes in {namespace}")


def pid_1(layout: Layout, host: str) -> int | None:
    """The machine's number of the host's PID 1; None when the host is dead, even if its number is used again."""
    try:
        pid = int((layout.own(host) / "pid").read_text())
        same = os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat(f"/run/netns/{layout.namespace(host)}"))
    except (OSError, ValueError):
        return None
    return pid if same else None


def everything(layout: Layout, host: str) -> list[Process]:
    """All processes on the host; none when it is dead."""
    pid = pid_1(layout, host)
    return processes.beside(pid) if pid else []


def command(layout: Layout, host: str, argv: list[str]) -> list[str]:
    """The command that runs `argv` on the host, without SSH."""
    pid = pid_1(layout, host)
    if pid is None:
        raise TestbedError(f"{host} is dead: boot it")
    return [sys.executable, "-I", "-S", ENTER, str(pid), *argv]


def freeze(layout: Layout, host: str) -> None:
    """Stop every process; and look again, as one may have had a child meanwhile."""

    def stopped() -> bool:
        running = [process for process in everything(layout, host) if not process.still]
        for process in running:
            send(process.pid, signal.SIGSTOP)
        return not running

    wait(stopped, lambda: f"{host} freezes")


def thaw(layout: Layout, host: str) -> None:
    """Let every process run."""
    for process in everything(layout, host):
        send(process.pid, signal.SIGCONT)
