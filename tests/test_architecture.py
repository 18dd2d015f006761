"""Imports point one way, and nothing heavy is imported before it is used."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "mxnet"}
PACKAGES = ("launch/dmltrain_launch", "dmltrain")
LEVELS = {  # folder -> its modules and folders from the bottom up: each imports itself and what stands before it
    "dmltrain": (
        *(
            "version base",
            "layers optimizers usage logs data recipes",
            "initial mxnet_files kvstore",
            "models audit",
            "backends",
        ),
        *(
            "checkpoints options report",
            "rounds",
            "train",
            "api experiment data_command fit",
            "score torch",
            "__init__",
        ),
    ),
    "dmltrain/kvstore": (
        *("local_steps waiting state_file log scratch spawned step view", "types ops codec", "kind encoded", "base"),
        *("agreement choices", "rules", "transport", "scheduler", "server", "worker", "local"),
        "__init__",
    ),
    "launch/dmltrain_launch": (  # its __init__, which has LaunchError alone, is below all
        *("__init__", "secret certificate own_program agent", "job"),
        *("channels control preflight sync terminal", "clusters", "command_line", "run", "forecast ending"),
        *("commands", "cli"),
    ),
}
# module -> the room above it that it imports in a function: `dmltrain.kvstore.create` is public, and needs the backends
UPWARDS = {"dmltrain.kvstore": "api"}
# what launch uses of dmltrain: the standard library alone. The agents get some of it, for Python 3.8.
FOR_AGENTS = ("dmltrain.base.capacity", "dmltrain.base.schema", "dmltrain.base.json_text")
SHARED = ("dmltrain.base.whole_file", "dmltrain.base.safe_text", *FOR_AGENTS)
LOOSE = {"__init__", "fit", "score", "version"}  # modules of dmltrain that are in no room
# A limit may be moved only in a commit that says why.
MOST_MODULES = 20  # of a folder; TABLES have one file for each row
MOST_METHODS, MOST_LEVELS = 25, 3  # of a class, and of the project's classes above one another
# Scripts know their public names: these do not count, nor in the classes that stand on them directly (decision 34).
INTERFACES = {"KVStore", "State"}
MOST_WORDS = 45  # in the glossary
SMALL, MOST_SMALL = 60, 20  # lines; how many modules of so few only one other module imports
TABLES = {"dmltrain/models", "dmltrain/data/readers", "dmltrain/optimizers"}
LARGE: dict[str, int] = {}  # classes with more methods, and how many they have: they may only shrink
DEEP: dict[str, int] = {}  # classes with more of the project's classes above them, and how many levels


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Parsing all files takes seconds, and many tests ask."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of the file's."""
    return [*ast.walk(parsed(path))]


@functools.cache
def imports(path: Path, types: bool = True) -> frozenset[str]:
    """Those anywhere in the file, in functions too; `types`: also those for annotations alone."""
    found: set[str] = set()
    tests = [node for node in nodes(path) if isinstance(node, ast.If)]
    of_types = {each for node in tests if ast.unparse(node.test) == "TYPE_CHECKING" for each in ast.walk(node)}
    for node in nodes(path):
        if not types and node in of_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT / "dmltrain").parts[0].removesuffix(".py")


def test_launch_and_dmltrain_import_nothing_of_each_other_but_what_they_share():
    launch, dmltrain = PACKAGES
    for path in sources(launch):
        found = {full for full in imports(path) if full.partition(".")[0] == "dmltrain"}
        assert all(full.startswith(SHARED) for full in found), path
    for path in sources(dmltrain):
        assert not {full for full in imports(path) if full.partition(".")[0] in ("launch", "dmltrain_launch")}, path
    for name in SHARED:
        used = imports(ROOT / f"{name.replace('.', '/')}.py")
        assert all(full.startswith(SHARED) or full.partition(".")[0] in sys.stdlib_module_names for full in used), name


def test_no_folder_has_too_many_modules():
    assert {path.stem for path in (ROOT / "dmltrain").glob("*.py")} == LOOSE
    counts = Counter(path.parent for package in PACKAGES for path in sources(package) if path.stem != "__init__")
    named = {folder.relative_to(ROOT).as_posix(): count for folder, count in counts.items()}
    assert {name: count for name, count in named.items() if count > MOST_MODULES and name not in TABLES} == {}


