"""Settings for all tests: hypothesis without wall-clock limits (machines are busy), and where the real data is."""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from tests import leftovers, owners
from tests.failing import pytest_runtest_makereport  # noqa: F401  (a hook)
from tests.forked_job import start_forked  # noqa: F401  (a fixture of all tests)
from tests.running_job import start_job  # noqa: F401  (a fixture of all tests)
from tests.tiers import examples

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many tests share few cores

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and SIGINT in the background: the programs
signal.signal(signal.SIGINT, signal.default_int_handler)  # under test would inherit that
os.environ[owners.MARK] = owners.mark()
owners.own()


def _interrupted(*_: object, _of: int = os.getpid()) -> None:
    if os.getpid() == _of:
        raise KeyboardInterrupt  # so that fixtures are torn down
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # in a child that a test has forked
    os.kill(os.getpid(), signal.SIGTERM)


signal.signal(signal.SIGTERM, _interrupted)

QUICK = {
    "tests": "checkpoint env initial layers messages options record schedule system_packages tiers",
    "tests/data": "batches cifar10 load mnist",
    "tests/kvstore": "codec cut link listener message outbox requests scheduler server server_keys server_link "
    "shared_memory shares transfers types",
    "tests/launch": "config dry_run forecast hosts job known_hosts mpi_command network "
    "preflight prepare show supervise",
    "tests/models": "models",
    "tests/report": "cut_off program shapes",
}
ROOT = Path(__file__).parents[1]
QUICK_FILES = {ROOT / folder / f"test_{name}.py" for folder, names in QUICK.items() for name in names.split()}


def _remove_leftovers(config: pytest.Config) -> None:
    """Of killed and interrupted runs, and at the end of this one, those of its own interrupted workers."""
    if not hasattr(config, "workerinput"):
        for each in leftovers.remove():
            print(f"Removed what a dead test run has left: {each}", file=sys.stderr)


def pytest_sessionstart(session: pytest.Session) -> None:
    _remove_leftovers(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    _remove_leftovers(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the modules that `make quick` runs whole."""
    for item in items:
        if item.path in QUICK_FILES:
            item.add_marker("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick` or `-m "alone and ..."` files without such tests are not imported: all of them take 15 s."""
    expression = config.option.markexpr
    marker = expression.partition(" and ")[0]
    if marker not in ("quick", "alone") or " or " in expression or not collection_path.match("test_*.py"):
        return None
    marked = f"mark.{marker}" in collection_path.read_text() or (marker == "quick" and collection_path in QUICK_FILES)
    return None if marked else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Modules and tests stay to the end, so the garbage collector need not look at these million objects: not while
    they are made, which would take a third longer, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# The tests of each share what takes long to make: trials side by side, clusters, results of MXNet, a browser,
# completion scripts, PyTorch's own tests, processes that have imported Lightning or torch's compiler.
TOGETHER = (
    "tests/backends/test_adapters.py",
    "tests/backends/test_torch_backend.py",
    "tests/backends/test_torch_peers.py",
    "tests/cluster/test_kubernetes.py",
    "tests/cluster/test_ray.py",
    "tests/cluster/test_slurm.py",
    "tests/cluster/test_fault_matrix.py",
    "tests/report/page/test_in_browser.py",
    "tests/test_architecture.py",
    "tests/test_completion.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` the tests of a file in TOGETHER go to one process, each other test to any that is free.

    pytest-xdist 3.8 has the marker xdist_group for that, which pytest 9.2 leaves without effect.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0] if nodeid.startswith(TOGETHER) else nodeid

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]  # else each test would count all that are over once more

    return Scheduling(config, log)


hypothesis.settings.register_profile(
    "project", deadline=None, max_examples=examples(50), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("project")


def _folder(variable: str, what: str) -> Path:
    path = os.environ.get(variable, "")
    if not path or not Path(path).is_dir():
        pytest.skip(f"{what} missing: set {variable} to a folder that has it")
    return Path(path)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with cifar10/ and mnist/."""
    return _folder("DMLTRAIN_DATA_DIR", "real CIFAR-10 and MNIST")


def _of_the_data(name: str, what: str) -> Path:
    path = _folder("DMLTRAIN_DATA_DIR", what) / name
    if not path.is_dir():
        pytest.skip(f"{what} missing: {path} does not exist")
    return path


@pytest.fixture(scope="session")
def ilsvrc12_sample() -> Path:
    """A folder with images/, real JPEGs of ILSVRC12, and synset_words.txt."""
    return _of_the_data("ilsvrc12-sample", "sample of ILSVRC12")


@pytest.fixture(scope="session")
def mx() -> ModuleType:
    """MXNet."""
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("mxnet is not installed")
    from dmltrain.backends.mxnet import compat

    return compat.load()


@pytest.fixture(scope="session")
def mxnet_files() -> Path:
    """A folder with records and checkpoints that MXNet's own programs wrote."""
    return _of_the_data("mxnet-files", "files that MXNet wrote")


@pytest.fixture(scope="session")
def mxnet_networks() -> Path:
    """A folder with the graphs of MXNet's own networks, and tables of their parameters."""
    return _of_the_data("networks", "graphs of MXNet's networks")


@pytest.fixture(scope="session")
def real_logs() -> Path:
    """A folder with mxnet/ and other/: logs of real runs with their expected values."""
    return _folder("DMLTRAIN_LOGS_DIR", "real training logs")
