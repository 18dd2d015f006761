"""Whether a job's Python script imports dmltrain, torch.distributed, MXNet or Lightning, anywhere in it."""

from __future__ import annotations

import ast
import re
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
    modules = [("dmltrain",), ("torch.distributed",), ("mxnet",), ("lightning", "pytorch_lightning")]
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