def dotted(path: Path) -> str:
    """The name of a file's module or package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removeprefix("launch.").removesuffix(".__init__")


def test_few_modules_are_splinters_of_another_one():
    """A row of a table has a file of its own, which its package imports."""
    modules = {dotted(path): path for package in PACKAGES for path in sources(package)}
    importers = defaultdict(set)
    for importer, path in [*modules.items(), *((path.stem, path) for path in (ROOT / "launch").glob("*.py"))]:
        for full in imports(path):
            importers[full if full in modules else full.rpartition(".")[0]].add(importer)
    splinters = {
        name
        for name, path in modules.items()
        if path.stem != "__init__"
        and path.read_text().count("\n") <= SMALL
        and len(importers[name]) == 1
        and name.rpartition(".")[0] not in importers[name]
    }
    assert len(splinters) <= MOST_SMALL, sorted(splinters)


@functools.cache
def classes() -> dict[str, tuple[set[str], list[str]]]:
    """Path and name of each class -> the names of its methods, and of its bases."""
    return {
        f"{path.relative_to(ROOT)} {node.name}": (
            {each.name for each in node.body if isinstance(each, ast.FunctionDef)},
            [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases],
        )
        for package in PACKAGES
        for path in sources(package)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }


def test_no_class_has_too_many_methods():
    every = {name: (methods, {name.split()[1], *bases} & INTERFACES) for name, (methods, bases) in classes().items()}
    public = {each for name in every if name.split()[1] in INTERFACES for each in every[name][0] if each[0] != "_"}
    counts = {name: len(methods - public if is_one else methods) for name, (methods, is_one) in every.items()}
    found = {name: count for name, count in counts.items() if count > MOST_METHODS}
    assert {name: found[name] for name in found if found[name] > LARGE.get(name, 0)} == {}
    assert set(LARGE) == set(found), "these are small by now"


def test_classes_do_not_stand_on_one_another():
    # By package: the two packages have classes of the same name, and none of them stands on one of the other package.
    bases = {(name.partition("/")[0], name.split()[1]): bases for name, (_, bases) in classes().items()}

    def levels(package: str, name: str) -> int:
        below = [base for base in bases[package, name] if (package, base) in bases and base != name]
        return 1 + max((levels(package, base) for base in below), default=0)

    found = {name: levels(package, name) for package, name in bases if levels(package, name) > MOST_LEVELS}
    assert {name: found[name] for name in found if found[name] > DEEP.get(name, 0)} == {}
    assert set(DEEP) == set(found), "these are flat by now"


def test_the_glossary_does_not_grow():
    _, _, glossary = (ROOT / "docs/architecture.md").read_text().partition("## Glossary")
    assert len([line for line in glossary.splitlines() if line.startswith("| ")]) - 2 <= MOST_WORDS


def test_there_are_no_more_lines_of_tests_than_of_code():
    def lines(packages: tuple[str, ...]) -> int:
        return sum(path.read_text().count("\n") for package in packages for path in sources(package))

    assert lines(("tests",)) <= lines(PACKAGES)


def test_files_that_are_whole_after_a_power_cut_have_one_writer():
    """A download has its own, because its content does not fit into memory at once."""
    found = {path for package in PACKAGES for path in sources(package) if "fsync" in path.read_text()}
    writers = ("dmltrain/base/whole_file.py", "dmltrain/data/download.py")
    assert {str(path.relative_to(ROOT)) for path in found} == set(writers)


def imported_below(folder: str, types: bool) -> dict[str, set[str]]:
    """Each module in the folder, by its path there (worker.store; worker for worker/__init__.py) -> the modules there
    that its file imports. The folder's own __init__ has that name."""
    paths = {".".join(path.relative_to(ROOT / folder).with_suffix("").parts): path for path in sources(folder)}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    prefix = folder.removeprefix("launch/").replace("/", ".") + "."
    found = {}
    for name, path in modules.items():
        inside = {full.removeprefix(prefix) for full in imports(path, types) if full.startswith(prefix)}
        used = {each if each in modules else each.rpartition(".")[0] or "__init__" for each in inside}
        found[name] = used & set(modules) - {name}
    return found


@pytest.mark.parametrize("folder", LEVELS)
def test_imports_point_one_way(folder):
    def level(module: str) -> int:
        return next(level for level, names in enumerate(LEVELS[folder]) if module.partition(".")[0] in names.split())

    for module, used in imported_below(folder, types=True).items():
        above = UPWARDS.get(f"{folder}.{module}")
        others = {other for other in used if other.partition(".")[0] not in (module.partition(".")[0], above)}
        wrong = {other for other in others if level(other) >= level(module)}
        assert not wrong, f"{module} imports {sorted(wrong)}, which do not lie below it"


@pytest.mark.parametrize("folder", LEVELS)
def test_no_circle_of_imports(folder):
    imported = imported_below(folder, types=False)
    while imported:
        leaves = {module for module, used in imported.items() if not used & set(imported)}
        assert leaves, f"these import each other in a circle: {sorted(imported)}"
        imported = {module: used for module, used in imported.items() if module not in leaves}


def test_the_kvstore_knows_no_backend_and_frameworks_are_imported_in_backends_only():
    for path in sources("dmltrain/kvstore"):
        assert not {full for full in imports(path) if full.startswith("dmltrain.backends")}, path
    for path in sources("dmltrain"):
        if room(path) not in ("backends", "__init__"):
            found = {full.partition(".")[0] for full in imports(path)} & FRAMEWORKS
            assert not found, f"{path} imports {found}"


def test_one_module_knows_what_torch_calls_its_gpus():
    found = {path.name for path in sources("dmltrain") if re.search(r"[\"']cuda|torch\.cuda", path.read_text())}
    assert found == {"devices.py"}


def test_the_agent_needs_the_standard_library_only():
    used = {full for path in sources("launch/dmltrain_launch/agent") for full in imports(path)}
    outside = {full for full in used if full.partition(".")[0] not in sys.stdlib_module_names}
    assert all(full.startswith(("dmltrain_launch.agent.", *FOR_AGENTS)) for full in outside), outside


@pytest.mark.parametrize(
    "program",
    [
        "import dmltrain, dmltrain.kvstore, dmltrain.fit",
        "import dmltrain_launch.cli; dmltrain_launch.cli.launch(['--help'])",
        "import dmltrain.report.cli",
        "import dmltrain.backends.mxnet.compat",
    ],
)
def test_no_framework_before_it_is_used(program):
    check = f"import sys\n{program}\nprint(sorted({FRAMEWORKS} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
