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

    def order(test: Path) -> tuple[int, bool, bool, int, Path]:
        return distances[test], not _mirrors(test, module), folder not in test.parents, len(graph[test]), test

    nearest = sorted(distances.values())[:MANY]
    chosen = sorted((test for test in distances if distances[test] <= nearest[-1]), key=order) if nearest else []
    farthest = max((distances[test] for test in chosen[:FEW]), default=0)
    return [test.relative_to(root).as_posix() for test in chosen[:MANY] if distances[test] <= farthest]


def _distances(root: Path, modules: list[Path]) -> dict[Path, int]:
    """Each test that gets to one of the modules -> how many imports lie between them."""
    importers, level, far = _importers(root), set(modules), 0
    distances = dict.fromkeys(modules, far)
    while level := {each for path in level for each in importers.get(path, ())} - distances.keys():
        far += 1
        distances |= dict.fromkeys(level, far)
    return {path: distances[path] for path in distances.keys() & _near(root)}


@cache
def _near(root: Path) -> frozenset[Path]:
    """The test files that count."""
    return frozenset(path for path in (root / "tests").rglob("test_*.py") if path.relative_to(root).parts[1] not in FAR)


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
    found = {path: frozenset(_imported(path, root)) - {path} for path in _files(root)}
    for test in _files(root):
        if test.name.startswith("test_"):
            found[test] |= {folder / "conftest.py" for folder in test.parents}
    return found


@cache
def _importers(root: Path) -> dict[Path, set[Path]]:
    found: dict[Path, set[Path]] = {}
    for path, imported in _imports(root).items():
        for each in imported:
            found.setdefault(each, set()).add(path)
    return found


@cache
def _files(root: Path) -> list[Path]:
    return [path for folder in ("dmltrain", "launch", "tests") for path in sorted((root / folder).rglob("*.py"))]


def _imported(path: Path, root: Path) -> Iterator[Path]:
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    for_types = {id(node) for each in nodes if _is_for_types(each) for node in ast.walk(each)}
    for node in nodes:
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
    return _named(root).get(name)


@cache
def _named(root: Path) -> dict[str, Path]:
    named = {}
    for top in (root / "launch", root):
        for path in _files(root):
            if path.is_relative_to(top):
                name = ".".join(path.relative_to(top).with_suffix("").parts)
                named[name.removesuffix(".__init__")] = path
    return named
