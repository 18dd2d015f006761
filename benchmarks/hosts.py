"""Five hosts with shaped links: time of a step through dmltrain's parameter server, against the network's lower bound.

    sudo .venv/bin/python benchmarks/hosts.py [--rate 1gbit] [--gc-type none,bf16,int8,2bit] [--format json]

A test bed of network namespaces (docs/testbed.md) has one worker and one server on each of n hosts. In a step every
worker pushes all keys and pulls their sums (100 arrays, V bytes of float32, in ResNet-50's proportions). Each host's
link then carries at least 2(n-1)V/n bytes each way, so a step takes at least 2(n-1)V/(nB): the bound. B is the goodput
that iperf3 measures in the same run with both directions of all links busy: each host sends to the next and receives
from the previous. With several workers on each host (--workers-per-host) the bound is that of one stream per host;
with --host-sum off each worker sends its own gradients. MXNet 1.9.1's dist_sync is measured, too, if it is installed.

The processes of all systems run the whole time; while it is another system's turn, they wait. Turns are interleaved
A B A B; figures are medians over turns, ratios medians over pairs of turns. All workers begin a step at the same time,
and a step's time is that of the slowest. Each result is checked, untimed (for lossy codecs see contest/lossy.py). All
hosts share this machine's cores: `cores` is the number that a system's processes use in a step, `others` the number
that the rest of the machine uses during the system's turns, `idle` the number that the system uses outside its turns;
the last two should be near 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from contest.bed import FIRST_PORT, Bed, OneEach, TestbedError, bed_of, missing
from contest.lossy import TYPES
from contest.team import Contest, Team, TeamFailed
from contest.workload import KEYS, bytes_of, shapes_of
from report import facts, fail, installed, show
from tables.hosts import Traffic, report, table

MXNET = Contest("mxnet", "sum", "MXNet dist_sync", "with_mxnet.py", launcher_threads=False)


@dataclass
class Run:
    """Results of the turns so far."""

    teams: list[Team]
    traffic: list[list[Traffic]] = field(default_factory=list)  # of each team, of each turn
    goodput: list[list[float]] = field(default_factory=list)  # bytes/s of each host, of each turn


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--hosts", type=int, default=5, help="each has a worker and a server (default %(default)s)")
    parser.add_argument("--workers-per-host", type=int, default=1, metavar="COUNT")
    parser.add_argument(
        "--host-sum",
        default="auto",
        help="comma-separated: auto, off; each is measured (default %(default)s)",
    )
    parser.add_argument(
        "--wire",
        default="plain",
        help="comma-separated: plain, auth, tls; each is measured (default %(default)s)",
    )
    parser.add_argument("--rate", default="1gbit", help="of each host's link, each way (default %(default)s)")
    parser.add_argument("--megabytes", type=float, default=25.0, help=f"of the {KEYS} keys (default %(default)s)")
    parser.add_argument(
        "--gc-type",
        default="none",
        help=f"comma-separated: none, {', '.join(TYPES)}; each is measured (default %(default)s)",
    )
    parser.add_argument("--systems", default="mxnet,dmltrain", help="comma-separated (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contest (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="untimed steps before them (default %(default)s)")
    parser.add_argument(
        "--iperf-seconds",
        type=float,
        default=2.0,
        help="time to measure the goodput in each turn (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.gc_type, arguments.systems = arguments.gc_type.split(","), arguments.systems.split(",")
    arguments.host_sum, arguments.wire = arguments.host_sum.split(","), arguments.wire.split(",")
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a usage error if an argument is invalid."""
    for option, names, valid in (
        ("--gc-type", arguments.gc_type, ["none", *TYPES]),
        ("--host-sum", arguments.host_sum, ["auto", "off"]),
        ("--wire", arguments.wire, ["plain", "auth", "tls"]),
        ("--systems", arguments.systems, ["mxnet", "dmltrain"]),
    ):
        for name in names:
            if name not in valid:
                parser.error(f"{option} {name!r}: choose one of {', '.join(valid)}")
    if min(arguments.repeats, arguments.steps, arguments.workers_per_host) < 1 or arguments.warm_up < 0:
        parser.error("--repeats, --steps and --workers-per-host must be at least 1, --warm-up at least 0")
    if not 2 <= arguments.hosts <= 250:
        parser.error("--hosts must be 2 to 250")
    if not arguments.megabytes > 0 or not arguments.iperf_seconds >= 1:
        parser.error("--megabytes must be more than 0, --iperf-seconds at least 1")


