"""The JSON and table of the comparison with DDP, computed from the turns of all systems."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Protocol

from contest.team import Team
from contest.training_systems import SYSTEMS
from report import spread

from tables.hosts import TOO_MANY_CORES, UNEVEN, Traffic, bound_seconds

BASELINE = "ddp"


class Run(Protocol):
    """See ddp.py."""

    network: str
    bytes: int
    teams: list[Team]
    goodput: list[list[float]]
    traffic: dict[str, list[Traffic]]


def report(runs: Sequence[Run], about: dict[str, Any]) -> dict[str, Any]:
    """All figures and facts, to judge and repeat the run, as JSON values; times in seconds."""
    networks = [_network(run, about) for run in runs]
    return {"networks": networks, **about, "doubts": [each for one in networks for each in one.pop("doubts")]}


def _network(run: Run, about: dict[str, Any]) -> dict[str, Any]:
    goodput = statistics.median(statistics.fmean(turn) for turn in run.goodput) if run.goodput else None
    bound = bound_seconds(about["workers"], run.bytes, goodput) if goodput else None
    turns = {team.contest.system: [block.seconds for block in team.blocks] for team in run.teams}
    digests = {team.contest.system: _digest(team) for team in run.teams}
    rows = [
        {**_row(team, turns, digests, bound, about["workers"] * about["batch"]), **_traffic(run, team)}
        for team in run.teams
    ]
    return {
        "network": run.network,
        "bytes": run.bytes,
        "goodput": goodput,
        "goodput_of_each_turn": run.goodput,
        "bound_seconds": bound,
        "systems": rows,
        "doubts": [f"{run.network}: {doubt}" for doubt in _doubts(run)],
    }


def _row(
    team: Team, turns: dict[str, list[float]], digests: dict[str, str | None], bound: float | None, samples: int
) -> dict[str, Any]:
    name, own = team.contest.system, turns[team.contest.system]
    seconds = spread(own)
    ratios = [a / b for a, b in zip(turns.get(BASELINE, []), own, strict=False)]
    return {
        "system": name,
        "label": team.contest.label,
        "seconds": seconds,
        "seconds_of_each_turn": own,
        "samples_per_second": samples / seconds["median"],
        "ratio_to_ddp": spread(ratios) if ratios else None,
        "cpu_seconds": statistics.median(block.worker_cpu_seconds + block.server_cpu_seconds for block in team.blocks),
        "share_of_bound": bound / seconds["median"] if bound else None,
        "weights": digests[name],
        "weights_as_ddp": None
        if BASELINE not in digests or SYSTEMS[name].lossy
        else digests[name] == digests[BASELINE],
        "other_cores": statistics.median(block.other_cores for block in team.blocks),
        "idle_cores": team.idle_cores(),
    }


def _traffic(run: Run, team: Team) -> dict[str, Any]:
    turns = run.traffic.get(team.contest.system)
    return {"busiest_link_bytes": spread([turn.busiest for turn in turns]) if turns else None}


def _digest(team: Team) -> str | None:
    """Of all workers' weights after the last turn; None if they differ."""
    found = {answer["digest"] for answer in team.answers}
    return found.pop() if len(found) == 1 else None


def _doubts(run: Run) -> list[str]:
    """Reasons not to trust the times, or the comparison."""
    each = [statistics.fmean(turn) for turn in run.goodput]
    found = []
    if each and max(each) > (1 + UNEVEN) * min(each):
        found.append(f"the goodput was between {min(each) * 8e-6:.0f} and {max(each) * 8e-6:.0f} Mbit/s")
    for team in run.teams:
        others = statistics.median(block.other_cores for block in team.blocks)
        if others > TOO_MANY_CORES:
            found.append(f"{team.contest.label}: others used {others:.2f} cores during its turns")
        if team.idle_cores() > TOO_MANY_CORES:
            found.append(f"{team.contest.label}: used {team.idle_cores():.2f} cores outside its turns")
        if SYSTEMS[team.contest.system].synchronous and _digest(team) is None:
            found.append(f"{team.contest.label}: its workers' weights differ")
    return found


def table(result: dict[str, Any]) -> str:
    """The report as text."""
    machine, turns = result["machine"], result["turns"]
    where = f"hosts with links of {result['rate']}, each a worker and a server" if result["rate"] else "workers"
    where += f", but for one of {result['slow_link']}" if result["slow_link"] else ""
    sleeps = [f"{result[name]:g} s of sleep {what}" for name, what in SLEEPS.items() if result[name]]
    if result["stragglers"]:
        sleeps.append("{1:g} times as long with a probability of {0:g}".format(*result["stragglers"]))
    if result["freeze"]:
        sleeps.append("worker 1 sleeps for {:g} s after every {:g} s".format(*result["freeze"]))
    lines = [
        ", ".join([f"{result['workers']} {where}", f"{result['batch']} samples a worker", *sleeps])
        + f"; {turns['repeats']} turns of {turns['steps']} steps after {turns['warm_up']}",
        f"{machine['processor']}, {machine['cores']} cores in all, {machine['system']}; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number),
    ]
    for network in result["networks"]:
        lines += ["", *_lines(network)]
    return "\n".join([*lines, *(f"do not trust these figures: {doubt}" for doubt in result["doubts"])])


SLEEPS = {"pause": "before each forward", "by_layer": "in all layers"}


def _lines(network: dict[str, Any]) -> list[str]:
    bound = network["bound_seconds"]
    lower = f", bound 2(n-1)V/(nB) {bound * 1e3:.1f} ms at {network['goodput'] * 8e-6:.0f} Mbit/s" if bound else ""
    return [
        f"{network['network']}: {network['bytes'] / 1e6:.1f} MB{lower}",
        f"{'ms a step':26}{'median':>9}{'min':>9}{'max':>9}{'x DDP':>8}{'samples/s':>11}{'CPU s':>8}{'MB':>8}"
        f"{'bound/time':>12}  weights",
        *map(_line, network["systems"]),
    ]


def _line(row: dict[str, Any]) -> str:
    seconds = "".join(f"{row['seconds'][name] * 1e3:9.1f}" for name in ("median", "min", "max"))
    ratio = f"{row['ratio_to_ddp']['median']:.2f}" if row["ratio_to_ddp"] else ""
    share = f"{row['share_of_bound']:.1%}" if row["share_of_bound"] else ""
    megabytes = f"{row['busiest_link_bytes']['median'] / 1e6:.1f}" if row["busiest_link_bytes"] else ""
    weights = {None: "", True: "as DDP", False: "others"}[row["weights_as_ddp"]]
    return (
        f"{row['label']:26}{seconds}{ratio:>8}{row['samples_per_second']:11.1f}{row['cpu_seconds']:8.3f}{megabytes:>8}"
        f"{share:>12}  {weights}"
    )
