"""The tests that are nearest to a module, as the tree has them. The first of these that finds any:

- tests that import the module, those of its name first;
- tests that import its package's front;
- tests whose helpers, or the programs that they start, import it;
- of the folder that mirrors its package, tests named like one of its packages (test_torch_layers.py), else all.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FAR = ("cluster", "benchmarks", "mutation")  # folders of tests that are of the whole, and slow


def dotted(path: str) -> str:
    """dmltrain/kvstore/codec/__init__.py -> dmltrain.kvstore.codec"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class _Tests:
    """What each test of a tree imports, with the fixtures of its folders; and what its helpers and programs do."""

    imports: dict[Path, frozenset[str]]
    by_helpers: dict[Path, frozenset[str]]


@cache
def _tests(root: Path) -> _Tests:
    files = {path: _imported(path, root) for path in sorted((root / "tests").rglob("*.py"))}
    tests = [path for path in files if path.name.startswith("test_") and _is_near(path, root)]
    for test in tests:
        files[test] = files[test].union(*(files.get(folder / "conftest.py", ()) for folder in test.parents))
    by_name = {dotted(path.relative_to(root).as_posix()): path for path in files}
    helpers = {test: frozenset().union(*(files[each] for each in _helpers(test, files, by_name))) for test in tests}
    return _Tests({test: files[test] for test in tests}, helpers)


def of(root: Path, module: str) -> list[str]:
    """Test files, relative to `root`, the nearest first, for a module given by its path."""
    tests, name, folder = _tests(root), dotted(module), _folder(root, module)
    choices: tuple[Callable[[Path], bool], ...] = (
        lambda test: name in tests.imports[test],
        lambda test: name.rpartition(".")[0] in tests.imports[test],
        lambda test: name in tests.by_helpers[test],
        lambda test: test.parent == folder and _is_named_like(test, module),
        lambda test: test.parent == folder,
    )
    found = ([test for test in tests.imports if is_near(test)] for is_near in choices)
    chosen = sorted(next(filter(None, found), []), key=lambda test: not _mirrors(test, module))
    return [test.relative_to(root).as_posix() for test in chosen]


def _is_near(test: Path, root: Path) -> bool:
    return test.relative_to(root / "tests").parts[0] not in FAR


def _mirrors(test: Path, module: str) -> bool:
    """test_server.py mirrors server.py and the package server."""
    return test.stem.removeprefix("test_") in Path(module).with_suffix("").parts


def _is_named_like(test: Path, module: str) -> bool:
    return any(f"test_{part}" in test.stem for part in Path(module).parts[:-1])


def _folder(root: Path, module: str) -> Path:
    """tests/kvstore for dmltrain/kvstore/worker/store.py."""
    parts = list(Path(module).parts[:-1])
    parts = parts[1:] if parts[0] == "dmltrain" else parts
    while parts and not list((root / "tests").joinpath(*parts).glob("test_*.py")):
        parts.pop()
    return (root / "tests").joinpath(*parts)


def _imported(path: Path, root: Path) -> frozenset[str]:
    """Dotted names of the modules that a file imports; a package counts where something of its front is used."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {each if _is_module(root, each) else node.module for each in inside}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            program = path.parent / "programs" / node.value  # which the test starts
            if node.value == program.name and program.exists():
                names.add(dotted(program.relative_to(root).as_posix()))
    return frozenset(names)


def _is_module(root: Path, name: str) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists() or path.is_dir()


def _helpers(test: Path, imports: dict[Path, frozenset[str]], by_name: dict[str, Path]) -> set[Path]:
    """Modules of the tests, programs among them, that a test imports or starts, at whatever distance. `by_name`: all
    modules of the tests, by their dotted names."""
    seen, left = {test}, [test]
    while left:
        fresh = {by_name[name] for name in imports[left.pop()] if name in by_name} - seen
        seen |= fresh
        left += fresh
    return seen - {test}
