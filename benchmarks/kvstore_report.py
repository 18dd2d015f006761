"""From the turns of all teams to the kvstore benchmark's JSON and its table. Pure."""

import statistics
from collections.abc import Sequence

from kvstore_team import Team

MOMENTUM_MODES = ("momentum-worker", "momentum-server")  # dmltrain's; the ratio takes the better one and names it
LIMITS = {
    "memcpy": "memcpy, one thread",
    "sum_in_place": "sum in place, one thread",
    "tcp_one_way": "one TCP stream, one way",
}


def report(teams: list[Team], limits: list[dict[str, float]], facts: dict) -> dict:
    """Everything a reader needs to judge and repeat the run, as JSON values; times in seconds."""
    turns = {(team.contest.system, team.contest.mode): [block.seconds for block in team.blocks] for team in teams}
    momentum = {mode: pairs(turns, ("mxnet", "momentum"), ("dmltrain", mode)) for mode in MOMENTUM_MODES}
    best = max(momentum, key=lambda mode: median(momentum[mode]) or 0.0)
    paired = {"sum": pairs(turns, ("mxnet", "sum"), ("dmltrain", "sum")), "momentum": momentum[best]}
    gloo = {mode: pairs(turns, ("gloo", mode), ("dmltrain", "sum")) for mode in ("tensors", "flat")}
    return {
        "ratio_to_mxnet": {name: median(ratios) for name, ratios in paired.items()},
        "ratio_to_mxnet_momentum_is_of": best if momentum[best] else None,
        "ratio_to_mxnet_of_each_turn": paired | momentum,
        "ratio_to_gloo": {mode: median(ratios) for mode, ratios in gloo.items()},
        "contests": [contest(team) for team in teams],
        "limits": {name: spread([limit[name] for limit in limits]) for name in LIMITS},
        **facts,
    }


def pairs(turns: dict[tuple[str, str], list[float]], other: tuple[str, str], ours: tuple[str, str]) -> list[float]:
    """How many times faster ours was in each pair of turns; empty if one of the two did not run."""
    return [a / b for a, b in zip(turns.get(other, []), turns.get(ours, []), strict=False)]


def median(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return statistics.median(values) if values else None


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def contest(team: Team) -> dict:
    """One team's figures, per step unless said otherwise."""
    return {
        "system": team.contest.system,
        "mode": team.contest.mode,
        "label": team.contest.label,
        "seconds": spread([block.seconds for block in team.blocks]),
        "seconds_of_each_turn": [block.seconds for block in team.blocks],
        "worker_cpu_seconds": statistics.median(block.worker_cpu_seconds for block in team.blocks),
        "server_cpu_seconds": statistics.median(block.server_cpu_seconds for block in team.blocks),
        "other_cores": statistics.median(block.other_cores for block in team.blocks),  # taken by all the rest
        "idle_cores": team.idle_cores(),  # taken while others had their turn
        "command": team.command[1:],
        "omp_num_threads": team.base.get("OMP_NUM_THREADS"),
    }


def table(result: dict) -> str:
    """The report as text."""
    work, turns, machine = result["workload"], result["turns"], result["machine"]
    lines = [
        f"{work['keys']} keys, {work['bytes'] / 1e6:.1f} MB, {work['workers']} workers, {work['servers']} server(s); "
        f"ms per push and pull of all, {turns['repeats']} turns of {turns['steps']} steps after {turns['warm_up']}",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number),
        "",
        f"{'':44}{'median':>8}{'min':>8}{'max':>8}   CPU: workers  servers    idle  others",
    ]
    for row in result["contests"]:
        lines.append(
            f"{row['label']:44}{milliseconds(row['seconds'])}{row['worker_cpu_seconds'] * 1e3:15.0f}"
            f"{row['server_cpu_seconds'] * 1e3:9.0f}{row['idle_cores']:8.2f}{row['other_cores']:8.2f}"
        )
    for name, label in LIMITS.items():
        rate = work["bytes"] / result["limits"][name]["median"] / 1e9
        lines.append(f"{label + ', the same bytes':44}{milliseconds(result['limits'][name])}   ({rate:.1f} GB/s)")
    return "\n".join([*lines, "", *ratio_lines(result)])


def milliseconds(seconds: dict[str, float]) -> str:
    """Three columns."""
    return "".join(f"{seconds[name] * 1e3:8.1f}" for name in ("median", "min", "max"))


def ratio_lines(result: dict) -> list[str]:
    """How many times faster dmltrain is, with the pairs it is the median of."""
    label = {"sum": "sum only", "momentum": f"SGD momentum ({result['ratio_to_mxnet_momentum_is_of']})"}
    lines = [
        f"dmltrain / MXNet, {label[name]}: {ratio:.2f}x  (turns: "
        + " ".join(f"{each:.2f}" for each in result["ratio_to_mxnet_of_each_turn"][name]) + ")"
        for name, ratio in result["ratio_to_mxnet"].items()
        if ratio is not None
    ]
    gloo = [f"{ratio:.2f}x ({mode})" for mode, ratio in result["ratio_to_gloo"].items() if ratio is not None]
    return lines + ([f"dmltrain / gloo all-reduce, sum only: {', '.join(gloo)}"] if gloo else [])
