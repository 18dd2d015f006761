"""In pytest: it enters the control group, and what it starts sends late. Itself it is neither frozen nor late."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from tests import control_groups


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaky", type=Path, help="the folder of tests.flaky")
    parser.addoption("--flaky-end", type=float, default=math.inf, help="no test starts later, by time.monotonic()")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--flaky")
    (folder / f"pytest-{os.getpid()}").touch()  # this process is not frozen
    if (folder / "group").exists():
        control_groups.enter(Path((folder / "group").read_text()), os.getpid())
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    library = folder / "delayed_sends.so"
    if library.exists() and not starts_workers:
        os.environ["LD_PRELOAD"] = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > item.config.getoption("--flaky-end"):
        pytest.skip("the time is over")
