"""In pytest: it enters the control group, and what it starts sends late. Itself it does neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import control_groups


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flaky", type=Path, help="the folder of tests.flaky")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--flaky")
    (folder / f"pytest-{os.getpid()}").touch()  # this process is not frozen
    if (folder / "group").exists():
        control_groups.enter(Path((folder / "group").read_text()), os.getpid())
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    library = folder / "delayed_sends.so"
    if library.exists() and not starts_workers:
        os.environ["LD_PRELOAD"] = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()
