"""The tests that are nearest to a module, as the tree has them: those that import it; then those that import a module,
a helper or a fixture which imports it, or start a program which does; and so on, until there are a few.

Of tests that are as near, those of the module's name come first, then those of the folder that mirrors its package,
then those that import least.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FAR = ("cluster", "benchmarks", "mutation")  # folders of tests that are of the whole, and slow
FEW, MANY = 3, 10  # test files: so many at least, and at most


def of(root: Path, module: str) -> list[str]:
    """Test files, relative to `root`, the nearest first, for a module given by its path. Of a module that nothing
    imports by its name, those of its neighbours."""
    groups = [[root / module], *([*folder.glob("*.py")] for folder in (root / module).parents)]
    distances = next(filter(None, (_distances(root, group) for group in groups)), {})
    graph, folder = _imports(root), _folder(root, module)

    def order(test: Path) -> tuple[int, bool, bool, int]:
        return distances[test], not _mirrors(test, module), folder not in test.parents, len(graph[test])

    chosen = sorted(sorted(distances), key=order)
    farthest = max((distances[test] for test in chosen[:FEW]), default=0)
    return [test.relative_to(root).as_posix() for test in chosen[:MANY] if distances[test] <= farthest]


def _distances(root: Path, modules: list[Path]) -> dict[Path, int]:
    """Each test that gets to one of the modules -> how many imports lie between them."""
    importers: dict[Path, set[Path]] = {}
    for path, imported in _imports(root).items():
        for each in imported:
            importers.setdefault(each, set()).add(path)
    distances, level = dict.fromkeys(modules, 0), set(modules)
    while level := {each for path in level for each in importers.get(path, ())} - distances.keys():
        distances |= dict.fromkeys(level, max(distances.values()) + 1)
    return {path: distance for path, distance in distances.items() if _is_near(root, path)}


def _is_near(root: Path, path: Path) -> bool:
    of_tests = path.name.startswith("test_") and path.is_relative_to(root / "tests")
    return of_tests and path.relative_to(root / "tests").parts[0] not in FAR


def _mirrors(test: Path, module: str) -> bool:
    """test_server.py mirrors server.py and the package server."""
    return test.stem.removeprefix("test_") in Path(module).with_suffix("").parts


def _folder(root: Path, module: str) -> Path:
    """tests/kvstore for dmltrain/kvstore/worker/store.py."""
    parts = list(Path(module).parts[:-1])
    parts = parts[1:] if parts[0] == "dmltrain" else parts
    while parts and not list((root / "tests").joinpath(*parts).glob("test_*.py")):
        parts.pop()
    return (root / "tests").joinpath(*parts)


@cache
def _imports(root: Path) -> dict[Path, frozenset[Path]]:
    """Each file of Python -> those of the project that it imports, or names in order to start them. A test imports the
    fixtures of its folders."""
    files = [path for folder in ("dmltrain", "launch", "tests") for path in sorted((root / folder).rglob("*.py"))]
    found = {path: frozenset(_imported(path, root)) - {path} for path in files}
    for test in files:
        if test.name.startswith("test_"):
            found[test] |= {folder / "conftest.py" for folder in test.parents}
    return found


def _imported(path: Path, root: Path) -> Iterator[Path]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {id(node) for each in ast.walk(tree) if _is_for_types(each) for node in ast.walk(each)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _file(root, name) else node.module for name in inside]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if "." in node.value and node.value.isascii() else []
            program = path.parent / "programs" / node.value if node.value.endswith(".py") else path
            if program != path and program.name == node.value and program.exists():
                yield program
        yield from filter(None, (_file(root, name) for name in names))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _file(root: Path, name: str) -> Path | None:
    """The file of a module or package, by its dotted name."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    paths = [folder.joinpath(*name.split(".")) for folder in (root, root / "launch")]
    choices = [choice for path in paths for choice in (path.with_suffix(".py"), path / "__init__.py")]
    return next((choice for choice in choices if choice.exists()), None)
