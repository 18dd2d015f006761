"""One list of all that users can read: tests/golden/messages.txt, so that a change of wording is reviewed as a diff.

    python -m tests.messages        # writes the list anew

It is made from the source: each text that is raised, logged or printed, and every other text of at least three words,
since it may get there through a variable or a function. Help of options and docstrings are left out. Where a text has a
value, the list has its name: {name}, {len(hosts)}, {one text|another}. Lines are sorted, so that moving code changes
nothing.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/golden/messages.txt"
PACKAGES = ("dmltrain", "launch")
LOGS = {"debug", "info", "warning", "error", "critical", "exception"}
SAYS = LOGS | {"print", "say", "_say", "warn", "note", "fail", "exit", "log"}
HELP = {"add_argument", "ArgumentParser", "add_parser", "add_argument_group", "Option", "option", "switch"}
PROSE = re.compile(r"[^\W\d]\S* +\S+ +\S*[^\W\d]")  # three words or more
NO_PROSE = re.compile(r"\\[bdswWSA(\[]|\(\?|\[\^|\$\{|&& |<[a-z]+[ >]")  # patterns, shell, HTML
ERRORS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}


def name_of(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def placeholder(node: ast.AST) -> str:
    """The value in a text, by its name. Not by ast.unparse, whose answers differ between Python's versions."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.Name() | ast.Attribute():
            return name_of(node)
        case ast.JoinedStr():
            return joined(node)
        case ast.FormattedValue():
            return f"{{{placeholder(node.value)}}}"
        case ast.IfExp():
            return f"{placeholder(node.body)}|{placeholder(node.orelse)}"
        case ast.Call() if name_of(node.func) == "join" and node.args:
            return placeholder(node.args[0])
        case ast.Call():
            return f"{name_of(node.func)}({', '.join(map(placeholder, node.args))})"
        case ast.Subscript() | ast.Starred():
            return placeholder(node.value)
        case ast.GeneratorExp() | ast.ListComp():
            return placeholder(node.elt)
    return " ".join(filter(None, map(placeholder, ast.iter_child_nodes(node))))


def joined(node: ast.JoinedStr) -> str:
    return "".join(map(placeholder, node.values))


def text_of(node: ast.AST) -> str | None:
    """The text that a constant, an f-string, or a sum of them has; None for any other expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return joined(node)
        case ast.BinOp(op=ast.Add()):
            parts = [text_of(node.left), text_of(node.right)]
            if any(part is not None for part in parts):
                sides = zip(parts, (node.left, node.right), strict=True)
                return "".join(f"{{{placeholder(side)}}}" if part is None else part for part, side in sides)
    return None


def is_said(node: ast.AST, errors: set[str]) -> bool:
    """Whether a text anywhere in it is for users, however short."""
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    name, of = name_of(node.func), name_of(getattr(node.func, "value", node.func))
    return name in SAYS | errors or (name == "write" and of in ("stderr", "stdout"))


def texts(node: ast.AST, errors: set[str], said: bool = False) -> Iterator[str]:
    text = text_of(node)
    if text is not None:
        if re.search("[^\\W\\d]{2}", text) if said else PROSE.search(text) and not NO_PROSE.search(text):
            yield text.replace("\n", "\\n").strip()
        return
    if isinstance(node, ast.Call) and name_of(node.func) in HELP:
        return
    said = said or is_said(node, errors)
    for field, value in ast.iter_fields(node):
        if field in ("slice", "test", "ops", "comparators"):  # what decides, which nobody reads
            continue
        for child in value if isinstance(value, list) else [value]:
            docstring = isinstance(child, ast.Expr) and text_of(child.value) is not None
            if isinstance(child, ast.AST) and not docstring:
                yield from texts(child, errors, said)


def errors_of(trees: list[ast.Module]) -> set[str]:
    """The names of all classes of errors, the packages' own and Python's."""
    classes = {node.name: node.bases for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found, before = set(ERRORS), 0
    while len(found) > before:
        before = len(found)
        found |= {name for name, bases in classes.items() if found & set(map(name_of, bases))}
    return found


def listed(root: Path = ROOT) -> str:
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in paths}
    errors, lines = errors_of([*trees.values()]), []
    for path, tree in trees.items():
        if found := sorted(set(texts(tree, errors))):
            lines += [f"{path.relative_to(root)}", *(f"    {text}" for text in found), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    LIST.write_text(listed())
