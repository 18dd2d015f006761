"""What happened to each job: its start, restarts, changes, faults and end, as job.json says."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from dmltrain.report.page.html import Content, Markup, element, join
from dmltrain.report.page.sections.section import Context, Section
from dmltrain.report.page.source import Folder
from dmltrain.report.runs.job_record import JobRecord

STAMP = "%Y-%m-%dT%H:%M:%S%z"  # dmltrain_launch.terminal.log_folder.stamp
EXIT_CODES = {  # docs/faults.md
    75: "another process was lost",
    124: "the time limit passed",
    125: "an error of the launcher or its agents",
    126: "the program is not executable",
    127: "the program was not found",
    130: "Ctrl-C",
    143: "SIGTERM",
}


def section(context: Context) -> Section | None:
    lists = [_of_folder(context, folder) for folder in context.sources.folders]
    return Section("Timeline", lists) if lists else None


def _of_folder(context: Context, folder: Folder) -> Markup:
    events = [event for _, earlier in folder.previous for event in _earlier(earlier)]
    events += list(_events(context, folder))
    return join([element("h3", folder.label), element("ol", *events, class_="timeline")])


def _earlier(job: JobRecord) -> Iterator[Markup]:
    words = f"an earlier run in this folder; {_ending(job)}"
    yield _event("other", job.started, "", words, job.cause)


def _events(context: Context, folder: Folder) -> Iterator[Markup]:
    job = folder.job
    count = [_count(job.workers, "worker"), _count(job.servers, "server")]
    yield _event("start", job.started, "", "start" + _listed(count), "")
    for number, attempt in enumerate(job.earlier, 1):
        code = _code(attempt.exit_code)
        yield _event("fault", attempt.ended, _after(job, attempt.ended), f"attempt {number} ended{code}", attempt.cause)
        link = element("a", f"restart {number}", href=context.link(f"{folder.path}/restart-{number}") + "/")
        yield _event("restart", "", "", link, "")
    for change in job.changes:
        after = "" if change.after is None else f"after {_span(change.after)}"
        where = f" {change.where}" if change.where else ""
        by = f"; asked for by {change.by}" if change.by else ""
        yield _event("other", "", after, f"{change.now} on all workers{where}{by}", "")
    yield _event(*_last(job))
    for process in job.processes:
        if process.exit_code and not process.by_launcher:
            how = process.signal or f"exit code {process.exit_code}{_meaning(process.exit_code)}"
            on = f" on {process.host}" if process.host else ""
            yield _event("fault", "", "", f"{process.name}{on} ended: {how}", "")


def _last(job: JobRecord) -> tuple[str, str | None, str, str, str | None]:
    if not job.ended:
        return "other", "", "", "no end is recorded: the job runs, or its launcher was lost", job.cause
    after = f"after {_span(job.seconds)}" if job.seconds is not None else _after(job, job.ended)
    return ("fault" if job.exit_code else "end"), job.ended, after, _ending(job), job.cause


def _ending(job: JobRecord) -> str:
    return f"end{_code(job.exit_code)}" if job.ended else "no end is recorded"


def _code(code: int | None) -> str:
    return "" if code is None else f", exit code {code}{_meaning(code)}"


def _meaning(code: int) -> str:
    return f" ({EXIT_CODES[code]})" if code in EXIT_CODES else ""


def _count(number: int | None, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}" if number else ""


def _listed(parts: list[str]) -> str:
    shown = [part for part in parts if part]
    return f": {', '.join(shown)}" if shown else ""


def _event(kind: str, when: str | None, after: str, text: Content, cause: str | None) -> Markup:
    parts: list[Content] = [element("time", _shown(when))] if when else []
    parts += [element("span", after, class_="after")] if after else []
    parts += [element("span", text, class_="what")]
    parts += [element("span", cause, class_="cause")] if cause else []
    return element("li", *parts, class_=kind)


def _shown(when: str) -> str:
    """`2026-11-21T03:34:36+0000` -> `2026-11-21 03:34:36 +0000`; another text as it is."""
    return f"{when[:10]} {when[11:19]} {when[19:]}" if _parsed(when) else when


def _after(job: JobRecord, when: str | None) -> str:
    start, end = _parsed(job.started), _parsed(when)
    return f"after {_span((end - start).total_seconds())}" if start and end else ""


def _parsed(when: str | None) -> datetime | None:
    try:
        return datetime.strptime(when or "", STAMP)
    except ValueError:
        return None


def _span(seconds: float) -> str:
    """59.1 s, 5 min 07 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
