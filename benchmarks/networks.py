"""Training speed of networks by number of workers and devices: MXNet's example/image-classification/benchmark.py.

    python benchmarks/networks.py --networks inception-bn:32:224 resnet-50:32:224 --worker_file hosts \\
        --worker_count 4 --gpu_count 2

dmltrain-launch trains each network on random images: on one host with 1, 2, 4, ... devices, then with all of them on 2,
4, ... hosts with dist_sync, as many servers as hosts. NETWORK:BATCH:SIZE has the batch of one device, and the height
and width of the images. `--gpu_count 0` uses the CPU; `--gpus 0,2` names GPUs. Without --worker_file all workers run on
this machine. The table has images/s of all workers, from their batch lines without the first, which warms up.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import CHECKOUT, INTERPRETER, SEARCH_PATH, facts, fail, installed, show

BATCH_LINES = 4  # of each worker, one of which warms up
LINE = re.compile(r"Batch \[\d+\]\tSpeed: ([\d.]+) samples/sec")


@dataclass(frozen=True)
class Network:
    """NETWORK[-LAYERS]:BATCH:SIZE."""

    name: str
    batch: int  # of one device
    size: int  # height and width of an image

    def words(self) -> list[str]:
        """Options of a training program."""
        name, _, depth = self.name.rpartition("-")
        named = [name, "--num-layers", depth] if name and depth.isdecimal() else [self.name]
        return ["--network", *named, "--image-shape", f"3,{self.size},{self.size}"]


def network(text: str) -> Network:
    """Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"([\w.-]+):(\d+):(\d+)", text)
    if not found or int(found[2]) < 1 or int(found[3]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NETWORK:BATCH:SIZE, such as resnet-50:32:224")
    return Network(found[1], int(found[2]), int(found[3]))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; MXNet's spelling with underscores works, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", type=network, required=True, metavar="NETWORK:BATCH:SIZE")
    parser.add_argument("--worker-file", "--worker_file", metavar="FILE", help="hosts, one a line")
    parser.add_argument("--worker-count", "--worker_count", type=int, default=1, metavar="N")
    parser.add_argument("--gpu-count", "--gpu_count", type=int, default=0, metavar="N", help="of each worker; 0: CPU")
    parser.add_argument("--gpus", metavar="I,J", help="of each worker, by number, in place of --gpu-count")
    parser.add_argument("--disp-batches", type=int, default=10, metavar="N", help="steps that are timed at once")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--log-dir", metavar="FOLDER", help="keep the logs of all jobs here")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args(argv)
    arguments.gpus = arguments.gpus.split(",") if arguments.gpus else list(map(str, range(arguments.gpu_count)))
    arguments.gpu_count = max(arguments.gpu_count, len(arguments.gpus))
    if not all(map(str.isdecimal, arguments.gpus)) or len(arguments.gpus) != arguments.gpu_count:
        parser.error("--gpus: expected numbers of GPUs, such as 0,1, as many as --gpu-count where that is given")
    if arguments.worker_count < 1 or arguments.gpu_count < 0:
        parser.error("--worker-count must be at least 1, --gpu-count at least 0")
    return arguments


def series(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted({*(power for power in powers if power <= most), most})


class JobFailed(Exception):
    """A job did not end well."""


def command(made: Network, workers: int, devices: int, arguments: argparse.Namespace, log_dir: Path) -> list[str]:
    """The job of a cell: BATCH_LINES lines of each worker."""
    hosts = ["-H", arguments.worker_file] if arguments.worker_file else ["--launcher", "local"]
    batch = made.batch * max(1, devices)
    examples = batch * workers * (BATCH_LINES * arguments.disp_batches + 1)
    program = [*INTERPRETER, str(CHECKOUT / "examples/train_imagenet.py"), "--benchmark", "1", *made.words()]
    program += ["--num-examples", str(examples), "--num-epochs", "1", "--batch-size", str(batch)]
    program += ["--disp-batches", str(arguments.disp_batches), "--backend", arguments.backend]
    program += ["--kv-store", "dist_sync" if workers > 1 else "device"]
    program += ["--gpus", ",".join(arguments.gpus[:devices])] if arguments.gpus else []
    servers = str(workers if workers > 1 else 0)
    launch = [
        sys.executable,
        "-m",
        "dmltrain_launch.cli",
        "-n",
        str(workers),
        "-s",
        servers,
        *hosts,
        "--log-dir",
        str(log_dir),
    ]
    return [*launch, *program]


def images_per_second(words: Sequence[str], log_dir: Path, workers: int) -> float:
    """Run the job; the sum over its workers of the medians of their lines without the first."""
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(words, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise JobFailed(f"the job ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    lines = [LINE.findall((log_dir / f"worker-{worker}.log").read_text()) for worker in range(workers)]
    return sum(statistics.median(map(float, line[1:])) for line in lines)


def cells(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """(workers, devices of each), as MXNet's benchmark.py."""
    alone = [(1, devices) for devices in series(max(1, arguments.gpu_count))]
    return alone + [(workers, max(1, arguments.gpu_count)) for workers in series(arguments.worker_count)[1:]]


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All cells of all networks; each is shown on standard error when it is known."""
    found = []
    for made in arguments.networks:
        for workers, devices in cells(arguments):
            log_dir = folder / f"{made.name}-{workers}x{devices}"
            words = command(made, workers, devices, arguments, log_dir)
            speed = images_per_second(words, log_dir, workers)
            print(f"{made.name}, {workers} workers x {devices} devices: {speed:.1f} images/s", file=sys.stderr)
            found.append({"network": made.name, "workers": workers, "devices": devices, "images_per_second": speed})
    return found


def table(result: dict[str, Any]) -> str:
    """A row for each cell, with the speed-up over the network's first one."""
    lines = ["| network | workers | devices of each | images/s | speed-up |", "| --- | --- | --- | --- | --- |"]
    first: dict[str, float] = {}
    for cell in result["cells"]:
        speed = cell["images_per_second"]
        base = first.setdefault(cell["network"], speed)
        lines.append(
            f"| {cell['network']} | {cell['workers']} | {cell['devices']} | {speed:.1f} | {speed / base:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a job failed."""
    arguments = parse(argv)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(arguments, Path(arguments.log_dir or temporary).absolute())
    except JobFailed as error:
        return fail("networks.py", error)
    versions = {name: installed(name) for name in ("dmltrain", arguments.backend)}
    show({"cells": found, **facts("networks.py", argv, versions)}, arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
