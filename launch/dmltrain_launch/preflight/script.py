"""What a job's Python script imports.

`read`: whether it imports dmltrain, torch.distributed, MXNet, Lightning or dmltrain's backend of torch.distributed,
anywhere in it.
`needs`: the modules that every run of it imports first. Only imports at the script's top level count, because others
may never run. Imports after a change of sys.path do not count, because the script may find these modules where
preflight does not search.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class Script:
    """What a script uses. One that cannot be read, or is not valid Python, counts as using none of them."""

    uses_dmltrain: bool = False
    uses_torch_distributed: bool = False
    uses_mxnet: bool = False
    uses_lightning: bool = False
    uses_torch_backend: bool = False


def script_of(argv: Sequence[str]) -> str:
    """The Python file that the command runs: `train.py`, `python -u train.py`; "" if unknown."""
    if not argv:
        return ""
    if argv[0].endswith(".py"):
        return argv[0]
    if PYTHON.fullmatch(Path(argv[0]).name):
        return next((word for word in argv[1:] if word.endswith(".py")), "")
    return ""


def read(argv: Sequence[str]) -> Script:
    """Read the script of a command that runs in the current directory."""
    try:
        return of_source(Path(script_of(argv)).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Script()


def of_source(source: str) -> Script:
    try:
        names = set(_names(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Script()
    modules = [
        ("dmltrain",),
        ("torch.distributed",),
        ("mxnet",),
        ("lightning", "pytorch_lightning"),
        ("dmltrain.torch",),
    ]
    return Script(*(any(_has(names, module) for module in each) for each in modules))


def _has(names: set[str], module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in names)


def _names(tree: ast.Module) -> Iterator[str]:
    """The full names of imported modules and of what is imported from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"  # after `import torch`, torch.distributed.init_process_group()


def needs(source: str) -> list[str]:
    """The top-level modules in order of import, without the standard library; [] if `source` is not valid Python."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the host's Python will report it
        return []
    modules: dict[str, None] = {}
    for statement in body:
        if _changes_path(statement):
            break
        modules.update(dict.fromkeys(_imported(statement)))
    return [name for name in modules if name not in sys.stdlib_module_names and name != "__main__"]


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
