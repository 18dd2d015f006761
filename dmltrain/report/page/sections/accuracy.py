"""Accuracy, loss and every other metric: over epochs, and the first ones also over time."""

from __future__ import annotations

import re
from dataclasses import replace

from dmltrain.report.page.chart import Chart
from dmltrain.report.page.sections.section import Context, Section

SPLITS = {"validation": "validation", "train": "train", "test": "test"}  # of a key -> name of a curve, in this order
LOSS = re.compile(r"loss|entropy|nll|perplexity|error|rmse|mae|mse")
MOST_METRICS = 12


def section(context: Context) -> Section | None:
    charts: list[Chart] = []
    for metric in _metrics(context):
        keys = {f"{split}_{metric}": name for split, name in SPLITS.items() if f"{split}_{metric}" in context.keys}
        shown, slug = metric.replace("_", " "), metric.replace("_", "-")
        unit = "fraction" if "accuracy" in metric else ""
        chart = context.lines(f"{slug}-by-epoch", f"{shown[:1].upper()}{shown[1:]} by epoch", shown, keys, unit=unit)
        by_time = context.over_time(chart, f"{slug}-by-time")
        charts += [
            drawn for drawn in (chart, replace(by_time, title=f"{shown[:1].upper()}{shown[1:]} by time")) if drawn.drawn
        ]
    rate = context.lines("learning-rate", "Learning rate by epoch", "learning rate", {"learning_rate": ""})
    charts += [rate] if rate.drawn else []
    return Section("Accuracy and loss", charts) if charts else None


def _metrics(context: Context) -> list[str]:
    """Accuracies first, then losses, then others; each in the order of the logs."""
    metrics = [key.partition("_")[2] for key in context.keys if key.partition("_")[0] in SPLITS]
    metrics = [metric for metric in dict.fromkeys(metrics) if metric and not metric.startswith("err_top")]

    def order(metric: str) -> tuple[int, int]:
        return 0 if metric == "accuracy" else 1 if LOSS.search(metric) else 2, metrics.index(metric)

    return sorted(metrics, key=order)[:MOST_METRICS]
