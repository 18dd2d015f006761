"""HTML as text: elements, tables and lists. Every text and attribute is escaped here, and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Markup(str):
    """HTML that is made of elements; any other text is escaped when it becomes part of one."""


Content = str | Markup


def text(content: Content) -> Markup:
    """`content` as HTML. Characters that HTML may not have become a question mark."""
    if isinstance(content, Markup):
        return content
    shown = "".join(letter if letter in "\n\t" or letter.isprintable() else "?" for letter in content)
    return Markup(html.escape(shown))


def element(name: str, *content: Content, **attributes: str | bool | None) -> Markup:
    """`<name attribute="...">content</name>`. `class_` is class, `data_x` is data-x; True is a bare attribute."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{shown}>{''.join(map(text, content))}</{name}>")


def join(parts: Iterable[Content]) -> Markup:
    return Markup("".join(map(text, parts)))


@dataclass(frozen=True)
class HtmlCell:
    """A cell of a table. sort: what the rows are sorted by; None: its text. run: the number of a run, which gets its
    mark. link: where the text leads to."""

    shown: Content
    sort: float | str | None = None
    number: bool = False
    run: int | None = None
    link: str | None = None


NOTHING = HtmlCell("", "")


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[HtmlCell]], sortable: bool = True) -> Markup:
    """A table that scrolls in its own frame. The first cell of a row is its heading."""
    numeric = [
        bool(rows) and all(row[place].number or not row[place].shown for row in rows) for place in range(len(headings))
    ]
    head = element("tr", *(_heading(name, number, sortable) for name, number in zip(headings, numeric, strict=True)))
    body = [
        element("tr", *(_cell(cell, place == 0) for place, cell in enumerate(row)), data_run=_run(row)) for row in rows
    ]
    table_of_rows = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
        class_="sortable" if sortable else None,
    )
    return element("div", table_of_rows, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _heading(name: str, number: bool, sortable: bool) -> Markup:
    content = element("button", name, type="button") if sortable and name else name
    return element("th", content, scope="col", class_="number" if number else None)


def _cell(cell: HtmlCell, first: bool) -> Markup:
    shown = element("a", cell.shown, href=cell.link) if cell.link is not None else text(cell.shown)
    if cell.run is not None:
        shown = Markup(mark(cell.run) + shown)
    more = {"class_": "number" if cell.number else None, "data_sort": None if cell.sort is None else str(cell.sort)}
    return element("th", shown, scope="row", **more) if first else element("td", shown, **more)


def _run(row: Sequence[HtmlCell]) -> str | None:
    return next((str(cell.run) for cell in row if cell.run is not None), None)


def mark(run: int) -> Markup:
    """Where the page's scripts draw the colour and marker of a run."""
    return element("span", class_="mark", data_mark=str(run), aria_hidden="true")


def facts(rows: Iterable[tuple[str, Content]]) -> Markup:
    """A list of names and values; rows without a value are left out."""
    shown = [Markup(element("dt", name) + element("dd", value)) for name, value in rows if value]
    return element("dl", *shown) if shown else Markup()
