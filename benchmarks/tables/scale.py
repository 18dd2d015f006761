"""The scale benchmark's JSON and table, computed from the turns of all cells. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
from contest.cells import BASE, MEMORY_BYTES, Measured
from contest.team import Block
from report import spread

from tables.kvstore import bound_seconds

HALF = 0.5  # of the bound; the report explains cells below it
TOO_MANY_CORES = 0.15  # used by others
HEAD = (
    "workers",
    "servers",
    "keys",
    "MB",
    "slices",
    "ms",
    "bound, ms",
    "of the bound",
    "slices alone, ms",
    "CPU ms: workers",
    "servers",
)


def row(measured: Measured) -> dict:
    """One cell's figures; times in seconds, of a step."""
    cell = measured.cell
    limits = [{"memcpy": seconds * measured.bytes / MEMORY_BYTES} for seconds in measured.memcpy]
    bounds = [bound_seconds(limit, {"workers": cell.workers}) for limit in limits]
    seconds = [block.seconds for block in measured.blocks]
    return {
        **{name: getattr(cell, name) for name in (*BASE, "slices")},
        "bytes": measured.bytes,
        "seconds": spread(seconds),
        "bound_seconds": statistics.median(bounds),
        "share_of_bound": statistics.median(bound / time for bound, time in zip(bounds, seconds, strict=True)),
        "worker_cpu_seconds": median_of(measured.blocks, lambda block: block.worker_cpu_seconds),  # of all together
        "server_cpu_seconds": median_of(measured.blocks, lambda block: block.server_cpu_seconds),
        "other_cores": median_of(measured.blocks, lambda block: block.other_cores),
        "slices_alone": {
            "seconds": median_of(measured.twin, lambda block: block.seconds),
            "worker_cpu_seconds": median_of(measured.twin, lambda block: block.worker_cpu_seconds),
            "server_cpu_seconds": median_of(measured.twin, lambda block: block.server_cpu_seconds),
        },
    }


def median_of(blocks: Sequence[Block], figure: Callable[[Block], float]) -> float:
    return statistics.median(map(figure, blocks))


def report(cells: Sequence[Measured], facts: dict) -> dict:
    """All figures and facts, to judge and repeat the run, as JSON values; times in seconds."""
    rows = [row(measured) for measured in cells]
    return {
        "cells": rows,
        "fixed_cost": fixed_cost(rows),
        "memcpy_bytes_per_second": MEMORY_BYTES / statistics.median(sum((cell.memcpy for cell in cells), [])),
        **facts,
    }


def fixed_cost(rows: Sequence[dict]) -> dict | None:
    """The cost of a step and of each slice without their bytes, from the twins with the base cell's workers and
    servers: seconds, and CPU seconds of one worker and one server. None if all have equally many slices."""
    same = [row for row in rows if (row["workers"], row["servers"]) == (rows[0]["workers"], rows[0]["servers"])]
    if len({row["slices"] for row in same}) < 2:
        return None
    slices = [row["slices"] for row in same]
    ways = {"seconds": 1, "worker_cpu_seconds": rows[0]["workers"], "server_cpu_seconds": rows[0]["servers"]}
    lines = {
        way: np.polyfit(slices, [row["slices_alone"][way] / count for row in same], 1, w=1 / np.array(slices))
        for way, count in ways.items()
    }  # weights: errors of measurement are relative, not absolute
    return {
        "workers": rows[0]["workers"],
        "servers": rows[0]["servers"],
        "step": {way: max(0.0, float(line[1])) for way, line in lines.items()},
        "slice": {way: float(line[0]) for way, line in lines.items()},
    }


def table(result: dict) -> str:
    """The report as Markdown."""
    machine, turns = result["machine"], result["turns"]
    lines = [
        f"`{result['command']}`: {machine['processor']}, {machine['cores']} cores, {machine['system']}; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        + ".",
        f"Sum only, {result['transport']}; median of {turns['repeats']} turns. The bound: (n + 1)V bytes at memcpy's "
        f"rate, {result['memcpy_bytes_per_second'] / 1e9:.1f} GB/s read and as much written, one thread.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{' ---: |' * len(HEAD)}",
        *(f"| {' | '.join(texts(entry))} |" for entry in result["cells"]),
    ]
    return "\n".join([*lines, "", *fixed_lines(result["fixed_cost"]), *explanations(result), *doubts(result)])


def texts(entry: dict) -> list[str]:
    """The cells of one row."""
    times = (entry["seconds"]["median"], entry["bound_seconds"])
    ours = (entry["slices_alone"]["seconds"], entry["worker_cpu_seconds"], entry["server_cpu_seconds"])
    return [
        *(f"{entry[name]:g}" for name in (*BASE, "slices")),
        *map(milliseconds, times),
        f"{entry['share_of_bound']:.0%}",
        *map(milliseconds, ours),
    ]


def milliseconds(seconds: float) -> str:
    """Milliseconds with at least two digits."""
    return f"{seconds * 1e3:.{2 if seconds < 1e-3 else 1 if seconds < 1e-2 else 0}f}"


def fixed_lines(fixed: dict | None) -> list[str]:
    """The cost of empty slices."""
    if fixed is None:
        return []
    step, slice_ = fixed["step"], fixed["slice"]
    return [
        f"Fixed cost with {fixed['workers']} workers and {fixed['servers']} server(s): {step['seconds'] * 1e3:.1f} "
        f"ms a step and {slice_['seconds'] * 1e6:.0f} us a slice, of which CPU: each worker "
        f"{slice_['worker_cpu_seconds'] * 1e6:.0f} us, each server {slice_['server_cpu_seconds'] * 1e6:.0f} us.",
        "",
    ]


def explanations(result: dict) -> list[str]:
    """Explanations of the cells below half of the bound."""
    below = [entry for entry in result["cells"] if entry["share_of_bound"] < HALF]
    return [f"- {name(entry)}: {explained(entry, result['machine']['cores'])}" for entry in below]


def name(entry: dict) -> str:
    """The description of a cell."""
    return (
        f"{entry['workers']} worker(s), {entry['servers']} server(s), {entry['keys']} keys, "
        f"{entry['megabytes']:g} MB ({entry['share_of_bound']:.0%})"
    )


def explained(entry: dict, cores: int) -> str:
    """The parts of a step that do not move bytes."""
    time, alone = entry["seconds"]["median"], entry["slices_alone"]["seconds"]
    busy = (entry["worker_cpu_seconds"] + entry["server_cpu_seconds"]) / cores
    processes = entry["workers"] + entry["servers"]
    causes = [f"its {entry['slices']} slices take {milliseconds(alone)} of {milliseconds(time)} ms without their bytes"]
    if processes > cores:
        causes.append(f"{processes} processes on {cores} cores: their CPU time takes {milliseconds(busy)} ms of each")
    return "; ".join(causes)


def doubts(result: dict) -> list[str]:
    """Reasons not to trust the times; empty if there are none."""
    others = [entry["other_cores"] for entry in result["cells"] if entry["other_cores"] > TOO_MANY_CORES]
    return (
        [
            f"- do not trust these times: in {len(others)} of {len(result['cells'])} cells other processes used up to "
            f"{max(others):.2f} cores"
        ]
        if others
        else []
    )
