"""Speed of gradients through the parameter server: dmltrain against MXNet 1.9.1's `dist_sync` and gloo's all-reduce.

In a step every worker pushes all keys and pulls all keys (ResNet-50's parameters as 100 arrays, 102 MB) on one host:
over TCP on loopback and, if the system has it, through shared memory (shm). A step's time is that of the slowest
worker, measured inside the workers, without barriers. The processes of all systems run the whole time; while it is
another system's turn, they wait. Turns are interleaved A B A B, `--repeats` times; a ratio is the median over pairs.
Before each step new gradients are written, and after it the result is checked; neither is timed. All systems have
default settings. Two columns show whether to trust the times; both should be near 0: `idle` is the number of cores that
a system used outside its turns, `others` the number that the rest of the machine used during them. The row "buckets" is
what training runs: the keys are parameters, and their buckets are pushed.

    python benchmarks/kvstore.py [--format table|json] [--systems dmltrain,mxnet,gloo] [--repeats 5] [--megabytes 102]
        [--keys 100] [--wire plain,auth,tls]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import machine
from contest.team import Contest, Team, TeamFailed
from contest.workload import KEYS, bytes_of, shapes_of
from report import facts, fail, installed, show
from tables.kvstore import report, table

# In the order of their turns: systems that are compared run one after the other.
CONTESTS = (
    Contest("mxnet", "sum", "MXNet dist_sync, sum only", "with_mxnet.py", launcher_threads=False),
    Contest("dmltrain", "sum", "dmltrain dist_sync, sum only, shm", "with_dmltrain.py", transport="shm"),
    Contest("dmltrain", "sum", "dmltrain dist_sync, sum only, tcp", "with_dmltrain.py", transport="tcp"),
    Contest("mxnet", "momentum", "MXNet dist_sync, momentum on server", "with_mxnet.py", launcher_threads=False),
    Contest(
        "dmltrain",
        "momentum-worker",
        "dmltrain dist_sync, momentum on workers, shm",
        "with_dmltrain.py",
        transport="shm",
    ),
    Contest(
        "dmltrain",
        "momentum-server",
        "dmltrain dist_sync, momentum on server, shm",
        "with_dmltrain.py",
        transport="shm",
    ),
    Contest("dmltrain", "buckets", "dmltrain dist_sync, buckets, mean, shm", "with_buckets.py", transport="shm"),
    Contest("dmltrain", "buckets", "dmltrain dist_sync, buckets, mean, tcp", "with_buckets.py", transport="tcp"),
    Contest("gloo", "tensors", "gloo all-reduce, each key a tensor", "with_gloo.py", servers=False),
    Contest("gloo", "flat", "gloo all-reduce, one flat tensor", "with_gloo.py", servers=False),
)
PROTECTED = {
    level: Contest(
        "dmltrain",
        "sum",
        f"dmltrain dist_sync, sum only, tcp, {level}",
        "with_dmltrain.py",
        transport="tcp",
        wire=level,
    )
    for level in ("auth", "tls")
}
SYSTEMS = {"dmltrain": "dmltrain", "mxnet": "mxnet", "gloo": "torch"}  # name -> distribution it needs


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated, of %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each system (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps before them (default %(default)s)")
    parser.add_argument("--megabytes", type=float, help="size of all keys (default ResNet-50's 102)")
    parser.add_argument("--keys", type=int, default=KEYS, help="number of keys (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument(
        "--mxnet-call",
        choices=["keys", "lists", "pushpull"],
        default="lists",
        help="MXNet's calls: push and pull key by key, with lists of keys, or pushpull key by key",
    )
    parser.add_argument(
        "--wire",
        default="plain",
        help="comma-separated: plain, auth, tls; dmltrain over TCP is measured with each (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    arguments.systems, arguments.wire = arguments.systems.split(","), arguments.wire.split(",")
    for level in arguments.wire:
        if level not in ("plain", "auth", "tls"):
            parser.error(f"--wire {level!r}: choose one of plain, auth, tls")
    for name in arguments.systems:
        if name not in SYSTEMS:
            parser.error(f"unknown system {name!r}; the systems are {', '.join(SYSTEMS)}")
    if min(arguments.repeats, arguments.steps, arguments.workers, arguments.servers, arguments.keys) < 1:
        parser.error("--repeats, --steps, --workers, --servers and --keys must be at least 1")
    if arguments.warm_up < 0:
        parser.error("--warm-up must be at least 0")
    if arguments.megabytes is not None and not arguments.megabytes > 0:
        parser.error("--megabytes must be more than 0")
    return arguments


@contextmanager
def teams_of(arguments: argparse.Namespace) -> Iterator[list[Team]]:
    """The started teams of all chosen contests; they are ended in any case."""
    options = ["--keys", str(arguments.keys)]
    options += [] if arguments.megabytes is None else ["--megabytes", str(arguments.megabytes)]
    teams = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-benchmark-")))
        contests = [*CONTESTS, *(PROTECTED[level] for level in arguments.wire if level != "plain")]
        for contest in (contest for contest in contests if contest.system in arguments.systems):
            print(f"starting {contest.label}", file=sys.stderr)
            call = ["--call", arguments.mxnet_call] if contest.system == "mxnet" else []
            place = folder / f"{contest.system}-{contest.mode}-{contest.transport}-{contest.wire}"
            place.mkdir()
            teams.append(Team(contest, arguments.workers, arguments.servers, options + call, place))
            stack.callback(teams[-1].stop)
        yield teams


def run(arguments: argparse.Namespace, size: int) -> tuple[list[Team], list[dict[str, float]]]:
    """Measure all teams and this machine's limits in turns; returns the teams and the machine's seconds."""
    limits = []
    with teams_of(arguments) as teams:
        for repeat in range(arguments.repeats):
            limits.append(machine.measure(size))
            for team in teams:
                team.take_turn(arguments.warm_up, arguments.steps)
            print(f"turn {repeat + 1} of {arguments.repeats} done", file=sys.stderr)
    return teams, limits


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a system failed."""
    arguments = parse(argv)
    versions = {name: installed(distribution) for name, distribution in SYSTEMS.items()}
    for name in [name for name in arguments.systems if versions[name] is None]:
        print(f"kvstore.py: skipping {name}: {SYSTEMS[name]} is not installed", file=sys.stderr)
        arguments.systems.remove(name)
    size = bytes_of(shapes_of(arguments.megabytes, arguments.keys))
    try:
        teams, limits = run(arguments, size)
    except TeamFailed as error:
        return fail("kvstore.py", error)
    about = {
        "workload": {"bytes": size, "keys": arguments.keys, "workers": arguments.workers, "servers": arguments.servers},
        "turns": {"repeats": arguments.repeats, "warm_up": arguments.warm_up, "steps": arguments.steps},
        **facts("kvstore.py", argv, versions),
    }
    show(report(teams, limits, about), arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
