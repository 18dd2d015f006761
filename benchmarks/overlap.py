"""The share of the communication that computation does not hide: a model of training on hosts with shaped links.

    sudo .venv/bin/python benchmarks/overlap.py [--rate 100mbit] [--gc-type none] [--format json]
    python benchmarks/overlap.py --loopback --hosts 2 --megabytes 102

During backward (2/3 of the computation) one key after another becomes ready and is pushed immediately, with forward
order as priority. In the next forward (1/3) each key's sum is waited for just before its layer. Steps without
computation (A) and steps with as much computation as A takes (B) are measured in turns A B A B in one job. The share
(B - computation) / A of the communication is exposed: 100 % if nothing overlaps. An accelerator is modelled, so
computation is a sleep (contest/programs/overlap.py). The job: dmltrain's dist_sync, one worker and one server on each
host of a test bed (docs/testbed.md); with --loopback all on this machine, also with one server for each worker.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contest.bed import FIRST_PORT, OneEach, TestbedError, bed_of, missing
from contest.lossy import TYPES
from contest.team import Contest, Team, TeamFailed
from contest.workload import KEYS, bytes_of, shapes_of
from report import facts, fail, installed, show, spread

CONTEST = Contest("dmltrain", "sum", "dmltrain dist_sync", "overlap.py")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--loopback", action="store_true", help="all processes on this machine, without a test bed")
    parser.add_argument("--hosts", type=int, default=5, help="each has a worker and a server (default %(default)s)")
    parser.add_argument("--rate", default="100mbit", help="of each host's link, each way (default %(default)s)")
    parser.add_argument("--megabytes", type=float, default=25.0, help=f"of the {KEYS} keys (default %(default)s)")
    parser.add_argument("--gc-type", default="none", choices=["none", *TYPES])
    parser.add_argument("--compute", type=float, help="seconds in a step (default: as long as the communication)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each kind (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="untimed steps before them (default %(default)s)")
    arguments = parser.parse_args(argv)
    if min(arguments.repeats, arguments.steps) < 1 or arguments.warm_up < 0 or not 2 <= arguments.hosts <= 250:
        parser.error("--repeats and --steps must be at least 1, --warm-up at least 0, --hosts 2 to 250")
    if not arguments.megabytes > 0 or not (arguments.compute is None or arguments.compute > 0):
        parser.error("--megabytes and --compute must be more than 0")
    return arguments


@contextmanager
def team_of(arguments: argparse.Namespace) -> Iterator[Team]:
    """The started job; it is ended in any case."""
    options = ["--megabytes", str(arguments.megabytes), "--gc-type", arguments.gc_type]
    with tempfile.TemporaryDirectory(prefix="overlap-benchmark-") as name, place_of(arguments, Path(name)) as place:
        team = Team(CONTEST, arguments.hosts, arguments.hosts, options, Path(name), place)
        try:
            yield team
        finally:
            team.stop()


@contextmanager
def place_of(arguments: argparse.Namespace, folder: Path) -> Iterator[OneEach | None]:
    """Hosts of a test bed, or None for this machine."""
    if arguments.loopback:
        yield None
        return
    with bed_of(arguments.hosts, arguments.rate, folder) as bed:
        yield OneEach(bed.testbed, FIRST_PORT)


def measure(arguments: argparse.Namespace) -> tuple[Team, float]:
    """Turns A B A B; returns the job, whose blocks are in this order, and the seconds of computation in a step."""
    with team_of(arguments) as team:
        compute = arguments.compute
        for repeat in range(arguments.repeats):
            team.take_turn(arguments.warm_up, arguments.steps, compute=0.0)
            compute = compute or team.blocks[0].seconds
            team.take_turn(arguments.warm_up, arguments.steps, compute=compute)
            print(f"turn {repeat + 1} of {arguments.repeats} done", file=sys.stderr)
        return team, compute


def report(team: Team, compute: float, facts: dict) -> dict:
    """All figures and facts, to judge and repeat the run, as JSON values; times in seconds."""
    alone, overlapped = ([block.seconds for block in team.blocks[kind::2]] for kind in (0, 1))
    exposed = [(both - compute) / single for both, single in zip(overlapped, alone, strict=True)]
    return {
        "exposed_share": statistics.median(exposed),
        "exposed_share_of_each_turn": exposed,
        "communication_seconds": spread(alone),
        "compute_seconds": compute,
        "step_seconds": spread(overlapped),
        "other_cores": statistics.median(block.other_cores for block in team.blocks),
        **facts,
    }


def table(result: dict) -> str:
    """The report as text."""
    work, turns = result["workload"], result["turns"]
    times = {
        "communication alone": result["communication_seconds"],
        "compute alone": spread([result["compute_seconds"]]),
        "both, overlapped": result["step_seconds"],
    }
    where = f"links of {result['rate']}" if result["rate"] else "loopback"
    lines = [
        f"{work['hosts']} hosts, each a worker and a server, {where}; {work['keys']} keys, "
        f"{work['bytes'] / 1e6:.1f} MB, --gc-type {result['gc_type']}; {turns['repeats']} turns of "
        f"{turns['steps']} steps after {turns['warm_up']}",
        "",
        f"{'ms a step':24}{'median':>8}{'min':>8}{'max':>8}",
    ]
    lines += [
        f"{name:24}" + "".join(f"{value[part] * 1e3:8.1f}" for part in ("median", "min", "max"))
        for name, value in times.items()
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"exposed: {result['exposed_share']:.1%} of the communication  (turns: "
            + " ".join(f"{share:.1%}" for share in result["exposed_share_of_each_turn"])
            + f"); others took {result['other_cores']:.2f} cores",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if the job failed or no test bed can be created."""
    arguments = parse(argv)
    lacking = "" if arguments.loopback else missing()
    if lacking:
        return fail("overlap.py", f"the test bed needs {lacking}; or use --loopback")
    try:
        team, compute = measure(arguments)
    except (TeamFailed, TestbedError) as error:
        return fail("overlap.py", error)
    result = report(
        team,
        compute,
        {
            "workload": {"bytes": bytes_of(shapes_of(arguments.megabytes)), "keys": KEYS, "hosts": arguments.hosts},
            "rate": None if arguments.loopback else arguments.rate,
            "gc_type": arguments.gc_type,
            "turns": {"repeats": arguments.repeats, "warm_up": arguments.warm_up, "steps": arguments.steps},
            **facts("overlap.py", argv, {"dmltrain": installed("dmltrain")}),
        },
    )
    show(result, arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
