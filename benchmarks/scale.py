"""Scaling on one host: a step's time against the bound, by number of workers, servers and keys and by model size.

In a step every worker pushes all keys and pulls their sums (dist_sync, sum only). All begin together, the slowest
worker's time counts, and every result is checked. The bound is that of kvstore.py: moving (n + 1)V bytes at this
machine's memory bandwidth, which is measured in each turn. There is a base cell (2 workers, 1 server, 100 keys, 100
MB), and cells that differ from it in one axis; with --full all combinations that fit into memory. Each cell is measured
with a twin that has as many slices, but almost no bytes. It explains cells below half of the bound (contest/cells.py).

    python benchmarks/scale.py [--format table|json] [--plot scale.svg] [--transport shm|tcp] [--full]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from contest.team import TeamFailed
from report import PACKAGES, facts, fail, installed, show

sys.path[:0] = PACKAGES  # the dmltrain that is measured lies beside the benchmark

from contest.cells import AXES, Cell, Measured, cells_of, fits, measure  # noqa: E402
from tables import scale_plot  # noqa: E402
from tables.scale import report, table  # noqa: E402


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--plot", metavar="FILE", help="plot the time over each axis; .svg, .png, .pdf")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    parser.add_argument("--full", action="store_true", help="all combinations of the axes")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each cell (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed steps of each turn (default %(default)s)")
    for name, values in AXES.items():
        default = ",".join(f"{value:g}" for value in values)
        parser.add_argument(
            f"--{name}",
            type=numbers(type(values[0])),
            default=values,
            metavar="N,...",
            help=f"values of this axis (default {default})",
        )
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1 or arguments.warm_up < 0:
        parser.error("--repeats must be at least 1, --warm-up at least 0")
    return arguments


def numbers(kind: type) -> Callable[[str], Sequence[Any]]:
    """A parser of comma-separated numbers above 0."""

    def read(text: str) -> Sequence[Any]:
        try:
            values = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
        except ValueError:
            values = ()
        if not values or not all(0 < value < float("inf") for value in values):
            raise argparse.ArgumentTypeError(f"{text!r}: expected numbers above 0, separated by commas")
        return values

    return read


def run(cells: Sequence[Cell], arguments: argparse.Namespace) -> list[Measured]:
    """Measure one cell after another; cells that do not fit into memory are skipped."""
    measured = []
    for number, cell in enumerate(cells, 1):
        if not fits(cell):
            print(f"skipping {cell}: it needs up to {cell.memory_bytes / 1e9:.1f} GB of memory", file=sys.stderr)
            continue
        print(f"{number} of {len(cells)}: {cell}", file=sys.stderr)
        measured.append(measure(cell, arguments.transport, arguments.repeats, arguments.warm_up))
    return measured


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a job or the plot failed, or nothing could be measured."""
    arguments = parse(argv)
    try:
        if arguments.plot:
            scale_plot.require()
        measured = run(cells_of({name: getattr(arguments, name) for name in AXES}, arguments.full), arguments)
        if not measured:
            return fail("scale.py", "no cell fits into this machine's memory")
        result = report(
            measured,
            {
                "transport": arguments.transport,
                "turns": {"repeats": arguments.repeats, "warm_up": arguments.warm_up},
                **facts("scale.py", argv, {"dmltrain": installed("dmltrain")}),
            },
        )
        show(result, arguments.format, table)
        if arguments.plot:
            scale_plot.save(result["cells"], arguments.plot)
    except (TeamFailed, scale_plot.PlotFailed) as error:
        return fail("scale.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
