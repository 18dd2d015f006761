"""Directives that fill pages from the code, so that no page repeats a table that the code has.

    ```{program-output} dmltrain-launch --help     what a program prints; the build fails when the program does
    ```
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

REPOSITORY = Path(__file__).parents[2]
WIDTH = 100  # columns of a program's output


class ProgramOutput(SphinxDirective):
    """The standard output of a command of this project, run in the repository."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the program may have changed
        program, *arguments = self.arguments[0].split()
        return [nodes.literal_block(text=_output([_found(program), *arguments]), language="text")]


def _found(program: str) -> str:
    """`python` is this Python; programs are those that the set-up installed beside it."""
    return sys.executable if program == "python" else str(Path(sys.executable).parent / program)


def _output(command: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True).stdout


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("program-output", ProgramOutput)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
