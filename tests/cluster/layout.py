"""Names, addresses and settings of a test bed. Pure.

A host is `login`, or `h1` to `hN`. What a test bed keeps lies in one folder, which every host sees:
    testbed.json     its settings                 hosts      a hosts file for dmltrain-launch and mpirun
    etc-hosts        every host's /etc/hosts      ssh/       every host's ~/.ssh: config, known_hosts, id_ed25519, ...
    h1/ ... login/   each host's own: its SSH host key, sshd's log, what it said when it booted, the pid of its PID 1
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.command import TestbedError

BASE = Path("/run/dmltrain-testbed")
NETWORK = "10.99.0"  # a /24, seen inside the test bed only
LOGIN = "login"
MOST_HOSTS = 250


@dataclass(frozen=True)
class Settings:
    """What `up` makes. `rate` is of each host's link, each way ("0": not limited); folders are absolute paths."""

    hosts: int = 5
    rate: str = "1gbit"
    private: tuple[str, ...] = ()  # on each host empty and its own, as are /tmp and /dev/shm
    share: tuple[str, ...] = ()  # seen by every host though it lies in a private folder; in it may be private ones

    @property
    def private_folders(self) -> list[str]:
        """All of them, outer ones first."""
        return sorted({"/tmp", "/dev/shm", *self.private})

    def check(self) -> None:
        """TestbedError where this cannot be made."""
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise TestbedError(f"{self.hosts} hosts: expected 1 to {MOST_HOSTS}")
        bits_per_second(self.rate)
        for folder in (*self.private, *self.share):
            if not Path(folder).is_absolute() or not Path(folder).is_dir():
                raise TestbedError(f"{folder}: no such folder; expected an absolute path of one that exists here")
        for folder in self.share:
            if folder in self.private:
                raise TestbedError(f"{folder} is both private and shared: give one of the two")


@dataclass(frozen=True)
class Layout:
    """Where the parts of the test bed `name` are."""

    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]{1,40}", self.name):
            raise TestbedError(f"test bed {self.name!r}: expected a name of small letters, digits and _")

    @property
    def folder(self) -> Path:
        return BASE / self.name

    def own(self, host: str) -> Path:
        """The folder for what is the host's own."""
        return self.folder / host

    @property
    def switch(self) -> str:
        return self.namespace("switch")

    def namespace(self, host: str) -> str:
        """The name of its network namespace."""
        return f"testbed-{self.name}-{host}"

    def host_of(self, namespace: str) -> str:
        """The reverse of `namespace`; "" where that is not one of this test bed."""
        match = re.fullmatch(rf"testbed-{self.name}-(h\d+|{LOGIN}|switch)", namespace)
        return match[1] if match else ""


def inside(folder: str, other: str) -> bool:
    """Whether `folder` lies somewhere below `other`."""
    return Path(other) in Path(folder).parents


def host_names(settings: Settings) -> list[str]:
    return [LOGIN, *(f"h{number}" for number in range(1, settings.hosts + 1))]


def address(host: str) -> str:
    return f"{NETWORK}.{254 if host == LOGIN else int(host[1:])}"


def mac(host: str) -> str:
    """The same after every boot: peers remember the old one for seconds."""
    return f"02:99:00:00:00:{int(address(host).rpartition('.')[2]):02x}"


def bits_per_second(rate: str) -> float:
    """1gbit, 2.5gbit, 100mbit, 64kbit, or 0 for not limited."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit)?", rate.lower())
    if not match:
        raise TestbedError(f"rate {rate}: expected one such as 1gbit, 100mbit, or 0 for no limit")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
