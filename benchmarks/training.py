"""Training speed: dmltrain's `local` and `dist_sync` (1 worker, 1 server) against a plain hand-written PyTorch loop.

    python benchmarks/training.py [--data-dir FOLDER_OF_CIFAR10] [--gpus 0] [--format json]

The contestants are complete programs. They are started once and train the whole time with the same data, batch, layout
and precision. They take turns: one runs, the others are stopped (SIGSTOP), in rounds (A B C, C B A, ...), so that other
load on the machine affects all of them equally. Speeds are those that the programs print; intervals that contain a stop
are not used. The ratio is the median over the rounds.
"""

import argparse
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from report import CHECKOUT, SEARCH_PATH, facts, installed, show

NETWORKS = {
    "resnet-20": ["--network", "resnet", "--num-layers", "20"],
    "inception-bn-28-small": ["--network", "inception-bn-28-small"],
}
SPEED = re.compile(r"Batch \[\d+\]\tSpeed: ([\d.]+) samples/sec")
DISPLAY = 2  # batches for each printed speed
START_SECONDS = 120.0
NO_TIMEOUT = "100000"  # s; a stopped process must not be reported as lost


class ContestantFailed(Exception):
    """A contestant ended or printed nothing; the message has the end of its output."""


@dataclass
class Contestant:
    """The processes of one contestant; the speeds are those of the last process, the worker."""

    name: str
    commands: list[tuple[list[str], dict[str, str]]]  # each with its environment
    folder: Path
    processes: list[subprocess.Popen] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # images/s of each turn

    def start(self) -> None:
        """Start all, wait until the worker trains, stop all."""
        self.folder.mkdir()
        for number, (command, environment) in enumerate(self.commands):
            with open(self.folder / str(number), "wb") as file:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        self._wait_for(2, START_SECONDS)
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float) -> None:
        """Run for `seconds`, and until at least three complete intervals are printed."""
        before = len(self._printed())
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self._wait_for(before + 5, START_SECONDS)
        self._signal(signal.SIGSTOP)
        self.speeds.append(statistics.harmonic_mean(self._printed()[before + 2 :]))  # earlier ones may contain the stop

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def _text(self) -> str:
        return (self.folder / str(len(self.processes) - 1)).read_text()

    def _printed(self) -> list[float]:
        return [float(speed) for speed in SPEED.findall(self._text())]

    def _wait_for(self, count: int, seconds: float) -> None:
        """Wait until the worker has printed `count` speeds."""
        end = time.monotonic() + seconds
        while len(self._printed()) < count:
            ended = [process.args for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > end:
                reason = "ended" if ended else f"printed nothing for {seconds} s"
                raise ContestantFailed(f"{self.name} {reason}: {self._text()[-2000:]}")
            time.sleep(0.02)


def contestants(network: str, options: argparse.Namespace, folder: Path) -> list[Contestant]:
    arguments = [
        "--batch-size",
        str(options.batch_size),
        "--dtype",
        options.dtype,
        "--lr",
        "0.05",
        "--num-epochs",
        "1000",
        "--disp-batches",
        str(DISPLAY),
        "--num-examples",
        str(options.num_examples),
    ]
    arguments += ["--dataset", "cifar10" if options.data_dir else "synthetic"]
    arguments += ["--data-dir", options.data_dir] if options.data_dir else []
    arguments += ["--gpus", options.gpus] if options.gpus else []
    chosen = NETWORKS[network]
    program = CHECKOUT / "benchmarks/contest/programs/plain_training.py"
    plain = [sys.executable, str(program), *arguments, "--network", chosen[1]]
    ours = [sys.executable, str(CHECKOUT / "examples/train_cifar10.py"), *arguments, *chosen]
    alone = {**os.environ, "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": str(options.threads)}
    return [
        Contestant("plain", [(plain, alone)], folder / "plain"),
        Contestant("local", [([*ours, "--kv-store", "local"], alone)], folder / "local"),
        Contestant("dist_sync", job([*ours, "--kv-store", "dist_sync"], alone, folder), folder / "dist_sync"),
    ]


def job(command: list[str], base: dict[str, str], folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """A scheduler, a server and a worker on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    shared = {
        **base,
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLTRAIN_JOB": "benchmark",
        "DMLTRAIN_KEY_FILE": str(key),
        "DMLTRAIN_HEARTBEAT_TIMEOUT": NO_TIMEOUT,
        "DMLTRAIN_WAIT_TIMEOUT": NO_TIMEOUT,
    }
    threads = {"scheduler": "1", "server": "1", "worker": base["OMP_NUM_THREADS"]}
    return [(command, {**shared, "DMLC_ROLE": role, "OMP_NUM_THREADS": count}) for role, count in threads.items()]


def measure(network: str, options: argparse.Namespace) -> dict:
    """Every contestant's speed in every turn, and the ratios to the plain loop of the same round."""
    with tempfile.TemporaryDirectory() as folder:
        found = contestants(network, options, Path(folder))
        try:
            for contestant in found:
                contestant.start()
            for number in range(options.turns):
                for contestant in found if number % 2 == 0 else reversed(found):
                    contestant.turn(options.seconds)
                    print(
                        f"{network} round {number + 1}: {contestant.name} {contestant.speeds[-1]:.1f} images/s",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            for contestant in found:
                contestant.end()
    plain = found[0].speeds
    ratios = {each.name: [own / base for own, base in zip(each.speeds, plain, strict=True)] for each in found[1:]}
    return {
        "images_per_second": {each.name: statistics.median(each.speeds) for each in found},
        "ratio_to_plain": {name: statistics.median(ratio) for name, ratio in ratios.items()},
        "images_per_second_of_each_turn": {each.name: each.speeds for each in found},
        "ratio_to_plain_of_each_turn": ratios,
    }


def table(results: dict[str, dict]) -> str:
    lines = [
        "| network | program | images/s | ratio to plain | minimum to maximum of all rounds |",
        "|---|---|---:|---:|---|",
    ]
    for network, result in results.items():
        for name, speed in result["images_per_second"].items():
            ratios = result["ratio_to_plain_of_each_turn"].get(name, [1.0])
            shown = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f}"
            lines.append(f"| {network} | {name} | {speed:.1f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that stopped contestants are ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--data-dir", help="CIFAR-10's folder (default: synthetic images of the same shape)")
    parser.add_argument("--num-examples", type=int, default=50000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--gpus", metavar="I", help="the GPU that all use in turns (default: the CPU)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=8, help="rounds")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args()
    results = {network: measure(network, options) for network in options.networks}
    versions = {name: installed(name) for name in ("dmltrain", "torch")}
    result = {"networks": results, "options": vars(options), **facts("training.py", None, versions)}
    show(result, options.format, lambda result: table(result["networks"]))


if __name__ == "__main__":
    main()
