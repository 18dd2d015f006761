"""Which share of the weights each server holds, by the speed of the hosts' links. Pure.

In a step of dist_sync a host with workers sends its gradients, except those that its own servers sum. Its servers send
their values to all other hosts with workers. With V bytes of weights of which the host's servers hold the share s, and
m hosts with workers, that is V (1 - s) + s V (m - 1) for a host with workers, and s V m for a host of servers only. It
receives as much. The slowest host decides when a step ends. So the shares are those for which all hosts take the same
time, or hold nothing: a host whose link is much slower than the others' only sends and receives its own gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

SIMILAR = 1.5  # rates that differ by less are taken for equal: measurements differ by chance
STEPS = 60  # of the bisection


def shares(workers: Sequence[str], servers: Sequence[str], rates: Mapping[str, float]) -> list[float]:
    """The share of each server, at most 1 in all. `workers` and `servers`: the host of each; `rates`: bytes/s of hosts,
    in any unit; a host without a rate counts as the fastest. Equal shares where nothing else is better."""
    count, hosts = Counter(servers), list(dict.fromkeys(servers))
    equal = [1.0 / len(servers)] * len(servers)
    known = [rate for rate in rates.values() if rate > 0]
    training = set(workers)
    if not known or max(known) < SIMILAR * min(known):
        return equal
    own = {host: rates.get(host) or max(known) for host in hosts}
    base = {host: float(host in training) for host in hosts}
    each = {host: len(training) - 2 * base[host] for host in hosts}  # bytes for each byte that it holds
    if min(each.values()) <= 0:  # two hosts with workers send as much, whatever they hold
        return equal

    def held(seconds: float) -> dict[str, float]:
        return {host: max(0.0, (seconds * own[host] - base[host]) / each[host]) for host in hosts}

    low, high = 0.0, (len(training) + 1.0) / min(own.values())
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(held(middle).values()) < 1.0 else (low, middle)
    found = held(high)
    return [found[host] / sum(found.values()) / count[host] for host in servers]
