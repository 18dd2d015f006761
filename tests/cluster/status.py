"""The state of a host, for people and for tests."""

from dataclasses import dataclass

from tests.cluster import host, network, processes, sshd
from tests.cluster.layout import Layout, address
from tests.cluster.processes import Process


@dataclass(frozen=True)
class Status:
    """A host now."""

    host: str
    address: str
    state: str  # alive, frozen or dead
    link: str  # up, unplugged, cut off or gone
    sshd: bool
    processes: int  # beside PID 1 and sshd

    @property
    def sound(self) -> bool:
        return (self.state, self.link, self.sshd) == ("alive", "up", True)

    def __str__(self) -> str:
        return (
            f"{self.host:5} {self.address:11}  {self.state:6}  link {self.link:9}  "
            f"{'sshd' if self.sshd else 'no sshd':7}  {self.processes} processes"
        )


def status(layout: Layout, name: str) -> Status:
    pid = host.pid_1(layout, name)
    init = processes.read(pid) if pid else None
    state = "dead" if init is None else "frozen" if init.still else "alive"
    link, listens = network.link_state(layout, name), sshd.listener(layout, name) is not None
    return Status(name, address(name), state, link, listens, len(guests(layout, name)))


def guests(layout: Layout, name: str) -> list[Process]:
    """What runs on the host beside PID 1 and sshd; nothing when it is dead."""
    return [each for each in host.everything(layout, name) if each.inner != 1 and not sshd.is_sshd(each)]
