"""A machine of a job, as a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A machine. `name` is what messages call it; the rest says how it is reached and what may run there.

    `address` is its IP on the training network, "" until the agents have found it; `interface` the NIC that has it.
    `python` runs bare scripts there: "" is this Python's path where that exists, else python3.
    `slots` is how many workers, and how many servers, it takes (None: any number); `roles` which roles (empty: all).
    `gpus` are the devices that its workers share; `workdir` replaces the launcher's. `where` names its line: "hosts:3".
    """

    name: str
    address: str = ""
    python: str = ""
    cores: int = 1
    hostname: str = ""  # what SSH connects to; "" is the name
    user: str = ""
    port: int = 0  # of its sshd; 0 is what the configuration says, else 22
    slots: int | None = None
    roles: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    workdir: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    interface: str = ""
    where: str = ""

    @property
    def target(self) -> str:
        """The name that SSH connects to."""
        return self.hostname or self.name
