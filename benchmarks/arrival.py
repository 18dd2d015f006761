"""How soon a worker that `dmltrain job add` adds to a running job makes its first step.

    python benchmarks/arrival.py [--turns 5] [--network ...] [--format json]
    sudo .venv/bin/python benchmarks/arrival.py --bed --rate 1gbit

Each turn starts an elastic job of 2 workers that trains ResNet-20, and adds one worker: on this machine, or with --bed
on a new host of a test bed (docs/testbed.md), over SSH. The seconds from the command on are divided in three:
`launcher` until the launcher has started the process, with the checks of a new host; `program` until the program is
ready to join: it has imported PyTorch, registered, and made its data and its network; `join` until it has pushed its
part of its first step.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from contest.bed import LOGIN, Bed, bed_of
from report import CHECKOUT, SEARCH_PATH, facts, installed, show

PARTS = ("launcher", "program", "join", "total")
DEADLINE = 120.0  # s


class Place:
    """Where the launcher and its commands run: this machine, or `login` of a test bed."""

    def __init__(self, bed: Bed | None):
        self.bed = bed
        self.hosts = ["--launcher", "ssh", "--hosts", "h1:2"] if bed else ["--launcher", "local"]
        self.more = "h2" if bed else "1"

    def start(self, words: list[str], folder: Path, output: Path) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
        with output.open("wb") as file:
            more = {"cwd": folder, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
            if self.bed:
                return self.bed.testbed.start(LOGIN, words, stdin=subprocess.DEVNULL, **more)
            return subprocess.Popen(words, **more)


@contextmanager
def running(place: Place, words: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    process = place.start(words, folder, folder / "output")
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def until(file: Path, pattern: str, job: subprocess.Popen) -> float:
    """When the file had such a line, in s since 1970."""
    deadline = time.monotonic() + DEADLINE
    while not (file.exists() and re.search(pattern, file.read_text(errors="replace"))):
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{file.name} has no {pattern!r}: {(file.parent / 'output').read_text()[-3000:]}")
        time.sleep(0.002)
    return time.time()


def arrival(place: Place, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The seconds of one arrival."""
    folder.mkdir()
    program = str(CHECKOUT / "examples/train_cifar10.py")
    launch = [
        sys.executable,
        "-m",
        "dmltrain_launch.cli",
        *place.hosts,
        "-n",
        "2",
        "-s",
        "1",
        "--elastic",
        "--log-dir",
        "logs",
    ]
    words = [*options.network.split(), "--kv-store", "dist_sync", "--dataset", "synthetic", "--image-shape", "3,32,32"]
    words += ["--batch-size", str(options.batch), "--num-examples", "100000", "--num-epochs", "1", "--audit", "audit"]
    with running(place, [*launch, program, *words], folder) as job:
        until(folder / "logs/worker-1.log", "View 1 ", job)
        time.sleep(2)
        asked = time.time()
        command = [
            sys.executable,
            "-c",
            "import dmltrain_launch.cli; dmltrain_launch.cli.job_main()",
            "add",
            "logs",
            place.more,
        ]
        add = place.start(command, folder, folder / "answer")
        started = until(folder / "output", r"starting worker 2 on", job)
        stepped = until(folder / "audit/samples-2.jsonl", r"\}\n", job)
        if add.wait() or "has joined the job" not in (folder / "answer").read_text():
            raise SystemExit(f"job add: {(folder / 'answer').read_text()}")
        line = re.search(r"^(.{23}) Node\[2\] Elastic: ", (folder / "logs/worker-2.log").read_text(), re.MULTILINE)
        assert line, "worker 2 has joined without being ready"
        ready = datetime.strptime(line[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return {
        "launcher": started - asked,
        "program": ready - started,
        "join": stepped - ready,
        "total": stepped - asked,
    }


def table(result: dict) -> str:
    rows = ["| s, median (largest) of " + str(len(result["turns"])) + " | " + " | ".join(PARTS) + " |"]
    rows += ["| --- |" + " ---: |" * len(PARTS)]
    cells = [[turn[part] for turn in result["turns"]] for part in PARTS]
    shown = [f"{statistics.median(cell):.2f} ({max(cell):.2f})" for cell in cells]
    return "\n".join([*rows, f"| {result['place']} | {' | '.join(shown)} |"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="--network resnet --num-layers 20", metavar="OPTIONS")
    parser.add_argument("--batch", type=int, default=16, help="samples of each worker's step")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--bed", action="store_true", help="on hosts of a test bed, which needs root")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, with --bed (default %(default)s)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bed = stack.enter_context(bed_of(2, options.rate, folder)) if options.bed else None
        turns = [arrival(Place(bed), options, folder / str(turn)) for turn in range(options.turns)]
    name = f"a new host over SSH, links of {options.rate}" if options.bed else "this machine"
    versions = {name: installed(name) for name in ("dmltrain", "torch")}
    show({"turns": turns, "place": name, **facts("arrival.py", argv, versions)}, options.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
