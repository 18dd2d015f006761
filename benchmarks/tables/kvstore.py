"""The kvstore benchmark's JSON and table, computed from the turns of all teams. Pure."""

import statistics
from collections.abc import Sequence

from contest.team import Team
from report import spread

MOMENTUM_MODES = ("momentum-worker", "momentum-server")  # dmltrain's; the ratio takes the better one and names it
TRANSPORTS = ("tcp", "shm")
LIMITS = {
    "memcpy": "memcpy, one thread",
    "sum_in_place": "sum in place, one thread",
    "tcp_one_way": "one TCP stream, one way",
}


def report(teams: list[Team], limits: list[dict[str, float]], facts: dict) -> dict:
    """All figures and facts, to judge and repeat the run, as JSON values; times in seconds."""
    turns = {key_of(team): [block.seconds for block in team.blocks] for team in teams}
    to_mxnet = {way: pairs(turns, ("mxnet", "sum", ""), ("dmltrain", "sum", way)) for way in TRANSPORTS}
    momentum = {mode: pairs(turns, ("mxnet", "momentum", ""), ("dmltrain", mode, "shm")) for mode in MOMENTUM_MODES}
    best = max(momentum, key=lambda mode: median(momentum[mode]) or 0.0)
    gloo = {
        f"{way}, {mode}": pairs(turns, ("gloo", mode, ""), ("dmltrain", "sum", way))
        for way in TRANSPORTS
        for mode in ("tensors", "flat")
    }
    plain = ("dmltrain", "sum", "tcp")
    to_plain = {level: pairs(turns, ("dmltrain", "sum", f"tcp {level}"), plain) for level in ("auth", "tls")}
    shm = turns.get(("dmltrain", "sum", "shm"), [])
    bound = [bound_seconds(limit, facts["workload"]) for limit in limits]
    return {
        "ratio_to_mxnet": {way: median(ratios) for way, ratios in to_mxnet.items()},
        "ratio_to_mxnet_momentum": median(momentum[best]),
        "ratio_to_mxnet_momentum_is_of": best if momentum[best] else None,
        "ratio_to_mxnet_of_each_turn": to_mxnet | momentum,
        "ratio_to_gloo": {which: median(ratios) for which, ratios in gloo.items()},
        "time_to_plain": {level: median(ratios) for level, ratios in to_plain.items()},
        "share_of_memory_bound": median([b / t for b, t in zip(bound, shm, strict=False)]),
        "contests": [contest(team) for team in teams],
        "limits": {name: spread([limit[name] for limit in limits]) for name in LIMITS},
        **facts,
    }


def key_of(team: Team) -> tuple[str, str, str]:
    """What identifies a contest."""
    protected = f" {team.contest.wire}" if team.contest.wire != "plain" else ""
    return team.contest.system, team.contest.mode, team.contest.transport + protected


def bound_seconds(limit: dict[str, float], workload: dict) -> float:
    """Seconds to move (workers + 1) V bytes at memcpy's rate: each worker's gradient is read once, and the sum is
    written once. (memcpy reads V bytes and writes V bytes.)"""
    return (workload["workers"] + 1) / 2 * limit["memcpy"]


def pairs(
    turns: dict[tuple[str, str, str], list[float]], other: tuple[str, str, str], ours: tuple[str, str, str]
) -> list[float]:
    """How many times faster ours was in each pair of turns; empty if one of the two did not run."""
    return [a / b for a, b in zip(turns.get(other, []), turns.get(ours, []), strict=False)]


def median(values: Sequence[float]) -> float | None:
    """The median, or None of no values."""
    return statistics.median(values) if values else None


def contest(team: Team) -> dict:
    """One team's figures; times of a step."""
    return {
        "system": team.contest.system,
        "mode": team.contest.mode,
        "transport": team.contest.transport,
        "wire": team.contest.wire,
        "label": team.contest.label,
        "seconds": spread([block.seconds for block in team.blocks]),
        "seconds_of_each_turn": [block.seconds for block in team.blocks],
        "worker_cpu_seconds": statistics.median(block.worker_cpu_seconds for block in team.blocks),
        "server_cpu_seconds": statistics.median(block.server_cpu_seconds for block in team.blocks),
        "other_cores": statistics.median(block.other_cores for block in team.blocks),  # used by the rest of the machine
        "idle_cores": team.idle_cores(),  # used outside its turns
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
    """Median, minimum and maximum, in three columns."""
    return "".join(f"{seconds[name] * 1e3:8.1f}" for name in ("median", "min", "max"))


def ratio_lines(result: dict) -> list[str]:
    """How many times faster dmltrain is: medians, and the pairs of turns."""
    best, each = result["ratio_to_mxnet_momentum_is_of"], result["ratio_to_mxnet_of_each_turn"]
    ratios = {way: (f"sum only, {way}", ratio) for way, ratio in result["ratio_to_mxnet"].items()}
    ratios |= {best: (f"SGD momentum ({best}), shm", result["ratio_to_mxnet_momentum"])}
    lines = [
        f"dmltrain / MXNet, {label}: {ratio:.2f}x  (turns: {' '.join(f'{turn:.2f}' for turn in each[name])})"
        for name, (label, ratio) in ratios.items()
        if ratio is not None
    ]
    gloo = [f"{ratio:.2f}x ({which})" for which, ratio in result["ratio_to_gloo"].items() if ratio is not None]
    share = result["share_of_memory_bound"]
    bound = [] if share is None else [f"shm reaches {share:.0%} of the bound: (n + 1) V bytes at memcpy's rate"]
    protected = [f"{ratio:.2f}x ({level})" for level, ratio in result["time_to_plain"].items() if ratio is not None]
    lines += [f"time with --wire / plain, tcp: {', '.join(protected)}"] if protected else []
    return lines + ([f"dmltrain / gloo all-reduce, sum only: {', '.join(gloo)}"] if gloo else []) + bound
