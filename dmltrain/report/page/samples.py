"""usage.csv of a job's log folder -> what each host used, over time. The launcher writes that file.

    time,host,cpu,memory,job_cpu,job_memory,gpu,gpu_memory

time: s since 1970. cpu: share of the host's cores that were busy. memory: share in use. job_cpu: cores that the job
kept busy. job_memory: MiB of the job. gpu: mean share of its GPUs. gpu_memory: MiB in use. A value that is no number,
or beyond all sense, is missing. A job with restarts has such a file in each attempt's folder.
"""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dmltrain.report.page.thin import Numbers

NAME = "usage.csv"
MOST_BYTES = 64 << 20
COLUMNS = ("cpu", "memory", "job_cpu", "job_memory", "gpu", "gpu_memory")
MOST_HOSTS = 1000
LARGEST = 1e30  # of a number; sums and differences of such numbers are finite


@dataclass(frozen=True)
class HostSamples:
    """The samples of a host. time: s since the first sample of the job. values: column -> a number for each time."""

    name: str
    time: Numbers
    values: Mapping[str, Numbers]


def read(folder: str) -> list[HostSamples]:
    """The hosts in the usage.csv of `folder`; [] if it has none that can be read."""
    path = os.path.join(folder, NAME)
    try:
        with open(path, encoding="utf-8", errors="replace", newline="", opener=_opener) as file:
            size = os.fstat(file.fileno())
            if not stat.S_ISREG(size.st_mode) or size.st_size > MOST_BYTES:
                return []
            return parse(file)
    except OSError:
        return []


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe of that name keeps nobody waiting


def parse(lines: Iterable[str]) -> list[HostSamples]:
    """The hosts in the lines of a usage.csv, in the order of their first samples. Rows without a time are skipped."""
    rows: dict[str, list[tuple[float, dict[str, float | None]]]] = {}
    for row in _rows(lines):
        time, host = _number(row.get("time")), row.get("host")
        if time is None or not host or (host not in rows and len(rows) == MOST_HOSTS):
            continue
        rows.setdefault(host, []).append((time, {column: _number(row.get(column)) for column in COLUMNS}))
    first = min((time for samples in rows.values() for time, _ in samples), default=0.0)
    return [_host(name, first, sorted(samples, key=lambda sample: sample[0])) for name, samples in rows.items()]


def _rows(lines: Iterable[str]) -> Iterable[dict[str, str]]:
    heading: list[str] | None = None
    for line in lines:
        try:
            [cells] = csv.reader([line.replace("\0", "")])
        except (csv.Error, ValueError):  # a field is too long, or the line is empty
            continue
        if heading is None:
            heading = cells
        else:
            yield dict(zip(heading, cells, strict=False))


def _host(name: str, first: float, samples: list[tuple[float, dict[str, float | None]]]) -> HostSamples:
    values = {column: [row[column] for _, row in samples] for column in COLUMNS}
    used = {column: numbers for column, numbers in values.items() if any(number is not None for number in numbers)}
    return HostSamples(name, [time - first for time, _ in samples], used)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if abs(number) <= LARGEST else None
