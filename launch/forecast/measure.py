"""What a step of a job's program costs on its hosts: its workers, started without servers, measure it themselves.

The contract is the environment (docs/environment.md): with DMLTRAIN_MEASURE set, the program prints one line and ends.
First all workers as the job would place them, at once: those of one host share its cores and memory as in the run.
Then, where a host has several, one alone with the whole host, as that is what many are compared with. Other work on a
host only ever makes a step longer: where one alone seems slower than several at once it is measured again, and of
repeated measurements the shortest counts.
"""

from __future__ import annotations

import ast
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.clusters import Cluster
from launch.forecast.forecast import MARK, Computing, Step, step_of
from launch.job.host import Host
from launch.job.job import Job, Setting, places
from launch.job.options import Options
from launch.job.role import WORKER
from launch.run.session import Session, catching
from launch.run.start import limits, new_mark
from launch.run.supervise import Supervisor
from launch.secret import redact

SECONDS = 5.0  # of steps
KEPT_BYTES = 1 << 16  # of what a program prints
EXTRA_SECONDS = 60.0  # for imports, the first steps, steps that take longer
REPEATS = 2  # of what is implausible


@dataclass
class Measured:
    """By host and number of workers there: one worker's seconds; `step` is the last that was told; and what failed."""

    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    spreads: dict[tuple[str, int], float] = field(default_factory=dict)  # of these seconds, see docs/environment.md
    step: Step | None = None
    failure: str = ""
    interrupted: int = 0  # the exit code, where a signal ended it

    def note(self, told: Sequence[tuple[str, Step]], workers: Counter[str]) -> None:
        """What workers told at once, and where: on a host the slowest of them counts, and of several times the best."""
        slowest: dict[str, Step] = {}
        for host, step in told:
            self.step = step
            if host not in slowest or step.seconds > slowest[host].seconds:
                slowest[host] = step
        for host, step in slowest.items():
            known, count = self.seconds.setdefault(host, {}), workers[host]
            if step.seconds < known.get(count, math.inf):
                known[count], self.spreads[host, count] = step.seconds, step.spread

    @property
    def computing(self) -> Computing:
        return Computing(self.seconds, max(self.spreads.values(), default=0.0))


def understands(job: Job) -> bool:
    """Whether the program heeds the variable: nobody else may be started, as it would train."""
    if any(each.name == MARK for each in job.settings):
        return True
    script = next((word for word in job.argv if word.endswith(".py")), "")
    try:
        source = Path(script).read_text() if script else ""
        return MARK in source or any(map(_imports_fit, ast.walk(ast.parse(source))))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False


def _imports_fit(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "dmltrain.fit" or node.module == "dmltrain" and any(a.name == "fit" for a in node.names)
    return isinstance(node, ast.Import) and any(each.name == "dmltrain.fit" for each in node.names)


def measure(job: Job, place: Cluster, options: Options) -> Measured:
    """Run the program on the hosts of the job's workers. `place.hosts` are the job's, and are so again afterwards."""
    hosts, found = place.hosts, Measured()
    workers = Counter(host.name for role, _, host in places(job, hosts) if role == WORKER)
    used = [host for host in hosts if host.name in workers]
    try:
        _run(job, used, workers, place, options, found)
        crowded = [host for host in used if workers[host.name] > 1]
        for _ in range(1 + REPEATS):
            if crowded and not found.failure:
                _run(job, crowded, Counter(host.name for host in crowded), place, options, found)
            crowded = [host for host in crowded if host.name in found.computing.doubts]
    finally:
        place.hosts = hosts
    return found


def _run(
    job: Job, hosts: Sequence[Host], workers: Counter[str], place: Cluster, options: Options, found: Measured
) -> None:
    """Start so many workers on each of these hosts, and note what they say."""
    asked = [each for each in job.settings if each.name == MARK]
    seconds = _number(asked[-1].value) if asked else SECONDS
    own = replace(
        job,
        mark=new_mark("measure"),
        num_workers=workers.total(),
        num_servers=0,
        placement="pack",
        needs=(),
        port=0,
        settings=(*job.settings, *([] if asked else [Setting(MARK, f"{seconds:g}")])),
    )
    place.hosts = [replace(host, slots=workers[host.name], roles=()) for host in hosts]
    bounds = replace(limits(options), timeout=seconds + EXTRA_SECONDS)
    supervisor, said = Supervisor(own, place.hosts, bounds), Said(own.num_workers)
    session = Session(supervisor, place, said, lambda: None)
    with catching(session.interrupt):
        session.run(None)
    told = [
        (process.task.host.name, step)
        for process, lines in zip(supervisor.processes, said.lines, strict=True)
        for step in filter(None, map(step_of, lines))
    ]
    found.note(told, workers)
    found.failure = redact(_failure(supervisor, said), job.secrets(place.hosts))
    found.interrupted = supervisor.exit_code * supervisor.interrupted


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return SECONDS  # the program will say what is wrong with it


def _failure(supervisor: Supervisor, said: Said) -> str:
    if supervisor.cause is None:
        return ""
    process = supervisor.cause.process
    lines = said.lines[supervisor.processes.index(process)] if process else []
    return supervisor.cause.text + (f": {lines[-1]}" if lines else "")


def start_line(job: Job) -> str:
    """What is about to happen."""
    return f"measuring a step of {shlex.join(job.argv[:1])} on the hosts of its {job.num_workers} workers"


class Said:
    """What the processes print, in place of `launch.terminal.output.Output`: the ends of it."""

    def __init__(self, count: int):
        self._printed = [b""] * count

    def write(self, task: int, data: bytes) -> None:
        self._printed[task] = (self._printed[task] + data)[-KEPT_BYTES:]

    def hurry(self) -> None:
        pass

    @property
    def lines(self) -> list[list[str]]:
        """By process."""
        return [each.decode(errors="replace").splitlines() for each in self._printed]
