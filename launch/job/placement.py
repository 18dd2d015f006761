"""Which process of a job runs on which host. Pure: counts and hosts in, places in launch order out.

A host with slots=N takes at most N workers and at most N servers, each role counted by itself: a server waits for the
network while its host's workers compute. The scheduler needs next to nothing and counts for nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launch import LaunchError
from launch.job.host import Host
from launch.job.role import SCHEDULER, SERVER, WORKER

OPTION = {SERVER: "-s", WORKER: "-n"}
LISTED_HOSTS = 8  # how many of them an error names

Place = tuple[str, int, Host]  # role, rank and host of a process
Hosts = Sequence[Host]


@dataclass(frozen=True)
class Policy:
    """One row of the table. `split(num_workers, num_servers, hosts)` gives the hosts of servers and of workers."""

    meaning: str
    split: Callable[[int, int, Hosts], tuple[list[Host], list[Host]]]


def place(num_workers: int, num_servers: int, hosts: Hosts, policy: str = "dmlc") -> list[Place]:
    """Role, rank and host of every process, in launch order: scheduler (when there are servers), servers, workers.

    LaunchError: more processes of a role than the hosts have room for, or a policy that these hosts do not allow.
    """
    if not hosts:
        raise LaunchError("there is no host to run on")
    if policy not in POLICIES:
        raise LaunchError(f"--placement {policy}: there is {listing()}")
    _check_room(SERVER, num_servers, hosts)
    _check_room(WORKER, num_workers, hosts)
    servers, workers = POLICIES[policy].split(num_workers, num_servers, hosts)
    scheduler = [_scheduler_host(hosts, servers, policy)] if servers else []
    chosen = ((SCHEDULER, scheduler), (SERVER, servers), (WORKER, workers))
    return [(role, rank, host) for role, those in chosen for rank, host in enumerate(those)]


def gpus_of(placed: Sequence[Place], rank: int, host: Host) -> tuple[str, ...]:
    """The devices of `host` that its worker `rank` gets; () when the host names none, which restricts nothing.

    The host's workers divide its devices into contiguous shares whose sizes differ by one at most: neighbours in
    gpus= are neighbours on the bus. More workers than devices share them round robin: that is slow, not wrong, and
    how several workers are tried out on one device.
    """
    beside = [each for role, each, place in placed if role == WORKER and place == host]
    local, workers, devices = beside.index(rank), len(beside), len(host.gpus)
    if workers > devices:
        return (host.gpus[local % devices],) if devices else ()
    return host.gpus[local * devices // workers : (local + 1) * devices // workers]


def room(host: Host, role: str) -> float:
    """How many processes of `role` the host takes; math.inf is any number."""
    if host.roles and role not in host.roles:
        return 0
    return math.inf if host.slots is None else host.slots


def _dmlc(num_workers: int, num_servers: int, hosts: Hosts) -> tuple[list[Host], list[Host]]:
    servers, after = _round_robin(SERVER, num_servers, hosts)
    return servers, _round_robin(WORKER, num_workers, hosts, after)[0]


def _spread(num_workers: int, num_servers: int, hosts: Hosts) -> tuple[list[Host], list[Host]]:
    return _round_robin(SERVER, num_servers, hosts)[0], _round_robin(WORKER, num_workers, hosts)[0]


def _pack(num_workers: int, num_servers: int, hosts: Hosts) -> tuple[list[Host], list[Host]]:
    return _fill(SERVER, num_servers, hosts), _fill(WORKER, num_workers, hosts)


def _dedicated(num_workers: int, num_servers: int, hosts: Hosts) -> tuple[list[Host], list[Host]]:
    """The last hosts get the servers, hosts that take no workers before others.

    They are as many as make the fullest host least full, and of such numbers the smallest: workers compute.
    """
    if not num_servers:
        return _spread(num_workers, 0, hosts)
    fitting = [
        (_round_robin(SERVER, num_servers, last)[0], _round_robin(WORKER, num_workers, others)[0])
        for last, others in _divisions(num_servers, hosts)
        if _has_room(SERVER, num_servers, last) and _has_room(WORKER, num_workers, others)
    ]
    if not fitting:
        servers, workers = _counted(num_servers, SERVER), _counted(num_workers, WORKER)
        raise LaunchError(
            f"--placement dedicated: the last of {_counted(len(hosts), 'host')} cannot take {servers} and leave the "
            f"others room for {workers}; give more hosts or slots=, say with roles= which host is for what, or choose "
            f"another --placement"
        )
    return min(fitting, key=lambda split: max(map(_most_on_one, split)))


def _divisions(num_servers: int, hosts: Hosts) -> Iterator[tuple[list[Host], list[Host]]]:
    """The last host for servers and the others, the last two and the others, ..., all in the order of `hosts`."""
    able = sorted((host for host in hosts if room(host, SERVER)), key=lambda host: not room(host, WORKER))
    for count in range(1, min(num_servers, len(able)) + 1):
        last = {host.name for host in able[-count:]}
        yield [host for host in hosts if host.name in last], [host for host in hosts if host.name not in last]


POLICIES = {
    "dmlc": Policy("servers, then workers, in one round robin over the hosts, as dmlc's tracker does", _dmlc),
    "pack": Policy("each role fills a host before the next", _pack),
    "spread": Policy("each role round robin from the first host", _spread),
    "dedicated": Policy("no host has both servers and workers; the last ones have the servers", _dedicated),
}


def listing() -> str:
    """The table in words, for --help and for errors."""
    return ", ".join(f"{name} ({policy.meaning})" for name, policy in POLICIES.items())


def _round_robin(role: str, count: int, hosts: Hosts, start: int = 0) -> tuple[list[Host], int]:
    """`count` hosts from number `start` on, those without room passed over, and the number after the last one taken.

    The hosts must have room for `count`.
    """
    left = [room(host, role) for host in hosts]
    chosen: list[Host] = []
    index = start
    while len(chosen) < count:
        at = index % len(hosts)
        if left[at]:
            left[at] -= 1
            chosen.append(hosts[at])
        index += 1
    return chosen, index


def _fill(role: str, count: int, hosts: Hosts) -> list[Host]:
    """`count` hosts, each as often as it takes processes of `role` before the next is used."""
    chosen: list[Host] = []
    able = [host for host in hosts if room(host, role)]
    for host in able:
        if len(chosen) < count:
            most = _full(host, role) if len(able) > 1 else math.inf
            chosen += [host] * int(min(most, count - len(chosen)))
    if len(chosen) < count:
        sizes = _listed(hosts, lambda host: str(_full(host, role) if host in able else 0))
        raise LaunchError(
            f"{OPTION[role]} {count} --placement pack: the hosts are full with {_counted(len(chosen), role)}: {sizes}; "
            f"give slots= to say how many a host takes, or fewer {role}s, or another --placement"
        )
    return chosen


def _full(host: Host, role: str) -> int:
    """When a host counts as full: at its slots, else at one process per GPU, else per core."""
    if host.slots is not None:
        return host.slots
    if not host.gpus and host.cores == 1:  # the value before an agent has counted them, too
        named = f"{host.name} ({host.where})" if host.where else host.name
        raise LaunchError(f"--placement pack: how many {role}s fill {named} is not known; give it slots=N (or gpus=)")
    return len(host.gpus) or host.cores


def _scheduler_host(hosts: Hosts, servers: Hosts, policy: str) -> Host:
    """A host whose roles= name it, else the first that has no roles=; beside server 0 when that would be wrong."""
    named = [host for host in hosts if SCHEDULER in host.roles]
    free = [host for host in hosts if not host.roles and policy != "dedicated"]
    return next(iter([*named, *free, *servers]))


def _check_room(role: str, count: int, hosts: Hosts) -> None:
    if _has_room(role, count, hosts):
        return
    total = int(sum(room(host, role) for host in hosts))
    if total:
        rooms = _listed(hosts, lambda host: f"{room(host, role):.0f}")
        raise LaunchError(
            f"{OPTION[role]} {count}: the hosts have slots for {_counted(total, role)}: {rooms}; "
            f"give slots= more, or fewer {role}s"
        )
    roles = _listed(hosts, lambda host: f"roles={','.join(host.roles)}")
    raise LaunchError(f"{OPTION[role]} {count}: no host takes {role}s: {roles}; add {role} to roles= of one")


def _has_room(role: str, count: int, hosts: Hosts) -> bool:
    return sum(room(host, role) for host in hosts) >= count


def _most_on_one(chosen: Hosts) -> int:
    return max(Counter(host.name for host in chosen).values(), default=0)


def _listed(hosts: Hosts, value: Callable[[Host], str]) -> str:
    said = [f"{host.name} {value(host)}" for host in hosts[:LISTED_HOSTS]]
    rest = len(hosts) - LISTED_HOSTS
    return ", ".join([*said, f"and {rest} more"] if rest > 0 else said)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
