"""dmltrain against what a PyTorch user would take instead: DistributedDataParallel over gloo, in the same training.

    python benchmarks/ddp.py [--networks mlp:25:100,resnet-20] [--batch 64] [--format json]
    sudo .venv/bin/python benchmarks/ddp.py --hosts 5 --rate 1gbit --batch 1 --pause 0.1

Each system trains the same network from the same weights on the same batches with the same SGD. Their processes run the
whole time; turns are interleaved A B A B. A turn's time ends when the weights of its last step are complete. Times are
those of the slowest worker, medians over turns; ratios are medians over pairs of turns, above 1 where a system is
faster than DDP. Weights after all turns are compared bit for bit with those of DDP.

Without --hosts all workers are on this machine, with --gpus on its GPUs; if each has one of its own, DDP sums over
NCCL, and weights may differ in their last bits. With --hosts they are on hosts of a test bed (docs/testbed.md), which
share this machine's cores; each has a worker and, for dmltrain, a server. A step then takes at least 2(n-1)V/(nB), by
a ring or by servers: V bytes of gradients, n hosts, and B the goodput that iperf3 measures in the same run. The system
dmltrain-apart has its servers on as many hosts more. --slow-link gives one host a link of another rate, and then there
is no bound. MB are the bytes of a step in the busiest direction of any of these links, headers included.

--pause and --by-layer sleep instead of computing, as a host does whose accelerator computes: --pause in one piece
before each forward, where nothing but a deferred step can overlap; --by-layer in each layer's forward (1/3) and
backward (2/3).

--stragglers P:FACTOR makes a pause FACTOR times as long with a probability of P, for the same steps in each system.
--freeze SECONDS:EVERY lets worker 1 sleep for SECONDS after every EVERY seconds of training. With dmltrain-async each
worker trains at its own pace for as long as the turn of the first system took; its time of a step is that of the mean
worker, and samples/s are those of all workers. All other systems end a turn when the last worker has made its steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from contest import networks
from contest.bed import FIRST_PORT, Bed, OneEach, TestbedError, bed_of, missing
from contest.team import Contest, Team, TeamFailed
from contest.training_systems import SYSTEMS
from report import facts, fail, installed, show
from tables.ddp import report, table
from tables.hosts import Traffic

NETWORKS = "mlp:25:100,mlp:100:100,resnet-20"
USUAL = "ddp,dmltrain,dmltrain-early,dmltrain-defer"


@dataclass
class Run:
    """The turns of all systems with one network. goodput: bytes/s of each host, of each turn. traffic: on the links of
    the workers' hosts, of each turn of each team; only on a test bed."""

    network: str
    bytes: int  # of its weights
    teams: list[Team]
    goodput: list[list[float]] = field(default_factory=list)
    traffic: dict[str, list[Traffic]] = field(default_factory=dict)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--format", choices=["table", "json"], default="table")
    add("--networks", default=NETWORKS, help=f"comma-separated, such as {networks.EXAMPLES} (default %(default)s)")
    add("--systems", default=USUAL, help=f"comma-separated: {', '.join(SYSTEMS)} (default %(default)s)")
    add("--batch", type=int, default=64, help="samples of each worker (default %(default)s)")
    add("--workers", type=int, default=2, help="on this machine (default %(default)s)")
    add("--servers", type=int, default=1, help="on this machine, for dmltrain (default %(default)s)")
    add("--hosts", type=int, help="of a test bed, instead; each has a worker and a server")
    add("--gpus", metavar="I,J", help="that the workers of this machine use in turn (default: the CPU)")
    add("--rate", default="1gbit", help="of each host's link, each way (default %(default)s)")
    add("--slow-link", metavar="RATE", help="of the second host, each way, if other than --rate")
    add("--pause", type=float, default=0.0, metavar="SECONDS", help="of sleep before each forward (default: none)")
    add("--stragglers", type=_pair, metavar="P:FACTOR", help="with a probability of P a pause is so many times as long")
    add("--freeze", type=_pair, metavar="SECONDS:EVERY", help="worker 1 sleeps so long after every EVERY seconds")
    add("--by-layer", type=float, default=0.0, metavar="SECONDS", help="of sleep in all layers (default: none)")
    add("--repeats", type=int, default=5, help="turns of each system (default %(default)s)")
    add("--steps", type=int, default=10, help="timed steps of a turn (default %(default)s)")
    add("--warm-up", type=int, default=2, help="untimed steps before them (default %(default)s)")
    arguments = parser.parse_args(argv)
    arguments.networks, arguments.systems = arguments.networks.split(","), arguments.systems.split(",")
    _check(parser, arguments)
    return arguments


