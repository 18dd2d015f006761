"""Run a benchmark as a user does, or in this process, read its figures, or take one of its modules to look at."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.forked_job import forked

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(line: str, *more: object, timeout: float = 250, **environ: str) -> subprocess.CompletedProcess[str]:
    """The benchmark and its arguments in `line`, between spaces, and `more`; `environ` is added to its environment."""
    return subprocess.run(
        f"{sys.executable} {BENCHMARKS}/{line}".split() + [*map(str, more)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | environ,
    )


def called(line: str, *more: object, backend: str = "torch", **environ: str) -> subprocess.CompletedProcess[str]:
    """What `run` returns, without a new interpreter: for benchmarks that start programs of their own and change nothing
    of this process. Training programs are forked with the framework of `backend`."""
    name, *words = [*line.split(), *map(str, more)]
    output, errors = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", [name, *words]), mock.patch.dict(os.environ, environ), among_benchmarks():
        importlib.import_module("report").INTERPRETER[:] = forked("", backend=backend)[:-1]  # up to the program
        main = importlib.import_module(name.removesuffix(".py")).main
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code = main() or 0  # its arguments are in sys.argv
            except SystemExit as end:
                code = end.code or 0
                if isinstance(code, str):
                    print(code, file=sys.stderr)
                    code = 1
    return subprocess.CompletedProcess([name, *words], code, output.getvalue(), errors.getvalue())


def figures(
    line: str, *more: object, how: Callable[..., subprocess.CompletedProcess[str]] = called, **environ: str
) -> Any:
    """The JSON that the benchmark prints."""
    done = how(line, *more, "--format", "json", **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def benchmark_module(name: str) -> ModuleType:
    """A module of benchmarks/, which find each other because they lie in one folder."""
    with among_benchmarks():
        return importlib.import_module(name)


@contextlib.contextmanager
def among_benchmarks() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield
    finally:
        sys.path.remove(str(BENCHMARKS))
