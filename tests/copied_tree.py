"""A copy of the packages that a test adds a file and a row of a table to, as somebody would who adds a new thing."""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def search_path(tree: Path = ROOT) -> str:
    """PYTHONPATH for programs that are to import both packages of this tree, whatever is installed."""
    return os.pathsep.join([str(tree), str(tree / "launch")])


def copy_packages(folder: Path, *packages: str) -> Path:
    for package in packages:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def one_more(tree: Path, file: str, content: str, table: str, opening: str, row: str, imported: str = "") -> None:
    """Write the file; and in the file of the table the row, behind the opening line, with the import that it needs."""
    (tree / file).write_text(content)
    text = (tree / table).read_text()
    assert text.count(opening) == 1, f"{table}: expected one {opening!r}"
    text = text.replace(opening, imported + "\n" + opening + row if imported else opening + row)
    (tree / table).write_text(text)
