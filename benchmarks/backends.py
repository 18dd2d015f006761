"""The two backends compared: the same network, batch, data order, initial weights and machine.

    python benchmarks/backends.py --data-dir FOLDER_OF_CIFAR10 [--epochs 2] [--turns 2] [--format json] [--log-dir DIR]

dmltrain-launch trains each case with `--backend torch` and `--backend mxnet` in turns (A B, B A, ...). The table has
medians over the turns: images/s of all workers, seconds per epoch, peak memory of a worker, and validation accuracy
after the last epoch. The learning rate is divided by 10 for the last epoch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import CHECKOUT, SEARCH_PATH, facts, installed, show

BACKENDS = ("torch", "mxnet")
CASES = {  # name -> workers, servers, training images, options of examples/train_cifar10.py
    "ResNet-20, dist_sync -n 2 -s 2": (
        2,
        2,
        50000,
        "--network resnet --num-layers 20 --kv-store dist_sync --batch-size 64",
    ),
    "ResNet-20, local": (1, 0, 10000, "--network resnet --num-layers 20 --kv-store local --batch-size 128"),
    "ResNet-20, dist_async -n 2 -s 2": (
        2,
        2,
        10000,
        "--network resnet --num-layers 20 --kv-store dist_async --batch-size 64 --lr 0.05",
    ),
    "inception-bn-28-small, local": (1, 0, 2560, "--network inception-bn-28-small --kv-store local --batch-size 128"),
    "LeNet, local": (1, 0, 2560, "--network lenet --kv-store local --batch-size 128 --lr 0.02"),
}


@dataclass(frozen=True)
class Outcome:
    """One training run. If it has several epochs, speed and time do not include the first, which warms up."""

    images_per_second: float  # of all workers
    epoch_seconds: float
    memory: float  # MiB, maximum over the workers
    accuracy: float  # after the last epoch


def train(case: str, backend: str, options: argparse.Namespace, folder: Path) -> Outcome:
    workers, servers, images, words = CASES[case]
    program = [
        str(CHECKOUT / "examples/train_cifar10.py"),
        "--image-shape",
        "3,32,32",
        "--lr",
        "0.1",
        *words.split(),
        "--backend",
        backend,
        "--num-epochs",
        str(options.epochs),
        "--lr-step-epochs",
        str(options.epochs - 1),
        "--num-examples",
        str(options.num_examples or images),
    ]
    program += ["--data-dir", options.data_dir] if options.data_dir else ["--dataset", "synthetic"]
    program += ["--gpus", options.gpus] if options.gpus else []
    command = [
        sys.executable,
        "-m",
        "dmltrain_launch.cli",
        "--launcher",
        "local",
        "-n",
        str(workers),
        "-s",
        str(servers),
        "--log-dir",
        str(folder),
        *program,
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": SEARCH_PATH}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}, {backend}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return outcome(folder)


def outcome(folder: Path) -> Outcome:
    """The outcome of a run, from its logs as dmltrain-parse reads them."""
    means, most = epochs_of(folder, "mean"), epochs_of(folder, "max")
    workers = len(list(folder.glob("worker-*.log")))
    warm = slice(1, None) if len(means) > 1 else slice(None)
    return Outcome(
        images_per_second=workers * statistics.median(epoch["speed"] for epoch in means[warm]),
        epoch_seconds=statistics.median(epoch["seconds"] for epoch in means[warm]),
        memory=max(epoch["memory"] for epoch in most),
        accuracy=means[-1]["validation_accuracy"],
    )


def epochs_of(folder: Path, aggregate: str) -> list[dict]:
    """A run's epochs, aggregated over its workers."""
    words = [str(folder), "--format", "json", "--aggregate", aggregate]
    done = subprocess.run(
        [sys.executable, "-m", "dmltrain.report.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        check=True,
    )
    return json.loads(done.stdout)[0]["epochs"]


def measure(case: str, options: argparse.Namespace, folder: Path) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {backend: [] for backend in BACKENDS}
    for turn in range(options.turns):
        for backend in BACKENDS if turn % 2 == 0 else reversed(BACKENDS):
            name = "-".join([*case.replace(",", "").replace("-", "").lower().split(), backend, str(turn + 1)])
            found[backend].append(train(case, backend, options, folder / name))
            print(f"{case}, turn {turn + 1}: {backend} {found[backend][-1]}", file=sys.stderr, flush=True)
    return found


def table(results: dict[str, dict[str, list[Outcome]]]) -> str:
    lines = [
        "| | backend | images/s | seconds per epoch | memory of a worker, MiB | accuracy |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for case, found in results.items():
        for backend, outcomes in found.items():
            speed, seconds, memory, accuracy = (
                statistics.median(getattr(outcome, name) for outcome in outcomes)
                for name in Outcome.__dataclass_fields__
            )
            lines.append(f"| {case} | {backend} | {speed:.0f} | {seconds:.1f} | {memory:.0f} | {accuracy:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="CIFAR-10's folder (default: synthetic images of the same shape)")
    parser.add_argument("--gpus", metavar="I,I", help="GPUs of each worker (default: the CPU)")
    parser.add_argument("--num-examples", type=int, help="training images of all cases (default: each case's own)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1, help="runs of each backend")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--log-dir", help="keep the logs here")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.log_dir or temporary).resolve()
        results = {case: measure(case, options, folder) for case in options.cases}
    versions = {name: installed(name) for name in ("dmltrain", *BACKENDS)}
    result = {"cases": results, **facts("backends.py", None, versions)}
    show(result, options.format, lambda result: table(result["cases"]))


if __name__ == "__main__":
    main()
