r"""An outcome as LaTeX: floats with tabular, to be read with \input. They need no package, and every text is escaped.

Letters beyond Latin, which pdflatex has not without more packages, are written as their number: [U+65E5].
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dmltrain.experiment.results.outcome import Outcome
from dmltrain.experiment.results.table import Table, TableEntry, tables

_LETTERS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "–": "--",
    "—": "---",
}
_LATIN = re.compile(r"[ -~\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff]")


def text(outcome: Outcome) -> str:
    """The whole file."""
    return "\n".join(_lines(outcome)) + "\n"


def escaped(words: str) -> str:
    """`words` as they are: no letter of them is a command."""
    return "".join(map(_letter, words))


def _letter(letter: str) -> str:
    if letter in _LETTERS:
        return _LETTERS[letter]
    if letter.isspace() or not letter.isprintable():
        return " "
    return letter if _LATIN.fullmatch(letter) else f"[U+{ord(letter):04X}]"


def _lines(outcome: Outcome) -> Iterator[str]:
    shown = tables(outcome)
    notes = [f"{_mark(note.mark)} {escaped(note.text)}." for note in shown.notes]
    sentences = [f"{escaped(outcome.title)}.", *map(escaped, (*outcome.caption, *outcome.sentences)), *notes]
    yield from _float(shown.main, " ".join(sentences))
    for table in shown.beside:
        yield from _float(table, f"{escaped(table.title)}: {_code(table.link)}.")


def _float(table: Table, caption: str) -> Iterator[str]:
    yield from (r"\begin{table}", r"\centering", rf"\caption{{{caption}}}")
    yield from (rf"\begin{{tabular}}{{{'l' * len(table.headings)}}}", r"\hline")
    yield _row(table.headings)
    yield r"\hline"
    yield from map(_row, table.lines)
    yield from (r"\hline", r"\end{tabular}", r"\end{table}")


def _row(line: tuple[TableEntry, ...]) -> str:
    r"""A row that begins with [ must not be taken for an argument of the \\ before it."""
    return " & ".join(map(_entry, line)) + r" \\"


def _entry(entry: TableEntry) -> str:
    words = escaped(entry.text) + (_mark(entry.mark) if entry.mark else "")
    return f"{{}}{words}" if words.startswith(("[", "*")) else words


def _mark(mark: str) -> str:
    return rf"\textsuperscript{{{mark}}}"


def _code(words: str) -> str:
    return rf"\texttt{{{escaped(words)}}}"
