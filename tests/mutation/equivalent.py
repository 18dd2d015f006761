"""Equivalent mutants, from equivalent.txt: those that behave as the module does, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("equivalent.txt")
Key = tuple[str, str, str]  # module, code of the line before the mutation, and after it


def read(text: str) -> dict[Key, str]:
    """(module, before, after) -> reason. Raises ValueError where one of these is missing."""
    found: dict[Key, str] = {}
    for number, block in _blocks(text):
        module, *rest = block
        before, after = ([line[2:] for line in rest if line.startswith(sign)] for sign in ("- ", "+ "))
        reason = " ".join(line for line in rest if not line.startswith(("- ", "+ ")))
        if not module.endswith(".py") or len(before) != 1 or len(after) != 1 or not reason:
            raise ValueError(f"line {number}: expected a module, one line with -, one with +, and a reason")
        found[module, before[0], after[0]] = reason
    return found


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """The blocks between empty lines, each with the number of its first line; lines with # are left out."""
    block: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not line.startswith("#"):
            block.append(line.strip())
        elif block and not line.strip():
            yield number - len(block), block
            block = []
