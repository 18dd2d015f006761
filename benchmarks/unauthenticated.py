"""What unauthenticated peers cost a job: its start and its steps while processes without the job's key open 1,000
connections a second to everything that the job listens on (tests/kvstore/programs/unauthenticated_peers.py).

    sudo .venv/bin/python benchmarks/unauthenticated.py [--rate 1000] [--repeats 5] [--format json]

Three kinds of runs take turns, `--repeats` times: without such peers; with peers that connect to a port that does not
belong to the job, so that they use the same cores; and with peers that connect to the job. Each run is a job of two
workers and two servers on this machine, in a network namespace of its own: `--steps` rounds of 4 MB (100 keys), with a
little computing between them. `start` is the time from the command to the first step; steps are those of worker 0.
Figures are medians over the runs; ratios are medians over pairs of runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import CHECKOUT, SEARCH_PATH, facts, fail, installed, show, spread

PEERS = CHECKOUT / "tests/kvstore/programs/unauthenticated_peers.py"
PROGRAM = CHECKOUT / "benchmarks/contest/programs/steps.py"
NAMESPACE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
KINDS = {"nobody": ("0", "elsewhere"), "elsewhere": ("{rate}", "elsewhere"), "at the job": ("{rate}", "new")}
DEADLINE = 300.0  # s, of one run


class RunFailed(Exception):
    """A run's job failed; the message has the end of its output."""


def run(kind: str, rate: float, steps: int) -> dict[str, float]:
    """One run: seconds of the start, median and 95th percentile of a step, and the number of connections."""
    peers = [each.format(rate=rate) for each in KINDS[kind]]
    launcher = [sys.executable, "-m", "dmltrain_launch.cli", "--launcher", "local", "-n", "2", "-s", "2"]
    with tempfile.TemporaryDirectory(prefix="unauthenticated-") as folder:
        began = time.time()
        found = subprocess.run(
            [*NAMESPACE, sys.executable, str(PEERS), *peers, *launcher, "--log-dir", "logs", str(PROGRAM), str(steps)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": SEARCH_PATH},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        if found.returncode:
            raise RunFailed(f"peers {kind}: the job ended with {found.returncode}:\n{found.stdout[-3000:]}")
        log = (Path(folder) / "logs/worker-0.log").read_text()
    (line,) = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {
        "start": line["began"] - began,
        "median": statistics.median(line["seconds"]),
        "p95": statistics.quantiles(line["seconds"], n=20)[-1],
        "connections": json.loads(found.stdout.splitlines()[-1])["opened"],
    }


def report(runs: dict[str, list[dict[str, float]]], about: dict[str, object]) -> dict:
    """All figures: spreads by kind, and ratios over pairs of runs."""
    ratios = {
        name: statistics.median(a[name] / b[name] for a, b in zip(runs["at the job"], runs["elsewhere"], strict=True))
        for name in ("median", "p95")
    }
    late = statistics.median(a["start"] - b["start"] for a, b in zip(runs["at the job"], runs["nobody"], strict=True))
    return {
        "runs": {kind: {name: spread([each[name] for each in of]) for name in of[0]} for kind, of in runs.items()},
        "ratio_to_elsewhere": ratios,
        "start_later_by": late,  # s
        **about,
    }


def table(result: dict) -> str:
    """The report as text."""
    lines = [f"{'peers':14}{'connections':>12}{'start, s':>10}{'step, ms':>10}{'95 %, ms':>10}"]
    for kind, figures in result["runs"].items():
        lines.append(
            f"{kind:14}{figures['connections']['median']:12,.0f}{figures['start']['median']:10.2f}"
            f"{figures['median']['median'] * 1e3:10.2f}{figures['p95']['median'] * 1e3:10.2f}"
        )
    ratios = result["ratio_to_elsewhere"]
    return "\n".join(
        [
            *lines,
            "",
            f"start later than without peers by {result['start_later_by']:.2f} s; steps at the job / elsewhere: "
            f"median {ratios['median']:.3f}, 95th percentile {ratios['p95']:.3f}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--rate", type=float, default=1000.0, help="connections per second (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of a run (default %(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.repeats, arguments.rate) < 1 or arguments.steps < 20:
        parser.error("--repeats and --rate must be at least 1, --steps at least 20")
    if os.geteuid():
        return fail("unauthenticated.py", "only root can make a network namespace: run it with sudo", 2)
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    try:
        for repeat in range(arguments.repeats):
            for kind, of in runs.items():
                of.append(run(kind, arguments.rate, arguments.steps))
            print(f"turn {repeat + 1} of {arguments.repeats} done", file=sys.stderr)
    except RunFailed as error:
        return fail("unauthenticated.py", error)
    about = facts("unauthenticated.py", argv, {"dmltrain": installed("dmltrain")})
    show(report(runs, about), arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
