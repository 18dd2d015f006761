"""The Markdown files: their length, their lines and their links. `make docs` checks what Sphinx sees of them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("logs/reference/*.md")]
)
LINE = 120
README_LINES = 150
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> list[tuple[int, str]]:
    """(number, line) of all lines that are not code: neither fenced nor indented by four after an empty line."""
    found, fence, indented, before = [], "", False, ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(`{3,})", line)
        indented = line.startswith("    ") and (indented or not before.strip())
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        elif not fence and not indented:
            found.append((number, line))
        before = line
    return found


def too_long(text: str) -> list[int]:
    """Numbers of the lines of prose that are too long: a table's row cannot be broken, nor can a link."""
    long = [(number, line) for number, line in prose(text) if len(line) > LINE and not line.startswith("|")]
    return [number for number, line in long if len(LINK.sub("", line).split()) > 3]


def links(text: str) -> list[str]:
    """The relative links, without code in which one looks like a link."""
    spans = (re.sub(r"`[^`]*`", "``", line) for _, line in prose(text))
    return [target for line in spans for target in LINK.findall(line) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What GitHub and MyST make of the headings."""
    headings = [line.lstrip("#").strip() for _, line in prose(text) if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(file: Path) -> list[str]:
    """The relative links of a file that lead nowhere."""
    found = []
    for link in links(file.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_lines_are_short_and_links_have_targets(file):
    assert too_long(file.read_text(encoding="utf-8")) == []
    assert dead(file) == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_long_lines_are_found_outside_tables_and_code():
    long = "word " * 30
    text = f"{long}\n\n    {long}\n\n```\n{long}\n```\n| {long} |\n[{long}](https://example.org)\n- {long}\n"
    assert too_long(text) == [1, 10]


def test_dead_links_and_anchors_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# A title's words: `x`\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-titles-words-x) [c](gone.md) `[d](code)` [e](https://example.org)\n"
        "[f](there.md#no-heading) ![g](gone.svg) [h](#nothing)\n"
    )
    assert dead(page) == ["gone.md", "there.md#no-heading", "gone.svg", "#nothing"]


# -- docs/architecture.md shows the tree as it is ---------------------------------------------------------------------


PAGE = (ROOT / "docs/architecture.md").read_text()


def packages() -> set[str]:
    found = (file for top in ("dmltrain", "launch") for file in (ROOT / top).rglob("__init__.py"))
    return {f"{file.parent.relative_to(ROOT)}/" for file in found}


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
