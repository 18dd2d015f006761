"""Speed and memory of dmltrain-parse: MB of logs a second, CPU seconds, and the peak of its memory.

For each format a log of 100 epochs is written, of the size asked for, with as many lines of batches as that takes; the
run of dmltrain itself has ten workers. Formats with a row for each epoch get a file of a twentieth. FILE... are real
logs, which are repeated until they have that size. The program runs once on a small log of the same format and then on
the large one: the difference is what the size costs in memory. The rows of each table are counted.

    python benchmarks/logs.py [--megabytes 100] [--repeats 3] [--format table|json] [FILE...]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from report import SEARCH_PATH, facts, fail, installed, show

EPOCHS = 100
WORKERS = 10
STAMP = "2026-11-22 02:18:37,504 Node[{rank}] "
MB = 10**6
ROW_AN_EPOCH = ("Keras' CSVLogger", "TensorBoard (CSV)")  # their tables are as long as their files
SMALLER = 20  # so their files are smaller by this


def of_workers(size: int, rank: int = 0, stamp: str = STAMP) -> Iterator[str]:
    """Lines of dmltrain; with another stamp of MXNet."""
    stamp = stamp.format(rank=rank)
    batch = "{0}Epoch[{1}] Batch [{2}]\tSpeed: 1323.83 samples/sec\taccuracy=0.582386\tcross-entropy=1.535439\n"
    values = ("Train-accuracy=0.757660", "Time cost=10.556", "Validation-accuracy=0.938889", "Speed=1682.334918")
    for epoch in range(EPOCHS):
        for number in range(size // EPOCHS // len(batch.format(stamp, epoch, 12345))):
            yield batch.format(stamp, epoch, 20 * number)
        yield from (f"{stamp}Epoch[{epoch}] {value}\n" for value in values)


def of_caffe(size: int, displayed: str = "(2.5 iter/s, 8s/20 iters), loss = 1.64") -> Iterator[str]:
    """Lines of Caffe; with another text after the iteration of PMLS-Caffe."""
    stamp = "I0605 03:34:06.123456 27501 solver.cpp:237]"
    comma = "" if displayed.startswith("(") else ","
    count = size // EPOCHS // (2 * len(stamp) + 120)
    for epoch in range(EPOCHS):
        yield f"{stamp} Iteration {epoch * count * 20}, Testing net (#0)\n"
        yield f"{stamp}     Test net output #0: accuracy = 0.938889\n"
        for number in range(count):
            iteration = (epoch * count + number) * 20
            yield f"{stamp} Iteration {iteration}{comma} {displayed}\n"
            yield f"{stamp}     Train net output #0: loss = 1.64 (* 1 = 1.64 loss)\n"


def of_keras(size: int) -> Iterator[str]:
    """Progress bars, each step over the one before."""
    bar = "{0:4d}/{1} [====>.........................] - ETA: 12s - loss: 1.6412 - acc: 0.4988"
    count = size // EPOCHS // (len(bar.format(1, 1000)) + 85)
    for epoch in range(1, EPOCHS + 1):
        yield f"Epoch {epoch}/{EPOCHS}\n"
        yield from (bar.format(number, count) + "\b" * 85 + "\r" for number in range(count))
        yield f"{count}/{count} [==============================] - 26s - loss: 0.7 - acc: 0.75 - val_acc: 0.938889\n"


def of_csv_logger(size: int) -> Iterator[str]:
    """Keras' CSVLogger has one row an epoch, so this file has as many epochs as its size takes."""
    yield "epoch,accuracy,loss,val_accuracy,val_loss\n"
    row = ",0.757660001516342,0.973456789123456,0.938889,1.4520000219345093\n"
    yield from (f"{epoch}{row}" for epoch in range(size // (len(row) + 6)))


def of_lightning(size: int) -> Iterator[str]:
    """Rows of steps, and two rows for each epoch."""
    yield "epoch,step,train_loss_step,train_acc_step,train_loss_epoch,val_acc\n"
    count = size // EPOCHS // 50
    for epoch in range(EPOCHS):
        yield from (
            f"{epoch},{step},0.973456789123456,0.757660001516342,,\n"
            for step in range(epoch * count, epoch * count + count)
        )
        yield f"{epoch},{epoch * count + count},,,0.8734567,\n{epoch},{epoch * count + count},,,,0.938889\n"


def of_tensorboard(size: int) -> Iterator[str]:
    """One row a step: its table is as long as the file."""
    yield "Wall time,Step,Value\n"
    yield from (f"{1700000000 + step}.123456,{step},0.9388890266418457\n" for step in range(size // 46))


FORMATS: dict[str, Callable[[int], Iterator[str]]] = {
    "MXNet": lambda size: of_workers(size, stamp="INFO:root:"),
    "Caffe": of_caffe,
    "PMLS-Caffe": lambda size: of_caffe(size, "loss: 1.64, time: 141.8"),
    "Keras": of_keras,
    "Keras' CSVLogger": of_csv_logger,
    "PyTorch Lightning": of_lightning,
    "TensorBoard (CSV)": of_tensorboard,
}


def write(folder: Path, name: str, size: int) -> Path:
    """The log or, for dmltrain, the folder of logs of about `size` bytes."""
    ending = "csv" if "CSV" in name or name == "PyTorch Lightning" else "log"
    if name != "dmltrain":
        path = folder / f"run-validation-tag-accuracy.{ending}"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(FORMATS[name](size))
        return path
    (folder / "run").mkdir()
    for rank in range(WORKERS):
        with (folder / "run" / f"worker-{rank}.log").open("w", encoding="utf-8") as file:
            file.writelines(of_workers(size // WORKERS, rank))
    return folder / "run"


def repeat(folder: Path, log: Path, size: int) -> Path:
    """A real log, as often as `size` takes, but at least once."""
    path = folder / log.name
    data = log.read_bytes()
    with path.open("wb") as file:
        for _ in range(max(1, round(size / len(data)))):
            file.write(data)
    return path


def size_of(path: Path) -> int:
    """Bytes of a log, or of all logs in a folder."""
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


def parse(path: Path) -> dict[str, float]:
    """Run dmltrain-parse: seconds, CPU seconds, peak of memory in MiB, lines of its table."""
    command = [sys.executable, "-m", "dmltrain.report.cli", "--format", "none", str(path)]
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    with tempfile.TemporaryFile() as out:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{path.name}: {process.stderr.read().decode()}")
        out.seek(0)
        lines = sum(1 for _ in out) - 1
    return {
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
        "rows": lines,
    }


def measure(make: Callable[[Path, int], Path], size: int, repeats: int) -> dict[str, float]:
    """The figures of one format."""
    with tempfile.TemporaryDirectory(prefix="dmltrain-logs-") as folder:
        (Path(folder) / "small").mkdir()
        small = parse(make(Path(folder) / "small", min(size, 200_000)))
        path = make(Path(folder), size)
        runs = [parse(path) for _ in range(repeats)]
        megabytes = size_of(path) / MB
    return {
        "megabytes": megabytes,
        "megabytes_per_second": megabytes / statistics.median(run["seconds"] for run in runs),
        "cpu_seconds_per_megabyte": statistics.median(run["cpu_seconds"] - small["cpu_seconds"] for run in runs)
        / megabytes,
        "peak_mib": max(run["peak_mib"] for run in runs),
        "grown_mib": max(run["peak_mib"] for run in runs) - small["peak_mib"],
        "rows": runs[0]["rows"],
    }


def table(result: dict) -> str:
    """Markdown."""
    lines = ["| log | MB | MB/s | MB per CPU second | peak, MiB | of it for the size, MiB | rows |", "|" + " --- |" * 7]
    for name, row in result["logs"].items():
        lines.append(
            f"| {name} | {row['megabytes']:.0f} | {row['megabytes_per_second']:.0f} "
            f"| {1 / row['cpu_seconds_per_megabyte']:.0f} | {row['peak_mib']:.0f} | {row['grown_mib']:.0f} "
            f"| {row['rows']} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all formats and the files; 1 if a log cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="real logs")
    parser.add_argument("--megabytes", type=float, default=100, help="size of each log (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--only", metavar="FORMAT", action="append", choices=["dmltrain", *FORMATS], help="one format")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    makers: dict[str, Callable[[Path, int], Path]] = {
        name: lambda folder, size, name=name: write(folder, name, size // SMALLER if name in ROW_AN_EPOCH else size)
        for name in arguments.only or ([] if arguments.files else ["dmltrain", *FORMATS])
    }
    makers |= {log.name: lambda folder, size, log=log: repeat(folder, log, size) for log in arguments.files}
    try:
        logs = {name: measure(make, int(arguments.megabytes * MB), arguments.repeats) for name, make in makers.items()}
    except (RuntimeError, OSError) as error:
        return fail("logs.py", error)
    show({"logs": logs, **facts("logs.py", argv, {"dmltrain": installed("dmltrain")})}, arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
