"""Which modules a script needs: those that every run of it imports first. Pure.

Only imports at the script's top level count, because others may never run. Imports after a change of sys.path do not
count, because the script may find these modules where preflight does not search.
"""

from __future__ import annotations

import ast
import sys


def needs(source: str) -> list[str]:
    """The top-level modules in order of import, without the standard library; [] if `source` is not valid Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the host's Python will report it
        return []
    found: dict[str, None] = {}
    for statement in body:
        if _changes_path(statement):
            break
        found.update(dict.fromkeys(_imported(statement)))
    return [name for name in found if name not in sys.stdlib_module_names and name != "__main__"]


def _imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
        return [statement.module.partition(".")[0]]
    return []


def _changes_path(statement: ast.stmt) -> bool:
    """Whether the statement mentions sys.path, sys.meta_path or site.addsitedir."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in (("sys", "path"), ("sys", "meta_path"), ("site", "addsitedir")):
                return True
        elif isinstance(node, ast.ImportFrom) and node.module == "sys" and "path" in {a.name for a in node.names}:
            return True
    return False
