"""Speed of gradient compression on one thread: GB of float32 encoded, decoded and added per CPU second, and memcpy.

The array is much larger than the caches. Its values are normally distributed with standard deviation 0.001, and the
residual is that of the fifth step. All types have their default parameters. Calls are interleaved; a figure is the
median. CPU seconds of the thread exclude other programs. Cores that are busy at the same time share the memory's
bandwidth: `--processes 2` shows the effect.

    python benchmarks/codecs.py [--megabytes 25] [--repeats 7] [--processes 1] [--format table|json]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
from report import facts, installed, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dmltrain.kvstore import codec

DEVIATION = 1e-3
TYPES = [{"type": name} for name in codec.TYPES if name != "none"]
STEPS = 5  # before the measurement


def calls(length: int) -> dict[str, dict[str, Callable[[], object]]]:
    """The timed calls: {row: {column: call}}."""
    source = (np.random.default_rng(0).standard_normal(length) * DEVIATION).astype(np.float32)
    out = np.zeros_like(source)
    found = {"memcpy": {"decode": lambda: np.copyto(out, source), "add": lambda: np.add(out, source, out=out)}}
    for parameters in TYPES:
        kind = codec.make(parameters)
        data = np.zeros(kind.nbytes(length), np.uint8)
        residual = np.zeros_like(source) if kind.needs_residual else None
        for _ in range(STEPS):
            kind.encode(source, data, residual)
        found[kind.name] = {
            "encode": lambda kind=kind, data=data, residual=residual: kind.encode(source, data, residual),
            "decode": lambda kind=kind, data=data: kind.decode(data, out),
            "add": lambda kind=kind, data=data: kind.add(data, out),
        }
    return found


def measure(length: int, repeats: int, barrier: Barrier | None = None) -> dict[str, dict[str, float]]:
    """GB/s for `length` float32, as {row: {column: median}}; with a barrier all processes begin each call together."""
    rows = calls(length)
    seconds = {(row, column): [] for row, columns in rows.items() for column in columns}
    for turn in range(repeats + 1):
        for (row, column), found in seconds.items():
            if barrier:
                barrier.wait()
            start = time.thread_time()
            rows[row][column]()
            if turn:  # the first is to warm up
                found.append(time.thread_time() - start)
    figures = {row: {} for row in rows}
    for (row, column), found in seconds.items():
        figures[row][column] = 4 * length / statistics.median(found) / 1e9
    return figures


def measure_in(processes: int, length: int, repeats: int) -> dict[str, dict[str, float]]:
    """The speed of the slowest of several processes that measure at the same time."""
    if processes == 1:
        return measure(length, repeats)
    context = get_context("spawn")
    with context.Manager() as manager, context.Pool(processes) as pool:
        barrier = manager.Barrier(processes)
        found = pool.starmap(measure, [(length, repeats, barrier)] * processes, chunksize=1)
    return {row: {column: min(each[row][column] for each in found) for column in found[0][row]} for row in found[0]}


def report(arguments: argparse.Namespace) -> dict:
    """All figures and the conditions of the measurement, as JSON values."""
    length = int(arguments.megabytes * 1e6 / 4)
    figures = measure_in(arguments.processes, length, arguments.repeats)
    share = {kind["type"]: codec.make(kind).nbytes(length) / (4 * length) for kind in TYPES}
    versions = {name: installed(name) for name in ("dmltrain", "numpy")}
    return {
        **facts("codecs.py", None, versions),
        "bytes": 4 * length,
        "processes": arguments.processes,
        "repeats": arguments.repeats,
        "types": TYPES,
        "bytes_to_float32": share,
        "gigabytes_per_cpu_second": figures,
    }


def table(result: dict) -> str:
    """The report as text."""
    about = result["machine"]
    lines = [
        f"{about['processor']}, {about['cores']} cores, numpy {result['versions']['numpy']}; "
        f"{result['bytes'] / 1e6:g} MB of float32, {result['processes']} process(es); "
        "GB of float32 per CPU second",
        "",
        f"{'':8}{'bytes':>8}{'encode':>8}{'decode':>8}{'add':>8}",
    ]
    for name, columns in result["gigabytes_per_cpu_second"].items():
        cells = [columns.get(column) for column in ("encode", "decode", "add")]
        lines.append(
            f"{name:8}{result['bytes_to_float32'].get(name, 1):8.1%}"
            + "".join(f"{'' if cell is None else format(cell, '.2f'):>8}" for cell in cells)
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=25)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args(argv)
    if not arguments.megabytes > 0 or min(arguments.repeats, arguments.processes) < 1:
        parser.error("--megabytes must be more than 0, --repeats and --processes at least 1")
    result = report(arguments)
    show(result, arguments.format, table)


if __name__ == "__main__":
    main()
