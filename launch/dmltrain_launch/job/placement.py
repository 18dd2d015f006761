"""Which process of a job runs on which host, and its share of that host's GPUs and cores. Pure.

A host with slots=N takes at most N workers and at most N servers. The roles are counted separately, because a server
waits for the network while its host's workers compute. The scheduler needs few resources and takes no slot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dmltrain_launch import LaunchError
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER

Resource = tuple[str | int, ...]  # a CPU or a limit; the first item identifies the kernel
ROUNDING = 1e-9  # sums of reciprocals: a third of six cores comes out a little below two
OPTION = {SERVER: "-s", WORKER: "-n"}
LISTED_HOSTS = 8  # hosts named in an error

Placement = tuple[str, int, Host]  # role, rank and host of a process
Hosts = Sequence[Host]


@dataclass(frozen=True)
class Policy:
    """One row of the table. `split(num_workers, num_servers, hosts)` gives the hosts of servers and of workers."""

    meaning: str
    split: Callable[[int, int, Hosts], tuple[list[Host], list[Host]]]


def place(num_workers: int, num_servers: int, hosts: Hosts, policy: str = "dmlc") -> list[Placement]:
    """Role, rank and host of every process, in launch order: scheduler (when there are servers), servers, workers.

    LaunchError if a role has more processes than the hosts have slots, or if the policy does not fit these hosts.
    """
    if not hosts:
        raise LaunchError("no host to run on")
    if policy not in POLICIES:
        raise LaunchError(f"--placement {policy}: expected {listing()}")
    _check_room(SERVER, num_servers, hosts)
    _check_room(WORKER, num_workers, hosts)
    servers, workers = POLICIES[policy].split(num_workers, num_servers, hosts)
    scheduler = [_scheduler_host(hosts, servers, policy)] if servers else []
    chosen = ((SCHEDULER, scheduler), (SERVER, servers), (WORKER, workers))
    return [(role, rank, host) for role, those in chosen for rank, host in enumerate(those)]


def host_by_host(placed: Sequence[Placement]) -> list[Placement]:
    """The same processes, with workers numbered by host: those of worker 0's host come first, as with torchrun."""
    workers = [host for role, _, host in placed if role == WORKER]
    names = list(dict.fromkeys(host.name for host in workers))
    workers.sort(key=lambda host: names.index(host.name))
    others = [placement for placement in placed if placement[0] != WORKER]
    return [*others, *((WORKER, rank, host) for rank, host in enumerate(workers))]


def workers_by_host(placed: Sequence[Placement]) -> dict[str, int]:
    """How many workers each host has that has any."""
    return Counter(host.name for role, _, host in placed if role == WORKER)


