"""The number of threads of each worker, so that the workers of a machine share its cores. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dmltrain_launch.job.host import Host

Resource = tuple[str | int, ...]  # a CPU or a limit; the first item identifies the kernel
ROUNDING = 1e-9  # sums of reciprocals: a third of six cores comes out a little below two


def threads(workers: Sequence[Host]) -> dict[str, int]:
    """Threads per worker by host name; `workers` has the host of each worker.

    Each CPU and each limit is divided equally among all workers that may use it, even if they are on different hosts.
    """
    counts = Counter(host.name for host in workers)
    hosts = {host.name: host for host in workers}
    users: Counter[Resource] = Counter()  # how many workers share a CPU or a limit
    for name, host in hosts.items():
        for each in [*_cpus(host), *_limits(host)]:
            users[each] += counts[name]
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
