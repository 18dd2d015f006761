"""An outcome as Markdown, for GitHub and Sphinx: caption, table, footnotes, sentences and plots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

from dmltrain.experiment.results.outcome import Outcome
from dmltrain.experiment.results.table import Note, Table, TableEntry, tables

_SPECIAL = re.compile(r"([\\`*{}\[\]<>|~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")  # dist_sync is no emphasis
_ENDINGS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


def text(outcome: Outcome) -> str:
    """The whole file."""
    shown = tables(outcome)
    return "\n".join(f"{block}\n" for block in _blocks(outcome, shown.main, shown.beside, shown.notes))


def escaped(words: str) -> str:
    """`words` as they are: no letter of them is markup, HTML, or the end of an entry."""
    words = _ENDINGS.sub(" ", words).replace("&", "&amp;")
    return _SPECIAL.sub(r"\\\1", words).replace(r"\<", "&lt;").replace(r"\>", "&gt;")


def _blocks(outcome: Outcome, main: Table, beside: tuple[Table, ...], notes: tuple[Note, ...]) -> Iterator[str]:
    yield " ".join([f"**{escaped(outcome.title)}.**", *map(escaped, outcome.caption)])
    yield _table(main)
    for table in beside:
        yield f"**{_link(table.title, table.link)}:**"
        yield _table(table)
    if notes:
        yield "\n".join(f"- <sup>{note.mark}</sup> {_link(note.text, note.link)}" for note in notes)
    if outcome.sentences:
        yield " ".join(map(escaped, outcome.sentences))
    for picture in outcome.pictures:
        yield f"![{escaped(picture.title)}]({_target(picture.file)})"


def _table(table: Table) -> str:
    lines = [table.headings, [TableEntry("---")] * len(table.headings), *table.lines]
    return "\n".join(
        "| " + " | ".join(_entry(entry) if place != 1 else entry.text for entry in line) + " |"
        for place, line in enumerate(lines)
    )


def _entry(entry: TableEntry) -> str:
    return _link(entry.text, entry.link) + (f"<sup>{entry.mark}</sup>" if entry.mark else "")


def _link(words: str, target: str) -> str:
    return f"[{escaped(words)}]({_target(target)})" if target else escaped(words)


def _target(target: str) -> str:
    return quote(target, safe="/:?&=%#,;+~@!-._")
