"""Stage "tests": the project's tests that need a GPU, and all tests of the trainer, on the GPU."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

import pytest

from dmltrain.options.table import Options
from gpu.running import Asked, Row, bar

ON_A_GPU = (
    "tests/backends/test_torch_distributed.py tests/backends/test_torch_elastic.py tests/device/test_codecs.py -k cuda"
)
OF_THE_TRAINER = "tests/backends/test_trainers.py -k torch"  # others compare with networks on the CPU
FEW = "tests/backends/test_torch_distributed.py -k cuda-"
OPTIONS = "-q -p no:cacheprovider --no-header --timeout 100"


def rows(asked: Asked) -> Iterator[Row]:
    yield from _run("tests that need a GPU", FEW if asked.small else ON_A_GPU, asked)
    if not asked.small:
        Options.device_names = property(_gpu_for_cpu)  # type: ignore[assignment]
        yield from _run("tests of the trainer, on the GPU", OF_THE_TRAINER, asked)


def _gpu_for_cpu(options: Options) -> tuple[str, ...]:
    """The devices of options: where they name none, the GPU."""
    return options.devices or options.gpus or ("gpu:0",)  # type: ignore[return-value]


class _Counted:
    """Of pytest, a plugin: what became of the tests."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1


def _run(name: str, words: str, asked: Asked) -> Iterator[Row]:
    counted, text = _Counted(), io.StringIO()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with contextlib.redirect_stdout(text):
        pytest.main([*OPTIONS.split(), *words.split()], plugins=[counted])
    yield {"tests": name, "passed": counted.passed, "failed": counted.failed, "text": text.getvalue()[-300:]}
    yield bar(f"{name}: passed without a failure", counted.passed * (not counted.failed), 1)
