"""The program of an experiment: where it is, and which options it takes."""

from __future__ import annotations

import ast
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dmltrain.experiment.plan.definition import Experiment

CHECKED = ("dmltrain.fit", "dmltrain.score")  # whose programs have the options of `dmltrain.options`
CHECK = "DMLTRAIN_CHECK"


@dataclass(frozen=True)
class Program:
    """`flags`: the options it takes, such as --lr; None: not known. `checks`: it answers to DMLTRAIN_CHECK."""

    path: str
    flags: frozenset[str] | None = None
    checks: bool = False


def find(experiment: Experiment) -> Program:
    """The program that the file names. UserError if there is none."""
    path = experiment.path.parent / os.path.expanduser(experiment.program)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait
            problem = "a folder" if path.is_dir() else "no regular file"
            raise experiment.error(("program",), f"{path} is {problem}: expected a program")
        source = path.read_text(encoding="utf-8", errors="replace") if path.suffix == ".py" else ""
    except OSError as error:
        raise experiment.error(
            ("program",), f"{path}: {error.strerror}: expected a program, its path relative to the folder of this file"
        ) from None
    ours = uses_dmltrain(source)
    return Program(from_here(path), our_flags() if ours else None, ours or CHECK in source)


def uses_dmltrain(source: str) -> bool:
    """Whether a program imports one of CHECKED."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return not names.isdisjoint(CHECKED)


def our_flags() -> frozenset[str]:
    from dmltrain.options import FLAGS  # takes a moment to import

    return frozenset(FLAGS)


def from_here(path: Path) -> str:
    """A path as a command in the working directory has it: relative if it lies below, else absolute."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative
