"""What speed-up to expect of a job, from what a step costs each host and what its links carry. Pure.

A parameter server's step moves every worker's gradients to the servers and the results back. With V bytes of gradients,
s servers and TCP that carries B bytes/s, the host whose card has most to carry decides:
    servers on hosts of their own       T = max(V / B, n V / (s B))     both directions at once
    a server beside each of n workers   T = 2 (n - 1) V / (n B)
and in general the sum over a host's processes, each direction for itself, where what stays in a host costs nothing.
That is when gradients and results flow at once; where results wait for all gradients, the times of both add up. Parts
of the model that are not split over servers count where they would be: on the emptiest server, big ones first.
A step takes max(computing, T) where all communication hides behind the computing, and computing, gradients, results
one after another where none does: the best and the worst to expect. Left out: the network's delay, and what processors
spend on sending.
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

from launch.job.placement import Place
from launch.job.role import SERVER, WORKER

MARK = "DMLTRAIN_MEASURE"
UNCOMPRESSED = {"none": (1.0, 1.0)}
PAYS = 1.1  # times one worker: less is not worth the machines
DISTURBED = 1.1  # times as long as it can be: more than measurements differ by themselves
UNSTEADY = 0.5  # spread of measurements from which on it is mentioned
FEW = 8  # workers, for each number of which there is a row


@dataclass(frozen=True)
class Step:
    """What a program says of its step: see docs/environment.md. `seconds` on one host, bytes of float32.

    `compression`: by --gc-type, the share that is left of the bytes of gradients, and of results.
    """

    seconds: float
    samples: float
    model_bytes: float
    network: str = ""
    kv_store: str = "dist_sync"
    gc_type: str = "none"
    backend: str = ""
    distributed: bool = True  # what the kvstore's type promises
    synchronous: bool = True
    compression: Mapping[str, tuple[float, float]] = field(default_factory=lambda: UNCOMPRESSED)
    summed_in_host: bool = False
    pieces: tuple[float, ...] = ()  # bytes of the parts that stay whole on one server; none: all is split evenly
    spread: float = 0.0  # of the measurements, as a share of `seconds`

    @property
    def compared(self) -> list[str]:
        """Each --gc-type whose bytes differ from those before it."""
        return [
            name
            for name, shares in self.compression.items()
            if next(each for each, same in self.compression.items() if same == shares) == name
        ]


def step_of(line: str) -> Step | None:
    """The step that a line of a program's output tells of; None when it is another line, or makes no sense."""
    word, _, text = line.partition(" ")
    if word != MARK:
        return None
    try:
        said = json.loads(text)
        seconds, samples, model_bytes = (
            float(said[name]) for name in ("seconds_per_step", "samples_per_step", "model_bytes")
        )
        given: dict[str, Any] = {
            name: str(said[name]) for name in ("network", "kv_store", "gc_type", "backend") if name in said
        }
        summed, pieces = bool(said.get("summed_in_host", False)), tuple(float(each) for each in said.get("pieces", ()))
        spread = float(said.get("spread", 0.0))
        given |= {name: bool(said[name]) for name in ("distributed", "synchronous") if name in said}
        compression = {
            str(name): (float(there), float(back))
            for name, (there, back) in said.get("compression", UNCOMPRESSED).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    good = all(0 < each < math.inf for each in [seconds, samples, model_bytes, *pieces, *chain(*compression.values())])
    if not good or "none" not in compression or not 0 <= spread < math.inf:
        return None
    given |= {"compression": compression, "summed_in_host": summed, "pieces": pieces, "spread": spread}
    return Step(seconds, samples, model_bytes, **given)


@dataclass(frozen=True)
class Links:
    """Bytes/s that TCP carries, by from and to, both directions busy. A card carries what its good links do."""

    speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def seconds(self, traffic: Mapping[tuple[str, str], float]) -> float | None:
        """How long these bytes, by from and to, take at once; None where a host's links are not known."""
        loads: defaultdict[tuple[str, str], float] = defaultdict(float)  # of the cards: ("out", host), ("in", host)
        for (source, target), count in traffic.items():
            loads["out", source] += count
            loads["in", target] += count
        cards = [(load, self._card(*card)) for card, load in loads.items()]
        if not all(speed for _, speed in cards):
            return None
        links = [(load, self.speeds[link]) for link, load in traffic.items() if self.speeds.get(link)]
        return max((load / speed for load, speed in [*cards, *links]), default=0.0)

    def _card(self, way: str, host: str) -> float:
        end = 0 if way == "out" else 1
        found = [speed for link, speed in self.speeds.items() if link[end] == host]
        return median(speed for speed in found if speed >= max(found) / 2) if found else 0.0


@dataclass(frozen=True)
class Computing:
    """Seconds of a step that sends nothing, by host and by the number of workers that share the host. Fewer workers
    never take longer than more do there: where they seem to, the measurement was disturbed."""

    measured: Mapping[str, Mapping[int, float]]
    spread: float = 0.0  # of the measurements, at worst

    def seconds(self, host: str, workers: int) -> float:
        """Between two measured numbers in proportion; a host that was not measured is taken for the slowest."""
        if not self.measured.get(host):
            return max(self.seconds(each, workers) for each in self.measured)
        found = self.measured[host]
        known = {number: min(seconds for more, seconds in found.items() if more >= number) for number in found}
        if workers in known:
            return known[workers]
        below = max((number for number in known if number < workers), default=0)
        above = min((number for number in known if number > workers), default=0)
        if not below or not above:
            return known[below or above]
        return known[below] + (known[above] - known[below]) * (workers - below) / (above - below)

    @property
    def doubts(self) -> dict[str, tuple[float, int, float]]:
        """Hosts on which fewer workers took clearly longer than more: seconds of the fewest, and how many took less."""
        found = {}
        for host, known in self.measured.items():
            fewest, (less, number) = min(known), min((seconds, number) for number, seconds in known.items())
            if known[fewest] > DISTURBED * less:
                found[host] = known[fewest], number, less
        return found

    @property
    def alone(self) -> tuple[float, str]:
        """What one worker takes on the best host, and that host."""
        return min((self.seconds(host, 1), host) for host in self.measured)


@dataclass(frozen=True)
class Forecast:
    """A step of `workers` workers, in seconds; `alone` is what one worker would take on the best host."""

    workers: int
    servers: int
    samples: float  # of one worker's step
    computing: float
    communicating: float  # gradients and results at once
    apart: float  # results after gradients
    alone: float

    @property
    def best(self) -> float:
        """Seconds of a step when all communication hides behind the computing."""
        return max(self.computing, self.communicating)

    @property
    def worst(self) -> float:
        """Seconds of a step when none does."""
        return self.computing + self.apart

    @property
    def speedups(self) -> tuple[float, float]:
        """Samples/s in units of one worker's on the best host: at worst, at best."""
        return self.workers * self.alone / self.worst, self.workers * self.alone / self.best

    @property
    def share(self) -> float:
        """Of a step, what is communication when none of it hides."""
        return self.apart / self.worst

    def batch(self, speedup: float) -> float:
        """The batch of one worker that gives this speed-up with nothing hidden, if computing grows with the batch;
        inf where the slowest worker is too slow for any."""
        gained = self.workers * self.alone - speedup * self.computing  # s, at this batch
        return self.samples * speedup * self.apart / gained if gained > 0 else math.inf


def loads(servers: int, model_bytes: float, pieces: Sequence[float] = ()) -> list[float]:
    """Bytes of the model that each server holds."""
    if not pieces:
        return [model_bytes / servers] * servers
    found = [0.0] * servers
    for piece in sorted(pieces, reverse=True):
        found[found.index(min(found))] += piece
    return found


def gradients(placed: Sequence[Place], step: Step) -> dict[tuple[str, str], float]:
    """Bytes of a step from workers' hosts to servers' on other hosts, uncompressed; results go the other way."""
    workers = [host.name for role, _, host in placed if role == WORKER]
    servers = [host.name for role, _, host in placed if role == SERVER]
    held = loads(len(servers), step.model_bytes, step.pieces)
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for worker in dict.fromkeys(workers) if step.summed_in_host else workers:
        for server, count in zip(servers, held, strict=True):
            if worker != server:
                found[worker, server] += count
    return dict(found)


def forecast(
    placed: Sequence[Place], step: Step, computing: Computing, links: Links, gc_type: str = "none"
) -> Forecast | None:
    """Of the workers and servers at these places, in step (dist_sync); None where a link that they need is unknown."""
    beside = Counter(host.name for role, _, host in placed if role == WORKER)
    servers = sum(role == SERVER for role, _, _ in placed)
    sent = gradients(placed, step)
    there, back = step.compression[gc_type]
    pushed = {link: there * count for link, count in sent.items()}
    pulled = {link[::-1]: back * count for link, count in sent.items()}
    both = {link: pushed.get(link, 0.0) + pulled.get(link, 0.0) for link in pushed | pulled}
    together, *apart = (links.seconds(each) for each in (both, pushed, pulled))
    known = [seconds for seconds in apart if seconds is not None]
    if together is None or len(known) < len(apart):
        return None
    slowest = max(computing.seconds(host, count) for host, count in beside.items())
    return Forecast(beside.total(), servers, step.samples, slowest, together, sum(known), computing.alone[0])


def alone(step: Step, computing: Computing) -> Forecast:
    """One worker on the best host, without servers."""
    seconds = computing.alone[0]
    return Forecast(1, 0, step.samples, seconds, 0.0, 0.0, seconds)


def counts(workers: int) -> list[int]:
    """For which numbers of workers there is a row: each, or the powers of two, and `workers`."""
    if workers <= FEW:
        return list(range(1, workers + 1))
    return [*(2**power for power in range((workers - 1).bit_length())), workers]
