"""Collectives of torch.distributed: the backend dmltrain against gloo, in one job, in turns.

    python benchmarks/collectives.py [--workers 2,4,8] [--bytes 4,4096,1048576] [--plot FILE] [--format json]

All workers are on this machine, and both groups in the same processes; blocks of calls alternate A B A B. A block's
time is that of the slowest worker; figures are medians over blocks, ratios medians over pairs of blocks, above 1 where
dmltrain is faster. Sizes and bandwidths are those of nccl-tests (PERFORMANCE.md): S is the bytes of a worker's whole
tensor, the one that all_gather fills and that reduce_scatter sums; algorithm bandwidth is S by time, bus bandwidth that
times 2(n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter, 1 for broadcast. Results are checked once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contest.team import Contest, Team, TeamFailed
from report import PACKAGES, facts, fail, installed, show

sys.path[:0] = PACKAGES  # the dmltrain that is measured lies beside the benchmark

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
BACKENDS = ("dmltrain", "gloo")
SIZES = tuple(4 << (2 * power) for power in range(14))  # bytes: 4 B to 256 MB
BLOCK_BYTES, MOST_CALLS = 1 << 24, 50  # in a block of calls


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--format", choices=["table", "json"], default="table")
    add("--plot", metavar="FILE", help="plot the bus bandwidth over the size; .svg, .png, .pdf")
    add("--operations", default=",".join(OPERATIONS), help="comma-separated (default %(default)s)")
    add("--workers", type=numbers, default=(2, 4, 8), help="comma-separated (default 2,4,8)")
    add("--bytes", type=numbers, default=SIZES, help="comma-separated (default: 4 to 268435456, each 4 times the last)")
    add("--repeats", type=int, default=7, help="blocks of each backend (default %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.operations = arguments.operations.split(",")
    for name in arguments.operations:
        if name not in OPERATIONS:
            parser.error(f"--operations {name!r}: choose of {', '.join(OPERATIONS)}")
    if arguments.repeats < 1 or min(arguments.workers) < 2:
        parser.error("--repeats must be at least 1, --workers at least 2")
    return arguments


def numbers(text: str) -> Sequence[int]:
    """Comma-separated numbers above 0."""
    try:
        values = tuple(map(int, text.split(",")))
    except ValueError:
        values = (0,)
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers above 0, separated by commas")
    return values


def measure(arguments: argparse.Namespace, workers: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of one number of workers."""
    folder.mkdir()
    contest = Contest("dmltrain", "both", f"{workers} workers", "with_collectives.py")
    team = Team(contest, workers, 1, [], folder)
    rows = []
    try:
        for operation in arguments.operations:
            for size in arguments.bytes:
                calls = max(1, min(MOST_CALLS, BLOCK_BYTES // size))
                team.take_turn(0, arguments.repeats, operation=operation, bytes=size, calls=calls, backends=BACKENDS)
                rows.append(row(operation, size, workers, [answer["blocks"] for answer in team.answers]))
                print(line(rows[-1]), file=sys.stderr)
    finally:
        team.stop()
    return rows


def row(operation: str, size: int, workers: int, answers: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """`answers`: of each worker, the seconds of a call in each block of each backend."""
    slowest = {name: [max(each) for each in zip(*(one[name] for one in answers), strict=True)] for name in BACKENDS}
    ratios = [gloo / own for own, gloo in zip(*(slowest[name] for name in BACKENDS), strict=True)]
    found: dict[str, Any] = {"operation": operation, "bytes": size, "workers": workers}
    for name, blocks in slowest.items():
        seconds = statistics.median(blocks)
        algorithm = size / seconds
        found[name] = {"seconds": seconds, "algorithm": algorithm, "bus": algorithm * factor(operation, workers)}
    return {**found, "ratio": statistics.median(ratios), "ratios": ratios}


def factor(operation: str, workers: int) -> float:
    """Of the algorithm bandwidth, which makes it that of the bus."""
    share = (workers - 1) / workers
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(operation, share)


def line(found: dict[str, Any]) -> str:
    """One row of the table, in Markdown."""
    cells = [found["operation"], str(found["workers"]), sized(found["bytes"])]
    for name in BACKENDS:
        own = found[name]
        cells += [f"{own['seconds'] * 1e6:.0f}", *(f"{own[each] / 1e9:.3g}" for each in ("algorithm", "bus"))]
    return f"| {' | '.join([*cells, format(found['ratio'], '.2f')])} |"


def sized(size: int) -> str:
    """Such as 4 KiB."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if size >> shift and not size % (1 << shift):
            return f"{size >> shift} {unit}"
    return f"{size} B"


def table(result: dict[str, Any]) -> str:
    """The report as Markdown."""
    machine = result["machine"]
    head = ["operation", "workers", "S"]
    for name in BACKENDS:
        head += [f"{name}, us", "algorithm, GB/s", "bus, GB/s"]
    return "\n".join(
        [
            f"`{result['command']}`: {machine['processor']}, {machine['cores']} cores, {machine['system']}; "
            + ", ".join(f"{name} {number}" for name, number in result["versions"].items()),
            "",
            f"| {' | '.join([*head, 'of gloo'])} |",
            f"| --- |{' ---: |' * (len(head))}",
            *map(line, result["rows"]),
        ]
    )


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Bus bandwidth over the size, a panel for each operation; a colour for each number of workers."""
    from dmltrain.report import style

    names = list(dict.fromkeys(each["operation"] for each in rows))
    figure, panels = style.figure(len(names), width=2.8, height=2.8, sharey=True)
    for axes, operation in zip(panels, names, strict=True):
        axes.set(xscale="log", yscale="log")
        for number, workers in enumerate(dict.fromkeys(each["workers"] for each in rows)):
            own = [each for each in rows if (each["operation"], each["workers"]) == (operation, workers)]
            for name in BACKENDS:
                bus = [each[name]["bus"] / 1e9 for each in own]
                label = f"{name}, {workers} workers"
                style.curve(axes, [each["bytes"] for each in own], bus, number, label, dashed=name != BACKENDS[0])
        style.finish(axes, f"{operation}, bytes", "")
    panels[0].set_ylabel("bus bandwidth, GB/s")
    style.save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a job failed."""
    arguments = parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="collectives-benchmark-") as folder:
            rows = [each for count in arguments.workers for each in measure(arguments, count, Path(folder, str(count)))]
    except TeamFailed as error:
        return fail("collectives.py", error)
    versions = {"dmltrain": installed("dmltrain"), "torch": installed("torch")}
    show(
        {"rows": rows, "repeats": arguments.repeats, **facts("collectives.py", argv, versions)}, arguments.format, table
    )
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
