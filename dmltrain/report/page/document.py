"""Sections -> the page: one HTML document with its style, scripts and data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources

from dmltrain.report.page.chart import Chart
from dmltrain.report.page.html import Content, Markup, element, join, mark, text
from dmltrain.report.page.pack import Pool
from dmltrain.report.page.sections import sections
from dmltrain.report.page.sections.section import Context, Section
from dmltrain.report.page.source import Sources

LIBRARY = "vendor/echarts.common.min.js"
STYLE = "assets/page.css"
SCRIPTS = ("data", "look", "value", "hover", "lines", "stack", "figure", "runs", "sort", "start")  # in this order
ASSETS = (LIBRARY, STYLE, *(f"assets/{name}.js" for name in SCRIPTS))
GENERATOR = "dmltrain-report"
MOST_BYTES = 1_900_000  # of a page, if its curves can be thinned so far
BYTES = 5.4  # of a number: 4 in base64, and what names its array
POINTS = (1000, 700, 500, 400, 300, 250, 200, 150, 100, 70, 50, 30, 20, 12, 8)  # of a curve: the first that fits


def document(sources: Sources, folder: str, version: str) -> str:
    """The page for `sources`; `folder`: where it will lie, for links. The same input gives the same text."""
    filled = sections(Context(sources, folder))
    charts = [chart for _, section in filled for chart in section.charts]
    bodies = [_section(name, section) for name, section in filled]
    most = points(charts, MOST_BYTES - sum(map(len, bodies)) - sum(len(_asset(name)) for name in ASSETS))
    title = _title(sources)
    head = [
        element("title", f"{title} - dmltrain report"),
        element("style", Markup(_asset(STYLE))),
    ]
    scripts = [_asset(LIBRARY), "\n".join(["(() => {", '"use strict";', *map(_script, SCRIPTS), "})();"])]
    body = [
        element("a", "To the content", href="#content", class_="skip"),
        element("header", element("h1", title), _subtitle(sources, version), _contents(filled)),
        _legend(sources),
        element("main", *_notes(sources), *_thinned(charts, most), *bodies, id="content"),
        element("script", Markup(_data(sources, charts, most)), type="application/json", id="data"),
        *(element("script", Markup(script)) for script in scripts),
    ]
    return join(
        [
            Markup("<!DOCTYPE html>\n"),
            Markup('<html lang="en">\n<head>\n<meta charset="utf-8">\n'),
            Markup(f'<meta name="generator" content="{GENERATOR}">\n'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
            Markup('<meta name="color-scheme" content="light dark">\n'),
            *head,
            Markup("\n</head>\n<body>\n"),
            Markup("\n".join(body)),
            Markup("\n</body>\n</html>\n"),
        ]
    )


def points(charts: Sequence[Chart], room: int) -> int:
    """How many points a curve may have, so that the charts' numbers fit into `room` bytes, if they can."""
    fitting = (most for most in POINTS if BYTES * sum(chart.numbers(most) for chart in charts) <= room)
    return next(fitting, POINTS[-1])


@cache
def _asset(name: str) -> str:
    content = resources.files("dmltrain.report.page").joinpath(name).read_text("utf-8").strip("\n")
    assert "</script" not in content and "</style" not in content, name
    return content


def _script(name: str) -> str:
    return _asset(f"assets/{name}.js")


def _policy(scripts: Sequence[str]) -> str:
    """Nothing is loaded, and only these scripts run."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _data(sources: Sources, charts: Sequence[Chart], most: int) -> str:
    pool = Pool()
    values = {
        "runs": [shown.label for shown in sources.runs],
        "charts": [chart.json(pool, most) for chart in charts],
        "arrays": pool.arrays,
    }
    plain = json.dumps(values, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace("&", "\\u0026")  # so that no text ends the element


def _title(sources: Sources) -> str:
    names = [experiment.title for experiment in sources.experiments] or [shown.label for shown in sources.runs]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if names else "no run"


def _subtitle(sources: Sources, version: str) -> Markup:
    count, workers = len(sources.runs), sum(len(shown.run.files) for shown in sources.runs)
    counted = f"{count} run{'s' * (count != 1)}, {workers} log{'s' * (workers != 1)} of workers"
    return element("p", f"{counted}; dmltrain {version}", class_="subtitle")


def _contents(filled: Sequence[tuple[str, Section]]) -> Markup:
    links = [element("li", element("a", section.heading, href=f"#{name}")) for name, section in filled]
    return element("nav", element("ul", *links), aria_label="Contents")


def _legend(sources: Sources) -> Markup:
    """Buttons that hide a run everywhere; the scripts add what they do."""
    if len(sources.runs) < 2:
        return Markup()
    buttons = [
        element("button", mark(run.number), run.label, type="button", data_toggle=str(run.number), aria_pressed="true")
        for run in sources.runs
    ]
    everything = element("button", "show all", type="button", id="show-all", class_="plain", hidden=True)
    return element("div", *buttons, everything, id="runs", role="group", aria_label="Runs: a click hides or shows one")


def _notes(sources: Sources) -> list[Markup]:
    shown = [element("li", element("strong", "error: "), fault) for fault in sources.faults]
    shown += [element("li", note) for note in sources.notes]
    script = Markup('<noscript><p class="note">The charts need JavaScript; the tables are complete.</p></noscript>')
    return [script, element("ul", *shown, class_="notes", aria_label="Notes")] if shown else [script]


def _thinned(charts: Sequence[Chart], most: int) -> list[Markup]:
    longest = max((chart.longest for chart in charts), default=0)
    if longest <= most:
        return []
    words = f"Long curves have at most {most} points here, of up to {longest}: the lowest and highest of each interval."
    return [element("p", words, class_="note")]


def _section(name: str, section: Section) -> Markup:
    blocks: list[Content] = []
    figures: list[Content] = []
    for block in section.blocks:
        if isinstance(block, str):
            blocks += [_grid(figures)] if figures else []
            figures = []
            blocks.append(block)
        else:
            figures.append(_figure(block))
    blocks += [_grid(figures)] if figures else []
    return element(
        "section",
        element("h2", section.heading, id=f"{name}-heading"),
        *blocks,
        id=name,
        aria_labelledby=f"{name}-heading",
    )


def _grid(figures: Sequence[Content]) -> Markup:
    return element("div", *figures, class_="charts")


def _figure(chart: Chart) -> Markup:
    """The frame of a chart, which the scripts fill."""
    notes = [element("p", note, class_="note") for note in chart.notes()]
    run = str(chart.run) if hasattr(chart, "run") else None
    return element(
        "figure",
        element("figcaption", text(chart.title)),
        element("div", class_="keys"),
        element("div", class_="chart", role="img", aria_label=chart.title),
        *notes,
        element("details", element("summary", "values as a table"), class_="values"),
        id=chart.id,
        data_of=run,
    )
