"""Fixtures of the report's tests: the real logs, the program, and parsing a text as a log."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import cli, reading, table
from dmltrain.report.runs import run
from tests.copied_tree import search_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def logs(real_logs: Path) -> Path:
    return real_logs


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess]:
    """Run dmltrain-parse in a process of its own: `process(*arguments, **for_subprocess_run)`. Never a traceback."""

    def call(*arguments: object, **options) -> subprocess.CompletedProcess:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60, **options}
        environment = {**os.environ, "PYTHONPATH": search_path(), **options.pop("env", {})}
        command = [sys.executable, "-m", "dmltrain.report.cli", *map(str, arguments)]
        done = subprocess.run(command, env=environment, **options)
        assert "Traceback" not in (done.stderr or done.stdout)
        return done

    return call


@pytest.fixture
def parse(capsys: pytest.CaptureFixture) -> Callable[..., subprocess.CompletedProcess]:
    """Call dmltrain-parse in this process, which is quicker: `parse(*arguments)` gives what a process would give."""

    def call(*arguments: object) -> subprocess.CompletedProcess:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as usage:
            code = usage.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


@pytest.fixture
def rows() -> Callable[..., dict]:
    """The rows of a log given as text or bytes: epoch -> key -> value. Of several runs in it, the rows of the first."""

    def read(log: str | bytes, aggregate: str = "mean") -> dict:
        found, _ = reading.scan(io.BytesIO(log.encode() if isinstance(log, str) else log))
        return dict(table.table(run.merge("x.log", [("x.log", found[0])]), aggregate).rows) if found else {}

    return read