def _pair(text: str) -> tuple[float, float]:
    try:
        first, second = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected two numbers, such as 0.05:10") from None
    return first, second


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with a usage error if an argument is invalid."""
    for name in arguments.systems:
        if name not in SYSTEMS:
            parser.error(f"--systems {name!r}: choose of {', '.join(SYSTEMS)}")
    for name in arguments.networks:
        try:
            networks.check(name)
        except networks.UnknownNetwork as error:
            parser.error(f"--networks: {error}")
    counts = (arguments.batch, arguments.workers, arguments.servers, arguments.repeats, arguments.steps)
    if min(counts) < 1 or arguments.warm_up < 0:
        parser.error("--batch, --workers, --servers, --repeats and --steps must be at least 1, --warm-up at least 0")
    if arguments.hosts is not None and not 2 <= arguments.hosts <= 250:
        parser.error("--hosts must be 2 to 250")
    if arguments.gpus and (arguments.hosts or not all(map(str.isdecimal, arguments.gpus.split(",")))):
        parser.error("--gpus: expected numbers of this machine's GPUs, such as 0,1, without --hosts")
    if not arguments.hosts and (arguments.slow_link or any(SYSTEMS[name].apart for name in arguments.systems)):
        parser.error("--slow-link and systems with servers on spare hosts need --hosts")
    if not 0 <= arguments.pause <= 60 or not 0 <= arguments.by_layer <= 60:
        parser.error("--pause and --by-layer must be 0 to 60 seconds")
    _check_unequal(parser, arguments)


def _check_unequal(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    probability, factor = arguments.stragglers or (0.0, 1.0)
    if arguments.stragglers and not (0 <= probability <= 1 and 1 <= factor <= 100 and arguments.pause):
        parser.error("--stragglers needs a probability of 0 to 1, a factor of 1 to 100, and a --pause above 0")
    frozen, every = arguments.freeze or (0.0, 1.0)
    if not 0 <= frozen <= 60 or not 0 < every <= 600:
        parser.error("--freeze needs 0 to 60 seconds of sleep, and up to 600 seconds between")
    if SYSTEMS[arguments.systems[0]].own_pace:
        parser.error(
            f"--systems: {arguments.systems[0]} trains for as long as the first system did, so it cannot be it"
        )


@contextmanager
def teams_of(arguments: argparse.Namespace, network: str, bed: Bed | None, folder: Path) -> Iterator[list[Team]]:
    """The started teams of all systems; they are ended in any case."""
    options = ["--network", network, "--batch", str(arguments.batch)]
    options += ["--pause", str(arguments.pause), "--by-layer", str(arguments.by_layer)]
    options += ["--gpus", arguments.gpus] if arguments.gpus else []
    for name, pair in (("--stragglers", arguments.stragglers), ("--freeze", arguments.freeze)):
        options += [name, *map(str, pair)] if pair else []
    teams: list[Team] = []
    with ExitStack() as stack:
        for number, name in enumerate(arguments.systems):
            system = SYSTEMS[name]
            contest = Contest(name, name, system.label, "train.py", servers=system.servers, codec=system.codec)
            place = folder / f"{network.replace(':', '-')}-{name}"
            place.mkdir()
            apart = arguments.hosts if bed and system.apart else 0
            hosts = OneEach(bed.testbed, FIRST_PORT + 2 * number, apart=apart) if bed else None
            workers, servers = (arguments.hosts,) * 2 if bed else (arguments.workers, arguments.servers)
            teams.append(Team(contest, workers, servers, options, place, hosts))
            stack.callback(teams[-1].stop)
        yield teams


def measure(arguments: argparse.Namespace, network: str, bed: Bed | None, folder: Path) -> Run:
    """All turns with one network."""
    with teams_of(arguments, network, bed, folder) as teams:
        run = Run(network, networks.make(network).bytes, teams)
        for repeat in range(arguments.repeats):
            if bed and not arguments.slow_link:
                run.goodput.append(bed.goodput(2.0))
            for team in teams:
                before = Traffic.read(bed) if bed else None
                made = _take_turn(arguments, team, teams[0])
                if bed and before:
                    run.traffic.setdefault(team.contest.system, []).append(Traffic.read(bed).since(before, made))
            print(f"{network}: turn {repeat + 1} of {arguments.repeats} done", file=sys.stderr)
        return run


def _take_turn(arguments: argparse.Namespace, team: Team, first: Team) -> float:
    """One turn; `first` has had its own. Returns the steps that the mean worker made, with those of the warm-up."""
    if not SYSTEMS[team.contest.system].own_pace:
        team.take_turn(arguments.warm_up, arguments.steps, untimed=arguments.warm_up)
        return arguments.warm_up + arguments.steps
    seconds = arguments.steps * first.blocks[-1].seconds
    team.take_turn(arguments.warm_up, arguments.steps, untimed=arguments.warm_up, seconds=seconds)
    mean = statistics.harmonic_mean([answer["seconds"][0] for answer in team.answers])
    team.blocks[-1] = replace(team.blocks[-1], seconds=mean)
    return statistics.fmean(answer["made"] for answer in team.answers)


@contextmanager
def _bed(arguments: argparse.Namespace, folder: Path) -> Iterator[Bed]:
    """The test bed, with as many hosts again if a system has its servers apart."""
    apart = any(SYSTEMS[name].apart for name in arguments.systems)
    with bed_of(arguments.hosts * (1 + apart), arguments.rate, folder) as bed:
        bed.hosts = bed.hosts[: arguments.hosts]  # of which the goodput is measured
        if arguments.slow_link:
            bed.testbed.rate(bed.hosts[1], arguments.slow_link)
        yield bed


def runs_of(arguments: argparse.Namespace) -> list[Run]:
    """One run for each network, one after another."""
    with tempfile.TemporaryDirectory(prefix="ddp-benchmark-") as name, ExitStack() as stack:
        folder = Path(name)
        bed = stack.enter_context(_bed(arguments, folder)) if arguments.hosts else None
        return [measure(arguments, network, bed, folder) for network in arguments.networks]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print it; 1 if a system failed or no test bed can be created."""
    arguments = parse(argv)
    lacking = missing() if arguments.hosts else ""
    if lacking:
        return fail("ddp.py", f"the test bed needs {lacking}; without --hosts, workers are on this machine")
    try:
        runs = runs_of(arguments)
    except (TeamFailed, TestbedError) as error:
        return fail("ddp.py", error)
    about = {
        "workers": arguments.hosts or arguments.workers,
        "servers": arguments.hosts or arguments.servers,
        "rate": arguments.rate if arguments.hosts else None,
        "slow_link": arguments.slow_link,
        **{name: getattr(arguments, name) for name in ("batch", "gpus", "pause", "by_layer", "stragglers", "freeze")},
        "turns": {"repeats": arguments.repeats, "warm_up": arguments.warm_up, "steps": arguments.steps},
        **facts("ddp.py", argv, {"dmltrain": installed("dmltrain"), "torch": installed("torch")}),
    }
    show(report(runs, about), arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