def gpus_of(placed: Sequence[Placement], rank: int, host: Host) -> tuple[str, ...]:
    """The devices of `host` that its worker `rank` gets; () if the host has no gpus=, so that all are visible.

    The host's workers divide its devices into contiguous shares whose sizes differ by at most one, because neighbours
    in gpus= are neighbours on the bus. If there are more workers than devices, workers share devices round robin: slow,
    but a way to try several workers on one device.
    """
    ranks = [number for role, number, its_host in placed if role == WORKER and its_host == host]
    local, workers, devices = ranks.index(rank), len(ranks), len(host.gpus)
    if workers > devices:
        return (host.gpus[local % devices],) if devices else ()
    return host.gpus[local * devices // workers : (local + 1) * devices // workers]


def spare_gpus(host: Host, taken: Sequence[Collection[str]]) -> tuple[str, ...]:
    """The devices of `host` for one worker more than those that have `taken` devices there; () if it has no gpus=.

    It gets its equal share, of the devices that the fewest workers have.
    """
    users = {device: sum(device in devices for devices in taken) for device in host.gpus}
    chosen = sorted(users, key=lambda device: users[device])[: max(1, len(users) // (len(taken) + 1))]
    return tuple(device for device in host.gpus if device in chosen)


def free_slots(host: Host, workers: int) -> float:
    """How many more workers fit on a host with `workers` of them: by its slots, else one per GPU, else any number."""
    limit = slots_for(host, WORKER)
    return (min(limit, len(host.gpus)) if host.gpus and host.slots is None else limit) - workers


def default_workers(host: Host) -> int:
    """How many workers a host gets that comes to a job: by its slots, else one per GPU, else one."""
    limit = free_slots(host, 0)
    return 1 if limit == math.inf else int(limit)


def slots_for(host: Host, role: str) -> float:
    """How many processes of `role` the host takes; math.inf if there is no limit."""
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
    """The last hosts get the servers, but hosts that take no workers come first.

    The number of server hosts minimizes the processes on the fullest host. Of several such numbers the smallest is
    taken, because workers need the hosts to compute.
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
            f"--placement dedicated: {_counted(len(hosts), 'host')} cannot take {servers} on the last hosts and "
            f"{workers} on the others; add hosts or slots=, set roles= per host, or choose another --placement"
        )
    return min(fitting, key=lambda split: max(map(_most_on_one, split)))


def _divisions(num_servers: int, hosts: Hosts) -> Iterator[tuple[list[Host], list[Host]]]:
    """Ways to divide hosts: (the last one, the others), (the last two, the others), ..., in the order of `hosts`."""
    able = sorted((host for host in hosts if slots_for(host, SERVER)), key=lambda host: not slots_for(host, WORKER))
    for count in range(1, min(num_servers, len(able)) + 1):
        last = {host.name for host in able[-count:]}
        yield [host for host in hosts if host.name in last], [host for host in hosts if host.name not in last]


POLICIES = {
    "dmlc": Policy("servers, then workers, round robin", _dmlc),
    "pack": Policy("each role fills one host before the next", _pack),
    "spread": Policy("each role round robin from the first host", _spread),
    "dedicated": Policy("the last hosts run servers only", _dedicated),
}


def listing() -> str:
    """The table as text, for --help and error messages."""
    return ", ".join(f"{name} ({policy.meaning})" for name, policy in POLICIES.items())


def _round_robin(role: str, count: int, hosts: Hosts, start: int = 0) -> tuple[list[Host], int]:
    """`count` hosts from index `start` on, skipping full hosts; and the index after the last one taken.

    The hosts must have slots for `count` processes.
    """
    left = [slots_for(host, role) for host in hosts]
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
    """`count` hosts; each is repeated until it is full, before the next is used."""
    chosen: list[Host] = []
    able = [host for host in hosts if slots_for(host, role)]
    for host in able:
        if len(chosen) < count:
            most = _full(host, role) if len(able) > 1 else math.inf
            chosen += [host] * int(min(most, count - len(chosen)))
    if len(chosen) < count:
        sizes = _listed(hosts, lambda host: str(_full(host, role) if host in able else 0))
        raise LaunchError(
            f"{OPTION[role]} {count} --placement pack: the hosts take at most {_counted(len(chosen), role)}: {sizes}; "
            f"set slots= per host, reduce {OPTION[role]}, or choose another --placement"
        )
    return chosen


def _full(host: Host, role: str) -> int:
    """How many processes fill a host: its slots, else one per GPU, else one per core."""
    if host.slots is not None:
        return host.slots
    if not host.gpus and host.cores == 1:  # also the default before an agent has counted the cores
        named = f"{host.name} ({host.where})" if host.where else host.name
        raise LaunchError(f"--placement pack: the number of {role}s that fill {named} is unknown; set slots=N or gpus=")
    return len(host.gpus) or host.cores


def _scheduler_host(hosts: Hosts, servers: Hosts, policy: str) -> Host:
    """A host with the role in roles=, else the first host without roles=, else the host of server 0."""
    named = [host for host in hosts if SCHEDULER in host.roles]
    free = [host for host in hosts if not host.roles and policy != "dedicated"]
    return next(iter([*named, *free, *servers]))


def _check_room(role: str, count: int, hosts: Hosts) -> None:
    if _has_room(role, count, hosts):
        return
    total = int(sum(slots_for(host, role) for host in hosts))
    if total:
        rooms = _listed(hosts, lambda host: f"{slots_for(host, role):.0f}")
        raise LaunchError(
            f"{OPTION[role]} {count}: the hosts have slots for {_counted(total, role)}: {rooms}; "
            f"increase slots= or reduce {OPTION[role]}"
        )
    roles = _listed(hosts, lambda host: f"roles={','.join(host.roles)}")
    raise LaunchError(f"{OPTION[role]} {count}: no host takes {role}s: {roles}; add {role} to roles= of one")


def _has_room(role: str, count: int, hosts: Hosts) -> bool:
    return sum(slots_for(host, role) for host in hosts) >= count


def _most_on_one(chosen: Hosts) -> int:
    return max(Counter(host.name for host in chosen).values(), default=0)


def _listed(hosts: Hosts, value: Callable[[Host], str]) -> str:
    texts = [f"{host.name} {value(host)}" for host in hosts[:LISTED_HOSTS]]
    rest = len(hosts) - LISTED_HOSTS
    return ", ".join([*texts, f"and {rest} more"] if rest > 0 else texts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def threads(workers: Sequence[Host]) -> dict[str, int]:
    """Threads per worker by host name; `workers` has the host of each worker.

    Each CPU and each limit is divided equally among all workers that may use it, even if they are on different hosts.
    """
    counts = Counter(host.name for host in workers)
    hosts = {host.name: host for host in workers}
    users: Counter[Resource] = Counter()  # how many workers share a CPU or a limit
    for name, host in hosts.items():
        for resource in [*_cpus(host), *_limits(host)]:
            users[resource] += counts[name]
    return {name: max(1, int(_share(host, users) + ROUNDING)) for name, host in hosts.items()}


def _share(host: Host, users: Mapping[Resource, int]) -> float:
    cpus = sum(1 / users[cpu] for cpu in _cpus(host))
    return min([cpus, *(cores / users[limit] for limit, cores in _limits(host).items())])


def _cpus(host: Host) -> list[Resource]:
    """Each CPU that the host may use, with its kernel."""
    if host.machine is None:
        return [(host.name, cpu) for cpu in range(host.cores)]
    return [(host.machine.boot_id or host.name, cpu) for cpu in host.machine.cpus]


def _limits(host: Host) -> dict[Resource, float]:
    if host.machine is None:
        return {}
    kernel = host.machine.boot_id or host.name
    return {(kernel, "limit", group): cores for group, cores in host.machine.limits}
