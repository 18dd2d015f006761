"""How many steps of other workers the weights missed, as measured."""

from __future__ import annotations

from dmltrain.report.page.sections.section import Context, Section


def section(context: Context) -> Section | None:
    chart = context.lines(
        "staleness",
        "Steps of others that a worker's weights missed, mean of an epoch",
        "steps",
        {"staleness": ""},
        from_zero=True,
    )
    return Section("Measured staleness", [chart]) if chart.drawn else None
