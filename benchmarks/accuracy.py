"""The effect of gradient compression on accuracy: the same training with each `--gc-type` and several seeds.

    python benchmarks/accuracy.py --data-dir FOLDER_OF_CIFAR10 --log-dir DIR [--gc-type none,bf16,int8,2bit]
        [--seeds 1,2] [--epochs 4] [--format table|json]

ResNet-20 on CIFAR-10 (He et al. 2015, arXiv:1512.03385, section 4.2), dist_sync, 2 workers of 64 images a batch, 2
servers; the learning rate, 0.1, is divided by 10 for the last epoch. Figures are validation accuracies after each
epoch, in percent, means over the seeds; `to none` is the final difference in percentage points; `MB` is the data that a
worker sends in an epoch. Runs with complete logs in `--log-dir` are not repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from backends import epochs_of
from contest.lossy import TYPES as MEASURED
from report import CHECKOUT, INTERPRETER, SEARCH_PATH, facts, installed, show

TYPES = tuple(name for name in MEASURED if "-" not in name)  # of --gc-type
PROGRAM = "--network resnet --num-layers 20 --image-shape 3,32,32 --kv-store dist_sync --batch-size 64 --lr 0.1"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="CIFAR-10's folder (default: synthetic images of the same shape)")
    parser.add_argument("--log-dir", required=True, help="folder for the logs, with a folder for each run")
    parser.add_argument("--gc-type", default="none,bf16,int8,2bit", help="comma-separated (default %(default)s)")
    parser.add_argument("--seeds", default="1,2", help="comma-separated (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--num-examples", type=int, default=50000, help="training images (default %(default)s)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse_args(argv)
    arguments.gc_type, arguments.seeds = arguments.gc_type.split(","), arguments.seeds.split(",")
    for name in arguments.gc_type:
        if name not in ("none", *TYPES):
            parser.error(f"--gc-type {name!r}: choose one of none, {', '.join(TYPES)}")
    if not all(seed.isdigit() for seed in arguments.seeds) or arguments.epochs < 1 or arguments.num_examples < 128:
        parser.error("--seeds must be whole numbers, --epochs at least 1, --num-examples at least 128")
    return arguments


def train(codec: str, seed: str, options: argparse.Namespace, folder: Path) -> None:
    """One run, with its logs in `folder`; ends the program if it fails."""
    words = [
        *PROGRAM.split(),
        "--gc-type",
        codec,
        "--seed",
        seed,
        "--num-epochs",
        str(options.epochs),
        "--lr-step-epochs",
        str(max(1, options.epochs - 1)),
        "--num-examples",
        str(options.num_examples),
    ]
    words += ["--data-dir", options.data_dir] if options.data_dir else ["--dataset", "synthetic"]
    command = [
        sys.executable,
        "-m",
        "dmltrain_launch.cli",
        "--launcher",
        "local",
        "-n",
        "2",
        "-s",
        "2",
        "--log-dir",
        str(folder),
        *INTERPRETER,
        str(CHECKOUT / "examples/train_cifar10.py"),
        *words,
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": SEARCH_PATH}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{codec}, seed {seed}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def curve(codec: str, seed: str, options: argparse.Namespace) -> list[dict]:
    """The epochs of one run; runs the training if its logs are missing or incomplete."""
    folder = Path(options.log_dir).resolve() / f"{codec}-seed{seed}"
    if not folder.exists() or len(epochs_of(folder, "mean")) < options.epochs:
        train(codec, seed, options, folder)
    epochs = epochs_of(folder, "mean")
    print(f"{codec}, seed {seed}: {100 * epochs[-1]['validation_accuracy']:.2f} %", file=sys.stderr, flush=True)
    return epochs


def summary(runs: dict[str, list[list[dict]]]) -> dict[str, dict]:
    """For each codec: accuracies by epoch (means over seeds), final accuracy of each seed, MB sent by a worker in an
    epoch."""
    return {
        codec: {
            "accuracies": [
                statistics.mean(100 * epoch["validation_accuracy"] for epoch in epochs)
                for epochs in zip(*seeds, strict=True)
            ],
            "last": [100 * epochs[-1]["validation_accuracy"] for epochs in seeds],
            "megabytes": statistics.median(epoch["sent"] / 1e6 for epochs in seeds for epoch in epochs),
        }
        for codec, seeds in runs.items()
    }


def table(results: dict[str, dict]) -> str:
    epochs = len(next(iter(results.values()))["accuracies"])
    lines = [
        "| --gc-type | "
        + " | ".join(f"epoch {number + 1}" for number in range(epochs))
        + " | to none | each seed | MB |",
        "| --- |" + " ---: |" * (epochs + 3),
    ]
    for codec, result in results.items():
        cells = [f"{accuracy:.2f}" for accuracy in result["accuracies"]]
        none = results.get("none")
        cells.append(f"{result['accuracies'][-1] - none['accuracies'][-1]:+.2f}" if none else "")
        cells += [", ".join(f"{last:.2f}" for last in result["last"]), f"{result['megabytes']:.0f}"]
        lines.append(f"| {codec} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    runs: dict[str, list[list[dict]]] = {codec: [] for codec in options.gc_type}
    for seed in options.seeds:  # all codecs with the first seed first
        for codec in options.gc_type:
            runs[codec].append(curve(codec, seed, options))
    results = summary(runs)
    versions = {"dmltrain": installed("dmltrain"), "torch": installed("torch")}
    result = {"types": results, **facts("accuracy.py", argv, versions)}
    show(result, options.format, lambda result: table(result["types"]))


if __name__ == "__main__":
    main()
