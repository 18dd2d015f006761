"""What --balance gains where one worker is slow, and what it costs where none is.

    python benchmarks/balance.py [--turns 5] [--workers 5] [--factor 2] [--format json]

dmltrain-launch trains the same network with and without --balance in turns (A B, B A, ...): once with a worker whose
steps take --factor times as long, once with workers of equal speed. Computing is emulated (--emulate-sample), so that
the workers of one machine do not share its cores. The throughput is that of the epochs from --first on, which begin
when the parts have been found. The ratio is the median over the pairs, above 1 where --balance is faster.

With n workers, one of which is f times slower, equal parts take f x batch x sample, and the best ones
n / (n - 1 + 1 / f) x batch x sample: so no parts can gain more than f x (n - 1 + 1 / f) / n.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

from elastic import running
from report import CHECKOUT, INTERPRETER, facts, installed, show

KINDS = ("equal parts", "--balance")
SECONDS = re.compile(r"Epoch\[(\d+)\] Time cost=(\S+)")


def command(folder: Path, options: argparse.Namespace, kind: str, factor: float) -> list[str]:
    """A job of synthetic images."""
    launch = [sys.executable, "-m", "dmltrain_launch.cli", "--launcher", "local", "-n", str(options.workers), "-s", "1"]
    launch += ["--log-dir", str(folder), "--elastic", *INTERPRETER, str(CHECKOUT / "examples/train_cifar10.py")]
    words = [*options.network.split(), "--kv-store", "dist_sync", "--dataset", "synthetic", "--image-shape", "3,32,32"]
    words += ["--num-val-examples", "10", "--batch-size", str(options.batch), "--num-epochs", str(options.epochs)]
    words += ["--num-examples", str(options.steps * options.batch * options.workers)]
    words += ["--emulate-sample", str(options.sample), "--slow-worker", f"{options.workers - 1}:{factor}"]
    return [*launch, *words, *(["--balance"] if kind == KINDS[1] else [])]


def samples_per_second(options: argparse.Namespace, kind: str, factor: float, folder: Path) -> float:
    folder.mkdir()
    with running(command(folder / "logs", options, kind, factor), folder / "output") as job:
        if code := job.wait():
            raise SystemExit(f"{kind}: exit code {code}\n{(folder / 'output').read_text()[-3000:]}")
    found = dict(SECONDS.findall((folder / "logs/worker-0.log").read_text()))
    epochs = [float(seconds) for epoch, seconds in found.items() if int(epoch) >= options.first]
    return options.steps * options.batch * options.workers / statistics.median(epochs)


def measured(options: argparse.Namespace, factor: float, folder: Path) -> dict[str, list[float]]:
    """Samples per second of each kind of job, of each turn."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(options.turns):
        for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
            found[kind].append(samples_per_second(options, kind, factor, folder / f"{factor} {kind} {turn}"))
            print(f"turn {turn + 1}, factor {factor:g}: {kind} {found[kind][-1]:.1f}/s", file=sys.stderr, flush=True)
    return found


def ratio(speeds: dict[str, list[float]]) -> float:
    without, balanced = (speeds[kind] for kind in KINDS)
    return statistics.median(b / a for a, b in zip(without, balanced, strict=True))


def table(result: dict) -> str:
    found = ["| slow worker | samples/s, equal parts | samples/s, --balance | ratio | ceiling |"]
    found.append("| --- | ---: | ---: | ---: | ---: |")
    for each in result["measured"]:
        speeds = [f"{statistics.median(each['speeds'][kind]):.1f}" for kind in KINDS]
        name = f"{each['factor']:g} times slower" if each["factor"] > 1 else "none"
        found.append(f"| {name} | {' | '.join(speeds)} | {each['ratio']:.3f} | {each['ceiling']:.2f} |")
    return "\n".join(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="--network lenet", metavar="OPTIONS")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--factor", type=float, default=2.0, help="how many times slower the last worker is")
    parser.add_argument("--sample", type=float, default=0.02, help="s, the emulated computing of a sample")
    parser.add_argument("--batch", type=int, default=32, help="samples of each worker's step, with equal parts")
    parser.add_argument("--steps", type=int, default=15, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="the first epoch that counts, from 0")
    parser.add_argument("--turns", type=int, default=5, help="pairs")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args(argv)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for factor in (options.factor, 1.0):
            speeds = measured(options, factor, Path(temporary))
            ceiling = factor * (options.workers - 1 + 1 / factor) / options.workers
            found.append({"factor": factor, "speeds": speeds, "ratio": ratio(speeds), "ceiling": ceiling})
    versions = {name: installed(name) for name in ("dmltrain", "torch")}
    load = os.getloadavg()[0]
    show({"measured": found, "load": load, **facts("balance.py", argv, versions)}, options.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
