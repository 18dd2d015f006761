"""What --elastic costs a job that loses nobody, and how soon a job goes on after a loss.

    python benchmarks/elastic.py [--turns 15] [--losses 10] [--lose server] [--network lenet] [--keys] [--format json]

The cost: dmltrain-launch trains the same network with and without --elastic in turns (A B, B A, ...). The ratio is the
median over the pairs of the seconds of an epoch, without the first epoch, above 1 where --elastic is slower. A job
without --elastic defers steps into the next forward, as training programs do. With --undefer it does not, so that the
rest of the difference is that of --elastic alone. With --keys the job is a script that pushes ResNet-50's gradients,
102 MB, and makes the steps of SGD with momentum on the workers, but computes no gradients; its steps are not deferred.
The ratio is then that of the median steps.

The losses: one worker of an elastic job, or with --lose server one of its servers, is killed with SIGKILL in the middle
of its training. The seconds are those from there until another worker begins the round after the one that was
interrupted, less the median of a round.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
from backends import epochs_of
from report import CHECKOUT, INTERPRETER, SEARCH_PATH, facts, installed, show

PLAIN, UNDEFERRED, ELASTIC = "plain", "plain, not deferred", "elastic"
STEPS = 40  # of an epoch
LONG = 100  # epochs of a job that ends when its loss has been measured


def launch(folder: Path, options: argparse.Namespace, kind: str) -> list[str]:
    words = [sys.executable, "-m", "dmltrain_launch.cli", "--launcher", "local", "-n", str(options.workers)]
    words += ["-s", str(options.servers), "--log-dir", str(folder), *(["--elastic"] if kind == ELASTIC else [])]
    return [*words, *INTERPRETER]


def command(folder: Path, options: argparse.Namespace, kind: str, epochs: int, *more: object) -> list[str]:
    """A job of synthetic images."""
    program = CHECKOUT / ("benchmarks/contest/undeferred.py" if kind == UNDEFERRED else "examples/train_cifar10.py")
    words = [*options.network.split(), "--kv-store", "dist_sync", "--dataset", "synthetic", "--image-shape", "3,32,32"]
    words += ["--batch-size", str(options.batch), "--num-examples", str(STEPS * options.batch * options.workers)]
    return [*launch(folder, options, kind), str(program), *words, "--num-epochs", str(epochs), *map(str, more)]


def keys_command(folder: Path, options: argparse.Namespace, kind: str, epochs: int) -> list[str]:
    """The job of --keys."""
    program = CHECKOUT / "benchmarks/contest/keys.py"
    return [*launch(folder / "logs", options, kind), str(program), str(folder), str(epochs), str(STEPS)]


@contextmanager
def running(words: list[str], output: Path) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def run(words: list[str], kind: str, output: Path) -> None:
    with running(words, output) as job:
        if code := job.wait():
            raise SystemExit(f"{kind}: exit code {code}\n{output.read_text()[-3000:]}")


def epoch_seconds(options: argparse.Namespace, kind: str, folder: Path) -> float:
    run(command(folder / "logs", options, kind, options.epochs), kind, folder / "output")
    return statistics.median(epoch["seconds"] for epoch in epochs_of(folder / "logs", "mean")[1:])


def step_seconds(options: argparse.Namespace, kind: str, folder: Path) -> float:
    """The median step of the script of --keys, without those of the first epoch."""
    run(keys_command(folder, options, kind, options.epochs), kind, folder / "output")
    ends = [float(line) for line in (folder / "steps-0").read_text().splitlines()][STEPS:]
    return statistics.median(after - before for before, after in pairwise(ends))


def costs(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of an epoch (with --keys of a step) of each kind of job, of each turn."""
    kinds = [UNDEFERRED if options.undefer or options.keys else PLAIN, ELASTIC]
    measure = step_seconds if options.keys else epoch_seconds
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(options.turns):
        for kind in kinds if turn % 2 == 0 else kinds[::-1]:
            place = folder / f"{kind} {turn}"
            place.mkdir()
            found[kind].append(measure(options, kind, place))
            print(f"turn {turn + 1}: {kind} {found[kind][-1]:.4f} s", file=sys.stderr, flush=True)
    return found


def process_of(job: subprocess.Popen, role: str, index: int) -> psutil.Process:
    for process in psutil.Process(job.pid).children(recursive=True):
        environment = process.environ()
        if environment.get("DMLC_ROLE") == role and environment.get(f"DMLC_{role.upper()}_ID") == str(index):
            return process
    raise SystemExit(f"{role} {index} has no process")


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def until(file: Path, count: int, job: subprocess.Popen) -> float:
    """When the file had so many lines, s."""
    while lines(file) < count:
        if job.poll() is not None:
            raise SystemExit(f"the job ended before {file.name} had {count} lines")
        time.sleep(0.001)
    return time.perf_counter()


def loss_seconds(options: argparse.Namespace, turn: int, folder: Path) -> float:
    """Of one loss."""
    folder.mkdir()
    audit = folder / "audit"
    victim = 1 + turn % (options.workers - 1) if options.lose == "worker" else turn % options.servers
    rounds, words = audit / "samples-0.jsonl", command(folder / "logs", options, ELASTIC, LONG, "--audit", audit)
    if options.keys:
        rounds, words = folder / "steps-0", keys_command(folder, options, ELASTIC, LONG)
    with running(words, folder / "output") as job:
        first = until(rounds, 5, job)
        usual = (until(rounds, 15, job) - first) / 10
        process = process_of(job, options.lose, victim)
        time.sleep(usual * (turn % 10) / 10)  # another moment of the round each time
        process.send_signal(signal.SIGKILL)
        killed, begun = time.perf_counter(), lines(rounds)
        return until(rounds, begun + 1, job) - killed - usual


def table(result: dict) -> str:
    found = []
    if costs := result["costs"]:
        plain, elastic = costs.values()
        ratio = statistics.median(b / a for a, b in zip(plain, elastic, strict=True))
        unit = "s a step" if result["keys"] else "s an epoch"
        found += [f"| | {unit} | ratio |", "| --- | ---: | ---: |"]
        for kind, seconds in costs.items():
            shown = f"{ratio:.3f}" if kind == ELASTIC else ""
            found.append(f"| {kind} | {statistics.median(seconds):.4g} | {shown} |")
    if losses := result["losses"]:
        found += ["", "| losses | s until the next round, median | largest |", "| ---: | ---: | ---: |"]
        found.append(f"| {len(losses)} | {statistics.median(losses):.3f} | {max(losses):.3f} |")
    return "\n".join(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="--network resnet --num-layers 20", metavar="OPTIONS")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="samples of each worker's step")
    parser.add_argument("--epochs", type=int, default=4, help=f"of {STEPS} steps, for the cost")
    parser.add_argument("--turns", type=int, default=15, help="pairs for the cost")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--lose", choices=["worker", "server"], default="worker")
    parser.add_argument("--undefer", action="store_true", help="compare with a plain job that does not defer steps")
    parser.add_argument("--keys", action="store_true", help="measure the cost with ResNet-50's gradients alone")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measured = costs(options, folder) if options.turns else {}
        losses = [loss_seconds(options, turn, folder / f"loss {turn}") for turn in range(options.losses)]
    versions = {name: installed(name) for name in ("dmltrain", "torch")}
    result = {"keys": options.keys, "costs": measured, "losses": losses, **facts("elastic.py", argv, versions)}
    show(result, options.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
