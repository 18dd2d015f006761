"""--only: the cells that the user chooses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain.base.errors import UserError
from dmltrain.experiment.plan import expression
from dmltrain.experiment.plan.cell import Cell
from dmltrain.experiment.plan.expression import as_text
from dmltrain.experiment.plan.sections import dashed, nearest


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells for which every text of `only` is true: name=value, several of them joined by commas, a cell's ID, or
    an expression. UserError if there are none."""
    left = list(cells)
    for text in only:
        left = _matching(left, text, {dashed(name) for cell in cells for name in cell.settings})
        if not left:
            raise UserError(f"--only {' --only '.join(only)}: no cell is meant; --dry-run lists the cells")
    return left


def _matching(cells: Sequence[Cell], text: str, names: set[str]) -> list[Cell]:
    if any(cell.id == text for cell in cells):
        return [cell for cell in cells if cell.id == text]
    pairs = [part.partition("=") for part in text.split(",")]
    if all(value[:1] != "=" and equals and dashed(name.strip()) in names for name, equals, value in pairs):
        wanted = {dashed(name.strip()): value.strip() for name, _, value in pairs}
        return [cell for cell in cells if _has(cell, wanted)]
    return _by_expression(cells, text, names)


def _has(cell: Cell, wanted: dict[str, str]) -> bool:
    own = {dashed(name): as_text(value) for name, value in cell.settings.items()}
    return all(name in own and _same(own[name], value) for name, value in wanted.items())


def _same(own: str, value: str) -> bool:
    """Whether a text means this value: 0.10 is the same as 0.1."""
    try:
        return own == value or float(own) == float(value)
    except ValueError:
        return False


def _by_expression(cells: Sequence[Cell], text: str, names: set[str]) -> list[Cell]:
    try:
        condition = expression.parse(text)
    except UserError as error:
        raise UserError(f"--only: {error}; expected name=value, a cell's ID, or an expression: devices > 1") from None
    known = {name.replace("-", "_") for name in names}
    for name in sorted(condition.names - known):
        listed = ", ".join(sorted(names)) or "none"
        raise UserError(f"--only {text}: no variable {name}{nearest(name, names)}; the variables are {listed}")
    return [cell for cell in cells if condition.names <= set(cell.settings) and condition.value(cell.settings)]
