#!/usr/bin/env python3
"""Hosts on one machine, out of Linux namespaces: `Testbed` for tests, and a command line (--help, docs/testbed.md).

Every host has its own network, processes, mounts, host name, shared memory, /tmp and sshd, and a link of limited rate
to a switch. A host `login`, whose link is not limited, is where the launcher runs. Root only. The machine's own
interfaces, routes and ~/.ssh stay as they are. Several test beds of different names live side by side.
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import owners
from tests.cluster import cuts, network, processes, ssh_files, sshd
from tests.cluster import host as hosts
from tests.cluster.command import TestbedError, attempt, namespaces
from tests.cluster.layout import BASE, LOGIN, Layout, Settings, address, host_names
from tests.cluster.processes import Process
from tests.cluster.requirements import missing
from tests.cluster.status import Status, guests, status


class Testbed:
    """A test bed by name, whether it is up or not. Every method raises TestbedError with a complete message."""

    __test__ = False  # no class of tests, whatever pytest thinks of its name

    def __init__(self, name: str = "default"):
        self.layout = Layout(name)
        self._outside: list[subprocess.Popen[bytes]] = []  # the parents of the hosts' PID 1s, to be reaped
        self._as_made: dict[str, int] = {}  # the files of ~/.ssh after `up`, until a fault is made

    # --- up and down ---

    def up(self, settings: Settings | None = None) -> None:
        """Have it so: boot what is missing or dead, undo every fault. None: as it was, or the defaults.

        Hosts live on through a second `up` unless the settings say other folders.
        """
        owners.own()  # for names with the pid
        with self._change():
            old = self.stored()
            new = settings or old or Settings()
            new.check()
            if old and (old.private, old.share) != (new.private, new.share):
                self._remove()
            elif old:
                for name in set(host_names(old)) - set(host_names(new)):
                    hosts.power_off(self.layout, name)
            with locked("machine"):
                self.folder.mkdir(exist_ok=True)
                ssh_files.make_mount_point()
                Path("/run/sshd").mkdir(exist_ok=True)  # which sshd wants
            self._file.write_text(json.dumps(asdict(new)))
            ssh_files.write(self.layout, new)
            network.make_switch(self.layout)
            self._repair(new)
            self._as_made = self._files()

    def settled(self) -> bool:
        """Whether `up` would find nothing to do: no fault since its last call here, hosts alive, ~/.ssh as it was."""
        own = self._as_made and self._as_made == self._files()
        return bool(own) and all(self.pid_1(host) and sshd.listener(self.layout, host) for host in self.hosts)

    def _files(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.dot_ssh.iterdir()}

    def _repair(self, settings: Settings) -> None:
        names, ports = host_names(settings), network.ports(self.layout)
        living = [name for name in names if self.pid_1(name) and name in ports]
        self._boot([name for name in names if name not in living], settings)
        network.heal(self.layout, living)
        cuts.heal(self.layout, living)
        for name in living:
            hosts.thaw(self.layout, name)
            sshd.start(self.layout, name)
        network.shape(self.layout, living, settings.rate)

    def down(self) -> None:
        """Nothing of it is left, whatever state it was in."""
        with self._change():
            self._remove()
            with locked("machine"):
                if not any(path.is_dir() for path in BASE.iterdir()):
                    ssh_files.remove_mount_point()

    def _remove(self) -> None:
        for name in filter(None, map(self.layout.host_of, namespaces())):
            if name != "switch":
                hosts.power_off(self.layout, name)
        attempt("ip", "netns", "delete", self.layout.switch)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what it has ---

    @property
    def folder(self) -> Path:
        return self.layout.folder

    @property
    def hosts_file(self) -> Path:
        """h1 to hN, a line each: for dmltrain-launch -H and mpirun --hostfile."""
        return self.folder / "hosts"

    @property
    def dot_ssh(self) -> Path:
        """What the hosts see as ~/.ssh: config, known_hosts, id_ed25519, authorized_keys. `up` restores it."""
        return self.folder / "ssh"

    @property
    def _file(self) -> Path:
        return self.folder / "testbed.json"

    def stored(self) -> Settings | None:
        """What it was made with; None when it is down."""
        try:
            found = json.loads(self._file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return Settings(found["hosts"], found["rate"], tuple(found["private"]), tuple(found["share"]))

    @property
    def settings(self) -> Settings:
        stored = self.stored()
        if stored is None:
            raise TestbedError(f"test bed {self.layout.name!r} is not up")
        return stored

    @property
    def hosts(self) -> list[str]:
        """login and h1 to hN."""
        return host_names(self.settings)

    @staticmethod
    def address(host: str) -> str:
        return address(host)

    def pid_1(self, host: str) -> int | None:
        """The machine's number of the host's PID 1; None when it is dead."""
        return hosts.pid_1(self.layout, host)

    # --- faults and their undoing ---

    def kill(self, *names: str) -> None:
        """Power loss: peers hear nothing any more, every process is gone."""
        self._each(names, hosts.power_off)

    def boot(self, *names: str) -> None:
        """Start the dead ones of these hosts."""
        with self._change(names):
            self._boot([name for name in names if not self.pid_1(name)], self.settings)

    def _boot(self, names: Sequence[str], settings: Settings) -> None:
        booting = {name: hosts.boot(self.layout, name, settings) for name in names}
        self._outside += booting.values()
        for name, process in booting.items():
            hosts.wait_booted(self.layout, name, process)

    def partition(self, *names: str) -> None:
        """These hosts reach each other and nobody else; they see no fault of the link."""
        with self._change(names):
            network.cut_off(self.layout, list(names))

    def unplug(self, *names: str) -> None:
        """Each of these hosts loses its cable, and sees that."""
        self._each(names, network.pull)

    def heal(self, *names: str) -> None:
        """Undo `partition` and `unplug` for these hosts, or for all."""
        with self._change(names):
            network.heal(self.layout, list(names) or self.hosts)

    def freeze(self, *names: str) -> None:
        """Stop every process; the kernel goes on acknowledging what peers send."""
        self._each(names, hosts.freeze)

    def thaw(self, *names: str) -> None:
        self._each(names, hosts.thaw)

    def kill_sshd(self, *names: str) -> None:
        """sshd and its sessions die, and nothing else."""
        self._each(names, sshd.kill)

    def start_sshd(self, *names: str) -> None:
        self._each(names, sshd.start)

    def change_host_key(self, *names: str) -> None:
        """sshd has another key than ~/.ssh/known_hosts says. `up` writes the new one there."""
        with self._change(names):
            for name in names:
                ssh_files.change_host_key(self.layout, name)
                sshd.kill(self.layout, name)
                sshd.start(self.layout, name)

    def rate(self, name: str, rate: str) -> None:
        """Another rate for one host, each way, until `up`: 100mbit, or 0 for no limit."""
        with self._change([name]):
            network.shape(self.layout, [name], rate)

    # --- commands and processes ---

    def start(self, host: str, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Run a command on the host in the caller's environment and folder, without SSH.

        What is sent to the Popen reaches the command, once; killing it kills the command; its return code is the
        command's. The command itself has another pid: `command_pid`.
        """
        return subprocess.Popen(self.command(host, argv), **popen)

    def run(self, host: str, argv: Sequence[str], timeout: float = 240.0, **popen: Any) -> subprocess.CompletedProcess:
        """`start`, and wait: standard output and error as text. The exit code is for the caller to judge."""
        return subprocess.run(
            self.command(host, argv),
            timeout=timeout,
            **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False, **popen},
        )

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command on the machine that runs `argv` on the host."""
        self._known([host])
        return hosts.command(self.layout, host, list(argv))

    @staticmethod
    def command_pid(started: subprocess.Popen[Any]) -> int | None:
        """The machine's pid of the command that `start` started; None before it runs and after it ended."""
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        try:
            return int(children.read_text().split()[0])
        except (OSError, IndexError):
            return None

    def processes(self, host: str) -> list[Process]:
        """What runs on the host beside PID 1 and sshd; nothing when it is dead."""
        return guests(self.layout, host)

    def sweep(self, *names: str) -> None:
        """Kill what `processes` lists, and sessions of sshd, on these hosts or all."""
        with self._change(names, fault=False):
            for name in names or self.hosts:
                processes.kill(functools.partial(self._not_the_hosts_own, name), name)

    def _not_the_hosts_own(self, host: str) -> list[Process]:
        listener = sshd.listener(self.layout, host)
        own = {self.pid_1(host), listener.pid if listener else None}
        return [process for process in hosts.everything(self.layout, host) if process.pid not in own]

    def logins(self, host: str) -> int:
        """How many SSH logins the host's sshd has seen since the test bed was made."""
        return sshd.logins(self.layout, host)

    def status(self) -> list[Status]:
        return [status(self.layout, host) for host in self.hosts]

    # --- one change at a time ---

    def _each(self, names: Sequence[str], change: Callable[[Layout, str], None]) -> None:
        with self._change(names):
            for name in names:
                change(self.layout, name)

    @contextlib.contextmanager
    def _change(self, names: Sequence[str] = (), fault: bool = True) -> Iterator[None]:
        """One change of this test bed at a time, to hosts that exist."""
        self._as_made = {} if fault else self._as_made
        if os.geteuid() != 0:
            raise TestbedError("needs root: namespaces, mounts and links are its business")
        BASE.mkdir(parents=True, exist_ok=True)
        with locked(f"bed-{self.layout.name}"):
            self._known(names)
            yield
        self._outside = [process for process in self._outside if process.poll() is None]

    def _known(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.hosts:
                raise TestbedError(f"no host {name}: there are {' '.join(self.hosts)}")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One holder at a time of what `name` stands for: a test bed, or what all of them share on this machine."""
    path = BASE / f"{name}.lock"
    while True:
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_file_of(path, lock.fileno()):
                continue  # the holder before this one has removed it
            try:
                yield
            finally:
                path.unlink()
            return


def _is_file_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


__all__ = ["LOGIN", "Process", "Settings", "Status", "Testbed", "TestbedError", "missing"]

if __name__ == "__main__":
    from tests.cluster.command_line import main

    sys.exit(main(sys.argv[1:]))
