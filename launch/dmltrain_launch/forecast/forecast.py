"""The expected speed-up of a job, from each host's computing time and the throughput of its links. Pure.

In each step, every worker sends its gradients to the servers and gets the results back. With V bytes of gradients,
s servers, n workers and a TCP throughput of B bytes/s, the network card with the most traffic determines the time:
    servers on separate hosts           T = max(V / B, n V / (s B))     both directions at the same time
    a server on each worker's host      T = 2 (n - 1) V / (n B)
In general, a card's traffic is the sum over the host's processes, per direction. Traffic inside a host costs nothing.
T assumes that gradients and results flow at the same time. If results wait for all gradients, both times add up.
Arrays that are not split are assigned to the server with the least data, largest first.
Best case: communication overlaps completely with computing, and a step takes max(computing, T).
Worst case: computing, gradients and results follow one another. Latency and the CPU time for sending are ignored.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

from dmltrain_launch.job.placement import Placement
from dmltrain_launch.job.role import SERVER, WORKER

MARK = "DMLTRAIN_MEASURE"
UNCOMPRESSED = {"none": (1.0, 1.0)}
PAYS = 1.1  # a smaller speed-up over one worker is not worth the machines
DISTURBED = 1.1  # a larger ratio of two step times is not measurement noise
UNSTEADY = 0.5  # a larger spread of the measurements is reported
FEW = 8  # up to so many workers, each number has a row


@dataclass(frozen=True)
class StepReport:
    """What a program reports about its training step; see docs/environment.md. `model_bytes` counts float32.

    `compression`: by --gc-type, the remaining share of the bytes of gradients, and of results. `local_steps`: of which
    one is followed by an exchange.
    """

    seconds: float
    samples: float
    model_bytes: float
    network: str = ""
    kv_store: str = "dist_sync"
    gc_type: str = "none"
    backend: str = ""
    distributed: bool = True  # this and the next: properties of the kvstore's type
    synchronous: bool = True
    compression: Mapping[str, tuple[float, float]] = field(default_factory=lambda: UNCOMPRESSED)
    summed_in_host: bool = False
    pieces: tuple[float, ...] = ()  # bytes of the arrays that are not split; (): everything is split evenly
    spread: float = 0.0  # of the measurements, as a share of `seconds`
    local_steps: float = 1.0

    @property
    def compared(self) -> list[str]:
        """Each --gc-type whose bytes differ from those before it."""
        return [
            name
            for name, shares in self.compression.items()
            if next(each for each, same in self.compression.items() if same == shares) == name
        ]


def step_of(line: str) -> StepReport | None:
    """The step that a line of a program's output reports; None for other or invalid lines."""
    word, _, text = line.partition(" ")
    if word != MARK:
        return None
    try:
        report = json.loads(text)
        seconds, samples, model_bytes = (
            float(report[name]) for name in ("seconds_per_step", "samples_per_step", "model_bytes")
        )
        given: dict[str, Any] = {
            name: str(report[name]) for name in ("network", "kv_store", "gc_type", "backend") if name in report
        }
        summed = bool(report.get("summed_in_host", False))
        pieces = tuple(float(each) for each in report.get("pieces", ()))
        spread, local_steps = float(report.get("spread", 0.0)), float(report.get("local_steps", 1.0))
        given |= {name: bool(report[name]) for name in ("distributed", "synchronous") if name in report}
        compression = {
            str(name): (float(pushed), float(pulled))
            for name, (pushed, pulled) in report.get("compression", UNCOMPRESSED).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    valid = all(0 < each < math.inf for each in [seconds, samples, model_bytes, *pieces, *chain(*compression.values())])
    if not valid or "none" not in compression or not 0 <= spread < math.inf or not 1 <= local_steps < math.inf:
        return None
    given |= {"compression": compression, "summed_in_host": summed, "pieces": pieces, "spread": spread}
    given["local_steps"] = local_steps
    return StepReport(seconds, samples, model_bytes, **given)


@dataclass(frozen=True)
class Links:
    """TCP throughput in bytes/s by (from, to), with both directions busy. A card is as fast as its fast links."""

    speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def seconds(self, traffic: Mapping[tuple[str, str], float]) -> float | None:
        """How long it takes to send these bytes by (from, to) at the same time; None if a host's links are unknown."""
        loads: defaultdict[tuple[str, str], float] = defaultdict(float)  # by card: ("out", host), ("in", host)
        for (source, target), count in traffic.items():
            loads["out", source] += count
            loads["in", target] += count
        cards = [(load, self._card(*card)) for card, load in loads.items()]
        if not all(speed for _, speed in cards):
            return None
        links = [(load, self.speeds[link]) for link, load in traffic.items() if self.speeds.get(link)]
        return max((load / speed for load, speed in [*cards, *links]), default=0.0)

    def _card(self, direction: str, host: str) -> float:
        end = 0 if direction == "out" else 1
        speeds = [speed for link, speed in self.speeds.items() if link[end] == host]
        return median(speed for speed in speeds if speed >= max(speeds) / 2) if speeds else 0.0


@dataclass(frozen=True)
class Computing:
    """Seconds of a step without communication, by host and by the number of workers on it.

    Fewer workers on a host are never slower than more. If they seem to be, other work disturbed the measurement.
    """

    measured: Mapping[str, Mapping[int, float]]
    spread: float = 0.0  # the largest one of the measurements

    def seconds(self, host: str, workers: int) -> float:
        """Interpolates between measured numbers of workers. A host without measurements counts as the slowest."""
        if not self.measured.get(host):
            return max(self.seconds(other, workers) for other in self.measured)
        measured = self.measured[host]
        known = {number: min(seconds for more, seconds in measured.items() if more >= number) for number in measured}
        if workers in known:
            return known[workers]
        below = max((number for number in known if number < workers), default=0)
        above = min((number for number in known if number > workers), default=0)
        if not below or not above:
            return known[below or above]
        return known[below] + (known[above] - known[below]) * (workers - below) / (above - below)

    @property
    def doubts(self) -> dict[str, tuple[float, int, float]]:
        """Hosts on which few workers were clearly slower than more: (seconds, the larger number, its seconds)."""
        doubtful = {}
        for host, known in self.measured.items():
            fewest, (less, number) = min(known), min((seconds, number) for number, seconds in known.items())
            if known[fewest] > DISTURBED * less:
                doubtful[host] = known[fewest], number, less
        return doubtful

    @property
    def alone(self) -> tuple[float, str]:
        """Seconds of one worker on the fastest host, and the name of that host."""
        return min((self.seconds(host, 1), host) for host in self.measured)


@dataclass(frozen=True)
class Forecast:
    """A step of `workers` workers, in seconds. `alone`: the step of one worker on the fastest host."""

    workers: int
    servers: int
    samples: float  # per worker and step
    computing: float
    communicating: float  # gradients and results at the same time
    apart: float  # results after gradients
    alone: float

    @property
    def best(self) -> float:
        """Seconds of a step if communication overlaps completely with computing."""
        return max(self.computing, self.communicating)

    @property
    def worst(self) -> float:
        """Seconds of a step without overlap."""
        return self.computing + self.apart

    @property
    def speedups(self) -> tuple[float, float]:
        """Throughput relative to one worker on the fastest host: (worst, best)."""
        return self.workers * self.alone / self.worst, self.workers * self.alone / self.best

    @property
    def share(self) -> float:
        """The share of communication in a step without overlap."""
        return self.apart / self.worst

    def batch(self, speedup: float) -> float:
        """The batch per worker that reaches this speed-up without overlap, if computing time grows with the batch.

        inf if the slowest worker is too slow for any batch.
        """
        gained = self.workers * self.alone - speedup * self.computing  # s, at the measured batch
        return self.samples * speedup * self.apart / gained if gained > 0 else math.inf


def loads(servers: int, model_bytes: float, pieces: Sequence[float] = ()) -> list[float]:
    """Bytes of the model that each server holds."""
    if not pieces:
        return [model_bytes / servers] * servers
    bytes_held = [0.0] * servers
    for piece in sorted(pieces, reverse=True):
        bytes_held[bytes_held.index(min(bytes_held))] += piece
    return bytes_held


def gradients(placed: Sequence[Placement], step: StepReport) -> dict[tuple[str, str], float]:
    """Uncompressed bytes per step from workers' hosts to servers' hosts. Results take the opposite direction."""
    workers = [host.name for role, _, host in placed if role == WORKER]
    servers = [host.name for role, _, host in placed if role == SERVER]
    held = loads(len(servers), step.model_bytes, step.pieces)
    traffic: defaultdict[tuple[str, str], float] = defaultdict(float)
    for worker in dict.fromkeys(workers) if step.summed_in_host else workers:
        for server, count in zip(servers, held, strict=True):
            if worker != server:
                traffic[worker, server] += count
    return dict(traffic)


def forecast(
    placed: Sequence[Placement], step: StepReport, computing: Computing, links: Links, gc_type: str = "none"
) -> Forecast | None:
    """The forecast of dist_sync for these placements, or of the mean step of several local ones; None if the throughput
    of a link is unknown."""
    workers = Counter(host.name for role, _, host in placed if role == WORKER)
    servers = sum(role == SERVER for role, _, _ in placed)
    sent = gradients(placed, step)
    push_share, pull_share = (share / step.local_steps for share in step.compression[gc_type])
    pushed = {link: push_share * count for link, count in sent.items()}
    pulled = {link[::-1]: pull_share * count for link, count in sent.items()}
    both = {link: pushed.get(link, 0.0) + pulled.get(link, 0.0) for link in pushed | pulled}
    together, *apart = (links.seconds(each) for each in (both, pushed, pulled))
    known = [seconds for seconds in apart if seconds is not None]
    if together is None or len(known) < len(apart):
        return None
    slowest = max(computing.seconds(host, count) for host, count in workers.items())
    return Forecast(workers.total(), servers, step.samples, slowest, together, sum(known), computing.alone[0])


def alone(step: StepReport, computing: Computing) -> Forecast:
    """One worker on the fastest host, without servers."""
    seconds = computing.alone[0]
    return Forecast(1, 0, step.samples, seconds, 0.0, 0.0, seconds)


def counts(workers: int) -> list[int]:
    """The numbers of workers in the table: all, or the powers of two and `workers`."""
    if workers <= FEW:
        return list(range(1, workers + 1))
    return [*(2**power for power in range((workers - 1).bit_length())), workers]
