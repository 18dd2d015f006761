"""Measure a step of a job's program on its hosts: start its workers without servers; each worker measures itself.

With the variable DMLTRAIN_MEASURE (docs/environment.md), the program prints one line with the result and exits.
The first run starts all workers where the job would place them, so those of one host share its cores and memory.
On hosts with several workers, a second run starts one worker alone, as the baseline of the speed-up. Other work on a
host can only lengthen a step. So if one worker alone seems slower than several at once, the run is repeated, and the
shortest result counts.
"""

from __future__ import annotations

import ast
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dmltrain_launch.clusters import Cluster
from dmltrain_launch.forecast.forecast import MARK, Computing, StepReport, step_of
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, Setting, placements
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import WORKER
from dmltrain_launch.run.described import limits, new_mark
from dmltrain_launch.run.session import Session, catching
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.secret import redact

SECONDS = 5.0  # how long each worker measures steps
KEPT_BYTES = 1 << 16  # of each process's output
EXTRA_SECONDS = 60.0  # for imports, warm-up and long steps
REPEATS = 2  # of implausible measurements


@dataclass
class Measured:
    """Seconds of a step by host and number of workers on it; the last `step` reported; and what failed."""

    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    spreads: dict[tuple[str, int], float] = field(default_factory=dict)  # of these seconds; see docs/environment.md
    step: StepReport | None = None
    failure: str = ""
    interrupted: int = 0  # the exit code if a signal ended the measurement, else 0

    def add(self, reports: Sequence[tuple[str, StepReport]], workers: Counter[str]) -> None:
        """Add the (host, step) reports of one run: the slowest worker of each host, and the best of several runs."""
        slowest: dict[str, StepReport] = {}
        for host, step in reports:
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


def supports_measuring(job: Job) -> bool:
    """Whether the program supports DMLTRAIN_MEASURE. Other programs must not be started: they would train."""
    if any(setting.name == MARK for setting in job.settings):
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
    return isinstance(node, ast.Import) and any(name.name == "dmltrain.fit" for name in node.names)


def measure(job: Job, cluster: Cluster, options: Options) -> Measured:
    """Run the program on the hosts of the job's workers. `cluster.hosts` is changed meanwhile and restored."""
    hosts, measured = cluster.hosts, Measured()
    workers = Counter(host.name for role, _, host in placements(job, hosts) if role == WORKER)
    used = [host for host in hosts if host.name in workers]
    try:
        _run(job, used, workers, cluster, options, measured)
        crowded = [host for host in used if workers[host.name] > 1]
        for _ in range(1 + REPEATS):
            if crowded and not measured.failure:
                _run(job, crowded, Counter(host.name for host in crowded), cluster, options, measured)
            crowded = [host for host in crowded if host.name in measured.computing.doubts]
    finally:
        cluster.hosts = hosts
    return measured


def _run(
    job: Job, hosts: Sequence[Host], workers: Counter[str], cluster: Cluster, options: Options, measured: Measured
) -> None:
    """Start `workers[name]` workers on each of these hosts, and add what they report to `measured`."""
    requested = [setting for setting in job.settings if setting.name == MARK]
    seconds = _seconds(requested[-1].value) if requested else SECONDS
    own = replace(
        job,
        mark=new_mark("measure"),
        num_workers=workers.total(),
        num_servers=0,
        placement="pack",
        needs=(),
        port=0,
        elastic=0,
        settings=(*job.settings, *([] if requested else [Setting(MARK, f"{seconds:g}")])),
    )
    cluster.hosts = [replace(host, slots=workers[host.name], roles=()) for host in hosts]
    bounds = replace(limits(options), timeout=seconds + EXTRA_SECONDS)
    supervisor, output = Supervisor(own, cluster.hosts, bounds), KeptOutput(own.num_workers)
    session = Session(supervisor, cluster, output, lambda: None)
    with catching(session.interrupt):
        session.run(None)
    reports = [
        (process.task.host.name, step)
        for process, lines in zip(supervisor.processes, output.lines, strict=True)
        for step in filter(None, map(step_of, lines))
    ]
    measured.add(reports, workers)
    measured.failure = redact(_failure(supervisor, output), job.secrets(cluster.hosts))
    measured.interrupted = supervisor.exit_code * supervisor.interrupted


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return SECONDS  # the program reports the error


def _failure(supervisor: Supervisor, output: KeptOutput) -> str:
    if supervisor.cause is None:
        return ""
    process = supervisor.cause.process
    lines = output.lines[supervisor.processes.index(process)] if process else []
    return supervisor.cause.text + (f": {lines[-1]}" if lines else "")


def start_line(job: Job) -> str:
    """The message before the measurement."""
    return f"measuring a step of {shlex.join(job.argv[:1])} on the hosts of its {job.num_workers} workers"


class KeptOutput:
    """A `dmltrain_launch.terminal.output.Sink` that keeps the end of each process's output in memory."""

    def __init__(self, count: int):
        self._printed = [b""] * count

    def write(self, task: int, data: bytes) -> None:
        self._printed[task] = (self._printed[task] + data)[-KEPT_BYTES:]

    def add(self, task: int) -> None:
        self._printed.append(b"")

    def open(self, name: str) -> None:
        self._printed.append(b"")

    def hurry(self) -> None:
        pass

    @property
    def lines(self) -> list[list[str]]:
        """The lines of each process."""
        return [each.decode(errors="replace").splitlines() for each in self._printed]
