"""Imports point one way, and nothing heavy is imported before it is used."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "mxnet"}
MAY_IMPORT = {  # room of dmltrain -> rooms it may import; what is not listed may import anything
    "safe_text": set(),
    "errors": {"safe_text"},
    "launcher": {"errors"},
    "whole_file": set(),
    "bounded": set(),
    "npz": {"arrays"},
    "env": {"errors"},
    "layers": {"errors"},
    "models": {"layers", "mxnet_files", "errors"},
    "record": {"errors", "env", "safe_text"},
    "report": {"record", "errors", "safe_text", "whole_file"},
    "arrays": set(),
    "agreement": {"arrays", "kvstore"},
    "audit": {"arrays", "bounded", "data", "errors", "kvstore", "whole_file"},
    "usage": set(),
    "mxnet_files": {"arrays", "bounded", "layers", "errors"},
    "normalisation": {"arrays"},
    "random_bits": {"arrays", "errors"},
    "optimizers": set(),
    "data": {"arrays", "normalisation", "random_bits", "errors", "safe_text", "whole_file"},
    "data_command": {
        *("arrays", "data", "errors", "kvstore", "launcher", "loading", "options", "safe_text", "whole_file")
    },
    "experiment": {"env", "errors", "launcher", "options", "report", "safe_text", "whole_file"},
    "initial": {"arrays", "layers", "random_bits", "errors"},
    "kvstore": {  # backends: only its __init__, with `create`
        *("arrays", "backends", "bounded", "env", "errors", "npz", "whole_file")
    },
    "backends": {
        *("agreement", "arrays", "bounded", "env", "errors", "heap", "initial", "kvstore", "layers", "metric"),
        *("models", "mxnet_files", "normalisation", "npz", "optimizers"),
    },
}

LEVELS = {  # folder -> its modules and folders from the bottom up: each imports itself and what stands before it
    "dmltrain/kvstore": (
        "local_steps waiting state_file log scratch spawned step view",
        *("types", "kind", "base", "codec", "rules", "transport", "scheduler", "server", "worker", "local", "__init__"),
    ),
    "launch": (  # its __init__, which has LaunchError alone, is below all
        *("__init__", "secret certificate whole_file own_program agent", "job"),
        *("channels control preflight sync terminal", "clusters", "command_line", "run", "forecast ending"),
        *("commands", "cli"),
    ),
}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Those anywhere in the file; parsing all files takes seconds, and many tests ask."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT / "dmltrain").parts[0].removesuffix(".py")


def test_launch_and_dmltrain_import_nothing_of_each_other():
    for package, other in (("launch", "dmltrain"), ("dmltrain", "launch")):
        for path in sources(package):
            assert other not in {full.partition(".")[0] for full in imports(path)}, path


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_folders_import_only_from_those_below_them(name):
    paths = [path for path in sources("dmltrain") if room(path) == name]
    assert paths
    for path in paths:
        used = {full.split(".")[1] for full in imports(path) if full.startswith("dmltrain.")}
        assert used <= MAY_IMPORT[name] | {name, "__version__"}, f"{path}: {sorted(used - MAY_IMPORT[name])}"


def test_files_that_are_whole_after_a_power_cut_have_one_writer():
    """A download has its own, because its content does not fit into memory at once."""
    found = {path for package in ("launch", "dmltrain") for path in sources(package) if "fsync" in path.read_text()}
    writers = ("launch/whole_file.py", "dmltrain/base/whole_file.py", "dmltrain/data/download.py")
    assert {str(path.relative_to(ROOT)) for path in found} == set(writers)


def imported_below(folder: str) -> dict[str, set[str]]:
    """Each module in the folder, by its path there (worker.store; worker for worker/__init__.py) -> the modules there
    that its file imports anywhere, in functions too. The folder's own __init__ has that name."""
    paths = {".".join(path.relative_to(ROOT / folder).with_suffix("").parts): path for path in sources(folder)}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    prefix = folder.replace("/", ".") + "."
    found = {}
    for name, path in modules.items():
        inside = {full.removeprefix(prefix) for full in imports(path) if full.startswith(prefix)}
        used = {each if each in modules else each.rpartition(".")[0] or "__init__" for each in inside}
        found[name] = used & set(modules) - {name}
    return found


@pytest.mark.parametrize("folder", LEVELS)
def test_imports_point_one_way(folder):
    def level(module: str) -> int:
        return next(level for level, names in enumerate(LEVELS[folder]) if module.partition(".")[0] in names.split())

    for module, used in imported_below(folder).items():
        others = {other for other in used if other.partition(".")[0] != module.partition(".")[0]}
        wrong = {other for other in others if level(other) >= level(module)}
        assert not wrong, f"{module} imports {sorted(wrong)}, which do not lie below it"


@pytest.mark.parametrize("folder", LEVELS)
def test_no_circle_of_imports(folder):
    imported = imported_below(folder)
    while imported:
        leaves = {module for module, used in imported.items() if not used & set(imported)}
        assert leaves, f"these import each other in a circle: {sorted(imported)}"
        imported = {module: used for module, used in imported.items() if module not in leaves}


def test_the_kvstore_knows_no_backend_and_frameworks_are_imported_in_backends_only():
    for path in sources("dmltrain/kvstore"):
        if path.relative_to(ROOT / "dmltrain/kvstore").as_posix() != "__init__.py":
            assert not {full for full in imports(path) if full.startswith("dmltrain.backends")}, path
    for path in sources("dmltrain"):
        if room(path) not in ("backends", "__init__"):
            found = {full.partition(".")[0] for full in imports(path)} & FRAMEWORKS
            assert not found, f"{path} imports {found}"


def test_the_agent_needs_the_standard_library_only():
    used = {full for path in sources("launch/agent") if path.stem != "bundle" for full in imports(path)}
    outside = {full for full in used if full.partition(".")[0] not in sys.stdlib_module_names}
    assert all(full.startswith("launch.agent.") for full in outside), outside


@pytest.mark.parametrize(
    "program",
    [
        "import dmltrain, dmltrain.kvstore, dmltrain.fit",
        "import launch.cli; launch.cli.launch(['--help'])",
        "import dmltrain.report.cli",
        "import dmltrain.backends.mxnet.compat",
    ],
)
def test_no_framework_before_it_is_used(program):
    check = f"import sys\n{program}\nprint(sorted({FRAMEWORKS} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