def contests_of(arguments: argparse.Namespace) -> list[Contest]:
    """The contests, in the order of their turns."""
    ours = [
        Contest(
            "dmltrain",
            "sum",
            label(codec, host_sum, wire),
            "with_dmltrain.py",
            codec=codec,
            host_sum="" if host_sum == "auto" else host_sum,
            wire=wire,
        )
        for codec in arguments.gc_type
        for host_sum in arguments.host_sum
        for wire in arguments.wire
    ]
    return ([MXNET] if "mxnet" in arguments.systems else []) + (ours if "dmltrain" in arguments.systems else [])


def label(codec: str, host_sum: str, wire: str) -> str:
    """The name of a contest of dmltrain's in the table."""
    words = ["dmltrain dist_sync", codec if codec != "none" else "", "each sends" if host_sum == "off" else ""]
    words.append(wire if wire != "plain" else "")
    return ", ".join(filter(None, words))


@contextmanager
def teams_of(arguments: argparse.Namespace, bed: Bed, folder: Path) -> Iterator[list[Team]]:
    """The started teams of all contests; they are ended in any case."""
    teams: list[Team] = []
    with ExitStack() as stack:
        for number, contest in enumerate(contests_of(arguments)):
            print(f"starting {contest.label}", file=sys.stderr)
            options = ["--megabytes", str(arguments.megabytes)]
            options += ["--gc-type", contest.codec] if contest.codec != "none" else []
            place = folder / f"{contest.system}-{contest.variant}"
            place.mkdir()
            hosts = OneEach(bed.testbed, FIRST_PORT + 2 * number, arguments.workers_per_host)
            workers = arguments.hosts * arguments.workers_per_host
            teams.append(Team(contest, workers, arguments.hosts, options, place, hosts))
            stack.callback(teams[-1].stop)
        yield teams


def measure(arguments: argparse.Namespace, bed: Bed, folder: Path) -> Run:
    """Measure the goodput and all teams in turns."""
    with teams_of(arguments, bed, folder) as teams:
        run = Run(teams, [[] for _ in teams])
        for repeat in range(arguments.repeats):
            run.goodput.append(bed.goodput(arguments.iperf_seconds))
            for team, traffic in zip(teams, run.traffic, strict=True):
                before = Traffic.read(bed)
                team.take_turn(arguments.warm_up, arguments.steps, together=True)
                traffic.append(Traffic.read(bed).since(before, arguments.warm_up + arguments.steps))
            print(f"turn {repeat + 1} of {arguments.repeats} done", file=sys.stderr)
        return run


def choose_systems(arguments: argparse.Namespace) -> dict[str, str | None]:
    """The systems' versions; prints and removes those that are not installed."""
    versions = {"mxnet": installed("mxnet"), "dmltrain": installed("dmltrain")}
    if "mxnet" in arguments.systems and versions["mxnet"] is None:
        print("hosts.py: skipping mxnet: it is not installed", file=sys.stderr)
        arguments.systems.remove("mxnet")
    return versions


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a system failed or no test bed can be created."""
    arguments = parse(argv)
    lacking = missing()
    if lacking:
        return fail("hosts.py", f"the test bed needs {lacking}")
    versions = choose_systems(arguments)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hosts-benchmark-") as folder,
            bed_of(arguments.hosts, arguments.rate, Path(folder)) as bed,
        ):
            run = measure(arguments, bed, Path(folder))
    except (TeamFailed, TestbedError) as error:
        return fail("hosts.py", error)
    about = {
        "workload": {
            "bytes": bytes_of(shapes_of(arguments.megabytes)),
            "keys": KEYS,
            "hosts": arguments.hosts,
            "workers_per_host": arguments.workers_per_host,
        },
        "rate": arguments.rate,
        "turns": {"repeats": arguments.repeats, "warm_up": arguments.warm_up, "steps": arguments.steps},
        **facts("hosts.py", argv, versions),
    }
    show(report(run.teams, run.traffic, run.goodput, about), arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
