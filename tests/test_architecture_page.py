"""docs/architecture.md shows the tree as it is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


def packages() -> set[str]:
    return {
        f"{file.parent.relative_to(ROOT)}/"
        for top in ("dmltrain", "launch")
        for file in (ROOT / top).rglob("__init__.py")
    }


def test_the_map_names_every_folder_once():
    rows = re.findall(r"^\| `([a-z_/]+/)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(packages())


def test_paths_and_links_of_the_page_exist():
    named = set(re.findall(r"`((?:dmltrain|launch|tests)/[\w./]+)`", PAGE))
    linked = {f"docs/{target.partition('#')[0]}" for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", PAGE)}
    assert named and linked
    assert [path for path in sorted(named | linked) if not (ROOT / path).exists()] == []


def test_classes_of_the_page_exist():
    defined = {
        node.name
        for top in ("dmltrain", "launch")
        for file in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    page = set(re.findall(r"\b(?:[A-Z][a-z]+){2,}\b", PAGE)) | {"Outbox", "Service", "Handle", "Task"}
    assert page - {"PyTorch", "NumPy"} <= defined


def test_every_module_says_in_its_first_line_what_it_is():
    for top in ("dmltrain", "launch", "benchmarks"):
        for file in (ROOT / top).rglob("*.py"):
            assert ast.get_docstring(ast.parse(file.read_text())), file


def test_the_glossary_is_in_order_and_has_each_word_once():
    words = re.findall(r"^\| ([a-z][^|]*?) \|", PAGE.partition("## Glossary")[2], re.MULTILINE)
    words.remove("word")
    assert len(words) > 30 and words == sorted(set(words))
