"""CPU, memory and GPUs: what the workers' logs say by epoch, and what the agents sampled over time."""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain.report.page.chart import Chart, Curve, LineChart
from dmltrain.report.page.samples import HostSamples
from dmltrain.report.page.sections.section import Context, Section
from dmltrain.report.table import mean

BY_EPOCH = {  # key -> title, label of the axis, unit
    "usage_cpu": ("Cores that a worker kept busy", "cores", ""),
    "usage_host_cpu": ("CPU of a worker's host", "share", "percent"),
    "usage_memory": ("Memory of a worker at the end of an epoch", "MiB", "MiB"),
    "memory": ("Largest memory of a worker so far", "MiB", "MiB"),
    "usage_host_memory": ("Memory in use on a worker's host", "share", "percent"),
    "usage_gpu": ("GPUs of a worker", "share", "percent"),
    "usage_gpu_memory": ("GPU memory of a worker", "MiB", "MiB"),
}
SAMPLED = {  # column of usage.csv -> the same
    "cpu": ("CPU of a host", "share", "percent"),
    "memory": ("Memory in use on a host", "share", "percent"),
    "job_cpu": ("Cores that the job kept busy on a host", "cores", ""),
    "job_memory": ("Memory of the job on a host", "MiB", "MiB"),
    "gpu": ("GPUs of a host", "share", "percent"),
    "gpu_memory": ("GPU memory in use on a host", "MiB", "MiB"),
}

MOST_HOSTS = 6  # with a curve each
INTERVALS = 150  # of the samples of more hosts


def section(context: Context) -> Section | None:
    charts: list[Chart] = [
        context.lines(key.replace("_", "-"), title, label, {key: ""}, unit=unit, from_zero=True)
        for key, (title, label, unit) in BY_EPOCH.items()
    ]
    charts += [
        LineChart(
            f"host-{column.replace('_', '-')}",
            f"{title}, sampled",
            "seconds since the first sample",
            label,
            _curves(context, column),
            unit,
            "seconds",
            from_zero=True,
        )
        for column, (title, label, unit) in SAMPLED.items()
    ]
    drawn = [chart for chart in charts if chart.drawn]
    return Section("Utilisation", drawn) if drawn else None


def _curves(context: Context, column: str) -> list[Curve]:
    """A curve for each host; with many hosts their mean and band."""
    by_host = sum(len(run.hosts) for run in context.runs) <= MOST_HOSTS
    curves: list[Curve] = []
    for run in context.runs:
        hosts = [host for host in run.hosts if column in host.values]
        if by_host or len(hosts) <= 1:
            curves += [_curve(run.number, host, column, place) for place, host in enumerate(hosts)]
        elif hosts:
            curves.append(_together(run.number, hosts, column))
    return curves


def _curve(run: int, host: HostSamples, column: str, place: int) -> Curve:
    return Curve(run, host.name, host.time, host.values[column], dash=place)


def _together(run: int, hosts: Sequence[HostSamples], column: str) -> Curve:
    """Mean, smallest and largest of all samples of an interval, of all hosts."""
    pairs = [
        (time, number)
        for host in hosts
        for time, number in zip(host.time, host.values[column], strict=True)
        if time is not None and number is not None
    ]
    width = max(time for time, _ in pairs) / INTERVALS or 1.0
    bins: dict[int, list[float]] = {}
    for time, number in pairs:
        bins.setdefault(min(int(time / width), INTERVALS - 1), []).append(number)
    rows = sorted(bins.items())
    return Curve(
        run,
        f"mean of {len(hosts)} hosts",
        [(place + 0.5) * width for place, _ in rows],
        [mean(numbers) for _, numbers in rows],
        [min(numbers) for _, numbers in rows],
        [max(numbers) for _, numbers in rows],
    )
