"""What the program says about the command line of each cell, without training (DMLTRAIN_CHECK)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.experiment.program import CHECK, Program

SECONDS = 300.0  # time limit; a thousand command lines take ten
Words = tuple[str, ...]


def ask(program: Program, lines: Sequence[Words], seconds: float = SECONDS) -> dict[Words, Mapping[str, Any]]:
    """The program's answer to each command line, by one process. {} if it gives none. UserError if it fails."""
    if not program.checks:
        return {}
    distinct = list(dict.fromkeys(lines))
    with tempfile.TemporaryDirectory(prefix="dmltrain-check-") as folder:
        file = Path(folder) / "lines.json"
        file.write_text(json.dumps(distinct))
        try:
            done = subprocess.run(
                [sys.executable, program.path],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                env=env.inherited(**{CHECK: str(file)}),
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{program.path} did not check its options within {seconds:g} s ({CHECK})") from None
    answers = parse(done.stdout, len(distinct))
    if answers is None or done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(
            f"{program.path} could not check its options: {last[:300]}; does `python {program.path}` start?"
        )
    return dict(zip(distinct, answers, strict=True))


def parse(output: str, count: int) -> list[Mapping[str, Any]] | None:
    """The answers in the program's output; None if it has none."""
    for line in output.splitlines():
        if line.startswith(f"{CHECK} "):
            try:
                answers = json.loads(line.removeprefix(f"{CHECK} "))
            except (ValueError, RecursionError):
                return None
            if not isinstance(answers, list) or len(answers) != count:
                continue
            if all(isinstance(answer, dict) for answer in answers):
                return answers
    return None


def options(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """All options of a command line, {} if they are not known."""
    value = answer.get("options")
    return value if isinstance(value, dict) else {}
