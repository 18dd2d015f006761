"""Settings for all tests: hypothesis without wall-clock limits (machines are busy), and where the real data is."""

import os
import signal
from pathlib import Path

import hypothesis
import pytest

from tests.running_job import start_job  # noqa: F401  (a fixture of all tests)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and SIGINT in the background: the programs
signal.signal(signal.SIGINT, signal.default_int_handler)  # under test would inherit that

ALONE = ("cluster", "launch", "benchmarks/test_launcher.py", "benchmarks/test_hosts.py",
         "kvstore/test_faults.py", "mxnet_faults.py", "mxnet_ends.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what must have the machine for itself: deadlines are part of what it tests, or it measures."""
    here = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(here).as_posix()
        if place.startswith(ALONE) or place.endswith(ALONE):
            item.add_marker("alone")


hypothesis.settings.register_profile("project", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
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


@pytest.fixture(scope="session")
def real_logs() -> Path:
    """A folder with mxnet/ and other/: logs of real runs with their expected values."""
    return _folder("DMLTRAIN_LOGS_DIR", "real training logs")
