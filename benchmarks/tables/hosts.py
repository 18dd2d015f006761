"""The five-host benchmark's JSON and table, computed from the turns of all teams on the test bed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from contest.bed import Bed
from contest.team import Team
from report import spread

from tables.kvstore import contest, pairs

TOO_MANY_CORES = 0.1  # used by others during a turn, or by a system outside its turns: do not trust the times
UNEVEN = 0.03  # share by which the goodput may differ between turns; more shows other load on links or cores


@dataclass(frozen=True)
class Traffic:
    """The traffic of the hosts' links, headers included."""

    links: dict[str, tuple[int, int]]  # host -> bytes (received, sent)
    retransmits: float  # TCP segments, all hosts
    steps: float = 1

    @staticmethod
    def read(bed: Bed) -> Traffic:
        return Traffic(bed.link_bytes(), bed.retransmits())

    def since(self, before: Traffic, steps: float) -> Traffic:
        """The traffic since `before`, which took `steps` steps."""
        links = {
            host: (got - before.links[host][0], sent - before.links[host][1])
            for host, (got, sent) in self.links.items()
        }
        return Traffic(links, self.retransmits - before.retransmits, steps)

    @property
    def busiest(self) -> float:
        """Bytes in a step in the busiest direction of any host's link."""
        return max(max(link) for link in self.links.values()) / self.steps

    @property
    def mean(self) -> float:
        """Mean bytes in a step in one direction of a host's link."""
        return statistics.fmean(way for link in self.links.values() for way in link) / self.steps


def bound_seconds(hosts: int, size: int, goodput: float) -> float:
    """The lower bound on the time of a step with a worker and a server on each host: each link carries its worker's
    pushes to the other hosts and its server's answers to the other workers. `size` in bytes, `goodput` in bytes/s."""
    return 2 * (hosts - 1) * size / (hosts * goodput)


def report(
    teams: Sequence[Team], traffic: Sequence[Sequence[Traffic]], goodput: Sequence[Sequence[float]], facts: dict
) -> dict:
    """All figures and facts, to judge and repeat the run, as JSON values; times in seconds."""
    work = facts["workload"]
    best = statistics.median(statistics.fmean(turn) for turn in goodput)
    bound = bound_seconds(work["hosts"], work["bytes"], best)
    turns = {(team.contest.system, team.contest.variant): [block.seconds for block in team.blocks] for team in teams}
    rows = [row(team, each, bound, turns) for team, each in zip(teams, traffic, strict=True)]
    result = {
        "goodput": best,
        "goodput_of_each_turn": [list(turn) for turn in goodput],
        "bound_seconds": bound,
        "contests": rows,
        **facts,
    }
    return {**result, "doubts": doubts(result)}


def row(team: Team, traffic: Sequence[Traffic], bound: float, turns: dict[tuple[str, str], list[float]]) -> dict:
    """One team's figures."""
    own = (team.contest.system, team.contest.variant)
    figures = contest(team)
    seconds = figures["seconds"]["median"]
    return {
        **figures,
        "gc_type": team.contest.codec,
        "host_sum": team.contest.host_sum or "auto",
        "wire": team.contest.wire,
        "share_of_bound": bound / seconds,
        "above_bound": seconds / bound - 1,
        "ratio_to_mxnet": ratio(turns, ("mxnet", "none"), own),
        "ratio_to_none": ratio(turns, ("dmltrain", "none"), own),
        "cores": (figures["worker_cpu_seconds"] + figures["server_cpu_seconds"]) / seconds,
        "busiest_link_bytes": spread([turn.busiest for turn in traffic]),  # of a step
        "mean_link_bytes": spread([turn.mean for turn in traffic]),
        "retransmitted_segments": statistics.median(turn.retransmits / turn.steps for turn in traffic),
    }


def ratio(turns: dict[tuple[str, str], list[float]], other: tuple[str, str], own: tuple[str, str]) -> float | None:
    """How many times faster than the other, median over pairs of turns; None if one did not run."""
    values = pairs(turns, other, own) if own != other else []
    return statistics.median(values) if values else None


def doubts(result: dict) -> list[str]:
    """Reasons not to trust the times; empty if there are none."""
    each = [statistics.fmean(turn) for turn in result["goodput_of_each_turn"]]
    found = (
        [f"the goodput was between {min(each) * 8e-6:.0f} and {max(each) * 8e-6:.0f} Mbit/s"]
        if max(each) > (1 + UNEVEN) * min(each)
        else []
    )
    for entry in result["contests"]:
        if entry["other_cores"] > TOO_MANY_CORES:
            found.append(f"{entry['label']}: others used {entry['other_cores']:.2f} cores during its turns")
        if entry["idle_cores"] > TOO_MANY_CORES:
            found.append(f"{entry['label']}: used {entry['idle_cores']:.2f} cores outside its turns")
    return found


def table(result: dict) -> str:
    """The report as text."""
    work, turns, machine = result["workload"], result["turns"], result["machine"]
    each = [way for turn in result["goodput_of_each_turn"] for way in turn]
    lines = [
        f"{work['hosts']} hosts, each {counted(work['workers_per_host'])} and a server, links of {result['rate']}; "
        f"{work['keys']} keys, {work['bytes'] / 1e6:.1f} MB; "
        f"{turns['repeats']} turns of {turns['steps']} steps after {turns['warm_up']}",
        f"{machine['processor']}, {machine['cores']} cores for all hosts, {machine['system']}; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number),
        "",
        f"goodput B, all links busy both ways (iperf3): {result['goodput'] * 8e-6:.1f} Mbit/s "
        f"({min(each) * 8e-6:.1f} to {max(each) * 8e-6:.1f})",
        f"bound 2(n-1)V/(nB): {result['bound_seconds'] * 1e3:.1f} ms",
        "",
        f"{'ms a step':30}{'median':>8}{'min':>8}{'max':>8} {'bound/time':>10} {'x MXNet':>8} {'x none':>7}"
        f" {'MB a link':>10} {'resent':>7} {'cores':>6} {'idle':>5} {'others':>6}",
        *(line(entry) for entry in result["contests"]),
    ]
    return "\n".join([*lines, *(f"do not trust these times: {doubt}" for doubt in result["doubts"])])


def counted(workers: int) -> str:
    return "a worker" if workers == 1 else f"{workers} workers"


def line(entry: dict) -> str:
    """One row. MB a link: in a step, busiest direction; resent: TCP segments retransmitted in a step."""
    seconds = "".join(f"{entry['seconds'][name] * 1e3:8.1f}" for name in ("median", "min", "max"))
    times = [f"{entry[name]:.2f}x" if entry[name] else "" for name in ("ratio_to_mxnet", "ratio_to_none")]
    return (
        f"{entry['label']:30}{seconds} {entry['share_of_bound']:10.1%} {times[0]:>8} {times[1]:>7}"
        f" {entry['busiest_link_bytes']['median'] / 1e6:10.1f} {entry['retransmitted_segments']:7.0f}"
        f" {entry['cores']:6.2f} {entry['idle_cores']:5.2f} {entry['other_cores']:6.2f}"
    )
