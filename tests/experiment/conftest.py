"""dmltrain-experiment as its users run it: a process of its own, in a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.copied_tree import search_path

ROOT = Path(__file__).parents[2]
SECONDS = 120.0


class Place:
    """A working folder with the program light.py."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        shutil.copy(Path(__file__).parent / "programs/light.py", folder)

    def write(self, text: str, name: str = "x.yaml") -> None:
        (self.folder / name).write_text(text)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dmltrain.experiment.cli", *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"},
            **more,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def cell(self, name: str, experiment: str = "x") -> Path:
        return self.folder / "logs/experiments" / experiment / "cells" / name

    def job(self, name: str) -> dict[str, Any]:
        return json.loads((self.cell(name) / "job.json").read_text())

    def pids(self, value: str) -> list[int]:
        """The processes of light.py with this --value that have started, whether they run or not."""
        return [int(path.name.rpartition("-")[2]) for path in (self.folder / "started").glob(f"{value}-*")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
