"""The workers and relays of one server: which may push, which workers a push counts for, which have finished. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Workers:
    """`hosts`: the ranks on each host, in the order in which hosts are added. Workers are identified by rank, the relay
    of a host by `relay_number`."""

    num_workers: int
    hosts: tuple[tuple[int, ...], ...]
    covers: dict[int, tuple[int, ...]] = field(init=False)  # worker or relay -> the workers whose sum it pushes
    finished: set[int] = field(default_factory=set)  # workers
    _relays: set[int] = field(default_factory=set)  # connected relays

    def __post_init__(self) -> None:
        self.on_hosts(self.hosts)

    def on_hosts(self, hosts: Sequence[tuple[int, ...]], lost: Collection[int] = ()) -> None:
        """From now on these workers push, and no relay is connected. Those that have finished stay so, except for
        replacements of `lost` workers."""
        self.hosts, self._relays = tuple(hosts), set()
        covers: dict[int, tuple[int, ...]] = {worker: (worker,) for worker in self.ranks}
        self.covers = covers | {relay_number(self.num_workers, host[0]): host for host in hosts if len(host) > 1}
        self.finished = self.finished.intersection(self.ranks).difference(lost)

    @property
    def ranks(self) -> list[int]:
        return [worker for host in self.hosts for worker in host]

    @property
    def all_finished(self) -> bool:
        return self.finished.issuperset(self.ranks)

    def takes(self, worker: int) -> bool:
        """Whether this worker, or relay, may push."""
        return worker in self.covers

    def join(self, worker: int) -> None:
        """A worker, or relay, has connected."""
        if worker not in self.covers[worker]:
            self._relays.add(worker)

    def finish(self, worker: int) -> bool:
        """A worker, or relay, has finished; returns whether it was a worker of those that push here."""
        if worker in self._relays:
            self._relays.remove(worker)
            return False
        if worker not in self.covers:  # it was removed before
            return False
        self.finished.add(worker)
        return True

    def finished_without_relay(self) -> set[int]:
        """The finished workers without a connected relay, which could still push for them."""
        return self.finished.difference(*(self.covers[relay] for relay in self._relays))


def relay_number(num_workers: int, leader: int) -> int:
    """The number that identifies the relay in worker `leader`: above all ranks."""
    return num_workers + leader
