"""Bytes that a worker exchanged with the servers."""

from __future__ import annotations

from dmltrain.report.page.sections.section import Context, Section

CHARTS = {
    "sent": "Sent to servers by a worker, in an epoch",
    "received": "Received from servers by a worker, in an epoch",
}


def section(context: Context) -> Section | None:
    charts = [
        context.lines(key, title, "bytes", {key: ""}, unit="bytes", from_zero=True) for key, title in CHARTS.items()
    ]
    drawn = [chart for chart in charts if chart.drawn]
    return Section("Traffic", drawn) if drawn else None
