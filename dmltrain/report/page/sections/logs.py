"""Links to the logs, relative to the page."""

from __future__ import annotations

import os

from dmltrain.report.page.html import Content, element, join, mark
from dmltrain.report.page.samples import NAME as SAMPLES
from dmltrain.report.page.sections.section import Context, Section
from dmltrain.report.page.source import PageRun
from dmltrain.report.runs.job_record import NAME as RECORD

MOST = 200  # links of a run


def section(context: Context) -> Section | None:
    blocks = [_of_run(context, shown) for shown in context.runs if shown.folder]
    return Section("Logs", blocks) if blocks else None


def _of_run(context: Context, shown: PageRun) -> Content:
    files = _files(shown)
    links = [element("li", element("a", os.path.basename(file), href=context.link(file))) for file in files[:MOST]]
    more = [element("li", f"and {len(files) - MOST} more")] if len(files) > MOST else []
    return join([element("h3", mark(shown.number), shown.label), element("ul", *links, *more, class_="files")])


def _files(shown: PageRun) -> list[str]:
    """All logs of a folder, and the launcher's files there; or the file that was named."""
    if not os.path.isdir(shown.run.log):
        return list(shown.run.files)
    others = sorted(name for name in os.listdir(shown.run.log) if name.endswith(".log") or name in (RECORD, SAMPLES))
    paths = [os.path.join(shown.run.log, name) for name in others]
    return [*shown.run.files, *(path for path in paths if path not in shown.run.files)]
