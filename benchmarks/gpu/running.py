"""A stage as a process: it prints each row of its results as a line of JSON, and is ended when its time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import CHECKOUT, INTERPRETER, SEARCH_PATH

MARK = "RESULT "
Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What is asked of all stages. `interpreter`: the command that runs training programs; (): Python."""

    small: bool
    interpreter: tuple[str, ...] = ()
    data_dir: str | None = None


def bar(name: str, value: float, least: float | None) -> Row:
    """A figure that has to be at least `least`; None: nothing is asked of it."""
    return {"bar": name, "value": value, "least": least}


def serve_stage(rows: Callable[[Asked], Iterator[Row]], asked: Asked) -> int:
    """In the stage's process."""
    INTERPRETER[:] = asked.interpreter
    for row in rows(asked):
        print(MARK + json.dumps(row), flush=True)
    return 0


def run_stage(name: str, command: list[str], seconds: float, out: Path) -> list[Row]:
    """The rows of a stage, and one that says that it `failed` if it did. They are added to out/results.jsonl."""
    since, rows = time.monotonic(), []
    with open(out / f"{name}.err", "wb") as errors, open(out / "results.jsonl", "a") as results:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=_environment(), text=True, start_new_session=True
        )
        timer = threading.Timer(seconds, _end, (process,))
        timer.start()
        for row in _rows(process):
            rows.append({"stage": name, **row})
            results.write(json.dumps(rows[-1]) + "\n")
            results.flush()
            print(f"  {json.dumps(row)}", file=sys.stderr, flush=True)
        code = process.wait()
        timer.cancel()
    took = time.monotonic() - since
    if code:
        why = f"its {seconds:g} s were over" if took >= seconds else f"it ended with {code}"
        rows.append({"stage": name, "failed": f"{why}: {(out / f'{name}.err').read_text()[-600:]}"})
        print(f"  {rows[-1]['failed']}", file=sys.stderr)
    return [*rows, {"stage": name, "seconds": round(took, 1)}]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([SEARCH_PATH, str(CHECKOUT), str(CHECKOUT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _rows(process: subprocess.Popen[str]) -> Iterator[Row]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def job(words: list[str], program: list[str], seconds: float, threads: int = 2) -> tuple[int, str]:
    """The exit code and the output of a job of the launcher on this machine; 124 if it took longer."""
    command = [sys.executable, "-m", "dmltrain_launch.cli", "--launcher", "local", *words, *INTERPRETER, *program]
    return finished(command, seconds, threads)


def finished(command: list[str], seconds: float, threads: int = 2) -> tuple[int, str]:
    """The exit code and the output of a program; 124 if it took longer."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124, f"longer than {seconds:.0f} s"
    return done.returncode, done.stdout + done.stderr
